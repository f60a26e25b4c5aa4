"""Weights in eight and four bits on each instruction set of this machine, against the arithmetic of docs/weights.md."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from kernels.test_cpu import ROWS, each_isa, rows_alone
from torch import Tensor

from orca_kernels.cpu.program import Packed, Program, in_turn

GROUP, PART = 128, 32
SHAPES = ((1, 1), (16, 128), (97, 24), (50, 129), (144, 300), (256, 70), (40, 640))


def coded(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [R, K] float32 -> codes [R, K] and scales [R, groups], as a loop over groups."""
    codes, scales = torch.empty_like(x), []
    for begin in range(0, x.shape[1], GROUP):
        part = x[:, begin : begin + GROUP]
        largest = part.abs().amax(1, keepdim=True)
        zero = largest < 1e-30
        codes[:, begin : begin + GROUP] = (part * (127 / largest).masked_fill(zero, 0)).round()
        scales.append((largest / 127).masked_fill(zero, 0))
    return codes, torch.cat(scales, 1)


def fours(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x [R, K] float32 -> codes of four bits [R, K], multipliers [R, parts], scales [R, groups], one by one."""
    codes, multipliers, scales = torch.zeros_like(x), torch.zeros(len(x), -(-x.shape[1] // PART)), []
    for begin in range(0, x.shape[1], GROUP):
        group = x[:, begin : begin + GROUP]
        largest = group.abs().amax(1, keepdim=True)
        zero = largest < 1e-30
        scaled = group * (120 / largest).masked_fill(zero, 0)
        scales.append((largest / 120).masked_fill(zero, 0))
        for first in range(0, scaled.shape[1], PART):
            for row, part in enumerate(scaled[:, first : first + PART]):
                farthest = max(part.tolist(), key=lambda number: (abs(number), number < 0))
                multiplier = round(farthest / -8) or 1
                multipliers[row, (begin + first) // PART] = multiplier
                nearest = (part / multiplier).round().clamp(-8, 7)
                codes[row, begin + first : begin + first + PART] = nearest
    return codes, multipliers, torch.cat(scales, 1)


Quantized = tuple[Tensor, ...]


def pack(program: Program, weight: Quantized, bias: Tensor | None = None) -> Packed:
    codes, *multipliers, scales = weight
    if multipliers:
        return program.pack_fours(codes.to(torch.int8), multipliers[0].to(torch.int8), scales, bias)
    return program.pack_codes(codes.to(torch.int8), scales, bias)


def in_eight(weight: Quantized) -> tuple[Tensor, Tensor]:
    codes, *multipliers, scales = weight
    for each in multipliers:
        codes = codes * each.repeat_interleave(PART, 1)[:, : codes.shape[1]]
    return codes, scales


def product(x: Tensor, weight: Quantized, bias: Tensor | None) -> Tensor:
    """[R, N] float64"""
    (a, of_a), (w, of_w) = coded(x), in_eight(weight)
    total = torch.zeros(len(x), len(weight[0]), dtype=torch.float64)
    for group, begin in enumerate(range(0, x.shape[1], GROUP)):
        both = slice(begin, begin + GROUP)
        integers = a[:, both].double() @ w[:, both].double().t()
        total += integers * of_a[:, group, None].double() * of_w[:, group].double()
    return total if bias is None else total + bias.double()


def matrix(n: int, k: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(n + k)
    weight = torch.randn(n, k) / k**0.5
    weight[n // 2, : k // 2] *= 100  # columns and groups have scales of their own
    return weight, torch.randn(n)


def multiplied(isa: str, x: Tensor, weight: Quantized, bias: Tensor | None, threads: int = 1) -> np.ndarray:
    n, k = weight[0].shape
    program = Program(torch.float32, threads, isa)
    rows, out, operand = program.rows(k), program.rows(n), program.codes(k)
    program.copy(rows, k, operand)
    program.linear(operand, pack(program, weight, bias), out)
    program.view(rows, len(x), k)[:] = x.numpy()
    program.run(rows_alone(len(x)).batch)
    return program.view(out, len(x), n).copy()


each_format = pytest.mark.parametrize("quantize", [coded, fours], ids=["int8", "int4"])
Quantize = Callable[[Tensor], Quantized]


@each_isa
@each_format
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_products_are_exact_but_for_the_sum_of_groups(isa: str, quantize: Quantize, n: int, k: int) -> None:
    """Float32 rounds once a group. A row's bits are the same beside any other rows, and with any number of threads."""
    floats, bias = matrix(n, k)
    weight = quantize(floats)
    x = torch.randn(600, k) * torch.logspace(-3, 3, 600)[:, None]
    x[3] = 0
    whole = multiplied(isa, x, weight, bias, threads=2)
    wanted = product(x, weight, bias)
    error = (torch.from_numpy(whole).double() - wanted).abs().amax(1)
    assert bool((error <= 4e-6 * wanted.abs().amax(1).clamp(min=1)).all())
    for rows in ROWS:
        assert np.array_equal(multiplied(isa, x[:rows], weight, bias), whole[:rows]), rows


@each_isa
@each_format
def test_what_an_operation_writes_becomes_codes(isa: str, quantize: Quantize) -> None:
    """By activations, gates and norms; the residual is added to what is there."""
    torch.manual_seed(5)
    x, (up, _), (gate, _), (down, bias) = torch.randn(19, 70), matrix(200, 70), matrix(200, 70), matrix(70, 200)
    program = Program(torch.bfloat16, 2, isa)
    rows, normed, middle = program.rows(70), program.codes(70), program.codes(200)
    of_gate, of_up, of_down = (quantize(each) for each in (gate, up, down))
    both = tuple(in_turn(*pair) for pair in zip(of_gate, of_up, strict=True))
    program.normalize(rows, program.norm(torch.ones(70), None, 0.0), normed)
    program.linear_gated(normed, pack(program, both), middle, "relu")
    program.linear_add(middle, pack(program, of_down, bias), rows)
    program.view(rows, 19, 70)[:] = x.numpy()
    program.run(rows_alone(19).batch)
    inside = x / x.square().mean(1, keepdim=True).sqrt()
    inside = (product(inside, of_gate, None).relu() * product(inside, of_up, None)).float()
    found = torch.from_numpy(program.view(rows, 19, 70).copy()).double()
    # An element at the middle of two codes may become the other one.
    assert (found - (x.double() + product(inside, of_down, bias))).abs().max() < 0.02 * found.abs().max()


@each_isa
@each_format
@pytest.mark.parametrize("strange", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_so_in_its_row(isa: str, quantize: Quantize, strange: float) -> None:
    floats, bias = matrix(40, 300)
    weight = quantize(floats)
    x = torch.randn(20, 300)
    right = multiplied(isa, x, weight, bias)
    x[7, 290] = strange
    found = multiplied(isa, x, weight, bias)
    assert not np.isfinite(found[7]).any()
    assert np.array_equal(np.delete(found, 7, 0), np.delete(right, 7, 0))


def alike_in_any_company(isa: str, x: Tensor, n: int, pack: Callable[[Program], Packed], wanted: Tensor) -> None:
    """Products of 120 rows and of some of them, against float64."""

    def multiplied(rows: int) -> np.ndarray:
        k, program = x.shape[1], Program(torch.float32, 2, isa)
        given, out, operand = program.rows(k), program.rows(n), program.codes(k)
        program.copy(given, k, operand)
        program.linear(operand, pack(program), out)
        program.view(given, rows, k)[:] = x[:rows].numpy()
        program.run(rows_alone(rows).batch)
        return program.view(out, rows, n).copy()

    whole = multiplied(120)
    error = (torch.from_numpy(whole).double() - wanted).abs()
    assert bool((error <= 4e-6 * wanted.abs().amax(0).clamp(min=1)).all())
    for rows in (1, 2, 3, 5, 13, 16, 17, 33):
        assert np.array_equal(multiplied(rows), whole[:rows]), rows


def numbers_of(x: Tensor) -> Tensor:
    """The numbers of which the codes of activations are made, rounded as these are, in float64."""
    codes, scales = coded(x)
    return codes.double() * scales.double().repeat_interleave(GROUP, 1)[:, : x.shape[1]]


@each_isa
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("n", "k"), [(16, 128), (97, 32), (50, 160), (40, 640)])
def test_blocks_of_32_inputs(isa: str, bits: int, n: int, k: int) -> None:
    """Q8_0 and Q4_0 of GGUF: a scale in float16 each, the smallest and the largest among them."""
    torch.manual_seed(n + k)
    least, most = (-127, 127) if bits == 8 else (-8, 7)
    codes = torch.randint(least, most + 1, (n, k)).to(torch.int8)
    scales = (torch.randn(n, k // PART) * 0.01).half()
    scales[0, 0], scales[1, 0] = 6e-8, 65504
    bias, x = torch.randn(n), torch.randn(120, k)
    weight = codes.double() * scales.double().repeat_interleave(PART, 1)
    wanted = numbers_of(x) @ weight.t() + bias.double()
    alike_in_any_company(isa, x, n, lambda program: program.pack_blocks(codes, scales, bias, bits=bits), wanted)


@each_isa
@pytest.mark.parametrize("step", [128, 64, 32])
@pytest.mark.parametrize(("n", "k"), [(16, 128), (97, 24), (50, 160), (144, 640)])
def test_groups_with_zero_points(isa: str, step: int, n: int, k: int) -> None:
    """All codes and zero points; scales of float16 and of bfloat16, the smallest and the largest of both among them."""
    torch.manual_seed(n + k)
    groups = -(-k // step)
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    zeros = torch.randint(0, 16, (n, groups), dtype=torch.uint8)
    scales = (torch.randn(n, groups) * 0.01).half().float()
    scales[::2] = scales[::2].bfloat16().float()
    scales[0, 0], scales[1, 0], scales[2, 0] = 2.0**-24, 65504, 2.0**-100
    bias, x = torch.randn(n), torch.randn(120, k)

    def spread(of_groups: Tensor) -> Tensor:
        return of_groups.double().repeat_interleave(step, 1)[:, :k]

    wanted = numbers_of(x) @ ((codes.double() - spread(zeros)) * spread(scales)).t() + bias.double()
    alike_in_any_company(isa, x, n, lambda program: program.pack_grouped(codes, zeros, scales, step, bias), wanted)
