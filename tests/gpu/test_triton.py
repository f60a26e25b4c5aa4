"""The Triton kernels at a model's true sizes on a GPU. (`tests/kernels/triton_kernels` has the small cases, for both.)

**Not run yet: no GPU was at hand.**
"""

import pytest
import torch
from kernels.requests_in_blocks import Part, Requests

from orca_kernels.reference import SplitAttention
from orca_kernels.triton.attention import split_attention
from orca_kernels.triton.linear import linear
from orca_kernels.triton.plan import Bounds, Plan
from orca_lab.cuda_kernels import CODED, codes
from orca_worker.models.formats.int4 import Fours
from orca_worker.models.formats.int8 import Codes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
CUDA = torch.device("cuda", 0)
TYPES = [torch.float16, torch.bfloat16]
TOTALS = [700, 512, 257, 33, 640, 1, 100, 600]
SHAPES = {"gpt3-13b": (40, 40, 128), "gpt2": (12, 12, 64), "grouped": (32, 8, 128), "large heads": (8, 4, 256)}


def requests_of(shape: str, dtype: torch.dtype, totals: list[int] = TOTALS) -> Requests:
    heads, kv_heads, size = SHAPES[shape]
    return Requests(totals, heads=heads, kv_heads=kv_heads, size=size, block_size=16, dtype=dtype, device=CUDA)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_is_the_same_bits_whatever_the_batch(shape: str, dtype: torch.dtype) -> None:
    """Rows of an initiation of 700 tokens, again as increments: alone, in a batch of 8, beside an initiation."""
    those = requests_of(shape, dtype)
    whole = those.attend([Part(0, 0, 700)])[0]
    others = [Part(i, total - 1) for i, total in enumerate(TOTALS) if i]
    for position in [*range(0, 40), *range(240, 300, 3), *range(500, 530), 699]:
        alone = those.attend([Part(0, position)])[0]
        beside = those.attend([*others, Part(0, position)])[-1]
        mixed = those.attend([Part(1, 0, 512), Part(0, position), *others[2:]])[1]
        for name, other in (("alone", alone), ("beside", beside), ("mixed", mixed)):
            assert torch.equal(other[0], whole[position]), (position, name)
    for chunk in (Part(0, 100, 60), Part(0, 250, 17), Part(0, 13, 687)):
        assert torch.equal(those.attend([chunk])[0], whole[chunk.context : chunk.context + chunk.length]), chunk


@pytest.mark.parametrize("dtype", TYPES)
def test_agrees_with_plain_torch(dtype: torch.dtype) -> None:
    those = requests_of("gpt3-13b", dtype)
    for parts in (
        [Part(i, total - 1) for i, total in enumerate(TOTALS)],
        [Part(0, 0, 700), Part(1, 511), Part(2, 200, 57), Part(4, 639)],
    ):
        mine = torch.cat(those.attend(parts))
        host = those.plan(parts)
        lengths, contexts = [p.length for p in parts], [p.context for p in parts]
        plain = SplitAttention(
            those.table[[p.request for p in parts]].to(CUDA).clamp(max=those.n_blocks - 1),
            lengths,
            contexts,
            torch.from_numpy(host.slots).to(CUDA),
            heads=those.heads,
            block_size=16,
        )
        qkv = torch.cat([those.qkv[p.request][p.context : p.context + p.length] for p in parts])
        q, k, v = qkv.split(those.heads, dim=1)
        keys, values = (x.nan_to_num() for x in those.memory(parts))  # it reads whole blocks
        plain.write(k, v, keys, values)
        error = 4e-3 if dtype == torch.float16 else 3e-2
        torch.testing.assert_close(mine, plain(q, keys, values, those.scale), rtol=error, atol=error)


def test_a_graph_is_replayed_with_another_batch() -> None:
    """Captured once for up to 8 increments of up to 700 tokens, then replayed with what `Plan.load` has copied."""
    those = requests_of("gpt3-13b", torch.float16)
    plan = Plan(Bounds.of_increments(8, 700, group=1, block_size=16), CUDA)
    batches = [
        [Part(i, total - 1) for i, total in enumerate(TOTALS)],
        [Part(3, 20), Part(0, 255), Part(1, 256)],
        [Part(0, 699)],
    ]
    keys, values = those.memory([Part(i, total) for i, total in enumerate(TOTALS)])
    q = torch.zeros(8, 40, 128, dtype=torch.float16, device=CUDA)
    plan.load(those.plan(batches[0]))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # Triton compiles before the capture
        split_attention(q, keys, values, plan, those.scale)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = split_attention(q, keys, values, plan, those.scale)
    for parts in batches:
        q.fill_(torch.nan)
        for i, part in enumerate(parts):
            q[i] = those.qkv[part.request][part.context, :40]
        plan.load(those.plan(parts))
        graph.replay()
        for i, right in enumerate(those.attend(parts)):
            assert torch.equal(out[i], right[0])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", CODED)
def test_a_product_with_codes_is_the_same_bits_whatever_the_batch(kind: str, dtype: torch.dtype) -> None:
    """Llama 7B's projection down. Products of float32 are of another instruction: they say what is right."""
    torch.manual_seed(0)
    weight = codes(kind, 4096, 11008, CUDA)
    x = torch.randn(4200, 11008, device=CUDA, dtype=dtype) * 0.1
    prompt = linear(x, weight)
    for rows in (*range(1, 20), 31, 32, 33, 48, 64, 500):
        assert torch.equal(linear(x[-rows:], weight), prompt[-rows:]), rows
    wide = linear(x[-8:].float(), weight)
    error = 2e-3 if dtype is torch.float16 else 1e-2
    torch.testing.assert_close(prompt[-8:].float(), wide, rtol=error, atol=1e-4 * float(wide.abs().max()))


@pytest.mark.parametrize("kind", [Codes, Fours])
def test_a_gpu_makes_the_codes_of_a_cpu(kind: type[Codes] | type[Fours]) -> None:
    x = torch.randn(4096, 1000) * torch.rand(4096, 1)
    for mine, right in zip(kind.of(x.to(CUDA)), kind.of(x), strict=True):
        assert torch.equal(mine.cpu(), right)
