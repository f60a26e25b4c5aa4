"""The loop of a GPU on a CPU (`kernels=device-loop`): static inputs, padded buckets, the token table, pieces."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_gpt2
from encoder_decoders import Seq2Seq, make_t5
from worker.driver import Sampled, TinyEngine, make_stage

from orca_kernels.triton.plan import Plan
from orca_worker.device import model as device_model
from orca_worker.device.replay import Calls
from orca_worker.iteration.batch import HERE
from orca_worker.iteration.device_tokens import DeviceTokens
from orca_worker.models import cuda

SLOTS = 960


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gpt2(tmp_path_factory.mktemp("m"), heads=3, layers=2, hidden=36, vocab=211, positions=96, seed=3)


def requests() -> list[Sampled]:
    """Greedy, drawn, cut by top-k and top-p, adjusted, with scored prompts; some prompts of more than a piece."""
    adjusted = {"repetition_penalty": 1.3, "top_logprobs": 2, "prompt_logprobs": True}
    ways = [{}, {"temperature": 0.9}, {"temperature": 0.8, "top_k": 20}, {"temperature": 1.1, "top_p": 0.8}, adjusted]
    return [
        Sampled([(5 + n * k) % 211 for k in range(1 + 7 * n)], 5, {"seed": n, "logprobs": n % 2 == 0} | ways[n % 5])
        for n in range(6)
    ]


def run(folder: Path, kernels: str) -> list[Sampled]:
    made = requests()
    TinyEngine(make_stage(folder, SLOTS, 16, kernels=kernels), SLOTS, 16, seed=1).run(made)
    return made


def same(mine: list[Sampled], theirs: list[Sampled]) -> None:
    assert [request.made for request in mine] == [request.made for request in theirs]
    for one, other in zip(mine, theirs, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4, nan_ok=True)
        assert (len(one.scored_prompt), len(one.tops)) == (len(other.scored_prompt), len(other.tops))


def test_the_loop_makes_the_tokens_of_plain_torch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replayed = 0

    def replay(calls: Calls) -> None:
        nonlocal replayed
        replayed += 1
        plain(calls)

    plain = Calls.replay
    monkeypatch.setattr(Calls, "replay", replay)
    same(run(folder, "device-loop"), run(folder, "torch"))
    assert replayed


def test_a_model_with_an_encoder_has_no_such_loop(tmp_path: Path) -> None:
    """Plain torch runs it."""
    stage = make_stage(make_t5(tmp_path, seed=1), SLOTS, 16, kernels="device-loop")
    made, known = Sampled([5, 6, 7], 4), Seq2Seq(tmp_path).greedy([5, 6, 7], 4)
    TinyEngine(stage, SLOTS, 16).run([made])
    assert made.made == known


@pytest.mark.parametrize("kernels", ["torch", "device-loop"])
def test_no_token_comes_from_what_pads_the_head(folder: Path, kernels: str) -> None:
    """The table of 211 tokens has 256 rows. Whatever stands in the last ones is in no sum, and in no draw."""
    plain, made = requests(), requests()
    for of in (plain, made):
        stage = make_stage(folder, SLOTS, 16, kernels=kernels)
        held: Any = stage._model
        table = next(iter((held.model if kernels == "torch" else held.model._stage)._tables.values()))
        assert len(table) == 256
        if of is made:
            table[211:] = torch.nan
        TinyEngine(stage, SLOTS, 16, seed=1).run(of)
    same(made, plain)


def test_no_graph_is_left_of_an_epoch_that_was_left(folder: Path) -> None:
    """NCCL's abort waits for the graphs that have its operations."""
    stage = make_stage(folder, SLOTS, 16, kernels="device-loop")
    model = stage._model
    assert isinstance(model, device_model.DeviceModel)
    assert model._recorded
    stage.leave()
    assert not model._recorded


@pytest.mark.parametrize("piece", [1, 8])
def test_many_tokens_run_in_pieces(folder: Path, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failure all running requests initiate together, and the memory of activations has a bound."""
    whole = run(folder, "device-loop")
    monkeypatch.setattr(device_model, "PIECE", piece)
    most = 0

    def forward(self: cuda.FusedStage, plan: Plan, ids: torch.Tensor, *rest: Any) -> object:
        nonlocal most
        most = max(most, len(ids))
        return plain(self, plan, ids, *rest)

    plain = cuda.FusedStage.forward
    monkeypatch.setattr(device_model, "BUCKETS", (1,))
    monkeypatch.setattr(device_model.DeviceModel, "_warm_up", lambda self, kv: None)
    monkeypatch.setattr(cuda.FusedStage, "forward", forward)
    same(run(folder, "device-loop"), whole)
    assert most == piece


def test_an_aborted_receive_is_no_index() -> None:
    """A receive that was aborted leaves anything in the table, and an index outside of it ends a CUDA context."""
    tokens = DeviceTokens(torch.device("cpu"), vocabulary=97)
    rows = torch.tensor([3, 4, 5])
    tokens.put(rows, torch.tensor([1 << 40, -7, 96]))
    assert tokens.find(rows, torch.full((3,), HERE)).tolist() == [96, 0, 96]


def test_kernels_that_fail_give_way_to_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's errors are no RuntimeErrors: a compiler that is broken must not keep an engine from forming."""

    class CompilationError(Exception):
        pass

    def broken(*_: object) -> None:
        raise CompilationError("ptxas has failed")

    monkeypatch.setattr(cuda, "add_norm", broken)
    assert cuda.failure(torch.device("cpu")) == "a kernel fails: ptxas has failed"
    monkeypatch.setattr(cuda, "add_norm", lambda x, update, norm: (x * 2, x))
    assert cuda.failure(torch.device("cpu")) == "a kernel computes something else than it should"
