"""The tokens of a stage must equal those of transformers, an independent implementation."""

import importlib
import json
import random
import shlex
import shutil
import textwrap
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import SHAPES, make_gpt2, make_shape
from iterations import begins, iteration_of
from properties import PART
from reference import Reference
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from worker.driver import Sampled, TinyEngine, make_stage
from worker.engines import in_process
from worker.logits import InTransformers, seen_by

from orca.v1 import worker_pb2
from orca_common.checkpoint import Checkpoint, read_checkpoint
from orca_common.errors import FailedPrecondition
from orca_kernels.cpu.library import instruction_sets
from orca_worker.iteration.batch import Batch
from orca_worker.iteration.model import Compute
from orca_worker.models.families import FAMILIES, check_partition, family_of, topology
from orca_worker.models.fields import ACTIVATIONS
from orca_worker.models.gpt2.configuration import GPT2Config
from orca_worker.models.plain import PlainKernels, TorchStage
from orca_worker.models.recorded import RecordedFamily
from orca_worker.models.recording import Attend, Norm, Normalize, Recording
from orca_worker.partition import SINGLE, Types
from orca_worker.sampling.sampling import EndOfModel
from orca_worker.stage.stage import Stage

BOTH = ("auto", "torch")  # kernels


def greedy(folder: Path, prompt: list[int], new_tokens: int) -> list[int]:
    """The tokens of transformers."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
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


def check_against_transformers(
    folder: Path, vocab: int, block_sizes: Sequence[int], seed: int, kernels: Sequence[str] = BOTH
) -> list[TinyEngine]:
    """The engines of all kernels and sizes of a block. transformers makes the tokens of the requests once."""
    slots, engines, reference = 12 * 48, list[TinyEngine](), Reference(folder)
    right = [reference.greedy(one.prompt, one.new_tokens) for one in requests_for(vocab, 10, seed)]
    assert len({*map(tuple, right)}) >= 8, "a model that answers all prompts alike tests nothing"
    for one, block_size in product(kernels, block_sizes):
        engine = TinyEngine(make_stage(folder, slots, block_size, kernels=one), slots, block_size, seed)
        requests = requests_for(vocab, 10, seed)
        engine.run(requests)
        assert [request.made for request in requests] == right, (one, block_size)
        engines.append(engine)
    return engines


@pytest.mark.parametrize(
    ("heads", "layers", "hidden", "vocab"), [(1, 1, 8, 97), (3, 2, 36, 211), (5, 5, 40, 97), (4, 3, 32, 600)]
)
def test_tokens_equal_transformers(tmp_path: Path, heads: int, layers: int, hidden: int, vocab: int) -> None:
    folder = make_gpt2(tmp_path, heads=heads, layers=layers, hidden=hidden, vocab=vocab, positions=48, seed=heads)
    assert all(engine.mixed > 2 for engine in check_against_transformers(folder, vocab, (1, 16), layers))


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
def test_variants_of_the_family(tmp_path: Path, config: dict[str, Any]) -> None:
    folder = make_gpt2(tmp_path, heads=3, layers=3, hidden=24, vocab=97, positions=48, seed=5, **config)
    check_against_transformers(folder, 97, (4,), 2)


@pytest.mark.parametrize("kind", ["gpt2", "t5", *dict.fromkeys(kind for kind, _ in SHAPES.values())])
def test_every_norm_has_the_epsilon_of_the_file(tmp_path: Path, kind: str) -> None:
    """No token would show another one behind the last layer, whose states are large."""
    fields = dict.fromkeys(("layer_norm_epsilon", "layer_norm_eps", "rms_norm_eps"), 0.25)
    AutoConfig.for_model(kind, **fields).save_pretrained(tmp_path)
    checkpoint = read_checkpoint(tmp_path)
    family = family_of(checkpoint)
    assert isinstance(family, RecordedFamily)
    made = family.record(family.read(checkpoint), SINGLE)
    operations = [*made.encoder, *made.crossing, *made.operations]
    norms: list[Norm | None] = [one.norm for one in operations if isinstance(one, Normalize)]
    for one in operations:
        if isinstance(one, Attend):
            norms += one.attention.query_norm, one.attention.key_norm
    assert {norm.epsilon for norm in norms if norm is not None} == {0.25}


OF_EACH_FAMILY = {kind: shape for shape, (kind, _) in SHAPES.items()}.values()  # its last one


@pytest.mark.parametrize("shape", SHAPES if PART == 1 else OF_EACH_FAMILY)
def test_tokens_of_odd_shapes_equal_transformers(tmp_path: Path, shape: str) -> None:
    """Of every family; windows are shorter than prompts. Some checkpoints are shards with an index. The logits of all
    shapes are below."""
    place = list(SHAPES).index(shape)
    folder = make_shape(tmp_path, shape, shards=place % 3 == 1)
    assert all(engine.mixed for engine in check_against_transformers(folder, 211, ((16, 5, 1)[place % 3],), place))


OLD = {  # the fields of files that older transformers have written
    "llama, 2 K/V heads": {"rope_theta": 1000.0, "rope_scaling": None},
    "llama, linear positions": {"rope_theta": 1000.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama, long positions of Llama 3": {
        "rope_theta": 500.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "qwen2, a window in the upper layer": {"rope_theta": 1e6, "layer_types": None},
    "gemma3, windows but in one layer": {
        "layer_types": None,
        "sliding_window_pattern": 2,
        "rope_theta": 1000.0,
        "rope_local_base_freq": 100.0,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    },
    "neox": {"rotary_pct": 0.25, "rotary_emb_base": 500},
}


@pytest.mark.parametrize("shape", OLD)
def test_files_of_older_transformers(tmp_path: Path, shape: str) -> None:
    folder = make_shape(tmp_path, shape)
    change_config(folder, rope_parameters=None, **OLD[shape])
    check_logits(folder, ["torch"])


def ways() -> list[tuple[str, str]]:
    """Kernels and types that this machine computes with."""
    return [("torch", "float32"), *((isa, dtype) for isa in instruction_sets() for dtype in ("float32", "bfloat16"))]


def prompts(count: int) -> list[list[int]]:
    return [request.prompt for request in requests_for(211, count, seed=3)]


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_of_the_same_batches_are_near_float64(tmp_path: Path, shape: str) -> None:
    """By each instruction set of this machine, in plain torch and in the loop of a GPU; in `make test` by the best one
    and one of the others. The tokens of each family are those of plain torch above.

    (By Triton: kernels/triton_kernels/test_stage.py.)
    """
    best, *others = [*instruction_sets(), "device-loop", "torch"]
    if PART > 1:
        others = [others[list(SHAPES).index(shape) % len(others)]]
    check_logits(make_shape(tmp_path, shape), [best, *others])


def check_logits(folder: Path, ways: Sequence[str]) -> None:
    """Against float64, in the same batches."""
    oracle, right = InTransformers(folder, torch.float64), dict[tuple[int, ...], Tensor]()
    for kernels in ways:
        requests = [Sampled(prompt, 4, {"logprobs": True}) for prompt in prompts(5)]
        for tokens, logits in seen_by(make_stage(folder, 400, 16, kernels=kernels), requests):
            if tokens not in right:
                right[tokens] = oracle.logits(tokens)
            assert (logits - right[tokens]).abs().max() < 2e-4, kernels  # logits are about 4, and up to 13


def test_bfloat16_is_as_near_as_that_of_transformers(tmp_path: Path) -> None:
    """Against float64 with the same rounded weights, over some shapes, by each instruction set of this machine."""
    ours, theirs = dict.fromkeys(instruction_sets(), 0.0), 0.0  # squares of all errors
    for n, shape in enumerate(list(SHAPES)[::3]):
        folder = make_shape(tmp_path / str(n), shape)
        oracle, other = InTransformers(folder, torch.float64, torch.bfloat16), InTransformers(folder, torch.bfloat16)
        right = {tuple(prompt): oracle.logits(prompt) for prompt in prompts(8)}
        theirs += sum(float((other.logits(prompt) - right[tuple(prompt)]).square().sum()) for prompt in prompts(8))
        for kernels in ours:
            requests = [Sampled(prompt, 1, {"logprobs": True}) for prompt in prompts(8)]
            for tokens, logits in seen_by(make_stage(folder, 400, 16, "bfloat16", kernels), requests):
                ours[kernels] += float((logits - right[tokens]).square().sum())
    assert all(0 < each <= theirs for each in ours.values()), (ours, theirs)


def change_config(folder: Path, **fields: Any) -> None:
    """Changes config.json; a field that is None is left out."""
    path = folder / "config.json"
    said = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in said.items() if value is not None}))


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
        # A whole file counts before an index, as in transformers.
        shutil.copy(folder / "model.safetensors.index.json", original)
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
    run_norm, run_model = PlainKernels.add_norm, TorchStage.forward

    def add_norm(self: PlainKernels, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        shapes.append(tuple(x.shape))
        return run_norm(self, x, *rest)

    def forward(self: TorchStage, batch: Batch, *rest: Any) -> EndOfModel:
        batches.append(batch)
        head = run_model(self, batch, *rest)
        assert not isinstance(head, Tensor)

        def at(indexes: np.ndarray) -> Tensor:
            assert indexes.tolist() == batch.out_at.tolist()  # logits of each request's last token alone
            return head(indexes)

        return at

    monkeypatch.setattr(PlainKernels, "add_norm", add_norm)
    monkeypatch.setattr(TorchStage, "forward", forward)
    engine.step([x3, x4], [x1, x2])
    assert shapes == [(7, 24)] * 2 * 2 + [(4, 24)]  # two norms a layer, and that of the head
    (batch,) = batches
    assert batch.query_lengths == [2, 3, 1, 1]
    assert batch.contexts == [0, 0, 3, 1]
    assert batch.positions.tolist() == [0, 1, 0, 1, 2, 3, 1]
    assert batch.out_at.tolist() == [1, 4, 5, 6]
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


@pytest.mark.parametrize("kernels", [*BOTH, "device-loop"])
def test_logits_that_are_no_numbers_give_no_token(tmp_path: Path, kernels: str) -> None:
    """The stage says which outputs these are, and of greedy requests too."""
    folder = make_gpt2(tmp_path, heads=1, layers=1, hidden=8, vocab=97, positions=48, seed=1)
    weights = load_file(folder / "model.safetensors")
    weights["transformer.wpe.weight"][3] = torch.nan  # so a row that has a token at position 3 gets no token
    save_file(weights, folder / "model.safetensors")
    stage = make_stage(folder, 64, 4, kernels=kernels)
    short, long = begins(1, [5, 6], range(2)), begins(2, [5, 6, 7, 8], range(2, 4))
    assert stage.run(iteration_of(new=[short, long])).not_finite == [1]


def wrong(b: int = 1, **fields: Any) -> dict[str, Any]:
    """Fields of an iteration of row 7, or of b rows from 7 on, of which some are wrong."""
    rows = {"rows": range(7, 7 + b), "starts": [2] * b, "counts": [1] * b, "outputs": [1] * b, "tokens": [1] * b}
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
        (wrong(outputs=[]), "1 counts, 0 outputs"),
        (wrong(tokens=[1, 2]), "1 outputs and 2 tokens"),
        (wrong(counts=[2]), "has not the tokens of 2 positions from 2 on"),
        (wrong(starts=[0]), "has not the tokens of 1 positions from 0 on"),
        (wrong(counts=[0]), "has not the tokens of 0 positions from 2 on"),
        (wrong(outputs=[2]), "0 drafts for outputs"),
        (wrong(drafts=[1]), "1 drafts for outputs"),
        (wrong(outputs=[2], drafts=[1]), "1 drafts in 1 positions"),
        (wrong(outputs=[3], counts=[2], drafts=[1, 1]), "2 drafts in 2 positions"),
        (wrong(outputs=[2], counts=[3], drafts=[1]), "has not the tokens of 2 positions from 2 on"),
        (wrong(outputs=[2], counts=[2], drafts=[97]), "vocabulary"),
        (wrong(tokens=[97]), "vocabulary"),
        (wrong(b=2, rows=[7, 7]), "a row twice"),
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
    made = stage.run(iteration_of(rows=[7], starts=[2], tokens=[5])).token_ids
    assert stage.run(iteration_of(rows=[7], starts=[2], tokens=[5])).token_ids == made, "with it, it does"
    with pytest.raises(FailedPrecondition, match="has not the tokens of 1 positions from 2 on"):
        stage.run(iteration_of(rows=[7], starts=[2]))
    stage.rows.table["known"][7] = 2  # as where the tokens are on a device alone
    with pytest.raises(FailedPrecondition, match="have come farther"):
        stage.run(iteration_of(rows=[7], starts=[2]))


def test_a_formation_drops_rows_and_keeps_the_model(tmp_path: Path) -> None:
    folder = make_gpt2(tmp_path, heads=1, layers=1, hidden=8, vocab=97, positions=48, seed=9)
    stage = Stage(read_checkpoint(folder), Types.of("float32"), torch.device("cpu"), None, Compute(1))
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


PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {  # how many parameters, and config.json
    "gemma-3-270m": (
        268_098_176,
        {
            "_sliding_window_pattern": 6,
            "architectures": ["Gemma3ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attn_logit_softcapping": None,
            "bos_token_id": 2,
            "dtype": "bfloat16",
            "eos_token_id": 1,
            "final_logit_softcapping": None,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 640,
            "initializer_range": 0.02,
            "intermediate_size": 2048,
            "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3,
            "max_position_embeddings": 32768,
            "model_type": "gemma3_text",
            "num_attention_heads": 4,
            "num_hidden_layers": 18,
            "num_key_value_heads": 1,
            "pad_token_id": 0,
            "query_pre_attn_scalar": 256,
            "rms_norm_eps": 1e-06,
            "rope_local_base_freq": 10000.0,
            "rope_scaling": None,
            "rope_theta": 1000000.0,
            "sliding_window": 512,
            "transformers_version": "4.55.0.dev0",
            "use_bidirectional_attention": False,
            "use_cache": True,
            "vocab_size": 262144,
        },
    ),
    "gemma-3-1b-it": (
        999_885_952,
        {
            "architectures": ["Gemma3ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attn_logit_softcapping": None,
            "bos_token_id": 2,
            "cache_implementation": "hybrid",
            "eos_token_id": [1, 106],
            "final_logit_softcapping": None,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 1152,
            "initializer_range": 0.02,
            "intermediate_size": 6912,
            "max_position_embeddings": 32768,
            "model_type": "gemma3_text",
            "num_attention_heads": 4,
            "num_hidden_layers": 26,
            "num_key_value_heads": 1,
            "pad_token_id": 0,
            "query_pre_attn_scalar": 256,
            "rms_norm_eps": 1e-06,
            "rope_local_base_freq": 10000,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.50.0.dev0",
            "use_cache": True,
            "vocab_size": 262144,
        },
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_are_accepted(tmp_path: Path, name: str) -> None:
    """Windows and rotary positions of each layer are those that transformers reads there."""
    parameters, config = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = read_checkpoint(tmp_path)
    (rank,) = topology(checkpoint, 1, 1, Types.of("bfloat16"))
    assert rank.weight_bytes == 2 * parameters
    theirs: Any = AutoConfig.from_pretrained(tmp_path)
    attentions = [op.attention for op in read_and_recorded(checkpoint).operations if isinstance(op, Attend)]
    assert [one.window for one in attentions] == [
        theirs.sliding_window if kind == "sliding_attention" else 0 for kind in theirs.layer_types
    ]
    for attention, kind in zip(attentions, theirs.layer_types, strict=True):
        assert attention.rotary is not None
        assert attention.rotary.theta == theirs.rope_parameters[kind]["rope_theta"]


def read_and_recorded(checkpoint: Checkpoint) -> Recording:
    family = family_of(checkpoint)
    assert isinstance(family, RecordedFamily)
    return family.record(family.read(checkpoint), SINGLE)


LLAMA, MISTRAL, QWEN, GPTJ = "llama, 2 K/V heads", "mistral, a window", "qwen2, a window in the upper layer", "gptj"
GEMMA = "gemma3, windows but in one layer"
ROPE: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("shape", "fields", "sentence"),
    [
        (LLAMA, {"rope_parameters": {"rope_type": "longrope"}}, "kind 'longrope'; known are default, linear"),
        (LLAMA, {"rope_parameters": {"rope_type": ["yarn"]}}, "kind a list; known are default"),
        (LLAMA, {"rope_parameters": {"rope_type": "linear"}}, "kind linear without factor"),
        (LLAMA, {"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "kind llama3 without low_freq_factor"),
        (LLAMA, {"rope_parameters": ROPE | {"factor": 0}}, "factor 0, not a number from"),
        (LLAMA, {"rope_parameters": ROPE | {"beta_fast": 0}}, "beta_fast 0, not a number from"),
        (LLAMA, {"rope_parameters": ROPE | {"original_max_position_embeddings": 0}}, "original_max_position_emb.* 0"),
        (LLAMA, {"rope_parameters": ROPE | {"rope_theta": 1}}, "rope_theta 1, not a number from"),
        (LLAMA, {"rope_parameters": "yarn"}, "rope_parameters 'yarn', not an object"),
        (
            LLAMA,
            {"rope_parameters": {"full_attention": ROPE}},
            r"asks for rotary positions by kind of layer \(full_attention\), which Llama",
        ),
        (LLAMA, {"num_key_value_heads": 4}, "shares 4 key/value heads among 6 heads"),
        (LLAMA, {"num_attention_heads": 7, "num_key_value_heads": 7, "head_dim": None}, "hidden size of 48 in 7 heads"),
        (LLAMA, {"head_dim": 9}, "turns 9 of 9 elements of a head"),
        (LLAMA, {"hidden_act": "exp"}, "activation 'exp'; Llama here has gelu"),
        (LLAMA, {"rms_norm_eps": "small"}, "rms_norm_eps 'small', not a number"),
        (LLAMA, {"attention_bias": "no"}, "attention_bias 'no', not true or false"),
        (LLAMA, {"num_hidden_layers": 0}, "num_hidden_layers 0, not a number from 1"),
        (MISTRAL, {"sliding_window": -1}, "sliding_window -1, not a number from 1"),
        (
            QWEN,
            {"layer_types": ["sliding_attention"]},
            "layer_types .*, not sliding_attention or full_attention of each",
        ),
        (QWEN, {"layer_types": ["sliding_attention", "chunked"]}, "layer_types a list, not sliding_attention"),
        (QWEN, {"layer_types": [["sliding_attention"], 7]}, "layer_types"),
        (GEMMA, {"attn_logit_softcapping": 50.0}, r"caps on scores of attention \(attn_logit_softcapping\)"),
        (GEMMA, {"final_logit_softcapping": 30.0}, r"a cap on logits \(final_logit_softcapping\), which Gemma 3 here"),
        (GEMMA, {"use_bidirectional_attention": True}, r"in both directions \(use_bidirectional_attention\), which"),
        (GEMMA, {"rope_parameters": {"rope_theta": 1e4}}, r"same rotary positions in all layers \(rope_theta\), which"),
        (GEMMA, {"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}, "kind 'longrope'; known are"),
        (GEMMA, {"rope_local_base_freq": 0}, "rope_local_base_freq 0, not a number from 2"),
        (GEMMA, {"sliding_window": 0}, "sliding_window 0, not a number from 1"),
        (GEMMA, {"layer_types": ["sliding_attention"]}, "layer_types .*, not sliding_attention or full_attention of"),
        (GEMMA, {"layer_types": None, "sliding_window_pattern": 0}, "sliding_window_pattern 0, not a number from 1"),
        (GEMMA, {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar 0, not a number from 1"),
        (GEMMA, {"num_key_value_heads": 4}, "shares 4 key/value heads among 6 heads"),
        (GEMMA, {"hidden_activation": "exp"}, "activation 'exp'; Gemma 3 here has gelu"),
        ("neox", {"rotary_pct": 2, "rope_parameters": None}, "rotary_pct 2, not a number from 0 to 1"),
        ("neox", {"num_attention_heads": 5}, "hidden size of 48 in 5 heads"),
        (GPTJ, {"rotary_dim": 10}, "turns 10 of 8 elements of a head"),
        (GPTJ, {"rotary_dim": 3}, "turns 3 of 8 elements of a head"),
    ],
    ids=str,
)
def test_fields_that_are_not_supported_stop_the_start(
    tmp_path: Path, shape: str, fields: dict[str, Any], sentence: str
) -> None:
    change_config(make_shape(tmp_path, shape), **fields)
    with pytest.raises(FailedPrecondition, match=f"^model: config.json of .* {sentence}"):
        check_partition(read_checkpoint(tmp_path), 1, 1)


@pytest.mark.parametrize(
    ("shape", "tp", "sentence"),
    [
        (LLAMA, 4, "tp 4: 6 heads and 2 key/value heads cannot be shared evenly by 4 tensor ranks"),
        ("mistral, a window", 2, "tp 2: 6 heads and 3 key/value heads cannot be shared evenly by 2 tensor ranks"),
        ("llama, 3 heads", 2, "tp 2: 3 heads cannot be shared evenly by 2 tensor ranks"),
        ("neox", 5, "tp 5: 6 heads cannot be shared evenly by 5 tensor ranks"),
    ],
)
def test_cuts_that_are_not_even_stop_the_start(tmp_path: Path, shape: str, tp: int, sentence: str) -> None:
    checkpoint = read_checkpoint(make_shape(tmp_path, shape))
    with pytest.raises(FailedPrecondition, match=f"^{sentence}$"):
        check_partition(checkpoint, tp, 1)


def test_more_query_heads_a_key_head_than_the_kernels_hold_stop_the_start(tmp_path: Path) -> None:
    folder = make_shape(tmp_path, LLAMA, hidden_size=130, num_attention_heads=65, num_key_value_heads=1)
    with pytest.raises(FailedPrecondition, match="65 query heads share a key/value head; 64 can in the"):
        make_stage(folder, 64, 4)
    engine = TinyEngine(make_stage(folder, 64, 4, kernels="torch"), 64, 4)
    engine.run(requests := [Sampled([5, 6, 7], 4)])
    assert requests[0].made == Reference(folder).greedy([5, 6, 7], 4)


def test_pickled_weights_are_refused_with_the_command_that_converts_them(tmp_path: Path) -> None:
    folder = make_shape(tmp_path / "it's", LLAMA)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises(FailedPrecondition, match=r"has its weights in pytorch_model\.bin, a pickle") as refusal:
        make_stage(folder, 64, 4)
    command = str(refusal.value).partition("as safetensors: ")[2]
    python, option, code = shlex.split(command)  # as a shell splits it: a new Python would import for seconds
    assert (python, option) == ("python", "-c")
    exec(code, {})  # noqa: S102  # of our own sentence
    assert load_file(folder / "model.safetensors").keys() == weights.keys()
    check_against_transformers(folder, 211, (16,), 2, ("auto",))


NEW_FAMILY = {
    "__init__.py": """
        from orca_worker.models.recorded import RecordedFamily
        from orca_worker.models.tables import Tables
        from .configuration import BigramConfig
        from .layers import record

        FAMILY = RecordedFamily(BigramConfig.read, record, "bigram.", Tables("table.weight", "head.weight"))
        """,
    "configuration.py": """
        from dataclasses import dataclass

        from orca_common.checkpoint import Checkpoint
        from orca_worker.models.fields import Fields


        @dataclass(frozen=True)
        class BigramConfig:
            vocab_size: int
            positions: int
            hidden: int
            layers: int
            heads: int
            inner: int
            tied: bool = True

            @classmethod
            def read(cls, checkpoint: Checkpoint) -> "BigramConfig":
                fields = Fields(checkpoint, "Bigram")
                fields.refuse_given("experts", "experts")
                sizes = [fields.whole(name, None) for name in ("hidden", "layers", "heads", "inner")]
                return cls(checkpoint.vocab_size, checkpoint.max_positions, *sizes)
        """,
    "layers.py": """
        from orca_worker.models.recording import Matrix, Recording, columns
        from orca_worker.partition import Place

        from .configuration import BigramConfig


        def record(config: BigramConfig, place: Place) -> Recording:
            r = Recording(place, config.hidden, config.vocab_size, config.positions)
            hidden, size, inner = config.hidden, config.hidden // config.heads, r.share_of_inner(config.inner)
            heads, _ = r.share_of_heads(config.heads, config.heads)
            cut = columns(heads, size)
            qkv, normed, out = r.rows(3 * len(cut)), r.operand(hidden), r.operand(len(cut))
            middle = r.operand(len(inner))
            if place.is_first:
                r.embed("table.weight", scale=2.0)
            for i in place.layers(config.layers):
                parts = [r.matrix(f"{i}.{part}", hidden, hidden, outs=[cut], bias=False) for part in "qkv"]
                r.normalize(normed, r.norm(f"{i}.norm", hidden, 1e-6, bias=False))
                r.linear(normed, Matrix.stacked(parts), qkv)
                r.attend(qkv, r.attention(len(heads), len(heads), size, 0.5), out)
                r.linear(normed, r.matrix(f"{i}.up", config.inner, hidden, outs=[inner]), middle, "relu")
                r.residual(
                    (out, r.matrix(f"{i}.merge", hidden, hidden, ins=[cut], bias=False)),
                    (middle, r.matrix(f"{i}.down", hidden, config.inner, ins=[inner])),
                )
            if place.is_last:
                r.normalize(normed, r.norm("norm", hidden, 1e-6, bias=False), of_head=True)
                r.head(normed, "table.weight" if config.tied else "head.weight")
            return r
        """,
}


async def test_a_family_is_a_folder_and_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As docs/change.md, "How to add a model family", says. It runs in all ways and on several ranks."""
    package = tmp_path / "packages/bigram"
    package.mkdir(parents=True)
    for name, text in NEW_FAMILY.items():
        (package / name).write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setitem(FAMILIES, "bigram", importlib.import_module("bigram").FAMILY)  # the line
    sizes = {"hidden": 24, "layers": 2, "heads": 6, "inner": 11}
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({"model_type": "bigram", "vocab_size": 97, "n_positions": 48, **sizes})
    )
    generator = torch.Generator().manual_seed(4)
    weights = {
        f"bigram.{part.name}": torch.randn(part.shape, generator=generator) * 3 / part.shape[-1] ** 0.5
        for part in family_of(read_checkpoint(folder))
        .share(read_checkpoint(folder), SINGLE, Types.of("float32"))
        .slices.values()
    }
    save_file(weights, folder / "model.safetensors")
    of = {name.removeprefix("bigram."): tensor.double() for name, tensor in weights.items()}

    def norm(x: Tensor, name: str) -> Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], of[name + ".weight"], 1e-6)

    def likeliest(tokens: list[int]) -> int:
        x = 2 * of["table.weight"][tokens]
        for i in range(2):
            normed = norm(x, f"{i}.norm")
            q, k, v = ((normed @ of[f"{i}.{part}.weight"].t()).view(-1, 6, 4).transpose(0, 1) for part in "qkv")
            scores = (q @ k.transpose(1, 2) * 0.5).masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
            seen = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
            middle = torch.relu(normed @ of[f"{i}.up.weight"].t() + of[f"{i}.up.bias"])
            x = x + seen @ of[f"{i}.merge.weight"].t() + middle @ of[f"{i}.down.weight"].t() + of[f"{i}.down.bias"]
        return int((norm(x[-1], "norm") @ of["table.weight"].t()).argmax())

    made = []
    for kernels in ("auto", "torch"):
        made.append(requests_for(97, 4, seed=1))
        TinyEngine(make_stage(folder, 400, 4, kernels=kernels), 400, 4).run(made[-1])
    made.append(requests_for(97, 4, seed=1))
    async with in_process(folder, 2, 2) as (master, _):
        await master.run(made[-1])
    for requests in made:
        for request in requests:
            tokens = list(request.prompt)
            for _ in range(request.new_tokens):
                tokens.append(likeliest(tokens))
            assert request.made == tokens[len(request.prompt) :]
    change_config(folder, experts=8)
    with pytest.raises(FailedPrecondition, match=r"experts \(experts\), which Bigram here does not have"):
        check_partition(read_checkpoint(folder), 1, 1)
