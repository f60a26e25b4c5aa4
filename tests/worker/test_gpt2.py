"""The tokens of a stage must equal those of transformers, an independent implementation."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import make_gpt2
from iterations import begins, iteration_of
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GPT2LMHeadModel
from worker.driver import Sampled, TinyEngine, make_stage

from orca.v1 import worker_pb2
from orca_common.checkpoint import read_checkpoint
from orca_common.errors import FailedPrecondition
from orca_worker.iteration.batch import Batch
from orca_worker.iteration.model import Compute
from orca_worker.models.gpt2.configuration import ACTIVATIONS, GPT2Config
from orca_worker.models.gpt2.layers import Layer
from orca_worker.models.gpt2.model import GPT2
from orca_worker.sampling.sampling import EndOfModel
from orca_worker.stage.stage import Stage

KERNELS = pytest.mark.parametrize("kernels", ["auto", "torch"])


def greedy(folder: Path, prompt: list[int], new_tokens: int) -> list[int]:
    """The tokens of transformers."""
    model = GPT2LMHeadModel.from_pretrained(folder).eval()
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(new_tokens):
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def requests_for(vocab: int, count: int, seed: int, longest: int = 23, new_tokens: int = 9) -> list[Sampled]:
    chance = random.Random(seed)
    return [
        Sampled(
            [chance.randrange(vocab) for _ in range(chance.choice([1, 2, 15, 16, 17, chance.randint(1, longest)]))],
            chance.randint(3, new_tokens),
        )
        for _ in range(count)
    ]


def check_against_transformers(folder: Path, vocab: int, block_size: int, seed: int, kernels: str) -> TinyEngine:
    slots = 12 * 48
    engine = TinyEngine(make_stage(folder, slots, block_size, kernels=kernels), slots, block_size, seed)
    requests = requests_for(vocab, 10, seed)
    engine.run(requests)
    assert len({tuple(request.made) for request in requests}) >= 8, (
        "a model that answers all prompts alike tests nothing"
    )
    for request in requests:
        assert request.made == greedy(folder, request.prompt, request.new_tokens)
    return engine


@KERNELS
@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize(
    ("heads", "layers", "hidden", "vocab"), [(1, 1, 8, 97), (3, 2, 36, 211), (5, 5, 40, 97), (4, 3, 32, 600)]
)
def test_tokens_equal_transformers(
    tmp_path: Path, heads: int, layers: int, hidden: int, vocab: int, block_size: int, kernels: str
) -> None:
    folder = make_gpt2(tmp_path, heads=heads, layers=layers, hidden=hidden, vocab=vocab, positions=48, seed=heads)
    engine = check_against_transformers(folder, vocab, block_size, layers, kernels)
    assert engine.mixed > 2


@KERNELS
@pytest.mark.parametrize(
    "config",
    [
        {"activation_function": "relu", "n_inner": 50},
        {"activation_function": "gelu", "layer_norm_epsilon": 0.1},
        {"scale_attn_weights": False},
        {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True},
        {"tie_word_embeddings": False, "activation_function": "silu"},
    ],
    ids=str,
)
def test_variants_of_the_family(tmp_path: Path, config: dict[str, Any], kernels: str) -> None:
    folder = make_gpt2(tmp_path, heads=3, layers=3, hidden=24, vocab=97, positions=48, seed=5, **config)
    check_against_transformers(folder, 97, 4, 2, kernels)


@pytest.mark.parametrize("layout", ["bare names", "shards"])
def test_layouts_of_checkpoints(tmp_path: Path, layout: str) -> None:
    original = make_gpt2(tmp_path / "a", heads=3, layers=2, hidden=24, vocab=97, positions=48, seed=6)
    weights = load_file(original / "model.safetensors")
    assert all(name.startswith("transformer.") for name in weights)
    folder = tmp_path / "b"
    folder.mkdir()
    shutil.copy(original / "config.json", folder)
    if layout == "bare names":
        save_file({n.removeprefix("transformer."): w for n, w in weights.items()}, folder / "model.safetensors")
    else:
        names = sorted(weights)
        index = {name: f"model-{i % 3}.safetensors" for i, name in enumerate(names)}
        for file in set(index.values()):
            save_file({name: weights[name] for name in names if index[name] == file}, folder / file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    for block_size in (1, 16):
        engines = [TinyEngine(make_stage(f, 480, block_size), 480, block_size) for f in (original, folder)]
        made = []
        for engine in engines:
            requests = requests_for(97, 4, 3)
            engine.run(requests)
            made.append([request.made for request in requests])
        assert made[0] == made[1]


def test_figure_4_and_5(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """x1 and x2 are in their increment phase, x3 begins with 2 tokens and x4 with 3: seven rows [7, H] in all."""
    folder = make_gpt2(tmp_path, heads=3, layers=2, hidden=24, vocab=97, positions=48, seed=7)
    stage = make_stage(folder, 400, 4, kernels="torch")
    engine = TinyEngine(stage, 400, 4)
    x1, x2 = Sampled([3, 1, 4], 3), Sampled([15], 3)
    x3, x4 = Sampled([9, 2], 1), Sampled([6, 5, 35], 1)
    engine.step([x1, x2], [])

    shapes: list[tuple[int, ...]] = []
    batches: list[Batch] = []
    run_layer, run_model = Layer.__call__, GPT2.forward

    def layer(self: Layer, x: Tensor, *rest: Any) -> Tensor:
        shapes.append(tuple(x.shape))
        return run_layer(self, x, *rest)

    def forward(self: GPT2, batch: Batch, *rest: Any) -> EndOfModel:
        batches.append(batch)
        head = run_model(self, batch, *rest)
        assert not isinstance(head, Tensor)

        def at(indexes: np.ndarray) -> Tensor:
            assert indexes.tolist() == batch.last.tolist()  # logits of each request's last token alone
            return head(indexes)

        return at

    monkeypatch.setattr(Layer, "__call__", layer)
    monkeypatch.setattr(GPT2, "forward", forward)
    engine.step([x3, x4], [x1, x2])
    assert shapes == [(7, 24)] * 2
    (batch,) = batches
    assert batch.query_lengths == [2, 3, 1, 1]
    assert batch.contexts == [0, 0, 3, 1]
    assert batch.positions.tolist() == [0, 1, 0, 1, 2, 3, 1]
    assert batch.last.tolist() == [1, 4, 5, 6]
    assert len(set(batch.slots.tolist())) == 7
    for request in (x1, x2, x3, x4):
        assert request.made == greedy(folder, request.prompt, len(request.made))


def test_an_increment_without_token_goes_on_from_the_last(tmp_path: Path) -> None:
    """Run-ahead: the scheduler issues an iteration before it has seen the tokens of the one before."""
    folder = make_gpt2(tmp_path, heads=1, layers=2, hidden=16, vocab=97, positions=48, seed=8)
    stage = make_stage(folder, 64, 4)
    engine = TinyEngine(stage, 64, 4)
    request = Sampled([5, 6, 7], 6)
    engine.step([request], [])
    row = engine.rows[id(request)][0]
    for _ in range(5):
        request.made += stage.run(iteration_of(rows=[row], starts=[2 + len(request.made)])).token_ids
    assert request.made == greedy(folder, request.prompt, 6)


def wrong(b: int = 1, **fields: Any) -> dict[str, Any]:
    """Fields of an iteration of row 7, or of b rows from 7 on, of which some are wrong."""
    rows = {"rows": range(7, 7 + b), "starts": [2] * b, "counts": [1] * b, "samples": [True] * b, "tokens": [1] * b}
    return rows | fields


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({}, "without requests"),
        (wrong(rows=[1]), "is not held"),
        (wrong(rows=[500]), "is not held"),
        (wrong(starts=[3]), "not come as far"),
        (wrong(starts=[2, 3]), "1 rows have 2 starts"),
        (wrong(counts=[1, 1]), "1 rows have 1 starts, 2 counts"),
        (wrong(samples=[]), "1 counts, 0 samples"),
        (wrong(tokens=[1, 2]), "1 samples and 2 tokens"),
        (wrong(counts=[2]), "2 positions of which one token is known"),
        (wrong(starts=[0]), "has not the tokens of 1 positions from 0 on"),
        (wrong(tokens=[97]), "vocabulary"),
        (wrong(b=2, rows=[7, 7]), "a row twice"),
        (wrong(starts=[1], tokens=[]), "has not the tokens"),
        (wrong(free_rows=[7]), "is not held"),
    ],
    ids=str,
)
def test_members_that_do_not_fit_are_refused(tmp_path: Path, fields: dict[str, Any], sentence: str) -> None:
    refused(tmp_path, worker_pb2.Iteration(**fields), sentence)


@pytest.mark.parametrize(
    ("new", "sentence"),
    [
        ({"row": 8, "token_ids": [1] * 49, "blocks": [*range(3), *range(4, 14)]}, "48 positions"),
        ({"row": 8, "token_ids": [1] * 5, "blocks": [1]}, "hold 4 tokens"),
        ({"row": 8, "token_ids": [1], "blocks": [16]}, "block 16 of 16"),
        ({"row": 8, "token_ids": [1], "blocks": [3]}, "block 3 belongs to another row"),
        ({"row": 8, "token_ids": [1], "blocks": [2, 2]}, "a block twice"),
        ({"row": 1 << 30, "token_ids": [1], "blocks": [1]}, "larger than any"),
        ({"row": 8, "token_ids": [1], "generated": 1, "blocks": [1]}, "at least one token"),
    ],
    ids=str,
)
def test_a_request_that_does_not_fit_is_refused(tmp_path: Path, new: dict[str, Any], sentence: str) -> None:
    refused(tmp_path, iteration_of([begins(**new)]), sentence)


def refused(folder: Path, iteration: worker_pb2.Iteration, sentence: str) -> None:
    """The stage holds row 7 with two tokens in block 3."""
    make_gpt2(folder, heads=1, layers=1, hidden=8, vocab=97, positions=48, seed=9)
    stage = make_stage(folder, 64, 4)
    stage.run(iteration_of([begins(7, [1, 2], [3], claim=0)]))
    assert stage.rows.held() == [(7, 0, 2)]
    with pytest.raises(FailedPrecondition, match=sentence):
        stage.run(iteration)


def test_a_row_that_has_come_farther_does_not_go_back_without_its_token(tmp_path: Path) -> None:
    folder = make_gpt2(tmp_path, heads=1, layers=1, hidden=8, vocab=97, positions=48, seed=9)
    stage = make_stage(folder, 64, 4)
    stage.run(iteration_of([begins(7, [1, 2], [3])]))
    stage.run(iteration_of(rows=[7], starts=[2], tokens=[5]))
    with pytest.raises(FailedPrecondition, match="have come farther"):
        stage.run(iteration_of(rows=[7], starts=[2]))


def test_a_formation_drops_rows_and_keeps_the_model(tmp_path: Path) -> None:
    folder = make_gpt2(tmp_path, heads=1, layers=1, hidden=8, vocab=97, positions=48, seed=9)
    stage = Stage(read_checkpoint(folder), "float32", torch.device("cpu"), None, Compute(1))
    memory = stage.form(16)
    assert memory.slot_bytes == 2 * 8 * 4
    assert 0 < memory.slots * memory.slot_bytes <= memory.free_bytes
    model = stage._model
    stage.allocate(64, 16)
    stage.run(iteration_of([begins(7, [1, 2], [3], claim=4)]))
    assert stage.rows.held() == [(7, 4, 2)]
    stage.form(16)
    stage.allocate(32, 16)
    assert stage.rows.held() == []
    assert stage._model is model


@pytest.mark.parametrize("activation", sorted(set(ACTIVATIONS.values())))
@pytest.mark.parametrize("flag", [False, True])
def test_a_configuration_can_be_said_without_files(activation: str, flag: bool) -> None:
    config = GPT2Config(97, 48, 24, 3, 2, 50, 0.1, activation, tied=flag, scale_attention=not flag, scale_by_layer=flag)
    assert GPT2Config.read(config.checkpoint("said")) == config
