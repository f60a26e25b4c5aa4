"""Products with weights in codes against float64 products with the numbers that the codes stand for."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from kernels.triton_device import DEVICE, EPSILON, TYPES
from torch import Tensor

from orca_kernels.triton import linear as kernels
from orca_kernels.triton.codes import Coded
from orca_kernels.triton.linear import linear
from orca_worker.models.formats.gguf import Blocks
from orca_worker.models.formats.grouped import Grouped
from orca_worker.models.formats.int4 import Fours
from orca_worker.models.formats.int8 import Codes

Made = tuple[Coded, Tensor]  # weights, and their numbers [N, K] float64


def spread(x: Tensor, each: int, inputs: int) -> Tensor:
    """x [N, K / each] -> [N, K] float64"""
    return x.double().repeat_interleave(each, 1)[:, :inputs]


def eights(outputs: int, inputs: int) -> Made:
    made = Codes.of(torch.randn(outputs, inputs))
    weight = Codes(made.codes.to(torch.int8), made.scales)
    return weight.coded(DEVICE), weight.codes.double() * spread(weight.scales, 128, inputs)


def fours(outputs: int, inputs: int) -> Made:
    weight = Fours.of(torch.randn(outputs, inputs))
    integers = weight.codes.double() * spread(weight.multipliers, 32, inputs)
    return weight.coded(DEVICE), integers * spread(weight.scales, 128, inputs)


def grouped(step: int, symmetric: bool, kind: torch.dtype, outputs: int, inputs: int) -> Made:
    groups = outputs, -(-inputs // step)
    codes = torch.randint(16, (outputs, inputs), dtype=torch.uint8)
    zeros = torch.full(groups, 8, dtype=torch.uint8) if symmetric else torch.randint(16, groups, dtype=torch.uint8)
    scales = torch.rand(groups).add(0.1).to(kind).float()
    scales[0, 0] = 2.0**-130 if kind is torch.bfloat16 else 2.0**-24  # the other type does not have it
    weight = Grouped(codes, zeros, scales, step).coded(DEVICE)
    assert (weight.points is None) == symmetric
    assert weight.scales.dtype is kind
    return weight, (codes.double() - spread(zeros, step, inputs)) * spread(scales, step, inputs)


def blocks(bits: int, outputs: int, inputs: int) -> Made:
    middle = 1 << (bits - 1)
    codes = torch.randint(-middle, middle, (outputs, inputs), dtype=torch.int8)
    scales = torch.rand(outputs, -(-inputs // 32)).half()
    return Blocks(codes, scales, bits).coded(DEVICE), codes.double() * spread(scales, 32, inputs)


CASES: dict[str, Callable[[int, int], Made]] = {
    "int8": eights,
    "int4": fours,
    "groups of 128": partial(grouped, 128, True, torch.float16),
    "zero points, groups of 128": partial(grouped, 128, False, torch.bfloat16),
    "zero points, groups of 64": partial(grouped, 64, False, torch.float16),
    "groups of 32": partial(grouped, 32, True, torch.bfloat16),
    "zero points, groups of 32": partial(grouped, 32, False, torch.float16),
    "Q8_0": partial(blocks, 8),
    "Q4_0": partial(blocks, 4),
}


def near(mine: Tensor, right: Tensor) -> None:
    """Float32 adds up some hundreds of products; the result is rounded to its type."""
    error = EPSILON[mine.dtype]
    torch.testing.assert_close(mine.double(), right, rtol=error, atol=1e-6 * float(right.abs().max()))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("case", CASES)
def test_rows_of_any_batch(case: str, dtype: torch.dtype) -> None:
    """No multiples of any tile or group. A row's bits are those that it has in a prompt."""
    torch.manual_seed(1)
    weight, numbers = CASES[case](70, 168)
    x, bias = torch.randn(70, 168).to(DEVICE, dtype), torch.randn(70).to(DEVICE, dtype)
    prompt = linear(x, weight, bias)
    near(prompt, x.double() @ numbers.to(DEVICE).t() + bias.double())
    for rows in (1, 3, 8, 64):
        assert torch.equal(linear(x[-rows:], weight, bias), prompt[-rows:]), rows
    near(linear(x[:2], weight), x[:2].double() @ numbers.to(DEVICE).t())


@pytest.mark.parametrize("case", ["int8", "int4", "zero points, groups of 128"])
def test_splits_have_programs_of_their_own_or_one(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2)
    weight, numbers = CASES[case](20, 2 * kernels.SPLIT + 200)
    x, bias = torch.randn(3, weight.inputs).to(DEVICE), torch.randn(20).to(DEVICE)
    several = linear(x, weight, bias)
    near(several, x.double() @ numbers.to(DEVICE).t() + bias.double())
    monkeypatch.setattr(kernels, "PROGRAMS", 1)
    assert torch.equal(linear(x, weight, bias), several)


def test_two_matrices_of_one_product() -> None:
    """One of them has no zero points, and scales of another type."""
    torch.manual_seed(3)
    x = torch.randn(2, 130).to(DEVICE)
    halves = [CASES[case](9, 130)[0] for case in ("groups of 32", "zero points, groups of 32")]
    both = halves[0].joined(halves[1], lambda *parts: torch.cat(parts))
    assert torch.equal(linear(x, both), torch.cat([linear(x, half) for half in halves], 1))


def test_scales_of_two_matrices_in_float16_and_in_bfloat16() -> None:
    """No type of 16 bits has both, so they stay in float32."""
    scales = torch.tensor([[1 + 2.0**-10], [2.0**-120]])
    codes, zeros = torch.full((2, 40), 9, dtype=torch.uint8), torch.full((2, 1), 8, dtype=torch.uint8)
    y = linear(torch.eye(1, 40).to(DEVICE), Grouped(codes, zeros, scales, 128).coded(DEVICE))
    assert torch.equal(y[0], scales[:, 0].to(DEVICE))


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")  # of the interpreter
def test_a_row_that_is_not_finite_stays_alone() -> None:
    weight, _ = CASES["int4"](8, 40)
    x = torch.ones(3, 40).to(DEVICE)
    right = linear(x, weight)
    x[1, 3] = torch.inf
    y = linear(x, weight)
    assert not y[1].isfinite().any()
    assert torch.equal(y[::2], right[::2])
