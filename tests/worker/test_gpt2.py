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
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GPT2LMHeadModel
from worker.driver import Sampled, TinyEngine, make_stage

from orca_common.checkpoint import read_checkpoint
from orca_common.errors import FailedPrecondition
from orca_kernels.cpu.library import instruction_sets
from orca_worker.batch import Batch
from orca_worker.models.gpt2 import cpu
from orca_worker.models.gpt2.configuration import ACTIVATIONS, GPT2Config
from orca_worker.models.gpt2.layers import Layer
from orca_worker.models.gpt2.model import GPT2
from orca_worker.models.model import Compute
from orca_worker.sampling import EndOfModel, SamplingModel
from orca_worker.stage import Stage

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
        iteration = {"increment_rows": [row], "increment_positions": [2 + len(request.made)]}
        request.made += stage.run(pb_iteration(**iteration)).token_ids
    assert request.made == greedy(folder, request.prompt, 6)


def pb_iteration(**fields: Any) -> Any:
    from orca.v1 import worker_pb2

    return worker_pb2.Iteration(**fields)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({}, "without requests"),
        ({"increment_rows": [1], "increment_positions": [1], "increment_tokens": [1]}, "is not held"),
        ({"increment_rows": [500], "increment_positions": [1], "increment_tokens": [1]}, "is not held"),
        ({"increment_rows": [7], "increment_positions": [3], "increment_tokens": [1]}, "not come as far"),
        ({"increment_rows": [7], "increment_positions": [2, 3], "increment_tokens": [1]}, "2 positions"),
        ({"increment_rows": [7], "increment_positions": [2], "increment_tokens": [1, 2]}, "1 positions and 2 tokens"),
        ({"increment_rows": [7], "increment_positions": [2], "increment_tokens": [97]}, "vocabulary"),
        ({"initiations": [{"row": 8, "token_ids": [1] * 49, "blocks": [*range(3), *range(4, 14)]}]}, "48 positions"),
        ({"initiations": [{"row": 8, "token_ids": [1] * 5, "blocks": [1]}]}, "hold 4 tokens"),
        ({"initiations": [{"row": 8, "token_ids": [1], "blocks": [16]}]}, "block 16 of 16"),
        ({"initiations": [{"row": 8, "token_ids": [1], "blocks": [3]}]}, "block 3 belongs to row 7"),
        ({"initiations": [{"row": 8, "token_ids": [1], "blocks": [2, 2]}]}, "a block twice"),
        ({"increment_rows": [7, 7], "increment_positions": [2, 2], "increment_tokens": [1, 1]}, "a row twice"),
        ({"increment_rows": [7], "increment_positions": [1]}, "have come farther"),
        ({"initiations": [{"row": 1 << 30, "token_ids": [1], "blocks": [1]}]}, "larger than any"),
        ({"initiations": [{"row": 8, "token_ids": [1], "generated": 1, "blocks": [1]}]}, "at least one token"),
        ({"free_rows": [7], "increment_rows": [7], "increment_positions": [2], "increment_tokens": [1]}, "is not held"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(tmp_path: Path, fields: dict[str, Any], sentence: str) -> None:
    folder = make_gpt2(tmp_path, heads=1, layers=1, hidden=8, vocab=97, positions=48, seed=9)
    stage = make_stage(folder, 64, 4)
    stage.run(pb_iteration(initiations=[{"row": 7, "token_ids": [1, 2], "blocks": [3]}]))
    assert stage.rows.held() == [(7, 0, 2)]
    with pytest.raises(FailedPrecondition, match=sentence):
        stage.run(pb_iteration(**fields))


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"activation_function": "mish"}, "activation 'mish'"),
        ({"add_cross_attention": True}, "cross attention"),
        ({"n_head": 5}, "hidden size of 8 in 5 heads"),
        ({"n_layer": 0}, "n_layer 0"),
        ({"n_layer": 2}, "lack h.1.ln_1.weight"),
        ({"vocab_size": 98}, r"\[97, 8\], config.json says \[98, 8\]"),
        ({"tie_word_embeddings": False}, "lack lm_head.weight"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"model_type": "llama"}, "of type llama"),
    ],
    ids=str,
)
def test_a_model_that_is_not_this_one_is_refused(tmp_path: Path, config: dict[str, Any], sentence: str) -> None:
    folder = make_gpt2(tmp_path, heads=1, layers=1, hidden=8, vocab=97, positions=48, seed=9)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    with pytest.raises(FailedPrecondition, match=sentence):
        make_stage(folder, 64, 4)


def test_weights_that_are_missing_or_broken_are_refused(tmp_path: Path) -> None:
    folder = make_gpt2(tmp_path, heads=1, layers=1, hidden=8, vocab=97, positions=48, seed=9)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(FailedPrecondition, match="cannot be read"):
        make_stage(folder, 64, 4)
    file.unlink()
    with pytest.raises(FailedPrecondition, match="lacks weights"):
        make_stage(folder, 64, 4)


def test_bfloat16_stays_near_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_gpt2(tmp_path, heads=4, layers=2, hidden=64, vocab=97, positions=48, seed=10, initializer_range=0.1)
    logits: dict[str, list[Tensor]] = {}
    for dtype in ("float32", "bfloat16"):
        stage = make_stage(folder, 480, 16, dtype, kernels="torch")
        logits[dtype] = spy = []
        model = stage._model
        assert isinstance(model, SamplingModel)
        forward = model.model.forward

        def keep(batch: Batch, *rest: Any, forward: Any = forward, spy: list[Tensor] = spy) -> EndOfModel:
            head = forward(batch, *rest)
            spy.append(head(batch.last))
            return head

        monkeypatch.setattr(model.model, "forward", keep)
        engine = TinyEngine(stage, 480, 16)
        first, second = Sampled(list(range(20)), 5), Sampled([3], 5)
        engine.step([first], [])
        first.made = [1]
        engine.step([second], [first])
    for exact, rounded in zip(logits["float32"], logits["bfloat16"], strict=True):
        assert rounded.dtype == torch.bfloat16
        assert (exact - rounded.float()).abs().max() < 0.05 * exact.abs().max()


@pytest.mark.parametrize("kernels", instruction_sets())
def test_bfloat16_is_nearer_to_float32_than_that_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: str
) -> None:
    """Weights are rounded as there, but hidden states, norms, softmax and logits stay float32."""
    folder = make_gpt2(tmp_path, heads=4, layers=6, hidden=128, vocab=211, positions=64, seed=3, initializer_range=0.1)
    prompts = [one.prompt for one in requests_for(211, 12, seed=1, longest=60)]
    seen: list[Tensor] = []
    sample = cpu.sample

    def look(logits: Tensor, *rest: Any) -> Any:
        seen.extend(logits.clone())
        return sample(logits, *rest)

    monkeypatch.setattr(cpu, "sample", look)
    engine = TinyEngine(make_stage(folder, 1024, 16, "bfloat16", kernels), 1024, 16)
    engine.step([Sampled(prompt, 1, {"logprobs": True}) for prompt in prompts], [])
    errors: list[tuple[float, float]] = []
    with torch.inference_mode():
        exact, rounded = (
            GPT2LMHeadModel.from_pretrained(folder, dtype=dtype).eval() for dtype in (torch.float32, torch.bfloat16)
        )
        for prompt, ours in zip(prompts, seen, strict=True):
            want, theirs = (model(torch.tensor([prompt])).logits[0, -1].float() for model in (exact, rounded))
            errors.append(((ours - want).abs().max().item(), (theirs - want).abs().max().item()))
    ours, theirs = (max(errors) for errors in zip(*errors, strict=True))
    assert ours < theirs


def test_a_formation_drops_rows_and_keeps_the_model(tmp_path: Path) -> None:
    folder = make_gpt2(tmp_path, heads=1, layers=1, hidden=8, vocab=97, positions=48, seed=9)
    stage = Stage(read_checkpoint(folder), "float32", torch.device("cpu"), None, Compute(1))
    memory = stage.form(16)
    assert memory.slot_bytes == 2 * 8 * 4
    assert 0 < memory.slots * memory.slot_bytes <= memory.free_bytes
    model = stage._model
    stage.allocate(64, 16)
    stage.run(pb_iteration(initiations=[{"row": 7, "claim": 4, "token_ids": [1, 2], "blocks": [3]}]))
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
