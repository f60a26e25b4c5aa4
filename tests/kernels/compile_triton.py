"""Compiles the kernels ahead of time, as on a GPU their launches would, and prints what each needs, a JSON line each.

    python tests/kernels/compile_triton.py 90        compute capability 9.0, an H100

No GPU is needed. The launching functions get tensors without memory (torch's device "meta"), and instead of a launch
the kernel is compiled with the launch's own arguments. ptxas, cuobjdump and nvdisasm come with Triton.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from orca_kernels.triton.activation import bias_act, gate_act
from orca_kernels.triton.attention import split_attention
from orca_kernels.triton.codes import coded
from orca_kernels.triton.draws import Draws
from orca_kernels.triton.linear import linear
from orca_kernels.triton.norm import Norm, add_norm
from orca_kernels.triton.plan import Plan, plan_batch
from orca_kernels.triton.rope import Rope
from orca_kernels.triton.sampling import sample
from orca_kernels.triton.write_kv import HeadNorms, write_kv

META = torch.device("meta")
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
BLOCK_SIZE = 16
TYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint64: "u64",
}


class Compiler:
    """Takes the place of a launch: compiles, once for the same kernel and types, and notes what came out."""

    def __init__(self, capability: int, folder: Path) -> None:
        self._target, self._folder = GPUTarget("cuda", capability, 32), folder
        self.shape = ""
        self.found: dict[str, dict[str, Any]] = {}

    def run(self, kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in ("num_warps", "num_stages", "enable_fp_fusion") if name in kwargs}
        signature, constants, attributes = {}, {}, {}
        for i, (name, value) in enumerate((dict(zip(kernel.arg_names, args, strict=False)) | kwargs).items()):
            parameter = kernel.params[i]
            assert parameter.name == name
            if isinstance(value, Tensor):
                signature[name], attributes[(i,)] = "*" + TYPES[value.dtype], [["tt.divisibility", 16]]
            elif parameter.is_constexpr:
                signature[name], constants[name] = "constexpr", value
            elif isinstance(value, float):
                signature[name] = "fp32"
            elif value == 1 and not parameter.do_not_specialize:
                signature[name], constants[name] = "constexpr", value
            else:
                signature[name] = "i32"
                if value % 16 == 0 and not parameter.do_not_specialize:
                    attributes[(i,)] = [["tt.divisibility", 16]]
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
        built = triton.compile(source, target=self._target, options=options)
        self.found[f"{self.shape} {kernel.__name__}"] = self._look(built)

    def _look(self, built: Any) -> dict[str, Any]:
        cubin = self._folder / "kernel.cubin"
        cubin.write_bytes(built.asm["cubin"])
        use = subprocess.run([TOOLS / "cuobjdump", "-res-usage", cubin], capture_output=True, text=True, check=True)
        code = subprocess.run([TOOLS / "nvdisasm", cubin], capture_output=True, text=True, check=True).stdout
        resources = re.search(r"REG:(\d+) STACK:(\d+)", use.stdout)
        assert resources is not None, use.stdout
        return {
            "registers": int(resources[1]),
            "spilled": int(resources[2]),  # bytes a thread
            "shared": built.metadata.shared,  # bytes a program
            "warps": built.metadata.num_warps,
            "products": sorted(set(re.findall(r"versionMajor = \d|kWidth = \d", built.asm["ttgir"]))),
            "instructions": {
                name: len(re.findall(rf"\b{name}\b", code))
                for name in ("HMMA", "HGMMA", "FFMA", "LDGSTS", "ATOM", "ATOMG", "RED")
            },
        }


def batch(lengths: list[int], contexts: list[int], group: int) -> Plan:
    blocks = max(map(int.__add__, lengths, contexts)) // BLOCK_SIZE + 1
    table, slots = np.zeros((len(lengths), blocks), np.int64), np.zeros(sum(lengths), np.int64)
    return plan_batch(table, lengths, contexts, slots, group=group, device=META)


def attention(heads: int, kv_heads: int, size: int, dtype: torch.dtype, window: int = 0, turned: bool = False) -> None:
    """One split, many splits, and a batch with an initiation. `turned`: norms of heads and rotary positions."""
    rope, norms = None, None
    if turned:
        table, weight = (torch.empty(n, dtype=dtype, device=META) for n in ((2048, size // 2), (size,)))
        rope, norms = Rope(table.float(), table.float()), HeadNorms(weight, weight, 1e-6)
    keys = torch.empty((1000, kv_heads, BLOCK_SIZE, size), dtype=dtype, device=META)
    for lengths, contexts in (([1] * 32, [600] * 32), ([70, 1], [0, 600])):
        plan = batch(lengths, contexts, heads // kv_heads)
        qkv = torch.empty((plan.bounds.tokens, (heads + 2 * kv_heads) * size), dtype=dtype, device=META)
        q = write_kv(qkv, keys, keys, plan, rope, norms=norms)
        split_attention(q, keys, keys, plan, size**-0.5, window)


def everything_else(hidden: int, vocabulary: int, dtype: torch.dtype) -> None:
    def empty(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=kind, device=META)

    x = empty(32, hidden)
    add_norm(x, x, Norm(x[0], x[0], 1e-5))
    bias_act(empty(32, 4 * hidden), empty(4 * hidden), "tanh_gelu")
    gate_act(empty(32, 8 * hidden), "silu")
    whole, fraction = empty(32, kind=torch.int64), empty(32, kind=torch.float64)
    sample(empty(32, vocabulary), Draws(fraction, whole, fraction, fraction, whole, whole))


# Of weights in codes: bits, inputs that share a point, inputs that share a scale, whether there are points.
CODES = {
    "int8": (8, 128, 128, False),
    "int4": (4, 32, 128, True),
    "groups128": (4, 128, 128, False),
    "zeros128": (4, 128, 128, True),
    "zeros64": (4, 64, 64, True),
    "zeros32": (4, 32, 32, True),
    "blocks8": (8, 32, 32, False),
    "blocks4": (4, 32, 32, False),
}


def product(rows: int, codes: str, dtype: torch.dtype) -> None:
    """A product with weights in codes, and the addition of its splits."""

    def empty(*shape: int, kind: torch.dtype = torch.int8) -> Tensor:
        return torch.empty(shape, dtype=kind, device=META)

    (bits, step, scaled, has_points), side = CODES[codes], 4096
    scales = empty(side, side // scaled, kind=torch.float32 if codes.startswith("int") else torch.float16)
    points = empty(side, side // step) if has_points else None
    how: dict[str, Any] = {"bits": bits, "step": step, "scaled": scaled, "multiplied": codes == "int4"}
    linear(empty(rows, side, kind=dtype), coded(empty(side, side), scales, points, **how))


SHAPES: dict[str, Callable[[], None]] = {
    "13b-fp16": lambda: attention(40, 40, 128, torch.float16),
    "13b-rest": lambda: everything_else(5120, 50257, torch.float16),
    "grouped-bf16": lambda: attention(32, 8, 128, torch.bfloat16),
    "llama8b-bf16": lambda: attention(32, 8, 128, torch.bfloat16, window=4096, turned=True),
    "gpt2-bf16": lambda: attention(12, 12, 64, torch.bfloat16),
    "llama7b-bf16": lambda: attention(32, 32, 128, torch.bfloat16, turned=True),
    "qwen8b-bf16": lambda: attention(32, 8, 128, torch.bfloat16, turned=True),
    "d96-bf16": lambda: attention(32, 32, 96, torch.bfloat16, turned=True),
    "d256-bf16": lambda: attention(8, 4, 256, torch.bfloat16),
    "d128-fp32": lambda: attention(32, 8, 128, torch.float32),
    "gpt2-fp32": lambda: attention(12, 12, 64, torch.float32),
} | {
    f"{codes}-{rows}-{name}": partial(product, rows, codes, dtype)
    for codes in CODES
    for rows in (1, 64)
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16))
}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        compiler = Compiler(int(sys.argv[1]), Path(folder))

        def run(kernel: JITFunction, *args: Any, **kwargs: Any) -> None:
            compiler.run(kernel, *args, **kwargs)

        setattr(JITFunction, "run", run)  # noqa: B010
        for compiler.shape in sys.argv[2:] or SHAPES:
            SHAPES[compiler.shape]()
    for name, needs in compiler.found.items():
        print(json.dumps({"kernel": name, **needs}))


if __name__ == "__main__":
    main()
