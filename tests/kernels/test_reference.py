"""Split attention against dense attention, one query at a time in float64."""

import pytest
import torch
from torch import Tensor

from orca_kernels.reference import SplitAttention, split_attention


def dense(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """One query [heads, D] over keys and values [n, heads, D]."""
    weights = torch.einsum("hd,nhd->hn", q.double(), k.double()).mul(scale).softmax(-1)
    return torch.einsum("hn,nhd->hd", weights, v.double())


CASES = {
    "increments": ([1, 1, 1], [0, 6, 30]),
    "initiations": ([1, 5, 37], [0, 0, 0]),
    "mixed": ([2, 3, 1, 1], [0, 0, 4, 9]),
    "page edges": ([1, 1, 1, 1, 16, 17, 15], [14, 15, 16, 17, 0, 0, 0]),
    "chunks": ([7, 1, 20, 1], [5, 33, 16, 100]),
    "many": ([1] * 32 + [9], [*range(0, 320, 10), 3]),
}


PROMPTS = {"mixed": [2, 2, 3, 9], "initiations": [1, 4, 20], "increments": [1, 6, 30]}  # of a prefix LM


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("case", "prompts"), [*((case, None) for case in CASES), *PROMPTS.items()])
@pytest.mark.parametrize(("heads", "size", "block_size"), [(1, 4, 1), (3, 20, 16), (5, 64, 7)])
def test_agrees_with_dense(
    case: str, prompts: list[int] | None, heads: int, size: int, block_size: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(len(case) + heads)
    lengths, contexts = CASES[case]
    totals = [context + length for context, length in zip(contexts, lengths, strict=True)]
    blocks = [-(-total // block_size) for total in totals]
    n_blocks = sum(blocks) + 3
    ids = torch.randperm(n_blocks)
    table = torch.full((len(lengths), max(blocks) + 1), n_blocks + 99)  # behind the end: never read
    keys, values = torch.full((2, n_blocks, heads, block_size, size), torch.nan, dtype=dtype)
    tokens = [torch.randn(3, total, heads, size, dtype=dtype) for total in totals]  # q, k, v
    slots, first = [], 0
    for i, (n, total) in enumerate(zip(blocks, totals, strict=True)):
        table[i, :n] = ids[first : first + n]
        first += n
        at = torch.arange(total)
        slots.append(table[i, at // block_size] * block_size + at % block_size)

    # what came before this iteration, then its own tokens: all by `write`
    old = SplitAttention(
        table,
        contexts,
        [0] * len(contexts),
        torch.cat([s[:c] for s, c in zip(slots, contexts, strict=True)]),
        heads=heads,
        block_size=block_size,
    )
    k, v = (torch.cat([t[j, :c] for t, c in zip(tokens, contexts, strict=True)]) for j in (1, 2))
    old.write(k, v, keys, values)
    new_slots = torch.cat([s[c:] for s, c in zip(slots, contexts, strict=True)])
    plan = SplitAttention(table, lengths, contexts, new_slots, heads=heads, block_size=block_size, prompts=prompts)
    q, k, v = (torch.cat([t[j, c:] for t, c in zip(tokens, contexts, strict=True)]) for j in range(3))
    plan.write(k, v, keys, values)
    scale = 1.7 * size**-0.5
    out = plan(q, keys, values, scale)

    expected = torch.stack(
        [
            dense(t[0, p], t[1, : max(p + 1, least)], t[2, : max(p + 1, least)], scale)
            for t, c, total, least in zip(tokens, contexts, totals, prompts or [0] * len(totals), strict=True)
            for p in range(c, total)
        ]
    )
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-6 if dtype == torch.float32 else 2e-2)
    if prompts is None:
        assert torch.equal(out, split_attention(q, keys, values, table, lengths, contexts, scale))
