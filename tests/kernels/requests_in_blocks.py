"""Requests with random queries, keys and values, whose blocks lie shuffled in a memory full of NaN."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from orca_kernels.triton.attention import split_attention
from orca_kernels.triton.plan import Bounds, HostPlan, Plan
from orca_kernels.triton.write_kv import write_kv


@dataclass(frozen=True)
class Part:
    """A request's part of a batch: `length` tokens from `context` on. Its first `prompt` ones see each other."""

    request: int
    context: int
    length: int = 1
    prompt: int = 0


class Requests:
    """`totals`: tokens of each request. The scale is that of attention."""

    def __init__(
        self,
        totals: Sequence[int],
        *,
        heads: int,
        kv_heads: int,
        size: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        generator = torch.Generator().manual_seed(len(totals) * 100 + heads)
        self.heads, self.kv_heads, self.size, self.block_size = heads, kv_heads, size, block_size
        self.device, self.scale = device, 1.7 * size**-0.5
        shape = (heads + 2 * kv_heads, size)
        self.qkv = [torch.randn(total, *shape, generator=generator).to(device, dtype) for total in totals]
        each = [-(-total // block_size) for total in totals]
        self.n_blocks = sum(each) + 3
        ids = torch.randperm(self.n_blocks, generator=generator)
        self.table = torch.full((len(totals), max(each) + 1), self.n_blocks + 99)  # behind the end: never read
        first = 0
        for i, n in enumerate(each):
            self.table[i, :n] = ids[first : first + n]
            first += n

    def slots(self, request: int, positions: Tensor) -> Tensor:
        return self.table[request, positions // self.block_size] * self.block_size + positions % self.block_size

    def memory(self, parts: Sequence[Part]) -> tuple[Tensor, Tensor]:
        """Keys and values as they are before an iteration: those of the parts' contexts, and NaN."""
        shape = (self.n_blocks, self.kv_heads, self.block_size, self.size)
        keys, values = torch.full((2, *shape), torch.nan, dtype=self.qkv[0].dtype, device=self.device)
        for part in parts:
            slots = self.slots(part.request, torch.arange(part.context)).to(self.device)
            old = self.qkv[part.request][: part.context]
            block, offset = slots // self.block_size, slots % self.block_size
            keys[block, :, offset] = old[:, self.heads : self.heads + self.kv_heads]
            values[block, :, offset] = old[:, self.heads + self.kv_heads :]
        return keys, values

    def plan(self, parts: Sequence[Part]) -> HostPlan:
        slots = [self.slots(p.request, torch.arange(p.context, p.context + p.length)) for p in parts]
        return HostPlan(
            self.table[[p.request for p in parts]].numpy(),
            [p.length for p in parts],
            [p.context for p in parts],
            torch.cat(slots).numpy(),
            group=self.heads // self.kv_heads,
            prompts=np.array([p.prompt for p in parts]),
        )

    def attend(self, parts: Sequence[Part], bounds: Bounds | None = None, window: int = 0) -> list[Tensor]:
        """One iteration: writes keys and values, runs attention -> [length, heads, size] of each part.

        With `bounds` the plan is padded. The rows that pad must come back as they were: NaN, in deterministic mode.
        """
        host = self.plan(parts)
        plan = Plan(bounds or host.bounds, self.device).load(host)
        lengths = [part.length for part in parts]
        padding = plan.bounds.tokens - sum(lengths)
        flat = [self.qkv[p.request][p.context : p.context + p.length].flatten(1) for p in parts]
        qkv = torch.cat([*flat, torch.full_like(flat[0][:1], torch.nan).expand(padding, -1)])
        keys, values = self.memory(parts)
        q = write_kv(qkv, keys, values, plan)
        out = split_attention(q, keys, values, plan, self.scale, window)
        *results, rest = out.split([*lengths, padding])
        if torch.are_deterministic_algorithms_enabled():
            assert rest.isnan().all()
        return results

    def expected(self, part: Part, window: int = 0) -> Tensor:
        """-> [length, heads, size], in float64. window: keys that a query sees at most; 0: all."""
        q, k, v = (
            self.qkv[part.request].double().split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        )  # each [total, ., size]
        k, v = (x.repeat_interleave(self.heads // self.kv_heads, 1) for x in (k, v))
        rows = []
        for position in range(part.context, part.context + part.length):
            seen = slice(max(position + 1 - window, 0) if window else 0, max(position + 1, part.prompt))
            weights = torch.einsum("hd,nhd->hn", q[position], k[seen]).mul(self.scale).softmax(-1)
            rows.append(torch.einsum("hn,nhd->hd", weights, v[seen]))
        return torch.stack(rows)
