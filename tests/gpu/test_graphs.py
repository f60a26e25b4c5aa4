"""CUDA graphs of increments at a model's true widths: captured, replayed, and compared with the same calls one by one.

**Not run yet: no GPU was at hand.** (`tests/kernels/triton_kernels/test_loop.py` has the small cases, for both.)
"""

from collections.abc import Iterator

import pytest
import torch
from iterations import iteration_of

from orca.v1 import worker_pb2
from orca_lab.shapes import Shape, gpt
from orca_lab.shards import BLOCK_SIZE, INCREMENT, INITIATION, Case, formed
from orca_worker.device.graphs import BUCKETS
from orca_worker.device.model import DeviceModel
from orca_worker.iteration.model import Compute
from orca_worker.partition import SINGLE
from orca_worker.stage.stage import Stage

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
CUDA = torch.device("cuda", 0)
WIDE = Shape("four layers of 13B", gpt(4, 5120, 40), 1, 1)
PROMPT, BATCH = 290, 12  # 14 tokens more fit into the blocks


@pytest.fixture(params=["float16", "bfloat16"])
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    torch.manual_seed(1)
    slots = 2 * Case(INITIATION, BATCH, PROMPT).slots
    with formed(WIDE, SINGLE, request.param, CUDA, slots) as stage:
        yield stage


def model_of(stage: Stage) -> DeviceModel:
    assert isinstance(stage._model, DeviceModel)
    return stage._model


def test_every_bucket_is_captured_and_says_its_memory(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    assert set(model_of(stage)._recorded) == set(BUCKETS)
    caplog.set_level("INFO")
    stage.form(BLOCK_SIZE)  # a new epoch, whose memory may lie elsewhere
    stage.allocate(2 * Case(INITIATION, BATCH, PROMPT).slots, BLOCK_SIZE)
    assert set(model_of(stage)._recorded) == set(BUCKETS)
    told = [record for record in caplog.records if record.message == "CUDA graphs"]
    assert len(told) == 1
    assert 0 <= told[0].bytes < 2 << 30  # pyright: ignore[reportAttributeAccessIssue]


def test_a_replay_is_the_same_bits_as_the_calls(stage: Stage) -> None:
    """The same inputs, in the same places, of batches that fill a bucket and that do not."""
    model = model_of(stage)
    stage.run(Case(INITIATION, BATCH, PROMPT).message(WIDE.config.vocab_size))
    for batch in (1, 3, 8, BATCH):
        stage.run(Case(INCREMENT, batch, PROMPT).message(WIDE.config.vocab_size))
        recorded = next(model._recorded[bucket] for bucket in BUCKETS if bucket >= batch)
        with torch.inference_mode():
            replayed = recorded.replay().logits
            assert replayed is not None
            replayed = replayed[:batch].clone()
            called = model._iterate(recorded.inputs, stage._kv, stage._plane, None).logits
        assert called is not None
        assert torch.isfinite(replayed).all()
        assert torch.equal(replayed, called[:batch]), batch


def test_tokens_with_graphs_and_without() -> None:
    made = []
    for graphs in (True, False):
        torch.manual_seed(1)
        slots = Case(INITIATION, BATCH, PROMPT).slots
        with formed(WIDE, SINGLE, "float32", CUDA, slots, Compute(graphs=graphs)) as stage:
            assert bool(model_of(stage)._recorded) == graphs
            made.append([stage.run(Case(INITIATION, BATCH, 20).message(WIDE.config.vocab_size)).token_ids])
            for step in range(8):
                increments = iteration_of(rows=range(BATCH), starts=[20 + step] * BATCH, tokens=made[-1][-1])
                made[-1].append(stage.run(increments).token_ids)
    assert made[0] == made[1]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_the_host_waits_nowhere_but_where_it_reads_tokens(stage: Stage) -> None:
    """CUDA itself refuses each call that would wait. Five iterations are launched before the first one is read."""
    stage.run(Case(INITIATION, BATCH, PROMPT).message(WIDE.config.vocab_size))
    right = [stage.run(ahead(0)).token_ids, *(stage.run(ahead(n)).token_ids for n in range(1, 5))]
    stage.run(Case(INITIATION, BATCH, PROMPT).message(WIDE.config.vocab_size))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        launched = [stage.launch(ahead(n)) for n in range(5)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [one.read().token_ids for one in launched] == right


def ahead(n: int) -> worker_pb2.Iteration:
    """Increment n after the initiation, without tokens."""
    return iteration_of(rows=range(BATCH), starts=[PROMPT + n] * BATCH)
