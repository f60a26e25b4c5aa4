"""Checkpoints that other tools quantized: their numbers, tokens of an independent implementation, refusals."""

import json
import random
import re
import resource
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import make_gpt2, make_shape
from fuzz.mutations import mutated
from properties import PART, covering
from quantized_files import WAYS, Way, fp8, gptq, make_quantized, packed, write_safetensors
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch
from worker.driver import Sampled, TinyEngine, make_stage
from worker.engines import in_process
from worker.test_quantize import CUTS, MANY, Oracle, check_tokens

from orca_common.checkpoint import Checkpoint, read_checkpoint
from orca_common.errors import FailedPrecondition
from orca_worker.models.check import check
from orca_worker.models.coded import CodedFiles, Part, parts_of
from orca_worker.models.families import check_type, check_weights, topology
from orca_worker.models.formats.layout import layout_of
from orca_worker.models.llama.configuration import LlamaConfig
from orca_worker.models.llama.layers import record
from orca_worker.models.weight_files import fingerprint
from orca_worker.partition import SINGLE, Types

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
LLAMA, QWEN2, QWEN3 = "llama, 2 K/V heads", "qwen2, a window in the upper layer", "qwen3, large heads"
TOOLS = Path(__file__).with_name("data") / "coded.safetensors"
each_way = pytest.mark.parametrize("name", WAYS)


def both(tmp_path: Path, shape: str, way: Way, **config: Any) -> tuple[Path, Path]:
    """A quantized checkpoint, and one of the same numbers in float32."""
    if shape == "gpt2":
        sizes: dict[str, Any] = {"heads": 4, "layers": 2, "hidden": 128, "vocab": 211, "positions": 64}
        floats = make_gpt2(tmp_path / "floats", **sizes, seed=4, initializer_range=0.3)
    else:
        sizes = {"use_sliding_window": False} if shape == QWEN2 else {}
        floats = make_shape(tmp_path / "floats", shape, **(SIZES | sizes | config))
    return make_quantized(floats, tmp_path / "model", way), floats


def requests_for(count: int) -> list[Sampled]:
    chance = random.Random(count)
    return [Sampled([chance.randrange(210) for _ in range(chance.randint(1, 30))], 6) for _ in range(count)]


def tokens_of(folder: Path, **how: Any) -> list[list[int]]:
    requests = requests_for(9)
    TinyEngine(make_stage(folder, 400, 16, **how), 400, 16).run(requests)
    return [request.made for request in requests]


def written_by_tools() -> Mapping[str, str]:
    """The configuration of each matrix of TOOLS."""
    raw = TOOLS.read_bytes()
    return json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])["__metadata__"]


@pytest.mark.parametrize("case", written_by_tools())
def test_the_numbers_of_the_tools_themselves(tmp_path: Path, case: str) -> None:
    """compressed-tensors 0.20.0, autoawq 0.2.9 and gptqmodel 7.7.0 have written matrices and read them again."""
    (tmp_path / "model.safetensors").symlink_to(TOOLS)
    layout = layout_of(json.loads(written_by_tools()[case]), "tools")
    assert layout is not None
    expected = load_torch(TOOLS)[f"{case}.expected"]
    outputs, inputs = expected.shape
    part = Part(case, outputs, inputs, (range(outputs),), (range(inputs),), False)
    files = CodedFiles(tmp_path, "", layout)
    files.check([part])
    codes, group, _ = files.read(part)
    whole = codes.numbers(slice(None), group)
    assert torch.equal(torch.from_numpy(whole).to(expected.dtype), expected)
    for some in (part._replace(outs=(range(3, 9), range(17, 24))), part._replace(ins=(range(5, 12), range(40, 71)))):
        codes, group, _ = files.read(some)
        cut = [np.concatenate([np.arange(one.start, one.stop) for one in ranges]) for ranges in (some.outs, some.ins)]
        assert np.array_equal(codes.numbers(slice(None), group), whole[np.ix_(*cut)])


@each_way
def test_tokens_equal_an_independent_implementation(tmp_path: Path, name: str) -> None:
    """Codes that a rank keeps multiply activations in eight bits; others are the same numbers in float32."""
    way = WAYS[name]
    shape = (LLAMA, QWEN2, QWEN3)[list(WAYS).index(name) % 3]
    folder, floats = both(tmp_path, shape, way)
    method = way.config["quant_method"]
    sentence = check(folder, 1, 1, config_only=False)
    assert sentence is not None
    assert sentence.lower().startswith(method)
    if way.kept is None:
        assert tokens_of(folder) == tokens_of(floats)
        assert tokens_of(folder, kernels="torch") == tokens_of(floats, kernels="torch")
        return
    requests = list[Sampled]()
    for kernels, counts in ("auto", (1, 3, MANY)), ("torch", (8,)):
        engine = TinyEngine(make_stage(folder, 40 * 48, 16, kernels=kernels), 40 * 48, 16)
        for count in counts:
            requests += (new := requests_for(count))
            engine.run(new)
    check_tokens(Oracle(floats, 1, None), requests)


MODELS = (
    ("gptq, groups of 128", LLAMA),
    ("awq, groups of 64", QWEN2),
    ("packed, 4 bits, zero points, groups of 64", LLAMA),
    ("W8A8", QWEN3),
    ("gptq, groups of 64, symmetric", "gpt2"),
)


@pytest.mark.parametrize(("model", "cut"), covering(MODELS, CUTS, strength=1), ids=str)
async def test_several_ranks(tmp_path: Path, model: tuple[str, str], cut: tuple[int, int]) -> None:
    """A tensor rank's inputs may begin within a group."""
    (name, shape), (tp, pp) = model, cut
    folder, floats = both(tmp_path, shape, WAYS[name])
    async with in_process(folder, tp, pp, slots=600) as (master, _):
        requests = requests_for(8)
        await master.run(requests)
    check_tokens(Oracle(floats, tp, None), requests)


@pytest.mark.parametrize("tp", [1, 3])
@pytest.mark.parametrize("act_order", [False, True])
async def test_parts_as_high_as_wide_of_a_model_with_transposed_tensors(
    tmp_path: Path, tp: int, act_order: bool
) -> None:
    """A whole projection of GPT-2's is square; so is a third of its queries, keys and values."""
    sizes: dict[str, Any] = {"heads": 6, "layers": 2, "hidden": 96, "vocab": 211, "positions": 64}
    floats = make_gpt2(tmp_path / "floats", **sizes, seed=7, initializer_range=0.1)
    folder = make_quantized(floats, tmp_path / "model", gptq(32, act_order=act_order))
    async with in_process(folder, tp, 1, slots=600) as (master, _):
        requests = requests_for(8)
        await master.run(requests)
    if not act_order:
        check_tokens(Oracle(floats, tp, None), requests)
        return
    async with in_process(floats, tp, 1, slots=600) as (master, _):
        plain = requests_for(8)
        await master.run(plain)
    assert [one.made for one in requests] == [one.made for one in plain]


@pytest.mark.parametrize("name", ["gptq, act-order", "gptq, groups of 16", "fp8, blocks", "FP8, blocks"])
async def test_numbers_on_several_ranks(tmp_path: Path, name: str) -> None:
    """Cut within words, groups and blocks."""
    config: dict[str, Any] = {"hidden_size": 48, "intermediate_size": 88, "head_dim": 12}
    made = []
    for folder in both(tmp_path, LLAMA, WAYS[name], **config):
        async with in_process(folder, 2, 2, slots=600) as (master, _):
            requests = requests_for(8)
            await master.run(requests)
        made.append([request.made for request in requests])
    assert made[0] == made[1]


@each_way
def test_the_plan_is_near_the_size_of_the_file(tmp_path: Path, name: str) -> None:
    """Of codes that are kept. Matrices of real models share more inputs."""
    way = WAYS[name]
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    folder, floats = both(tmp_path, LLAMA, way, **sizes)
    share = topology(read_checkpoint(folder), 1, 1, Types.of("float32"))[0]
    whole = sum(x.nbytes for x in load_file(floats / "model.safetensors").values())
    limit = 1.08 * (folder / "model.safetensors").stat().st_size
    assert share.weight_bytes < limit if way.kept else share.weight_bytes == whole
    (folder / "model.safetensors").unlink()  # before they are fetched the plan is that of config.json
    if "act-order" not in name and "float32" not in name:
        assert topology(read_checkpoint(folder), 1, 1, Types.of("float32"))[0].weight_bytes == share.weight_bytes


def test_layers_that_were_left_alone(tmp_path: Path) -> None:
    """Then all matrices become numbers; and codes by `quantize` are made of the same numbers."""
    way = gptq(32)
    way.skip = re.compile(r"layers\.1\.mlp\.down_proj")
    folder, floats = both(tmp_path, LLAMA, way)
    assert tokens_of(folder) == tokens_of(floats)
    assert tokens_of(folder, quantize="int8") == tokens_of(floats, quantize="int8")


def test_the_fingerprint_covers_codes_and_the_configuration(tmp_path: Path) -> None:
    folder, _ = both(tmp_path, LLAMA, gptq(32))
    before = fingerprint(folder)
    raw = bytearray((folder / "model.safetensors").read_bytes())
    raw[-5] ^= 1
    (folder / "model.safetensors").write_bytes(raw)
    assert fingerprint(folder) != before


# -- what is wrong


def changed(folder: Path, **fields: Any) -> None:
    """config.json says something else of the weights; None takes a field away."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] = {
        key: value for key, value in (config["quantization_config"] | fields).items() if value is not None
    }
    file.write_text(json.dumps(config))


WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}


@pytest.mark.parametrize(
    ("way", "fields", "part"),
    [
        (gptq(32), {"bits": 3}, "were quantized by gptq with bits 3, which is not 4"),
        (gptq(32), {"group_size": 0}, "gptq with group_size 0, which is not a number from 1 to"),
        (gptq(32), {"group_size": True}, "gptq with group_size True"),
        (gptq(32), {"group_size": None}, "gptq with group_size None"),
        (gptq(32), {"checkpoint_format": "marlin"}, "with checkpoint_format 'marlin', which is not gptq or gptq_v2"),
        (gptq(32), {"lm_head": True}, "gptq with lm_head True, which is not read"),
        (gptq(32), {"dynamic": {"-:.*": {}}}, "gptq with dynamic an object, which is not read"),
        (WAYS["awq, groups of 64"], {"version": "gemv"}, "awq with version 'gemv', which is not gemm"),
        (packed(4, 32), {"config_groups": None}, "with config_groups None, which is not an object"),
        (packed(4, 32), {"config_groups": {"a": {}, "b": {}}}, "config_groups a list, which is not one group"),
        (packed(4, 32), {"config_groups": {"a": {"weights": WEIGHTS | {"num_bits": 3}}}}, "with num_bits 3"),
        (packed(4, 32), {"config_groups": {"a": {"weights": WEIGHTS | {"strategy": "x"}}}}, "with strategy 'x'"),
        (
            packed(4, 32),
            {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "format 'sparse-24-bitmask', which is not",
        ),
        (
            packed(4, 32),
            {"transform_config": {"config_groups": {"R1": {}}}},
            "config_groups an object, which is not read",
        ),
        (packed(4, 32), {"config_groups": {"a": {}}, "format": "marlin-24"}, "with weights None"),
        (fp8((48, 64)), {"weight_block_size": [0, 64]}, "fp8 with weight_block_size a list, which is not two numbers"),
    ],
)
def test_a_configuration_that_is_not_read(tmp_path: Path, way: Way, fields: dict[str, Any], part: str) -> None:
    """It is refused before the weights are fetched."""
    folder, _ = both(tmp_path, LLAMA, way)
    (folder / "model.safetensors").unlink()
    changed(folder, **fields)
    with pytest.raises(FailedPrecondition, match=part):
        check_type(folder)


UP = "model.layers.1.mlp.up_proj"
Entries = dict[str, Any]


def tensors_of(folder: Path) -> Entries:
    raw = (folder / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    kinds = {"I32": np.int32, "I64": np.int64, "F16": np.float16, "F32": np.float32, "BF16": np.uint16}
    found = Entries()
    for name, one in json.loads(raw[8:start]).items():
        begin, end = (start + at for at in one["data_offsets"])
        kind = kinds.get(one["dtype"], np.uint8)
        found[name] = one["dtype"], np.frombuffer(raw[begin:end], kind).reshape(one["shape"]).copy()
    return found


def replaced(end: str, change: Callable[[Any], Any]) -> Callable[[Entries], None]:
    def on(tensors: Entries) -> None:
        kind, array = tensors[UP + end]
        tensors[UP + end] = kind, change(array)

    return on


def with_group(value: int) -> Callable[[Any], Any]:
    def on(index: Any) -> Any:
        index[77] = value
        return index

    return on


@pytest.mark.parametrize(
    ("way", "change", "part"),
    [
        (gptq(32), replaced(".g_idx", with_group(4)), "up_proj.g_idx has the group 4; there are 4"),
        (gptq(32), replaced(".g_idx", with_group(-1)), "up_proj.g_idx has the group -1; there are 4"),
        (gptq(32), replaced(".g_idx", lambda x: x[:-1]), r"g_idx is \[127\] in I32; a group for each of 128 inputs"),
        (gptq(32), replaced(".scales", lambda x: x[:-1]), r"up_proj.scales is \[3, 320\] in F16; .* makes \[4, 320\]"),
        (gptq(32), replaced(".scales", lambda x: x.view("i2")), None),
        (gptq(32), replaced(".qzeros", lambda x: x.T.copy()), r"up_proj.qzeros is \[40, 4\] in I32"),
        (gptq(32), replaced(".qweight", lambda x: x[1:]), r"up_proj.qweight is \[15, 320\] in I32; .* \[16, 320\]"),
        (gptq(32), lambda tensors: tensors.pop(UP + ".qzeros"), "lack .*up_proj.qzeros, which GPTQ, 4 bits"),
        (gptq(32), lambda tensors: tensors.pop(UP + ".qweight"), "lack .*up_proj.weight"),
        (
            gptq(32),
            lambda tensors: tensors.update({UP + ".qweight": ("F32", tensors[UP + ".qweight"][1])}),
            "lack .*up_proj.weight",
        ),
        (packed(4, 32), replaced(".weight_scale", lambda x: x[:, :1]), r"weight_scale is \[320, 1\] in BF16"),
        (fp8((48, 64)), replaced(".weight_scale_inv", lambda x: x[:1]), r"weight_scale_inv is \[1, 2\] in F32"),
    ],
)
def test_tensors_that_are_wrong(tmp_path: Path, way: Way, change: Callable[[Entries], object], part: str) -> None:
    """Before a process of an engine starts, with the file, the tensor and the reason."""
    folder, _ = both(tmp_path, LLAMA, way)
    tensors = tensors_of(folder)
    change(tensors)
    write_safetensors(folder / "model.safetensors", tensors)
    if part is None:
        check_weights(read_checkpoint(folder))
        return
    with pytest.raises(FailedPrecondition, match=rf"^model: the weights in .*{part}"):
        check_weights(read_checkpoint(folder))
    with pytest.raises(FailedPrecondition, match=part):
        make_stage(folder, 400, 16).form(16)


def test_a_wrong_group_size_and_files_without_codes(tmp_path: Path) -> None:
    folder, floats = both(tmp_path, LLAMA, gptq(32))
    changed(folder, group_size=64)
    with pytest.raises(FailedPrecondition, match=r"q_proj.qzeros is \[4, 16\] in I32; GPTQ, 4 bits, groups of 64 of"):
        check_weights(read_checkpoint(folder))
    (folder / "model.safetensors").write_bytes((floats / "model.safetensors").read_bytes())
    with pytest.raises(FailedPrecondition, match=r"lack .*q_proj.qweight, which GPTQ, 4 bits, groups of 64 has"):
        check_weights(read_checkpoint(folder))


@pytest.mark.parametrize("name", ["W8A8", "fp8, blocks", "packed, 4 bits"])
def test_a_head_in_codes(tmp_path: Path, name: str) -> None:
    """It is said before a process starts, and not that the head is missing."""
    folder, _ = both(tmp_path, LLAMA, WAYS[name])
    tensors = tensors_of(folder)
    codes = next(
        key for key in WAYS[name].tensors("lm_head", tensors["lm_head.weight"][1], np.random.default_rng(1))[0]
    )
    tensors.pop("lm_head.weight")
    kind = {"W8A8": "I8", "fp8, blocks": "F8_E4M3"}.get(name, "I32")
    tensors[codes] = kind, np.zeros((2, 2), {"I32": np.int32}.get(kind, np.int8))
    write_safetensors(folder / "model.safetensors", tensors)
    with pytest.raises(FailedPrecondition, match=rf"{codes} is in {kind}; .* of layers alone may be in codes"):
        check_weights(read_checkpoint(folder))


def test_a_matrix_of_more_inputs_than_any_has(tmp_path: Path) -> None:
    """Heads and their size are within bounds; the group of each input of their product would fill a machine."""
    folder, _ = both(tmp_path, LLAMA, gptq(32))
    file = folder / "config.json"
    heads = {"num_attention_heads": 1 << 17, "head_dim": 1 << 17}
    file.write_text(json.dumps(json.loads(file.read_text()) | heads))
    with pytest.raises(FailedPrecondition, match=r"o_proj has 17179869184 inputs"):
        check_weights(read_checkpoint(folder))
    with pytest.raises(FailedPrecondition, match=r"o_proj has 17179869184 inputs"):
        topology(read_checkpoint(folder), 1, 1, Types.of("float32"))


def everything(checkpoint: Checkpoint) -> None:
    """Reads the numbers of all matrices."""
    layout = layout_of(checkpoint.quantization, checkpoint.name)
    if layout is None:  # nothing says that there are codes
        return
    files = CodedFiles(checkpoint.folder, "model.", layout)
    for part in parts_of(record(LlamaConfig.read(checkpoint), SINGLE)).values():
        if files.has(part):
            codes, group, _ = files.read(part)
            assert codes.numbers(slice(None), group).shape == (part.outputs, part.inputs)


COUNT = 200 if PART > 1 else 20_000
FUZZED = ("gptq, act-order", "awq, groups of 64", "packed, 4 bits, zero points, groups of 64", "W8A8", "fp8, blocks")


@pytest.mark.parametrize("name", FUZZED)
def test_changed_files_are_read_or_refused(tmp_path: Path, name: str) -> None:
    """Files and configurations are cut short, have other bytes, or pieces that come twice."""
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16, "num_hidden_layers": 1}
    folder, _ = both(tmp_path, LLAMA, WAYS[name], **sizes, vocab_size=8)
    weights, config = folder / "model.safetensors", folder / "config.json"
    whole, said = weights.read_bytes(), config.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    chance, read, before = random.Random(name), 0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    layout = json.dumps(json.loads(said)["quantization_config"]).encode()
    for number in range(COUNT):
        if number % 2:
            head = mutated(whole[8:header], [whole[8:header]], chance)
            raw = len(head).to_bytes(8, "little") + head + whole[header:]
            raw = raw if chance.random() < 0.9 else whole[: chance.randrange(len(whole))]
            weights.unlink(missing_ok=True)  # a file that is cut to nothing is flushed by some file systems
            weights.write_bytes(raw)
            config.write_bytes(said)
        else:
            weights.write_bytes(whole)
            config.write_bytes(said.replace(layout, mutated(layout, [layout], chance)))
        with suppress(FailedPrecondition):  # and nothing else
            checkpoint = read_checkpoint(folder)
            check_weights(checkpoint)
            topology(checkpoint, 1, 1, Types.of("float32"))
            everything(checkpoint)
            read += 1
    assert 0 < read < COUNT
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # KiB
