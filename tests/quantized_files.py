"""Writes checkpoints as other tools quantize them, from the layouts' descriptions alone: plain numpy, word by word."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

Tensors = dict[str, tuple[str, np.ndarray]]  # types in safetensors, and arrays with as many bytes an item
LINEAR = re.compile(r"\.((q|k|v|o|gate|up|down)_proj|c_attn|c_proj|c_fc)\.weight$")


def write_safetensors(file: Path, tensors: Tensors) -> None:
    header, at, data = dict[str, Any](), 0, b""
    for name, (kind, array) in tensors.items():
        raw = array.tobytes()
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [at, at + len(raw)]}
        at, data = at + len(raw), data + raw
    head = json.dumps(header).encode()
    file.write_bytes(len(head).to_bytes(8, "little") + head + data)


def bf16(x: np.ndarray) -> tuple[str, np.ndarray]:
    """Cut off, so that the numbers are those of bfloat16."""
    return "BF16", (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def widened(stored: tuple[str, np.ndarray]) -> np.ndarray:
    kind, x = stored
    return (x.astype(np.uint32) << 16).view(np.float32) if kind == "BF16" else x.astype(np.float32)


def stored(x: np.ndarray, kind: str) -> tuple[str, np.ndarray]:
    return bf16(x) if kind == "BF16" else (kind, x.astype({"F16": np.float16, "F32": np.float32}[kind]))


def words(codes: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """codes [.., n] -> words [.., n / codes of a word] int32. order: of the codes, from the lowest bits on."""
    each = 32 // bits
    whole = np.zeros((*codes.shape[:-1], -(-codes.shape[-1] // each) * each), np.uint64)
    whole[..., : codes.shape[-1]] = codes
    made = np.zeros(whole[..., ::each].shape, np.uint64)
    for place in range(each):
        made |= whole[..., order[place] if order else place :: each] << np.uint64(bits * place)
    return made.astype(np.uint32).view(np.int32)


@dataclass
class Way:
    """How matrices are quantized. `tensors` writes one [out, in] float32, and returns its numbers, too."""

    config: Mapping[str, Any]
    tensors: Callable[[str, np.ndarray, np.random.Generator], tuple[Tensors, np.ndarray]]
    kept: str | None  # how a rank keeps them, or None
    dtype: str = "float32"
    skip: re.Pattern[str] = field(default_factory=lambda: re.compile("(?!)"))


def grouped(
    x: np.ndarray, index: np.ndarray, bits: int, symmetric: bool, kind: str
) -> tuple[np.ndarray, np.ndarray, tuple[str, np.ndarray], np.ndarray]:
    """x [out, in], the group of each input -> codes [out, in] from 0, zero points [out, g], scales, numbers."""
    groups = int(index.max()) + 1
    low, high = np.zeros((2, len(x), groups), np.float32)
    for group in range(groups):
        low[:, group], high[:, group] = x[:, index == group].min(1), x[:, index == group].max(1)
    most, middle = (1 << bits) - 1, 1 << (bits - 1)
    if symmetric:
        scales = stored(np.maximum(abs(low), abs(high)) / (middle - 1), kind)
        zeros = np.full(low.shape, middle)
    else:
        low, high = np.minimum(low, 0), np.maximum(high, 0)
        low[::3], high[1::3] = 0, 0  # zero points of 0 and of the largest code
        scales = stored(np.maximum((high - low) / most, 1e-4), kind)
        zeros = np.clip(np.rint(-low / widened(scales)), 0, most).astype(int)
    by_input = widened(scales)[:, index], zeros[:, index]
    codes = np.clip(np.rint(x / by_input[0]) + by_input[1], 0, most).astype(int)
    return codes, zeros, scales, ((codes - by_input[1]) * by_input[0]).astype(np.float32)


def gptq(group: int, *, symmetric: bool = False, act_order: bool = False, version: str | None = "gptq") -> Way:
    def tensors(name: str, x: np.ndarray, chance: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        index = np.arange(x.shape[1]) // (group if group > 0 else x.shape[1])
        index = chance.permutation(index) if act_order else index
        codes, zeros, scales, numbers = grouped(x, index, 4, symmetric, "F16")
        packed = words(zeros.T, 4)
        if version != "gptq_v2":  # one less, of the whole word
            packed = (packed.view(np.uint32) - np.uint32(0x11111111)).view(np.int32)
        return {
            f"{name}.qweight": ("I32", np.ascontiguousarray(words(codes, 4).T)),
            f"{name}.qzeros": ("I32", packed),
            f"{name}.scales": ("F16", np.ascontiguousarray(scales[1].T)),
            f"{name}.g_idx": ("I32", index.astype(np.int32)),
        }, numbers

    config = {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": act_order, "sym": symmetric}
    kept = None if act_order or (group > 0 and group % 32) else "grouped"
    return Way(config | ({} if version is None else {"checkpoint_format": version}), tensors, kept)


def awq(group: int, kind: str = "F16") -> Way:
    def tensors(name: str, x: np.ndarray, chance: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        codes, zeros, scales, numbers = grouped(x, np.arange(x.shape[1]) // group, 4, False, kind)
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        return {
            f"{name}.qweight": ("I32", words(np.ascontiguousarray(codes.T), 4, order)),
            f"{name}.qzeros": ("I32", words(np.ascontiguousarray(zeros.T), 4, order)),
            f"{name}.scales": (scales[0], np.ascontiguousarray(scales[1].T)),
        }, numbers

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    return Way(config, tensors, "grouped" if kind != "F32" else None)


def scheme(form: str, weights: Mapping[str, Any], inputs: Any = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group | {"format": form}},
        "ignore": ["lm_head"],
    }


def packed(bits: int, group: int, *, symmetric: bool = True, kind: str = "BF16") -> Way:
    """compressed-tensors' words. group 0: a scale for each output."""

    def tensors(name: str, x: np.ndarray, chance: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        index = np.arange(x.shape[1]) // (group or x.shape[1])
        codes, zeros, scales, numbers = grouped(x, index, bits, symmetric, kind)
        found: Tensors = {
            f"{name}.weight_packed": ("I32", words(codes, bits)),
            f"{name}.weight_scale": scales,
            f"{name}.weight_shape": ("I64", np.array(x.shape, np.int64)),
        }
        if not symmetric:
            found[f"{name}.weight_zero_point"] = "I32", np.ascontiguousarray(words(zeros.T, bits).T)
        return found, numbers

    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel", "group_size": None}
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, **strategy}
    kept = ("grouped" if kind != "F32" else None) if bits == 4 else "eights" if symmetric and group % 128 == 0 else None
    return Way(scheme("pack-quantized", weights), tensors, kept)


def eight_bits(strategy: str, *, symmetric: bool = True) -> Way:
    """compressed-tensors' W8A8."""

    def tensors(name: str, x: np.ndarray, chance: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        rows = x.reshape(1, -1) if strategy == "tensor" else x
        codes, zeros, scales, numbers = grouped(rows, np.zeros(rows.shape[1], int), 8, symmetric, "BF16")
        shape = (1,) if strategy == "tensor" else (len(x), 1)
        found: Tensors = {
            f"{name}.weight": ("I8", (codes - 128).reshape(x.shape).astype(np.int8)),
            f"{name}.weight_scale": (scales[0], scales[1].reshape(shape)),
        }
        if not symmetric:
            found[f"{name}.weight_zero_point"] = "I8", (zeros - 128).reshape(shape).astype(np.int8)
        return found, numbers.reshape(x.shape)

    weights = {"num_bits": 8, "type": "int", "symmetric": symmetric, "strategy": strategy}
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    return Way(scheme("int-quantized", weights, inputs), tensors, "eights" if symmetric else None)


def float8_values() -> np.ndarray:
    """Of the 127 codes with a sign of 0 that are numbers, in ascending order."""
    return np.array(
        [rest / 8 * 2.0**-6 for rest in range(8)]
        + [(1 + rest / 8) * 2.0 ** (exponent - 7) for exponent in range(1, 16) for rest in range(8)][:-1]
    )


def float8(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x within 448 -> codes uint8, and their numbers."""
    values = float8_values()
    nearest = np.searchsorted((values[1:] + values[:-1]) / 2, np.abs(x))  # in the middle the smaller one
    return (nearest + 128 * (x < 0)).astype(np.uint8), (np.sign(x) * values[nearest]).astype(np.float32)


def in_float8(x: np.ndarray, scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """scales: of the shape of x -> codes, and the products of their numbers with the scales."""
    codes, numbers = float8(x / scales)
    return codes, numbers * scales.astype(np.float32)


def blocks_of(x: np.ndarray, block: tuple[int, ...], kind: str) -> tuple[tuple[str, np.ndarray], np.ndarray]:
    """A scale for each block, and the same for each number."""
    rows, columns = block
    found = np.zeros((-(-x.shape[0] // rows), -(-x.shape[1] // columns)), np.float32)
    for i, j in np.ndindex(found.shape):
        found[i, j] = np.abs(x[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]).max() / 448 * 1.01
    if kind == "F8_E8M0":
        exponents = np.ceil(np.log2(found)).astype(int)
        scales, values = (kind, (exponents + 127).astype(np.uint8)), np.ldexp(np.float32(1), exponents)
    else:
        scales = stored(found, kind)
        values = widened(scales)
    return scales, values.repeat(rows, 0).repeat(columns, 1)[: x.shape[0], : x.shape[1]]


def fp8(block: tuple[int, int] | None, kind: str = "F32") -> Way:
    """transformers' own."""

    def tensors(name: str, x: np.ndarray, chance: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        scales, each = blocks_of(x, block or x.shape, kind)
        codes, numbers = in_float8(x, each)
        alone = scales if block else (scales[0], scales[1].reshape(()))
        return {f"{name}.weight": ("F8_E4M3", codes), f"{name}.weight_scale_inv": alone}, numbers

    size = None if block is None else list(block)
    return Way({"quant_method": "fp8", "weight_block_size": size, "activation_scheme": "dynamic"}, tensors, None)


def compressed_fp8(strategy: str) -> Way:
    def tensors(name: str, x: np.ndarray, chance: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        block = {"tensor": x.shape, "channel": (1, x.shape[1]), "block": (48, 40)}[strategy]
        scales, each = blocks_of(x, block, "BF16")
        codes, numbers = in_float8(x, each)
        of_tensor = (scales[0], scales[1].reshape(1)) if strategy == "tensor" else scales
        return {f"{name}.weight": ("F8_E4M3", codes), f"{name}.weight_scale": of_tensor}, numbers

    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "block_structure": [48, 40]}
    return Way(scheme("float-quantized", weights), tensors, None)


WAYS: dict[str, Way] = {
    "gptq, groups of 128": gptq(128),
    "gptq, groups of 64, symmetric": gptq(64, symmetric=True, version=None),
    "gptq, groups of 32, version 2": gptq(32, version="gptq_v2"),
    "gptq, one group": gptq(-1),
    "gptq, groups of 16": gptq(16),
    "gptq, act-order": gptq(32, act_order=True),
    "awq, groups of 64": awq(64),
    "awq, groups of 32, bfloat16": awq(32, "BF16"),
    "awq, groups of 32, float32": awq(32, "F32"),
    "packed, 4 bits, groups of 32": packed(4, 32),
    "packed, 4 bits, zero points, groups of 64": packed(4, 64, symmetric=False, kind="F16"),
    "packed, 4 bits": packed(4, 0),
    "packed, 8 bits": packed(8, 0),
    "packed, 8 bits, groups of 64": packed(8, 64),
    "packed, 8 bits, zero points": packed(8, 0, symmetric=False),
    "W8A8": eight_bits("channel"),
    "W8A8, a scale": eight_bits("tensor"),
    "W8A8, zero points": eight_bits("channel", symmetric=False),
    "fp8, blocks": fp8((48, 64)),
    "fp8, blocks, powers of two": fp8((64, 64), "F8_E8M0"),
    "fp8, a scale": fp8(None),
    "FP8, a scale": compressed_fp8("tensor"),
    "FP8": compressed_fp8("channel"),
    "FP8, blocks": compressed_fp8("block"),
}


def make_quantized(floats: Path, folder: Path, way: Way, *, seed: int = 1) -> Path:
    """A checkpoint of floats in a way. The one of floats gets the numbers that it stands for."""
    chance, tensors, numbers = np.random.default_rng(seed), Tensors(), dict[str, np.ndarray]()
    for name, x in load_file(floats / "model.safetensors").items():
        numbers[name] = x
        if LINEAR.search(name) and not way.skip.search(name):
            is_transposed = ".c_" in name  # GPT-2's
            given = np.ascontiguousarray(x.T) if is_transposed else x
            found, made = way.tensors(name.removesuffix(".weight"), given, chance)
            numbers[name] = np.ascontiguousarray(made.T) if is_transposed else made
            tensors |= found
        else:
            tensors[name] = "F32", x
    save_file(numbers, floats / "model.safetensors")
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((floats / "config.json").read_text()) | {"quantization_config": way.config}
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", tensors)
    return folder
