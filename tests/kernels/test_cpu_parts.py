"""The CPU kernels of models with an encoder, on each instruction set: near float64, and bit for bit their own equals.

Attention over fixed keys, and from a later key on, with a bias by distance; norms in place, copies, a table's own bias.
Attention of a prefix LM, whose kernels are the same.
"""

import subprocess
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.test_cpu import WAYS, Memory, Way, close, each_dtype, each_isa, normed, pointers, rows_alone
from properties import covering
from torch import Tensor

from orca_kernels.cpu.program import Attention, Program


class Members(NamedTuple):
    inputs: Sequence[int]  # keys of the encoder's tokens, or of a prompt
    firsts: Sequence[int]  # position of the first query
    lengths: Sequence[int]  # queries


def attention(
    isa: str,
    dtype: torch.dtype,
    of: Members,
    *,
    sees_input: bool = False,
    sees_prompt: bool = False,
    heads: int,
    size: int,
    reach: int = 0,
    block_size: int = 16,
    threads: int = 1,
    seed: int = 0,
    only: int | None = None,
    codes: bool = False,
) -> tuple[np.ndarray, Tensor]:
    """Attention over keys and values that lie in shuffled blocks among NaN, of all members or one. -> the result, and
    that of float64."""
    draw, shuffle = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(1)
    ends = [(0 if sees_prompt else n) + first + length for n, first, length in zip(*of, strict=True)]
    columns = -(-max(ends) // block_size)
    order = torch.randperm(len(ends) * columns + 3, generator=shuffle)[: len(ends) * columns].reshape(-1, columns)
    of_memory = len(ends) * columns + 3, heads, block_size, size, None if codes else dtype
    keys, values = Memory(*of_memory), Memory(*of_memory)
    bias = torch.randn(heads, 2 * reach + 1, generator=draw) if reach else None
    rows, wants, chosen = [], [], []
    for r, (n, first, length) in enumerate(zip(*of, strict=True)):
        k, v = (torch.randn(ends[r], heads, size, generator=draw) for _ in range(2))
        q = torch.randn(length, heads, size, generator=draw)
        at = torch.arange(ends[r])
        keys.put(order[r, at // block_size], at % block_size, k)
        values.put(order[r, at // block_size], at % block_size, v)
        if only is not None and r != only:
            continue
        chosen.append(r)
        rows.append(q.flatten(1))
        seen = slice(0, n) if sees_input else slice(0 if sees_prompt else n, ends[r])
        kd, vd = (keys.numbers(x[seen]).transpose(0, 1) for x in (k, v))
        scores = q.double().transpose(0, 1) @ kd.transpose(1, 2) * 0.3
        distance = torch.arange(kd.shape[1]) - torch.arange(first, first + length)[:, None]
        if bias is not None:
            scores = scores + bias.double()[:, distance.clamp(-reach, reach) + reach]
        if not sees_input:
            later = (distance > 0) & (at[: kd.shape[1]] >= (n if sees_prompt else 0))
            scores = scores.masked_fill(later, -torch.inf)
        wants.append((scores.softmax(-1) @ vd).transpose(0, 1).flatten(1))
    x, width = torch.cat(rows), heads * size
    program = Program(dtype, threads, isa)
    q_rows, out, done = program.rows(width), program.operand(width), program.rows(width)
    sees: dict[str, Any] = {"sees_input": sees_input, "sees_prompt": sees_prompt}
    kept_in = torch.int8 if codes else dtype
    a = Attention(0, heads, 1, size, kept_in, 0.3, **sees, bias=bias, narrows=dtype is torch.bfloat16)
    program.attend(q_rows, a, out)
    program.linear(out, program.pack(torch.eye(width)), done)
    program.view(q_rows, len(x), width)[:] = x.numpy()
    firsts, lengths = ([each[r] for r in chosen] for each in (of.firsts, of.lengths))
    inputs = np.array([of.inputs[r] for r in chosen])
    kept: dict[str, Any] = rows_alone(len(x)).kept | {
        "positions": np.concatenate([np.arange(f, f + n) for f, n in zip(firsts, lengths, strict=True)]),
        "starts": np.cumsum([0, *lengths]),
        "blocks": order[chosen].numpy(),
        "selection": np.zeros(0, np.int64),
        "keys": keys.memory,
        "values": values.memory,
        "block_size": block_size,
    }
    batch = pointers(kept)
    batch.inputs = inputs.ctypes.data
    program.run(batch)
    return program.view(done, len(x), width).copy(), torch.cat(wants)


MIXED = Members([1, 37, 5, 64, 33, 70, 90], [0, 0, 5, 15, 31, 0, 70], [1, 37, 1, 1, 3, 70, 1])


HEADS = ((3, 64), (5, 20), (2, 32))  # heads, size


@pytest.mark.parametrize(
    ("way", "sees_input", "reach", "shape"), covering(WAYS, (True, False), (0, 9, 40), HEADS), ids=str
)
def test_attention(way: Way, sees_input: bool, reach: int, shape: tuple[int, int]) -> None:
    """Over all keys of the input, or from a later key on."""
    (isa, dtype), (heads, size) = way, shape
    for block_size, codes in ((1, False), (16, False), (20, False), (16, True), (5, True)):
        of: dict[str, Any] = {"heads": heads, "size": size, "reach": reach, "block_size": block_size}
        got, want = attention(isa, dtype, MIXED, sees_input=sees_input, **of, codes=codes)
        close(got, want, dtype)


# Whole prompts, some with tokens of their answers behind them, and increments.
PROMPTS = Members([1, 37, 5, 64, 33, 70, 90, 2], [0, 0, 0, 64, 40, 0, 0, 2], [1, 37, 9, 1, 3, 75, 90, 1])


@pytest.mark.parametrize(("way", "reach", "shape"), covering(WAYS, (0, 9), HEADS), ids=str)
def test_attention_of_a_prefix_lm(way: Way, reach: int, shape: tuple[int, int]) -> None:
    (isa, dtype), (heads, size) = way, shape
    for block_size, codes in ((1, False), (16, False), (20, False), (16, True)):
        of: dict[str, Any] = {"heads": heads, "size": size, "reach": reach, "block_size": block_size}
        got, want = attention(isa, dtype, PROMPTS, sees_prompt=True, **of, codes=codes)
        close(got, want, dtype)


@each_isa
@each_dtype
@settings(max_examples=8)
@given(data=st.data())
def test_attention_of_any_company_is_the_same_bits(isa: str, dtype: torch.dtype, data: st.DataObject) -> None:
    inputs = data.draw(st.lists(st.integers(1, 70), min_size=2, max_size=4))
    firsts, lengths = ([data.draw(st.integers(least, 40)) for _ in inputs] for least in (0, 1))
    shape: dict[str, Any] = {"heads": 2, "size": data.draw(st.sampled_from([16, 64])), "reach": 9}
    shape["codes"] = data.draw(st.booleans())
    sees = data.draw(st.sampled_from(["sees_input", "sees_prompt", ""]))
    if sees == "sees_prompt":  # a whole prompt, or a token behind it
        lengths = [
            max(length, n) if first < n else length for n, first, length in zip(inputs, firsts, lengths, strict=True)
        ]
        firsts = [0 if first < n else first for n, first in zip(inputs, firsts, strict=True)]
    if sees:
        shape[sees] = True
    of, chosen = Members(inputs, firsts, lengths), data.draw(st.integers(0, len(inputs) - 1))
    together, _ = attention(isa, dtype, of, **shape, threads=2)
    alone, _ = attention(isa, dtype, of, **shape, block_size=data.draw(st.sampled_from([1, 5, 32])), only=chosen)
    first = sum(lengths[:chosen])
    assert np.array_equal(together[first : first + lengths[chosen]], alone)


@each_isa
@each_dtype
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("width", [24, 50])
def test_a_norm_in_place_and_a_copy(isa: str, dtype: torch.dtype, with_bias: bool, width: int) -> None:
    torch.manual_seed(4)
    x, weight, bias, matrix = torch.randn(7, width), torch.randn(width), torch.randn(width), torch.randn(width, width)
    program = Program(dtype, 1, isa)
    rows, copied, operand = program.rows(width), program.rows(width), program.operand(width)
    packed = program.pack(matrix / width**0.5)
    program.normalize(rows, program.norm(weight, bias if with_bias else None, 1e-3), operand, in_place=True)
    program.copy(rows, width, operand)
    program.linear(operand, packed, copied)
    program.view(rows, 7, width)[:] = x.numpy()
    program.run(rows_alone(7).batch)
    if with_bias:
        want = torch.nn.functional.layer_norm(x.double(), [width], weight.double(), bias.double(), 1e-3)
    else:
        want = x.double() / (x.double().square().mean(1, keepdim=True) + 1e-3).sqrt() * weight.double()
    close(program.view(rows, 7, width), want, torch.float32)
    close(program.view(copied, 7, width), want @ (matrix / width**0.5).to(dtype).double().t(), dtype)


@each_isa
@each_dtype
def test_a_table_with_a_bias_of_its_own_and_tokens_that_are_never_made(isa: str, dtype: torch.dtype) -> None:
    torch.manual_seed(6)
    weight, bias, x = torch.randn(97, 24), torch.randn(97), torch.randn(9, 24)
    bias[[3, 40, 96]] = -torch.inf
    program = Program(dtype, 2, isa)
    rows, operand = program.rows(24), program.operand(24)
    table = program.pack(weight)
    program.normalize(rows, program.norm(torch.ones(24), torch.zeros(24), 0.0), operand, selected=True)
    program.head(operand, program.with_bias(table, bias))
    logits = np.full((9, 97), np.nan, np.float32)
    program.view(rows, 9, 24)[:] = x.numpy()
    found = rows_alone(9, logits=logits)
    program.run(found.batch)
    want = normed(x) @ weight.to(dtype).double().t() + bias.double()
    assert np.isneginf(logits[:, [3, 40, 96]]).all()
    finite = np.isfinite(want[0].numpy())
    close(logits[:, finite].copy(), want[:, finite], dtype)
    assert (found.kept["best_index"] == logits.argmax(1)).all()


SHORT_OF_MEMORY = """
import resource
from pathlib import Path

import torch

from orca_kernels.cpu.program import Attention, Program

program = Program(torch.float32, threads=1)
x, out, bias = program.rows(16), program.operand(16), torch.zeros(1, (1 << 27) + 1)
size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (1 << 26), size + (1 << 26)))
try:
    program.attend(x, Attention(0, 1, 1, 16, torch.float32, 1.0, bias=bias), out)
except MemoryError as error:
    print(error)
"""


def test_an_exception_of_cpp_does_not_end_the_process() -> None:
    """A table of 512 MB is copied where 64 MB are left."""
    ran = subprocess.run([sys.executable, "-c", SHORT_OF_MEMORY], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout.strip()) == (0, "no memory for an operation of the program"), ran.stderr
