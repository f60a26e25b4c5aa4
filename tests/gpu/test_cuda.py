"""What only a GPU can show: CUDA gives the tokens of transformers, and an earlier stage's host does not wait for it.

    make gpu        or, on a machine that has torch and nothing of ours, tests/gpu/run.sh

float32 without TF32, whose 10 bits of mantissa would decide tokens.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_gpt2, make_shape
from e2e.test_tokens import CASES, POSITIONS, Case, compared, differing
from reference import TIE
from worker.driver import Sampled, TinyEngine

from orca_common.checkpoint import read_checkpoint
from orca_common.scores import unpack_prompt
from orca_lab.roofline import accelerator
from orca_lab.shapes import Shape, gpt
from orca_lab.shards import BLOCK_SIZE, INCREMENT, INITIATION, formed, measure_place, places
from orca_lab.shards import Case as ShardCase
from orca_worker.data_plane.backends import Nccl
from orca_worker.data_plane.process_groups import open_store
from orca_worker.iteration.model import Compute
from orca_worker.partition import Types
from orca_worker.stage.stage import Stage

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL gives each rank a GPU of its own: needs two")

CUDA = torch.device("cuda", 0)
VOCABULARY = 211
SIZES = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4}
WIDE: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama, 2 K/V heads": SIZES,
    "qwen3, large heads": SIZES | {"num_key_value_heads": 2, "head_dim": 64},
}
NO_TF32 = {"NVIDIA_TF32_OVERRIDE": "0"}  # of cuBLAS; torch's own default is off as well
TINY = Shape("tiny", gpt(4, 64, 4, positions=256, vocab_size=101), 2, 2)


async def test_tokens_of_odd_sizes(tmp_path: Path) -> None:
    """The whole stack, with the rank on the GPU. What differs, if anything, must be a tie that rounding decides."""
    check(await differing(tmp_path, CASES[-2], device="cuda", environment=NO_TF32))


@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("shape", WIDE)
async def test_tokens_equal_transformers(tmp_path: Path, shape: str, run_ahead: int) -> None:
    """Heads of 64, as of published models. One iteration ahead the host launches before it has read the tokens."""
    if shape == "gpt2":
        model = make_gpt2(
            tmp_path / "model", heads=4, layers=4, hidden=256, vocab=VOCABULARY, positions=POSITIONS, seed=7
        )
    else:
        model = make_shape(tmp_path / "model", shape, max_position_embeddings=POSITIONS, **WIDE[shape])
    settings = {"device": "cuda", "max_batch_size": 8, "run_ahead": run_ahead, "environment": NO_TF32}
    check(await compared(tmp_path / "run", model, VOCABULARY, **settings))


def check(margins: list[float]) -> None:
    assert all(margin < TIE for margin in margins), margins
    assert len(margins) <= 1


@needs_two
async def test_tokens_of_two_tensor_ranks(tmp_path: Path) -> None:
    """NCCL between two GPUs."""
    case = Case(max_bs=3, block_size=16, heads=4, layers=3, hidden=32, vocab=211)
    check(await differing(tmp_path, case, device="cuda", tp=2, environment=NO_TF32))


def test_draws_are_those_of_a_cpu(tmp_path: Path) -> None:
    """Temperature, top-k, top-p, adjustments and log probabilities, of one stage without its processes."""
    folder = make_gpt2(tmp_path, heads=3, layers=3, hidden=36, vocab=211, positions=96, seed=4, initializer_range=0.3)
    made: list[list[list[int]]] = []
    logprobs: list[list[float]] = []
    for device in (torch.device("cpu"), CUDA):
        stage = Stage(read_checkpoint(folder), Types.of("float32"), device, 960, Compute(1))
        assert stage.form(16).slots == 960
        stage.allocate(960, 16)
        asked = {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "min_p": 0.02, "logit_bias": {5: 2.0}}
        asked |= {"top_logprobs": 3, "prompt_logprobs": True}
        ways = [{}, {"top_k": 40}, {"top_p": 0.8}, {"top_k": 60, "top_p": 0.9, **asked}]
        requests = [
            Sampled([5 + n, 7, 11 * n], 20, {"temperature": 0.8, "seed": n, "logprobs": True} | ways[n % 4])
            for n in range(12)
        ]
        TinyEngine(stage, 960, 16, seed=1).run(requests)
        made.append([request.made for request in requests])
        logprobs.append([p for request in requests for p in request.logprobs])
        scored = [unpack_prompt(request.scored_prompt, 3)[1:] for request in requests if request.scored_prompt]
        assert len(scored) == 3
        logprobs[-1] += [p for prompt in scored for p, _ in prompt if p is not None]
    assert made[0] == made[1]
    assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-3)


def test_memory_is_offered(tmp_path: Path) -> None:
    folder = make_gpt2(tmp_path, heads=2, layers=2, hidden=16, vocab=97, positions=48, seed=9)
    stage = Stage(read_checkpoint(folder), Types.of("bfloat16"), CUDA, None, Compute(1))
    memory = stage.form(16)
    assert memory.slot_bytes == 2 * 2 * 16 * 2
    assert 0 < memory.slots * memory.slot_bytes <= memory.free_bytes < torch.cuda.mem_get_info(CUDA)[1]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_host_of_an_earlier_stage_does_not_wait(dtype: str) -> None:
    """CUDA itself refuses each call that would wait for the device. (tests/worker/test_fake_cuda.py says the same.)"""
    first = places(2, 2)[0]
    todo = [ShardCase(INITIATION, 3, 20), ShardCase(INCREMENT, 3, 20)]
    with formed(TINY, first, dtype, CUDA, 6 * 2 * BLOCK_SIZE) as stage:
        for case in todo:
            message = case.message(TINY.config.vocab_size)
            stage.run(message)  # libraries open their handles
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                output = stage.run(message)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert output.hidden is not None
            assert output.hidden.device == CUDA


def test_shards_are_timed_against_a_floor() -> None:
    for place in places(2, 2):
        rows = measure_place(TINY, place, "bfloat16", CUDA, [ShardCase(INITIATION, 2, 20)], repetitions=3)
        assert all(row.seconds[0] > 0 for row in rows)
        known = accelerator(torch.cuda.get_device_name(CUDA)) is not None
        assert all((row.floor is not None) == known for row in rows)


def test_nccl_of_one_rank() -> None:
    """A group as a rank makes it, of this rank alone: NCCL refuses two ranks on one GPU (before 2.30)."""
    nccl = Nccl(CUDA)
    group = nccl.group(open_store("127.0.0.1"), 0, 1)
    nccl.meet(group, 0, 1, sums=True)
    x = torch.arange(4.0, device=CUDA)
    group.allreduce([x]).wait()
    assert x.tolist() == [0, 1, 2, 3]
    nccl.leave(group)
