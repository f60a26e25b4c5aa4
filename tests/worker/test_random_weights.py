"""Weights that are made: the same model however it is cut, from a seed or from the name of a shape."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_shape
from encoder_decoders import change
from worker.driver import Sampled, TinyEngine, make_stage
from worker.engines import in_process

from orca_common.checkpoint import RANDOM_WEIGHTS, read_checkpoint, resolve_model, shape_names
from orca_common.errors import FailedPrecondition
from orca_worker.models import random_weights
from orca_worker.models.families import topology
from orca_worker.models.random_weights import RandomWeights
from orca_worker.partition import Slice, Types

CPU = torch.device("cpu")

TINY = {"model_type": "gpt2", "vocab_size": 97, "n_positions": 64, "n_layer": 4, "n_embd": 24, "n_head": 4}


def make_tiny(folder: Path, seed: Any = 3) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY | {RANDOM_WEIGHTS: seed}))
    return folder


def made(part: Slice, seed: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return RandomWeights(seed, {part.name: part}, dtype, CPU).get(part.name)


@pytest.mark.parametrize("shape", ["llama, 2 K/V heads", "neox", "gptj"])
def test_each_rank_has_its_part_of_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str) -> None:
    checkpoint = read_checkpoint(make_shape(tmp_path / "model", shape))
    monkeypatch.setattr(random_weights, "CHUNK", 100)
    cut = 0
    for rank in topology(checkpoint, 2, 2, Types.of("float32")):
        for part in rank.slices.values():
            whole = made(Slice(part.name, part.shape, part.axis, (range(part.shape[part.axis]),)))
            index = torch.tensor([i for one in part.ranges for i in one])
            assert torch.equal(made(part), whole.index_select(part.axis, index)), part
            cut += len(index) < part.shape[part.axis]
    assert cut > 20


def test_a_tensor_has_its_own_numbers() -> None:
    def of(name: str, *shape: int) -> Slice:
        return Slice(name, shape, 0, (range(shape[0]),))

    matrix = made(of("a.weight", 300, 200))
    assert len(matrix.unique()) > 59_000
    assert matrix.std().item() == pytest.approx(0.02, rel=0.02)
    assert matrix.mean().item() == pytest.approx(0, abs=0.0003)
    others = (of("b.weight", 300, 200), 1), (of("a.weight", 300, 200), 2)
    for part, seed in others:
        correlation = torch.corrcoef(torch.stack([matrix.flatten(), made(part, seed).flatten()]))[0, 1]
        assert abs(correlation.item()) < 0.02
    assert made(of("norm.weight", 300)).mean().item() == pytest.approx(1, abs=0.01), "it scales a norm"
    assert made(of("norm.bias", 300)).mean().item() == pytest.approx(0, abs=0.01)


async def test_any_cut_makes_the_same_tokens(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "model")
    chance = random.Random(4)
    prompts = [[chance.randrange(97) for _ in range(chance.randint(1, 20))] for _ in range(6)]
    sampling = {"temperature": 1.0, "seed": 5}
    alone = [Sampled(prompt, 8, sampling) for prompt in prompts]
    TinyEngine(make_stage(folder, 400, 4), 400, 4).run(alone)
    async with in_process(folder, 2, 2) as (master, _):
        cut = [Sampled(prompt, 8, sampling) for prompt in prompts]
        await master.run(cut)
    assert [request.made for request in cut] == [request.made for request in alone]
    change(folder, **{RANDOM_WEIGHTS: 4})
    other = [Sampled(prompt, 8, sampling) for prompt in prompts]
    TinyEngine(make_stage(folder, 400, 4), 400, 4).run(other)
    assert [request.made for request in other] != [request.made for request in alone], "another seed, another model"


def test_the_models_of_table_1_have_names() -> None:
    assert shape_names() == ["gpt3-101b", "gpt3-13b", "gpt3-175b", "gpt3-341b"]
    cuts = {"gpt3-13b": (1, 1), "gpt3-101b": (8, 1), "gpt3-175b": (8, 2), "gpt3-341b": (8, 4)}
    for name, (tp, pp) in cuts.items():
        checkpoint = read_checkpoint(resolve_model(name))
        assert checkpoint.name == name
        ranks = topology(checkpoint, tp, pp, Types.of("bfloat16"))
        parameters = sum(rank.weight_bytes for rank in ranks) / 2e9
        assert parameters == pytest.approx(int(name[5:-1]), rel=0.03)


def test_a_folder_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny(tmp_path / "gpt3-13b")
    monkeypatch.chdir(tmp_path)
    assert read_checkpoint(resolve_model("gpt3-13b")).vocab_size == 97


@pytest.mark.parametrize("seed", [-1, "1", 1.5, True, 1 << 63], ids=str)
def test_no_seed(tmp_path: Path, seed: Any) -> None:
    checkpoint = read_checkpoint(make_tiny(tmp_path / "model", seed))
    with pytest.raises(FailedPrecondition, match=f"gives {RANDOM_WEIGHTS} .*, not a seed from 0 to"):
        topology(checkpoint, 1, 1, Types.of("float32"))


def test_larger_than_the_machine() -> None:
    with pytest.raises(FailedPrecondition, match="this machine has"):
        make_stage(resolve_model("gpt3-341b"), 400, 4)
