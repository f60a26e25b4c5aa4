"""From logits to tokens on the device: greedy, and with a temperature. Each row is read in pieces of fixed size.

`piece_statistics` reads the logits once: each piece's maximum, its first index, and the sum of exp(logit - maximum).
`greedy_row` merges the pieces in order: the likeliest token (the first of equals) and its log probability.

Top-k, top-p and min-p keep the tokens whose logits are not too far below the largest one. `cut_row` searches for that
distance, bit by bit, by counts and sums of the tokens within a distance: nothing is sorted, and nothing is written but
the distance. `piece_weights` and `drawn_row` draw among these tokens.

With a temperature the token is found as `orca_worker.sampling.sampling` finds it, by inverting the cumulative
distribution in the vocabulary's order with a draw of Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as
1, 2, 3", SC'11), key seed, counter index. The draw is exact, all of its 53 bits. So a token is a function of seed,
index and the row's logits. Sums of probabilities are float64, but exponentials are the device's: where the draw falls
within a float32 rounding of the border of two tokens, another device may choose the other.
"""

# pyright: reportGeneralTypeIssues=false
# (a kernel calls functions of Triton's language, which pyright takes for functions that never return)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .draws import Draws
from .launch import launch

PIECE = 1024  # tokens of the vocabulary in a piece: part of what a result is a function of
PASS = 4096  # tokens that a pass of a search reads at once


@triton.jit
def piece_of_row(logits, V: tl.constexpr, N: tl.constexpr, piece):
    """-> logits [N] in float32; -inf behind the vocabulary."""
    i = piece * N + tl.arange(0, N)
    return tl.load(logits + i, mask=i < V, other=float("-inf")).to(tl.float32)


@triton.jit
def piece_statistics(logits, stride, maxima, at_maxima, sums, V: tl.constexpr, N: tl.constexpr, PIECES: tl.constexpr):
    """Grid: rows, pieces. maxima, at_maxima, sums [B, PIECES]."""
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    x = piece_of_row(logits + row * stride, V, N, piece)
    numbers = tl.where(x == x, x, float("-inf"))  # noqa: PLR0124
    maximum, at = tl.max(numbers, 0, return_indices=True, return_indices_tie_break_left=True)
    # The sum is NaN where a logit is NaN or infinity. It makes the row's log probability NaN, whatever else is there.
    total = tl.sum(tl.exp(x - tl.where(maximum == float("-inf"), 0.0, maximum)), 0)
    out = row * PIECES + piece
    tl.store(maxima + out, maximum)
    tl.store(at_maxima + out, piece * N + at)
    tl.store(sums + out, total)


@triton.jit
def greedy_row(maxima, at_maxima, sums, ids, logprobs, PIECES: tl.constexpr, PIECES_PADDED: tl.constexpr):
    """Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    p = tl.arange(0, PIECES_PADDED)
    real = p < PIECES
    m = tl.load(maxima + row * PIECES + p, mask=real, other=float("-inf"))
    maximum, piece = tl.max(m, 0, return_indices=True, return_indices_tie_break_left=True)
    s = tl.load(sums + row * PIECES + p, mask=real, other=0.0)
    total = tl.sum(s * tl.exp(m - tl.where(maximum == float("-inf"), 0.0, maximum)), 0)
    tl.store(ids + row, tl.load(at_maxima + row * PIECES + piece).to(tl.int64))
    tl.store(logprobs + row, -tl.log(tl.where(total > 0.0, total, float("nan"))))


@triton.jit
def draw_of(seed, index):
    """Philox4x32-10 of a seed and an index, uint64 each -> [0, 1) in float64, 53 bits."""
    low, high = tl.full([1], 0xFFFFFFFF, tl.uint64), tl.full([1], 32, tl.uint64)
    c0, c1 = (index & low).to(tl.uint32), (index >> high).to(tl.uint32)
    k0, k1 = (seed & low).to(tl.uint32), (seed >> high).to(tl.uint32)
    zero = tl.zeros([1], tl.uint32)
    a, b, _, _ = tl.philox_impl(c0, c1, zero, zero, k0, k1, 10)
    return ((a >> 5).to(tl.float64) * 67108864.0 + (b >> 6).to(tl.float64)) * 1.1102230246251565e-16


@triton.jit
def distances_of_piece(logits, piece, maximum, temperature, V: tl.constexpr, N: tl.constexpr):
    """Logits of a row -> distances [N] float32: (maximum - logit) / temperature, which is not negative."""
    x = piece_of_row(logits, V, N, piece)
    return tl.div_rn(maximum - x, tl.broadcast_to(temperature, x.shape))


@triton.jit
def weight_of(distance, farthest):
    """The share of a token before all are divided by their sum, float64."""
    return tl.where(distance <= farthest, tl.exp(0.0 - distance), 0.0).to(tl.float64)


@triton.jit
def maximum_of_row(maxima, row, PIECES: tl.constexpr, PIECES_PADDED: tl.constexpr):
    p = tl.arange(0, PIECES_PADDED)
    return tl.max(tl.load(maxima + row * PIECES + p, mask=p < PIECES, other=float("-inf")), 0)


@triton.jit
def weight_within(logits, maximum, temperature, farthest, V: tl.constexpr, N: tl.constexpr):
    """The weight of all tokens of a row that are not beyond `farthest`, float64."""
    total = tl.zeros([N], tl.float64)
    for piece in range(0, tl.cdiv(V, N)):
        distance = distances_of_piece(logits, piece, maximum, temperature, V, N)
        total += weight_of(distance, farthest)
    return tl.sum(total, 0)


@triton.jit
def distance_that_reaches(
    need, logits, maximum, temperature, farthest, V: tl.constexpr, N: tl.constexpr, COUNT: tl.constexpr
):
    """The smallest distance within which the weights of a row's tokens add up to `need`, or, with COUNT, their number.

    The bits of a float that is not negative are an integer in the same order. So this is a search for an integer of 32
    bits, two of them in a pass over the row. A sum of more tokens, in the same order, is never smaller, rounded or not.
    """
    below = tl.full([], 0, tl.uint32)  # distances of fewer bits do not reach it
    step = tl.full([], 1 << 30, tl.uint32)
    for _ in range(16):
        first, second, third = tl.zeros([N], tl.float64), tl.zeros([N], tl.float64), tl.zeros([N], tl.float64)
        for piece in range(0, tl.cdiv(V, N)):
            distance = distances_of_piece(logits, piece, maximum, temperature, V, N)
            weight = tl.full([N], 1.0, tl.float64) if COUNT else weight_of(distance, farthest)
            bits = distance.to(tl.uint32, bitcast=True)
            first += tl.where(bits < below + step, weight, 0.0)
            second += tl.where(bits < below + 2 * step, weight, 0.0)
            third += tl.where(bits < below + 3 * step, weight, 0.0)
        short = (tl.sum(first, 0) < need).to(tl.uint32) + (tl.sum(second, 0) < need).to(tl.uint32)
        below += step * (short + (tl.sum(third, 0) < need).to(tl.uint32))
        step = step >> 2
    return tl.minimum(below, 0x7F800000).to(tl.float32, bitcast=True)  # infinity: nothing is cut


@triton.jit
def cut_row(
    logits, stride, maxima, temperatures, top_k, top_p, min_p, farthest,
    V: tl.constexpr, PIECES: tl.constexpr, PIECES_PADDED: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Grid: rows. farthest [B] float32: the largest distance of a token that top-k, top-p and min-p leave, in this
    order. Equal ones stay together."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row).to(tl.float32)
    bound = tl.full([], float("inf"), tl.float32)
    if temperature > 0:
        temperature = tl.maximum(temperature, 1e-30)
        maximum = maximum_of_row(maxima, row, PIECES, PIECES_PADDED)
        logits += row * stride
        k, p, least = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row).to(tl.float32)
        if (k > 0) & (k < V):
            bound = distance_that_reaches(k.to(tl.float64), logits, maximum, temperature, bound, V, N, COUNT=True)
        if (p > 0) & (p < 1):
            need = p * weight_within(logits, maximum, temperature, bound, V, N)
            bound = distance_that_reaches(need, logits, maximum, temperature, bound, V, N, COUNT=False)
        if least > 0:
            bound = tl.minimum(bound, 0.0 - tl.log(least))  # the weight of the most probable token is 1
    tl.store(farthest + row, bound)


@triton.jit
def piece_weights(
    logits, stride, maxima, temperatures, farthest, weights,
    V: tl.constexpr, PIECES: tl.constexpr, PIECES_PADDED: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Grid: rows, pieces. weights [B, PIECES] float64: the sum of each piece at the row's temperature."""
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    maximum = maximum_of_row(maxima, row, PIECES, PIECES_PADDED)
    temperature = tl.load(temperatures + row).to(tl.float32)
    if temperature > 0:
        distance = distances_of_piece(logits + row * stride, piece, maximum, tl.maximum(temperature, 1e-30), V, N)
        tl.store(weights + row * PIECES + piece, tl.sum(weight_of(distance, tl.load(farthest + row)), 0))


@triton.jit
def drawn_row(
    logits, stride, maxima, weights, temperatures, farthest, seeds, indexes, ids, logprobs, sums,
    V: tl.constexpr, PIECES: tl.constexpr, PIECES_PADDED: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Grid: rows. Where the temperature is above 0: replaces the likeliest token by the drawn one."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row).to(tl.float32)
    if temperature > 0:
        p = tl.arange(0, PIECES_PADDED)
        real = p < PIECES
        m = tl.load(maxima + row * PIECES + p, mask=real, other=float("-inf"))
        maximum = tl.max(m, 0)
        w = tl.load(weights + row * PIECES + p, mask=real, other=0.0)
        one = tl.arange(0, 1)
        u = tl.sum(draw_of(tl.load(seeds + row + one), tl.load(indexes + row + one)), 0)
        threshold = u * tl.sum(w, 0)
        cumulative = tl.cumsum(w, 0)
        piece = tl.minimum(tl.min(tl.where(real & (cumulative > threshold), p, PIECES), 0), PIECES - 1)
        before = tl.sum(tl.where(p < piece, w, 0.0), 0)
        distance = distances_of_piece(logits + row * stride, piece, maximum, tl.maximum(temperature, 1e-30), V, N)
        x = weight_of(distance, tl.load(farthest + row))
        found = before + tl.cumsum(x, 0) > threshold
        token = tl.min(tl.where(found & (x > 0), piece * N + tl.arange(0, N), V), 0)
        if token < V:  # rounding can lift the threshold above the last sum: the likeliest token stays
            tl.store(ids + row, token.to(tl.int64))
            s = tl.load(sums + row * PIECES + p, mask=real, other=0.0)
            total = tl.sum(s * tl.exp(m - maximum), 0)
            logit = tl.load(logits + row * stride + token).to(tl.float32)
            tl.store(logprobs + row, logit - maximum - tl.log(total))


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """logits [B, V] -> the likeliest tokens [B] int64, the first of equals, and their log probabilities [B] float32.

    A log probability is NaN where a logit of the row is NaN or infinity, or all are minus infinity. Such a row has no
    token, and what stands there as its token means nothing.
    """
    ids, logprobs, _, _ = _greedy(logits)
    return ids, logprobs


def sample(logits: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
    """logits [B, V] -> tokens [B] int64 and their log probabilities [B] float32 (of the model, without temperature and
    cuts; NaN as in `greedy`)."""
    ids, logprobs, maxima, sums = _greedy(logits)
    (rows, size), pieces = logits.shape, maxima.shape[1]
    shape = {"V": size, "PIECES": pieces, "PIECES_PADDED": triton.next_power_of_2(pieces)}
    farthest = torch.empty(rows, dtype=torch.float32, device=logits.device)
    weights = torch.empty((rows, pieces), dtype=torch.float64, device=logits.device)
    launch(
        cut_row, (rows,), logits, logits.stride(0), maxima, draws.temperatures, draws.top_k, draws.top_p, draws.min_p,
        farthest, **shape, N=PASS, num_warps=16,
    )  # fmt: skip
    launch(
        piece_weights, (rows, pieces), logits, logits.stride(0), maxima, draws.temperatures, farthest, weights,
        **shape, N=PIECE,
    )  # fmt: skip
    launch(
        drawn_row, (rows,), logits, logits.stride(0), maxima, weights, draws.temperatures, farthest,
        draws.seeds.view(torch.uint64), draws.indexes.view(torch.uint64), ids, logprobs, sums, **shape, N=PIECE,
    )  # fmt: skip
    return ids, logprobs


def _greedy(logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> ids, logprobs [B]; maxima, sums [B, pieces]."""
    rows, size = logits.shape
    assert logits.stride(1) == 1, logits.stride()
    pieces = -(-size // PIECE)
    maxima, sums = torch.empty((2, rows, pieces), dtype=torch.float32, device=logits.device)
    at_maxima = torch.empty((rows, pieces), dtype=torch.int32, device=logits.device)
    ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    launch(
        piece_statistics, (rows, pieces), logits, logits.stride(0), maxima, at_maxima, sums,
        V=size, N=PIECE, PIECES=pieces,
    )  # fmt: skip
    launch(
        greedy_row, (rows,), maxima, at_maxima, sums, ids, logprobs,
        PIECES=pieces, PIECES_PADDED=triton.next_power_of_2(pieces),
    )  # fmt: skip
    return ids, logprobs, maxima, sums
