"""Products with adapters by the kernels of a CPU: near float64, and of each row alone."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from kernels.test_cpu import each_dtype, each_isa, rows_alone
from torch import Tensor

from orca_kernels.cpu.program import DeltaPart, Program, in_turn, low_rank

INPUTS = 70
# (outputs of a part, its rank or 0) of one operation, one behind the other: whole panels, and parts that share panels
PLAIN = ([(48, 16), (16, 3), (16, 0)], [(5, 2), (3, 7), (12, 1), (40, 0), (24, 19)], [(21, 4)])
GATED = ([(64, 16)], [(20, 5)])  # of a gate; `up` has as many


def parts_of(widths: Sequence[tuple[int, int]], first: int, chance: torch.Generator) -> list[DeltaPart]:
    """A's and B's numbers are such that bfloat16 has them, and sums of a few of their products about 1."""
    found, column = list[DeltaPart](), first
    for outputs, rank in widths:
        if rank:
            a = torch.randn(rank, INPUTS, generator=chance).div(INPUTS**0.5).bfloat16().float()
            b = torch.randn(outputs, rank, generator=chance).div(rank**0.5).bfloat16().float()
            found.append(DeltaPart(a, b, column))
        column += outputs
    return found


def dense(parts: Sequence[DeltaPart], columns: int) -> Tensor:
    """B A [columns, inputs] of one adapter, in float64."""
    whole = torch.zeros(columns, INPUTS, dtype=torch.float64)
    for part in parts:
        whole[part.column : part.column + len(part.b)] += part.b.double() @ part.a.double()
    return whole


@pytest.mark.parametrize("widths", PLAIN)
def test_b_is_cut_into_panels(widths: Sequence[tuple[int, int]]) -> None:
    columns = -(-sum(outputs for outputs, _ in widths) // 16) * 16
    parts = parts_of(widths, 0, torch.Generator().manual_seed(1))
    a, runs = low_rank(parts, columns, 0)
    found = torch.zeros(columns // 16, 16, INPUTS)
    for run in runs:
        assert run.b.shape[2] % 2 == 0
        for half, first in enumerate((run.first, run.second)):
            columns_of = slice(8 * half, 8 * half + 8)
            found[run.begin : run.end, columns_of] = run.b[:, columns_of] @ a[first : first + run.b.shape[2]]
    torch.testing.assert_close(found.view(columns, INPUTS).double(), dense(parts, columns))


class Operation:
    """A linear operation with adapters, by number: those of `of`, and others that change nothing here."""

    def __init__(self, isa: str, dtype: torch.dtype, widths: Sequence[tuple[int, int]], *, gated: bool) -> None:
        chance = torch.Generator().manual_seed(2)
        self.outputs = sum(one for one, _ in widths)
        each = -(-self.outputs // 8) * 8 if gated else -(-self.outputs // 16) * 16
        self.columns, self.up = (2 * each, each) if gated else (each, 0)
        self.of = {n: parts_of(widths, 0, chance) for n in (0, 1, 3)}
        if gated:
            self.of = {n: [*parts, *parts_of(widths, self.up, chance)] for n, parts in self.of.items()}
            self.of[3] = self.of[3][1:]  # `up` alone
        self.weight = torch.randn(2 * self.outputs if gated else self.outputs, INPUTS, generator=chance)
        self.weight = self.weight.div(INPUTS**0.5).bfloat16().float()
        program = self.program = Program(dtype, 2, isa)
        self.x, x = program.rows(INPUTS), program.operand(INPUTS)
        self.out, middle = program.rows(self.outputs), program.operand(self.outputs)
        program.copy(self.x, INPUTS, x)
        delta = program.delta(x)
        for number, parts in self.of.items():
            program.add_adapter(delta, number, parts, self.columns, self.up)
        if gated:
            program.linear_gated(x, program.pack(in_turn(*self.weight.chunk(2))), middle, "none", delta)
            program.linear(middle, program.pack(torch.eye(self.outputs)), self.out)
        else:
            program.linear(x, program.pack(self.weight), self.out, delta)

    def run(self, rows: Tensor, adapters: np.ndarray) -> np.ndarray:
        batch, kept = rows_alone(len(rows))
        kept["adapters"] = np.ascontiguousarray(adapters)
        batch.adapters = kept["adapters"].ctypes.data
        self.program.view(self.x, len(rows), INPUTS)[:] = rows.numpy()
        self.program.run(batch)
        return self.program.view(self.out, len(rows), self.outputs).copy()

    def exactly(self, row: Tensor, adapter: int) -> Tensor:
        change = dense(self.of.get(adapter, []), self.columns)
        if not self.up:
            return (self.weight.double() + change[: self.outputs]) @ row.double()
        gate, up = self.weight.double().chunk(2)
        of_gate = (gate + change[: self.outputs]) @ row.double()
        return of_gate * ((up + change[self.up : self.up + self.outputs]) @ row.double())


@each_isa
@each_dtype
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_rows_of_many_adapters(isa: str, dtype: torch.dtype, gated: bool) -> None:
    """Rows without an adapter, and of one that changes nothing here, are among them; and each is the same alone."""
    numbers = np.array([0, 1, -1, 3, 2, 0, 0, 3, 1, -1, 1, 1, 0, 0, 0, 0, 0, 3, 1, 2, 0], np.int32)
    rows = torch.randn(len(numbers), INPUTS, generator=torch.Generator().manual_seed(3)).bfloat16().float()
    tolerance = 2e-5 if dtype is torch.float32 else 5e-2
    for widths in GATED if gated else PLAIN:
        operation = Operation(isa, dtype, widths, gated=gated)
        made = operation.run(rows, numbers)
        for n, adapter in enumerate(numbers.tolist()):
            want = operation.exactly(rows[n], adapter)
            off = (torch.from_numpy(made[n]).double() - want).abs().max()
            assert off <= tolerance * max(1.0, float(want.abs().max())), n
            assert (operation.run(rows[n : n + 1], numbers[n : n + 1]) == made[n]).all()
        again = np.arange(len(numbers))[::-1].copy()
        assert (operation.run(rows[again], numbers[again]) == made[again]).all()
