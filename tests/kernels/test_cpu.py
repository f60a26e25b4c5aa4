"""The CPU kernels on each instruction set that this machine runs: near float64, and bit for bit their own equals."""

import os
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from properties import covering
from torch import Tensor

from orca_kernels.cpu.library import BatchPointers, instruction_sets
from orca_kernels.cpu.program import MAX_GROUP, Attention, Program, Rotary, in_turn
from orca_kernels.reference import Codes

ISAS = instruction_sets()
DTYPES = (torch.float32, torch.bfloat16)
# Of a result of about 1. A bfloat16 operand carries 8 bits, half an ulp of 1 is 2e-3, and two are rounded on the way.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3}

Way = tuple[str, torch.dtype]
WAYS: list[Way] = list(product(ISAS, DTYPES))  # one axis of a product: each has kernels of its own

each_isa = pytest.mark.parametrize("isa", ISAS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


class Pointers(NamedTuple):
    """A batch, and the arrays that it points to."""

    batch: BatchPointers
    kept: dict[str, np.ndarray]


def rows_alone(tokens: int, **more: Any) -> Pointers:
    """A batch for operations that know of nothing but rows: `tokens` requests of one token each."""
    kept = {
        "token_ids": np.zeros(tokens, np.int64),
        "positions": np.zeros(tokens, np.int64),
        "slots": np.zeros(tokens, np.int64),
        "starts": np.arange(tokens + 1),
        "blocks": np.zeros((tokens, 1), np.int64),
        "selection": np.arange(tokens),
        "best": np.zeros(tokens, np.float32),
        "best_index": np.zeros(tokens, np.int32),
        **more,
    }
    return Pointers(pointers(kept), kept)


def pointers(kept: dict[str, Any]) -> BatchPointers:
    batch = BatchPointers(
        tokens=len(kept["token_ids"]),
        requests=len(kept["starts"]) - 1,
        columns=kept["blocks"].shape[1],
        selected=len(kept["selection"]),
        block_size=kept.get("block_size", 1),
    )
    for name in ("token_ids", "positions", "slots", "starts", "blocks", "selection", "best", "best_index"):
        kept[name] = np.ascontiguousarray(kept[name])
        setattr(batch, name, kept[name].ctypes.data)
    if "logits" in kept:
        batch.logits, batch.logits_stride = kept["logits"].ctypes.data, kept["logits"].shape[1]
    if "keys" in kept:
        batch.keys, batch.values = kept["keys"].data_ptr(), kept["values"].data_ptr()
        batch.layer_bytes = kept["keys"].nbytes
    return batch


def close(got: np.ndarray | Tensor, want: Tensor, dtype: torch.dtype) -> None:
    got = (torch.from_numpy(got.copy()) if isinstance(got, np.ndarray) else got).double()
    assert got.shape == want.shape
    assert not got.isnan().any()
    scale = want.double().abs().max().clamp(min=1)
    assert (got - want.double()).abs().max() <= TOLERANCE[dtype] * scale


# Linear operations: rows around the blocks of each kernel, columns and inputs that fill no panel and no tile.
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 16, 17, 31, 32, 33, 48, 50, 64, 65, 100)
SHAPES = ((1, 1), (16, 32), (97, 24), (50, 33), (144, 96), (256, 70))


def linear(
    isa: str, dtype: torch.dtype, x: Tensor, weight: Tensor, bias: Tensor | None, act: str | None, threads: int = 1
) -> np.ndarray:
    """act(norm(x) W^T + b) through an operand, and W = 1 behind it where there is an activation."""
    program = Program(dtype, threads, isa)
    n, k = weight.shape
    x_rows, out = program.rows(k), program.rows(n)
    operand = program.operand(k)
    program.normalize(x_rows, program.norm(torch.ones(k), torch.zeros(k), 0.0), operand)
    if act is None:
        program.linear(operand, program.pack(weight, bias), out)
    else:
        middle = program.operand(n)
        program.linear_act(operand, program.pack(weight, bias), middle, act)
        program.linear(middle, program.pack(torch.eye(n)), out)
    program.view(x_rows, len(x), k)[:] = x.numpy()
    program.run(rows_alone(len(x)).batch)
    return program.view(out, len(x), n).copy()


def normed(x: Tensor) -> Tensor:
    x = x.double()
    return (x - x.mean(1, keepdim=True)) / x.var(1, unbiased=False, keepdim=True).sqrt()


def sleeping(thread: str) -> bool:
    return Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def test_threads_without_work_leave_the_cores_to_others() -> None:
    """They spin for a moment, then sleep. Threads that spun on made a stream 9 times slower beside busy processes."""
    before = set(os.listdir("/proc/self/task"))
    program = Program(torch.float32, 3, ISAS[0])
    operand, out = program.operand(32), program.rows(16)
    program.normalize(program.rows(32), program.norm(torch.ones(32), torch.zeros(32), 0.0), operand)
    program.linear(operand, program.pack(torch.ones(16, 32), None), out)
    program.run(rows_alone(4).batch)
    threads = set(os.listdir("/proc/self/task")) - before
    assert len(threads) == 2, "the caller is the third"
    until = time.monotonic() + 60
    while not all(map(sleeping, threads)):
        assert time.monotonic() < until


@each_isa
@each_dtype
@pytest.mark.parametrize(("n", "k"), [shape for shape in SHAPES if shape[1] > 1])
def test_linear(isa: str, dtype: torch.dtype, n: int, k: int) -> None:
    torch.manual_seed(n)
    weight, bias = torch.randn(n, k) / k**0.5, torch.randn(n)
    x = torch.randn(max(ROWS), k)
    want = normed(x) @ weight.to(dtype).double().t() + bias.double()
    for rows in ROWS:
        close(linear(isa, dtype, x[:rows], weight, bias, None), want[:rows], dtype)


@each_isa
@each_dtype
@pytest.mark.parametrize("act", ["gelu", "tanh_gelu", "relu", "silu", "tanh"])
def test_activations(isa: str, dtype: torch.dtype, act: str) -> None:
    torch.manual_seed(3)
    weight, bias, x = torch.randn(40, 24) / 5, torch.randn(40) * 4, torch.randn(19, 24)
    before = normed(x) @ weight.to(dtype).double().t() + bias.double()
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "gelu": torch.nn.functional.gelu,
        "tanh_gelu": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        "relu": torch.relu,
        "silu": torch.nn.functional.silu,
        "tanh": torch.tanh,
    }
    close(linear(isa, dtype, x, weight, bias, act), functions[act](before), dtype)


@each_isa
@each_dtype
def test_a_residual_is_added_and_norms_have_their_weights(isa: str, dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    x, y = torch.randn(7, 50), torch.randn(7, 50)
    weight, bias, matrix = torch.randn(50), torch.randn(50), torch.randn(50, 50) / 7
    for with_bias in (True, False):
        program = Program(dtype, 1, isa)
        x_rows, y_rows, operand = program.rows(50), program.rows(50), program.operand(50)
        program.normalize(x_rows, program.norm(weight, bias if with_bias else None, 1e-3), operand)
        program.linear_add(operand, program.pack(matrix), y_rows)
        program.add(x_rows, y_rows)
        program.view(x_rows, 7, 50)[:], program.view(y_rows, 7, 50)[:] = x.numpy(), y.numpy()
        program.run(rows_alone(7).batch)
        if with_bias:
            norm = torch.nn.functional.layer_norm(x.double(), [50], weight.double(), bias.double(), 1e-3)
        else:
            norm = x.double() / (x.double().square().mean(1, keepdim=True) + 1e-3).sqrt() * weight.double()
        want = y.double() + norm @ matrix.to(dtype).double().t()
        close(program.view(y_rows, 7, 50), want, dtype)
        close(program.view(x_rows, 7, 50), x.double() + want, dtype)


@each_isa
@each_dtype
def test_the_embedding_reads_the_head(isa: str, dtype: torch.dtype) -> None:
    """Tied weights are kept once: the embedding finds a token's row in the panels. A rank has a part of them."""
    torch.manual_seed(5)
    table, positions = torch.randn(97, 24).to(dtype), torch.randn(48, 24).to(dtype)
    program = Program(dtype, 1, isa)
    x = program.rows(24)
    program.embed(x, program.pack(table), 100, positions)
    ids, at = np.array([100, 196, 99, 197, 150] * 5), np.arange(25)
    program.run(rows_alone(25, token_ids=ids, positions=at).batch)
    want = positions[at].float()
    inside = torch.tensor(np.flatnonzero((ids >= 100) & (ids < 197)))
    want[inside] += table[torch.tensor(ids)[inside] - 100].float()
    assert torch.equal(torch.tensor(program.view(x, 25, 24)), want)


@each_isa
@each_dtype
@pytest.mark.parametrize("vocabulary", [15, 97, 1000])
@pytest.mark.parametrize("selection", [[39, 0, 7, 8, 21], range(599, 0, -1)], ids=len)
def test_the_head(isa: str, dtype: torch.dtype, vocabulary: int, selection: Sequence[int]) -> None:
    torch.manual_seed(6)
    weight, x = torch.randn(vocabulary, 24), torch.randn(600, 24)
    weight[vocabulary // 2] = weight[3]  # equals: the first counts
    program = Program(dtype, 2, isa)
    rows, operand = program.rows(24), program.operand(24)
    program.normalize(rows, program.norm(torch.ones(24), torch.zeros(24), 0.0), operand, selected=True)
    program.head(operand, program.pack(weight))
    count = len(selection)
    want = normed(x)[list(selection)] @ weight.to(dtype).double().t()
    for logits in (np.full((count, vocabulary + 3), np.nan, np.float32), None):
        program.view(rows, 600, 24)[:] = x.numpy()
        found = rows_alone(600, selection=np.array(selection), **({} if logits is None else {"logits": logits}))
        program.run(found.batch)
        best, index = found.kept["best"][:count], found.kept["best_index"][:count]
        close(best.copy(), want.max(1).values, dtype)
        close(want[torch.arange(count), torch.tensor(index).long()], want.max(1).values, dtype)
        if logits is not None:
            close(logits[:, :vocabulary], want, dtype)
            assert np.isnan(logits[:, vocabulary:]).all()
            assert (logits[:, :vocabulary].argmax(1) == index).all()
            assert (logits[np.arange(count), index] == best).all()


@each_isa
@each_dtype
def test_the_head_of_a_row_that_is_not_finite(isa: str, dtype: torch.dtype) -> None:
    """NaN is larger than every number, wherever it stands; infinity shows by itself. Other rows are as without it."""
    torch.manual_seed(6)
    weight, x = torch.randn(970, 24), torch.randn(40, 24)
    program = Program(dtype, 2, isa)
    rows, operand = program.rows(24), program.operand(24)
    program.normalize(rows, program.norm(torch.ones(24), torch.zeros(24), 0.0), operand, selected=True)
    program.head(operand, program.pack(weight))
    selection = np.arange(40)

    def best() -> np.ndarray:
        found = rows_alone(40, selection=selection)
        program.run(found.batch)
        return found.kept["best"][:40].copy()

    program.view(rows, 40, 24)[:] = x.numpy()
    good = best()
    x[[3, 17]], x[20, 5] = torch.nan, torch.inf
    program.view(rows, 40, 24)[:] = x.numpy()
    bad = best()
    assert np.flatnonzero(~np.isfinite(bad)).tolist() == [3, 17, 20]
    assert (bad == good)[np.isfinite(bad)].all()
    for at in (0, 500, 969):  # one output alone
        spoilt = weight.clone()
        spoilt[at, 0] = torch.nan
        program = Program(dtype, 2, isa)
        rows, operand = program.rows(24), program.operand(24)
        program.normalize(rows, program.norm(torch.ones(24), torch.zeros(24), 0.0), operand, selected=True)
        program.head(operand, program.pack(spoilt))
        program.view(rows, 40, 24)[:] = torch.randn(40, 24).numpy()
        assert np.isnan(best()).all()


GATES = ((1, 24), (7, 24), (8, 33), (13, 50), (70, 48), (24, 70))  # columns of each half, inputs


@pytest.mark.parametrize(("way", "bias", "shape"), covering(WAYS, (False, True), GATES), ids=str)
def test_gates(way: Way, bias: bool, shape: tuple[int, int]) -> None:
    """activation(gate) * up. Columns of both stand side by side in eights, of which the last may be cut."""
    (isa, dtype), (inner, width) = way, shape
    torch.manual_seed(inner)
    gate, up = torch.randn(2, inner, width) / width**0.5
    added = torch.randn(2, inner) if bias else None
    x = torch.randn(19, width)
    halves = [
        normed(x) @ w.to(dtype).double().t() + (0 if b is None else b.double())
        for w, b in zip((gate, up), (None, None) if added is None else added, strict=True)
    ]
    both = in_turn(*added) if added is not None else None
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "gelu": torch.nn.functional.gelu,
        "silu": torch.nn.functional.silu,
        "relu": torch.relu,
    }
    for act, function in functions.items():
        want = function(halves[0]) * halves[1]
        for rows in (1, 2, 19):
            program = Program(dtype, 2, isa)
            x_rows, out = program.rows(width), program.rows(inner)
            operand, middle = program.operand(width), program.operand(inner)
            program.normalize(x_rows, program.norm(torch.ones(width), torch.zeros(width), 0.0), operand)
            program.linear_gated(operand, program.pack(in_turn(gate, up), both), middle, act)
            program.linear(middle, program.pack(torch.eye(inner)), out)
            program.view(x_rows, rows, width)[:] = x[:rows].numpy()
            program.run(rows_alone(rows).batch)
            close(program.view(out, rows, inner), want[:rows], dtype)


@each_isa
@each_dtype
def test_an_embedding_is_scaled(isa: str, dtype: torch.dtype) -> None:
    """Learned positions are not."""
    torch.manual_seed(5)
    table, positions = torch.randn(97, 24).to(dtype), torch.randn(48, 24).to(dtype)
    ids, at = np.array([0, 96, 50, 3, 3]), np.array([47, 0, 1, 2, 3])
    for learned in (None, positions):
        program = Program(dtype, 1, isa)
        x = program.rows(24)
        program.embed(x, program.pack(table), 0, learned, 7.5)
        program.run(rows_alone(5, token_ids=ids, positions=at).batch)
        want = 7.5 * table[ids].double() + (0 if learned is None else learned[at].double())
        close(program.view(x, 5, 24), want, torch.float32)


@each_isa
@each_dtype
def test_a_head_with_a_bias(isa: str, dtype: torch.dtype) -> None:
    torch.manual_seed(6)
    weight, bias, x = torch.randn(97, 24) / 5, torch.randn(97) * 3, torch.randn(9, 24)
    program = Program(dtype, 2, isa)
    rows, operand = program.rows(24), program.operand(24)
    program.normalize(rows, program.norm(torch.ones(24), torch.zeros(24), 0.0), operand, selected=True)
    program.head(operand, program.pack(weight, bias))
    program.view(rows, 9, 24)[:] = x.numpy()
    logits = np.full((9, 97), np.nan, np.float32)
    found = rows_alone(9, logits=logits)
    program.run(found.batch)
    close(logits, normed(x) @ weight.to(dtype).double().t() + bias.double(), dtype)
    assert (found.kept["best_index"] == logits.argmax(1)).all()
    assert (found.kept["best"] == logits.max(1)).all()


# Attention


class Requests(NamedTuple):
    contexts: Sequence[int]
    lengths: Sequence[int]  # queries


class Memory:
    """Keys or values of a layer among NaN, in a type or in codes of eight bits."""

    def __init__(self, n_blocks: int, heads: int, block_size: int, size: int, dtype: torch.dtype | None) -> None:
        if dtype is None:
            self.memory = torch.full((n_blocks, heads, block_size * (size + 4)), -1, dtype=torch.int8)  # scales: NaN
        else:
            self.memory = torch.full((n_blocks, heads, block_size, size), torch.nan, dtype=dtype)
        self.block_size, self.dtype = block_size, dtype

    def put(self, block: Tensor, offset: Tensor, x: Tensor) -> None:
        """x [tokens, heads, size]"""
        if self.dtype is None:
            Codes.within(self.memory, self.block_size).put(block, offset, x)
        else:
            self.memory[block, :, offset] = x.to(self.dtype)

    def numbers(self, x: Tensor) -> Tensor:
        """x as it is kept, in float64."""
        if self.dtype is not None:
            return x.to(self.dtype).double()
        largest = x.abs().amax(-1, keepdim=True)
        return torch.round(x * (127 / largest)).double() * (largest / 127).double()


def attention(
    isa: str,
    dtype: torch.dtype,
    requests: Requests,
    *,
    heads: int,
    group: int = 1,
    size: int,
    block_size: int,
    threads: int = 1,
    seed: int = 0,
    members: Sequence[int] | None = None,
    last: float | None = None,
    last_key: float | None = None,
    window: int = 0,
    codes: bool = False,
) -> tuple[np.ndarray, Tensor]:
    """Attention of requests whose keys and values of earlier tokens are in shuffled blocks among NaN, or in `codes`.

    Only of `members`, if they are given. `last`: what each one's last token has as key and value, `last_key`: as key
    alone. Returns the result [T, heads * group * size] and that of float64.
    """
    generator, shuffle = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(1)
    ends = [context + length for context, length in zip(*requests, strict=True)]
    columns = -(-max(ends) // block_size)
    n_blocks = len(ends) * columns + 3
    order = torch.randperm(n_blocks, generator=shuffle)[: len(ends) * columns].reshape(len(ends), columns).numpy()
    keys, values = (Memory(n_blocks, heads, block_size, size, None if codes else dtype) for _ in range(2))
    rows, wants, slots, positions = [], [], [], []
    for r, (context, length) in enumerate(zip(*requests, strict=True)):
        end = context + length
        k, v = (torch.randn(end, heads, size, generator=generator) for _ in range(2))
        q = torch.randn(length, heads * group, size, generator=generator)
        if last is not None:
            k[-1] = v[-1] = last
        if last_key is not None:
            k[-1] = last_key
        at = torch.arange(end)
        block = torch.tensor(order[r])[at // block_size]
        keys.put(block[:context], at[:context] % block_size, k[:context])
        values.put(block[:context], at[:context] % block_size, v[:context])
        if members is not None and r not in members:
            continue
        rows.append(torch.cat([q.flatten(1), k[context:].flatten(1), v[context:].flatten(1)], 1))
        slots.append((block * block_size + at % block_size)[context:])
        positions.append(at[context:])
        kd, vd = (keys.numbers(x).repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
        scores = q.double().transpose(0, 1) @ kd.transpose(1, 2) * 0.3
        scores = scores.masked_fill(at > at[context:, None], -torch.inf)
        if window:
            scores = scores.masked_fill(at <= at[context:, None] - window, -torch.inf)
        wants.append((scores.softmax(-1) @ vd).transpose(0, 1).flatten(1))
    chosen = range(len(ends)) if members is None else members
    lengths = [requests.lengths[r] for r in chosen]
    x = torch.cat(rows)
    program = Program(dtype, threads, isa)
    kept_in = torch.int8 if codes else dtype
    a = Attention(0, heads, group, size, kept_in, 0.3, window, narrows=dtype is torch.bfloat16)
    width = heads * group * size
    qkv, out, done = program.rows(x.shape[1]), program.operand(width), program.rows(width)
    program.write_kv(qkv, a)
    program.attend(qkv, a, out)
    program.linear(out, program.pack(torch.eye(width)), done)
    program.view(qkv, len(x), x.shape[1])[:] = x.numpy()
    kept: dict[str, Any] = rows_alone(len(x)).kept | {
        "positions": torch.cat(positions).numpy(),
        "slots": torch.cat(slots).numpy(),
        "starts": np.cumsum([0, *lengths]),
        "blocks": order[list(chosen)],
        "selection": np.zeros(0, np.int64),
        "keys": keys.memory,
        "values": values.memory,
        "block_size": block_size,
    }
    program.run(pointers(kept))
    return program.view(done, len(x), width).copy(), torch.cat(wants)


MIXED = Requests([0, 0, 5, 15, 16, 31, 32, 0, 70], [1, 37, 1, 1, 1, 1, 1, 70, 3])


HEADS = ((2, 1, 64), (3, 1, 20), (14, 1, 20), (1, 4, 32), (2, 3, 8), (1, 1, 128))  # heads, group, size


@pytest.mark.parametrize(("way", "shape", "block_size"), covering(WAYS, HEADS, (1, 16, 20, 32)), ids=str)
def test_attention(way: Way, shape: tuple[int, int, int], block_size: int) -> None:
    (isa, dtype), (heads, group, size) = way, shape
    got, want = attention(isa, dtype, MIXED, heads=heads, group=group, size=size, block_size=block_size)
    close(got, want, dtype)


CODED = (
    (2, 1, 64, 16, 0),
    (3, 1, 20, 5, 0),
    (14, 1, 20, 1, 5),
    (1, 4, 32, 32, 0),
    (2, 3, 7, 16, 33),
    (1, 1, 128, 20, 0),
)


@pytest.mark.parametrize(("way", "shape"), covering(WAYS, CODED), ids=str)
def test_attention_over_codes(way: Way, shape: tuple[int, int, int, int, int]) -> None:
    """Keys and values in eight bits: those that the test has put there, and those that the kernel writes. In bfloat16
    queries and the softmax's weights are narrowed, as over keys and values in bfloat16."""
    (isa, dtype), (heads, group, size, block_size, window) = way, shape
    of: dict[str, Any] = {"heads": heads, "group": group, "size": size, "block_size": block_size, "window": window}
    got, want = attention(isa, dtype, MIXED, **of, codes=True)
    close(got, want, dtype)


@each_isa
def test_heads_become_codes(isa: str) -> None:
    """Each instruction set makes the codes and scales of plain torch, also next to 0 and not finite."""
    torch.manual_seed(2)
    tokens, heads, size = 6, 3, 70
    x = torch.randn(tokens, 3, heads, size)
    x[1, 1:] *= 1e-31
    x[2, 1:] = 0
    x[3, 1, 1, 5], x[4, 2, 0, 69] = torch.nan, -torch.inf
    keys, values, want_keys, want_values = (Memory(3, heads, 2, size, None) for _ in range(4))
    program = Program(torch.float32, 1, isa)
    qkv = program.rows(3 * heads * size)
    program.write_kv(qkv, Attention(0, heads, 1, size, torch.int8, 1.0))
    slots = torch.tensor([3, 0, 5, 1, 4, 2])
    kept = rows_alone(tokens, slots=slots.numpy()).kept
    program.view(qkv, tokens, 3 * heads * size)[:] = x.flatten(1).numpy()
    program.run(pointers(kept | {"keys": keys.memory, "values": values.memory, "block_size": 2}))
    for n, (got, want) in enumerate(((keys, want_keys), (values, want_values)), 1):
        want.put(slots // 2, slots % 2, x[:, n])
        found, made = (Codes.within(each.memory, 2) for each in (got, want))
        assert torch.equal(found.codes, made.codes)
        scales, wanted = (each.scales.contiguous().view(torch.float32) for each in (found, made))
        assert torch.equal(scales.nan_to_num(-1), wanted.nan_to_num(-1))


@pytest.mark.parametrize(
    ("way", "window", "shape"),
    covering(WAYS, (1, 5, 31, 32, 33, 64, 1000), ((2, 3, 64, 16), (1, 1, 20, 5))),
    ids=str,
)
def test_a_window(way: Way, window: int, shape: tuple[int, int, int, int]) -> None:
    """It ends within tiles of 32 keys, on their borders, and is longer than all requests."""
    (isa, dtype), (heads, group, size, block_size) = way, shape
    got, want = attention(isa, dtype, MIXED, heads=heads, group=group, size=size, block_size=block_size, window=window)
    close(got, want, dtype)


@each_isa
@each_dtype
@pytest.mark.parametrize(("group", "size", "half"), [(3, 20, 5), (1, 64, 32), (2, 10, 0), (2, 7, 3)])
@pytest.mark.parametrize("norms", [False, True])
def test_queries_and_keys_are_normed_and_turned(
    isa: str, dtype: torch.dtype, group: int, size: int, half: int, norms: bool
) -> None:
    """Values and what is behind the pairs stay; keys and values go to their slots in the type of the weights."""
    torch.manual_seed(size)
    tokens, kv_heads, positions = 9, 2, 40
    heads = group * kv_heads
    angles = torch.arange(positions)[:, None] * 100.0 ** -(torch.arange(half) / max(half, 1))
    of_query, of_key = torch.rand(2, size) + 0.5
    program = Program(dtype, 2, isa)
    a = Attention(
        layer=0,
        kv_heads=kv_heads,
        group=group,
        head_size=size,
        dtype=dtype,
        scale=1.0,
        rotary=Rotary(angles.cos().contiguous(), angles.sin().contiguous()) if half else None,
        query_norm=program.norm(of_query, None, 1e-3) if norms else None,
        key_norm=program.norm(of_key, None, 1e-3) if norms else None,
    )
    qkv = program.rows((heads + 2 * kv_heads) * size)
    program.write_kv(qkv, a)
    x = torch.randn(tokens, heads + 2 * kv_heads, size)
    at, slots = np.array([0, 1, 39, 7, 7, 20, 3, 11, 38]), np.arange(tokens)[::-1].copy()
    keys, values = (torch.full((tokens, kv_heads, 1, size), torch.nan, dtype=dtype) for _ in range(2))
    kept = rows_alone(tokens, positions=at, slots=slots).kept | {"keys": keys, "values": values}
    program.view(qkv, tokens, x[0].numel())[:] = x.flatten(1).numpy()
    program.run(pointers(kept))

    want = x.double()
    q, k, v = want.split([heads, kv_heads, kv_heads], 1)
    if norms:
        q, k = (
            each / (each.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight.double()
            for each, weight in ((q, of_query), (k, of_key))
        )
    turn = torch.complex(angles.cos().double(), angles.sin().double())[at][:, None]

    def turned(heads: Tensor) -> Tensor:
        pairs = torch.complex(heads[..., :half], heads[..., half : 2 * half]) * turn
        return torch.cat([pairs.real, pairs.imag, heads[..., 2 * half :]], -1)

    got = torch.tensor(program.view(qkv, tokens, x[0].numel())).view(tokens, -1, size)[:, :heads]
    close(got, turned(q), torch.float32)
    close(keys[slots, :, 0], turned(k), dtype)
    assert torch.equal(values[slots, :, 0], v.to(dtype))


@each_isa
@each_dtype
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("codes", [False, True])
def test_a_token_adds_nothing_to_those_before_it(isa: str, dtype: torch.dtype, group: int, codes: bool) -> None:
    """Not even where its key and value are no numbers, which 0 times would be none either."""
    if isa == "amx" and dtype == torch.bfloat16 and not codes:
        pytest.skip("AMX multiplies whole tiles: by the 0 of a key that a row does not see, too")
    requests = Requests([0, 20], [41, 7])
    shape: dict[str, Any] = {"heads": 2, "group": group, "size": 64, "block_size": 16, "codes": codes}
    good, _ = attention(isa, dtype, requests, **shape)
    bad, _ = attention(isa, dtype, requests, **shape, last=torch.nan)
    assert np.flatnonzero(np.isnan(bad).any(axis=1)).tolist() == [40, 47]
    assert np.isnan(bad[[40, 47]]).all()
    assert np.array_equal(np.delete(bad, [40, 47], axis=0), np.delete(good, [40, 47], axis=0))


@each_isa
@each_dtype
@pytest.mark.parametrize("group", [1, 4, 16])
@pytest.mark.parametrize("codes", [False, True])
def test_a_score_that_is_no_number_shows(isa: str, dtype: torch.dtype, group: int, codes: bool) -> None:
    """Weights of keys or queries that are no numbers must not pass for a mean of the values."""
    shape: dict[str, Any] = {"heads": 2, "group": group, "size": 32, "block_size": 16, "codes": codes}
    got, _ = attention(isa, dtype, Requests([0, 20], [41, 1]), **shape, last_key=torch.nan)
    assert np.flatnonzero(np.isnan(got).any(axis=1)).tolist() == [40, 41]
    assert np.isnan(got[[40, 41]]).all()


@each_isa
@each_dtype
@settings(max_examples=8)
@given(data=st.data())
def test_attention_of_any_company_is_the_same_bits(isa: str, dtype: torch.dtype, data: st.DataObject) -> None:
    """A request's rows are the same bits alone, in a batch, with another block size and more threads."""
    ends = data.draw(st.lists(st.integers(1, 80), min_size=2, max_size=5))
    lengths = [data.draw(st.integers(1, end)) for end in ends]
    requests = Requests([end - length for end, length in zip(ends, lengths, strict=True)], lengths)
    chosen = data.draw(st.integers(0, len(ends) - 1))
    shape: dict[str, Any] = {"heads": 2, "size": data.draw(st.sampled_from([16, 64])), "seed": chosen}
    shape["window"] = data.draw(st.sampled_from([0, 1, 20, 33]))
    shape |= {"group": data.draw(st.sampled_from([1, 3])), "codes": data.draw(st.booleans())}
    together, _ = attention(isa, dtype, requests, **shape, block_size=16, threads=2)
    alone, _ = attention(
        isa, dtype, requests, **shape, block_size=data.draw(st.sampled_from([1, 5, 32])), members=[chosen]
    )
    first = sum(lengths[:chosen])
    assert np.array_equal(together[first : first + lengths[chosen]], alone)


@each_isa
@each_dtype
@settings(max_examples=8)
@given(data=st.data())
def test_a_row_of_a_product_is_the_same_bits_in_any_company(isa: str, dtype: torch.dtype, data: st.DataObject) -> None:
    n, k = data.draw(st.sampled_from([(97, 24), (144, 96), (50, 70)]))
    torch.manual_seed(n)
    weight, bias, x = torch.randn(n, k), torch.randn(n), torch.randn(100, k)
    act = data.draw(st.sampled_from([None, "tanh_gelu"]))
    rows = data.draw(st.integers(1, 100))
    first = data.draw(st.integers(0, rows - 1))
    together = linear(isa, dtype, x[:rows], weight, bias, act, threads=2)
    assert np.array_equal(linear(isa, dtype, x[first : first + 1], weight, bias, act), together[first : first + 1])


@each_isa
@each_dtype
def test_a_large_product_is_the_same_bits_in_parts(isa: str, dtype: torch.dtype) -> None:
    """Deep and wide enough that sums are put aside and taken up again, and that rows come in several groups."""
    torch.manual_seed(8)
    n, k = 912, 1632
    weight, bias, x = torch.randn(n, k) / k**0.5, torch.randn(n), torch.randn(530, k)
    together = linear(isa, dtype, x, weight, bias, None)
    close(together, normed(x) @ weight.to(dtype).double().t() + bias.double(), dtype)
    for act in None, "relu":
        together = linear(isa, dtype, x, weight, bias, act)
        for first, last in ((0, 1), (100, 116), (200, 264), (300, 397), (505, 530)):
            alone = linear(isa, dtype, x[first:last], weight, bias, act, threads=2)
            assert np.array_equal(alone, together[first:last])


def test_an_instruction_set_that_the_machine_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"this machine runs .*portable"):
        Program(torch.float32, 1, "avx1024")


def test_more_query_heads_a_key_head_than_the_kernels_hold_are_refused() -> None:
    """Their scores would be written beyond the place for them."""
    program = Program(torch.float32, 1, ISAS[0])
    attention = Attention(layer=0, kv_heads=1, group=MAX_GROUP + 1, head_size=4, dtype=torch.float32, scale=1.0)
    with pytest.raises(ValueError, match=f"{MAX_GROUP + 1} query heads share a key/value head; {MAX_GROUP} can"):
        program.attend(program.rows((MAX_GROUP + 3) * 4), attention, program.operand((MAX_GROUP + 1) * 4))
