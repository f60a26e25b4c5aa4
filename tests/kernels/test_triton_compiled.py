"""What the kernels need of a GPU, read from their machine code: no GPU is needed to compile them.

Budgets are per thread (registers, bytes that spill) and per program (shared memory). Registers of an attention kernel
decide how many programs share a multiprocessor: of 65,536, two warps with 192 registers take 12,288, so five fit.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SHARED = {"80": 163 * 1024, "90": 227 * 1024}  # bytes that a program may have
REGISTERS = {
    "mixed": 255,
    "increments": 255,
    "merge_splits": 64,
    "cut_row": 128,
    "multiply": 224,
}  # cut_row: what 16 warps leave
FEW = 64  # of the others
# The kernel of mixed batches keeps two sums of values. One is touched only once a split: what spills is part of it.
SPILLED = {"mixed": 128}
SPILLED_OF_256 = {
    "mixed": 512,
    "increments": 64,
}  # of heads of 256 elements: two sums of twice the width, in four warps
SPILLED_ON_80 = {"mixed": 128, "increments": 96}
# Of 64 rows: ptxas takes 128 registers, so that two programs of 8 warps fit. With two stages it takes 182: none spill.
SPILLED_OF_BLOCKS_ON_80 = {"multiply": 24}
SPILLED_IN_WINDOWS = {"mixed": 128, "increments": 40}
INCREMENTS_OF_90 = 208  # registers, heads of up to 128 elements and no window: where speed counts most
TENSOR_CORES = ("increments", "mixed", "multiply")
# Of weights in codes: those of compile_triton.py.
CODES = ("int8", "int4", "groups128", "zeros128", "zeros64", "zeros32", "blocks8", "blocks4")


# `make test` compiles one shape for a capability, and products for the other; `make distributed` all of both.
@pytest.mark.parametrize(
    ("capability", "shapes"),
    [
        ("90", ["13b-fp16"]),
        pytest.param(
            "90",
            [
                *("llama7b-bf16", "gpt2-fp32", "13b-rest", "llama8b-bf16", "qwen8b-bf16", "gpt2-bf16", "d96-bf16"),
                *("d256-bf16", "d128-fp32"),
            ],
            marks=pytest.mark.long,
        ),
        pytest.param(
            "80", ["13b-fp16", "llama7b-bf16", "qwen8b-bf16", "gpt2-bf16", "d96-bf16"], marks=pytest.mark.long
        ),
    ],
)
def test_budgets(capability: str, shapes: list[str]) -> None:
    found = compiled(capability, shapes)
    assert len(found) >= 4 * len(shapes)
    for needs in found:
        check(needs, capability)


def compiled(capability: str, shapes: list[str]) -> list[dict[str, Any]]:
    """The needs of each kernel. Triton compiles only what has changed."""
    script = Path(__file__).with_name("compile_triton.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, script, capability, *shapes],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


def check(needs: dict[str, Any], capability: str) -> None:
    shape, kernel = needs["kernel"].split()
    assert needs["registers"] <= REGISTERS.get(kernel, FEW), needs
    others = {"d256-bf16": SPILLED_OF_256, "llama8b-bf16": SPILLED_IN_WINDOWS}
    spilled = others.get(shape, SPILLED)
    if capability == "80":
        spilled = SPILLED_OF_BLOCKS_ON_80 if shape.startswith("blocks") else SPILLED_ON_80
    assert needs["spilled"] <= spilled.get(kernel, 0), needs
    assert needs["shared"] <= SHARED[capability], needs
    done = needs["instructions"]
    assert not done["ATOM"] + done["ATOMG"] + done["RED"], needs  # sums would depend on who comes first
    assert not done["HGMMA"], needs  # wgmma: increments and initiations would no longer be the same bits
    if kernel in TENSOR_CORES:
        assert bool(done["HMMA"]) == (not shape.endswith("fp32")), needs
        assert done["LDGSTS"], needs  # keys and values are loaded ahead
    if (
        kernel == "increments"
        and capability == "90"
        and shape in ("13b-fp16", "llama7b-bf16", "qwen8b-bf16", "d96-bf16")
    ):
        assert needs["registers"] <= INCREMENTS_OF_90, needs
    if (shape, kernel) == ("13b-fp16", "increments"):
        assert not done["FFMA"], needs  # the compiler has contracted nothing: this kernel does not ask for it


@pytest.mark.parametrize(
    ("capability", "kinds"),
    [
        ("80", ["int8-{}-bf16"]),
        pytest.param(
            "90", [f"{kind}-{{}}-{dtype}" for kind in CODES for dtype in ("bf16", "fp16")], marks=pytest.mark.long
        ),
        pytest.param("80", [f"{kind}-{{}}-bf16" for kind in CODES], marks=pytest.mark.long),
    ],
)
def test_products_with_codes(capability: str, kinds: list[str]) -> None:
    """A row is the same bits in a batch of 1 and of 64: tiles of both have the same instruction, and take the same
    inputs to one of them."""
    found = compiled(capability, [kind.format(rows) for kind in kinds for rows in (1, 64)])
    products = [needs for needs in found if needs["kernel"].endswith(" multiply")]
    assert len(products) == 2 * len(kinds)
    for needs in found:
        check(needs, capability)
    for few, many in zip(products[::2], products[1::2], strict=True):
        assert few["products"] == many["products"], (few, many)
        assert any(line.startswith("versionMajor = 2") for line in few["products"]), few
