"""Split attention in plain torch: what machines without fused kernels run, and what fused kernels are tested against.

Selective batching (paper section 3.2): attention runs request by request, all other operations on the flat batch [T, H]
of all requests' tokens. For query i of a request whose first query is at position `context`:

    out_i = softmax(scale * q_i . K[0 : context + i + 1]) V[0 : context + i + 1]

Keys and values are stored in blocks, [n_blocks, heads, block_size, D] (HND) for each layer, as numbers or in `Codes`. A
request's block table lists its blocks in order. Scores, softmax and sums are float32 whatever the type of the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .transfer import to_device

# Increments are computed in padded pieces with at most this many elements of gathered keys, by type of device.
# CPU: 2**18 fits in the L2 cache. On a Zen 5 core, 32 increments x 12 heads x 64 x ~240 tokens in float32 take 6.5 ms
# in such pieces, and 32 ms in one piece.
# GPU: fewer pieces need fewer launches. 32 increments x 12 heads x 128 x 129 tokens need 26 operations a layer in one
# piece, and 208 in pieces of the CPU's size (counted, not timed). A piece's copies need memory
# besides the keys and values: 0.75 GiB for 2**25 in bfloat16 at 128 a head.
PIECE = {"cpu": 2**18, "cuda": 2**25}


ZERO = 1e-30  # numbers of which the largest is below it are zeros: 127 / largest would not be finite


def eight_bits(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [.., n] float32 -> codes like x, float32, and scales [.., 1], one for n numbers.

    A code is the integer that is nearest to x * (127 / largest), half to even; the scale is largest / 127. A NaN makes
    both NaN.
    """
    largest = x.abs().amax(-1, keepdim=True)  # NaN where one is
    is_zero = largest < ZERO
    codes = (x * (127 / largest).masked_fill_(is_zero, 0)).round_()
    scales = largest / torch.full_like(largest, 127)  # by a number of the host a GPU multiplies with 1 / 127
    return codes, scales.masked_fill_(is_zero, 0)


class Codes(NamedTuple):
    """Keys or values of a layer in eight bits: a number is code * scale, with one scale for a token and head."""

    codes: Tensor  # [n_blocks, heads, block_size, D] int8
    scales: Tensor  # [n_blocks, heads, block_size, 4] int8: the bytes of a float32, which may lie anywhere

    @classmethod
    def within(cls, memory: Tensor, block_size: int) -> Codes:
        """Views memory [n_blocks, heads, block_size * (D + 4)] int8 as codes and scales: in each block and head the
        codes come first."""
        of_scales = block_size * torch.float32.itemsize
        codes, scales = memory.split([memory.shape[2] - of_scales, of_scales], 2)
        return cls(codes.unflatten(2, (block_size, -1)), scales.unflatten(2, (block_size, -1)))

    def put(self, block: Tensor, offset: Tensor, x: Tensor) -> None:
        """Makes the codes of x [T, heads, D]."""
        codes, scales = eight_bits(x.float())
        self.codes[block, :, offset] = codes.nan_to_num_(127).to(torch.int8)
        self.scales[block, :, offset] = scales.flatten().view(torch.int8).view(*x.shape[:2], 4)

    def pages(self, at: Tensor) -> Tensor:
        """The numbers [len(at), block_size, D] float32 of blocks' heads, seen as [n_blocks * heads, ..]."""
        codes, scales = (each.flatten(0, 1).index_select(0, at) for each in self)
        return codes * scales.view(torch.float32)

    def tokens(self, block: Tensor, offset: Tensor) -> Tensor:
        """The numbers [tokens, heads, D] float32 of tokens."""
        scales = self.scales[block, :, offset].contiguous()
        return self.codes[block, :, offset] * scales.view(torch.float32)


Cache = Tensor | Codes


class SplitAttention:
    """The attention of one batch: planned once an iteration, run in each layer.

    block_table [B, n] int64: block ids of each request, in order (entries after its last token are not read);
    query_lengths [B], contexts [B]: how many tokens each request has in this batch, and how many before them;
    slots [T] int64: where each token's key and value go: block * block_size + offset;
    prompts [B]: tokens of each request's prompt, if these see each other; they are in one batch then.
    """

    def __init__(
        self,
        block_table: Tensor,
        query_lengths: Sequence[int],
        contexts: Sequence[int],
        slots: Tensor,
        *,
        heads: int,
        block_size: int,
        prompts: Sequence[int] | None = None,
    ) -> None:
        self._heads, self._block_size = heads, block_size
        self._head = torch.arange(heads, device=slots.device)
        self._at = block, offset = slots // block_size, slots % block_size
        # row of token t, head h in the cache seen as [n_blocks * heads * block_size, D]
        self._targets = ((block[:, None] * heads + self._head) * block_size + offset[:, None]).flatten()

        first, starts = 0, []
        for length in query_lengths:
            starts.append(first)
            first += length
        self._initiations = [
            (
                starts[i],
                length,
                contexts[i],
                prompts[i] if prompts is not None else 0,
                self._pages(block_table[i : i + 1], contexts[i] + length),
            )
            for i, length in enumerate(query_lengths)
            if length > 1
        ]
        increments = sorted((contexts[i] + 1, i) for i, length in enumerate(query_lengths) if length == 1)
        self._pieces = [self._piece(block_table, piece, starts) for piece in self._cut(increments)]

    def _pages(self, table: Tensor, tokens: int) -> Tensor:
        """Rows [b * heads * n] of the cache, seen as [n_blocks * heads, block_size * D], with the first `tokens`."""
        table = table[:, : -(-tokens // self._block_size)]
        return (table[:, None, :] * self._heads + self._head[:, None]).flatten()

    def _cut(self, increments: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
        """Cuts ascending (tokens, request) pairs into pieces of about PIECE elements of padded keys (64 a head)."""
        limit = PIECE[self._head.device.type]
        pieces: list[list[tuple[int, int]]] = []
        for tokens, request in increments:
            if not pieces or (len(pieces[-1]) + 1) * tokens * self._heads * 64 > limit:
                pieces.append([])
            pieces[-1].append((tokens, request))
        return pieces

    def _piece(
        self, block_table: Tensor, piece: list[tuple[int, int]], starts: list[int]
    ) -> tuple[Tensor, Tensor, int, int, Tensor, Tensor | None]:
        device = self._head.device
        shortest, longest = piece[0][0], piece[-1][0]
        requests = to_device(torch.tensor([request for _, request in piece]), device)
        rows = to_device(torch.tensor([starts[request] for _, request in piece]), device)
        tokens = to_device(torch.tensor([tokens for tokens, _ in piece]), device)
        padding = None  # [b, longest - shortest]: true after a request's last token
        if longest > shortest:
            table = block_table[requests]
            n_blocks = -(-tokens // self._block_size)
            real = torch.arange(table.shape[1], device=device) < n_blocks[:, None]
            table = torch.where(real, table, table[:, :1])  # pads with a block of the request's own
            padding = torch.arange(shortest, longest, device=device) >= tokens[:, None]
        else:
            table = block_table[requests]
        return rows, tokens, shortest, longest, self._pages(table, longest), padding

    def write(self, k: Tensor, v: Tensor, keys: Cache, values: Cache) -> None:
        """Writes the batch's keys and values, each [T, heads, D], to their slots in a layer's cache."""
        size = k.shape[-1]
        for x, cache in ((k, keys), (v, values)):
            if isinstance(cache, Codes):
                cache.put(*self._at, x)
            else:
                cache.view(-1, size).index_copy_(0, self._targets, x.reshape(-1, size))

    def _numbers_of(self, cache: Cache, pages: Tensor, size: int) -> Tensor:
        """The numbers of pages [b * heads * n] -> [b * heads * n, block_size * D]."""
        if isinstance(cache, Codes):
            return cache.pages(pages).flatten(1)
        return cache.view(-1, self._block_size * size).index_select(0, pages)

    def __call__(self, q: Tensor, keys: Cache, values: Cache, scale: float, window: int = 0) -> Tensor:
        """q [T, group * heads, D] -> the same shape. The batch's own keys and values must have been written.

        `group` query heads in a row share one of the `heads` of keys and values. window: keys that a query sees at
        most, its own among them; 0: all.
        """
        heads, size = self._heads, q.shape[2]
        group = q.shape[1] // heads
        out = torch.empty_like(q)
        for start, length, context, prompt, pages in self._initiations:
            k = self._numbers_of(keys, pages, size).view(heads, -1, size)[:, : context + length]
            v = self._numbers_of(values, pages, size).view(heads, -1, size)[:, : context + length]
            k, v = (each.repeat_interleave(group, 0) if group > 1 else each for each in (k, v))
            mask = None
            if context or prompt or 0 < window < length:
                seen = torch.arange(context + length, device=q.device)
                mask = seen <= seen[context:, None].clamp(min=prompt - 1)  # [length, context + length]
                if window:
                    mask &= seen > seen[context:, None] - window
            part = q[start : start + length].transpose(0, 1).to(k)  # [heads, length, D]
            part = scaled_dot_product_attention(
                part[None], k[None], v[None], attn_mask=mask, is_causal=mask is None, scale=scale
            )
            out[start : start + length] = part[0].transpose(0, 1)
        for rows, tokens, shortest, longest, pages, padding in self._pieces:
            k = self._numbers_of(keys, pages, size).view(len(rows), heads, -1, size)[:, :, :longest].float()
            v = self._numbers_of(values, pages, size).view(len(rows), heads, -1, size)[:, :, :longest].float()
            queries = q[rows].view(len(rows), heads, group, size).float()
            scores = torch.matmul(queries, k.transpose(2, 3)).mul_(scale)  # [b, heads, group, longest]
            if 0 < window < longest:
                before = torch.arange(longest, device=q.device) < tokens[:, None] - window
                scores.masked_fill_(before[:, None, None], -torch.inf)
            if padding is not None:
                scores[..., shortest:].masked_fill_(padding[:, None, None], -torch.inf)
                v[:, :, shortest:].masked_fill_(padding[:, None, :, None], 0)  # 0 * NaN of stale memory would be NaN
            out[rows] = torch.matmul(scores.softmax(-1), v).view(len(rows), -1, size).to(q.dtype)
        return out


class PartAttention:
    """The attention of one batch of the encoder or the decoder of a model that has both, request by request.

    block_table [B, n] int64; query_lengths, firsts [B]: how many tokens each request has in this batch, and the
    position of the first; inputs [B]: tokens of the encoder, whose keys and values are a request's first ones.
    """

    def __init__(
        self, block_table: Tensor, query_lengths: Sequence[int], firsts: Sequence[int], inputs: Sequence[int]
    ) -> None:
        self._members = list(zip(block_table, query_lengths, firsts, inputs, strict=True))

    def __call__(
        self, q: Tensor, keys: Cache, values: Cache, scale: float, sees_input: bool, bias: Tensor | None
    ) -> Tensor:
        """q [T, heads, D], caches [n_blocks, heads, block_size, D] -> the same shape as q.

        sees_input: a query sees all keys of the encoder's tokens; else those behind them up to its own. bias [heads,
        2 * reach + 1] float32: added to a score by key - query, from -reach on, and the outermost beyond.
        """
        out, start = torch.empty_like(q), 0
        block_size = (keys.codes if isinstance(keys, Codes) else keys).shape[2]
        for blocks, length, first, inputs in self._members:
            begin, end = (0, inputs) if sees_input else (inputs, inputs + first + length)
            at = torch.arange(begin, end, device=q.device)
            block, offset = blocks[at // block_size], at % block_size
            of_tokens = (
                cache.tokens(block, offset) if isinstance(cache, Codes) else cache[block, :, offset]
                for cache in (keys, values)
            )
            k, v = (each.transpose(0, 1).float() for each in of_tokens)  # [heads, keys, D]
            queries = q[start : start + length].transpose(0, 1).float()
            scores = queries @ k.transpose(1, 2) * scale
            distance = (at - begin) - torch.arange(first, first + length, device=q.device)[:, None]
            if bias is not None:
                reach = bias.shape[1] // 2
                scores = scores + bias[:, distance.clamp(-reach, reach) + reach]
            if not sees_input:
                scores = scores.masked_fill(distance > 0, -torch.inf)
            out[start : start + length] = (scores.softmax(-1) @ v).transpose(0, 1).to(q.dtype)
            start += length
        return out


def split_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    query_lengths: Sequence[int],
    contexts: Sequence[int],
    scale: float,
    window: int = 0,
) -> Tensor:
    """`SplitAttention` in one call, over caches [n_blocks, heads, block_size, D] that hold all keys and values.

    q [T, group * heads, D] -> the same shape.
    """
    _, heads, block_size, _ = keys.shape
    slots = torch.empty(0, dtype=torch.int64, device=q.device)
    plan = SplitAttention(block_table, query_lengths, contexts, slots, heads=heads, block_size=block_size)
    return plan(q, keys, values, scale, window)


def turned(x: Tensor, positions: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotary positions: turns elements j and j + half of each head of x [T, heads, D] by the angles that tables
    [.., half] float32 have at positions [T] -> [T, heads, D]."""
    half = cosines.shape[1]
    cosine, sine = cosines[positions][:, None], sines[positions][:, None]
    a, b, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
    both = torch.cat([a * cosine - b * sine, b * cosine + a * sine], -1)
    return torch.cat([both.to(x.dtype), rest], -1)
