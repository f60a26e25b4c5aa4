"""Bias, split, norms of heads, rotary embedding and K/V write, against float64."""

import pytest
import torch
from kernels.requests_in_blocks import Part, Requests
from kernels.triton_device import DEVICE
from torch import Tensor

from orca_kernels.triton.plan import Bounds, Plan
from orca_kernels.triton.rope import Rope
from orca_kernels.triton.write_kv import HeadNorms, write_kv


def rope_of(half: int) -> Rope:
    angles = torch.arange(64)[:, None] * 100.0 ** -(torch.arange(half) / half)
    return Rope(angles.cos().to(DEVICE), angles.sin().to(DEVICE))


def turned(x: Tensor, positions: Tensor, rope: Rope) -> Tensor:
    """x [T, heads, D] as complex numbers times e^(i angle), in float64."""
    angle = torch.complex(rope.cosines.double(), rope.sines.double())[positions][:, None]  # [T, 1, half]
    x, half = x.double().clone(), rope.half
    a, b = slice(0, half), slice(half, 2 * half)
    result = torch.complex(x[..., a], x[..., b]) * angle
    x[..., a], x[..., b] = result.real, result.imag
    return x


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "rope"),
    [(9, 9, None), (6, 2, None), (6, 2, rope_of(10)), (3, 1, rope_of(4))],
)
def test_write_kv(heads: int, kv_heads: int, rope: Rope | None, bias: bool, normed: bool) -> None:
    those = Requests(
        [9, 9, 3], heads=heads, kv_heads=kv_heads, size=20, block_size=7, dtype=torch.float16, device=DEVICE
    )
    parts = [Part(0, 4, 2), Part(1, 0, 8), Part(2, 2)]
    host = those.plan(parts)
    tokens = host.bounds.tokens
    padded = Bounds(4, tokens + 2, host.bounds.tiles, host.bounds.blocks, host.bounds.keys, increments_only=False)
    plan = Plan(padded, DEVICE).load(host)
    qkv = torch.cat([those.qkv[p.request][p.context : p.context + p.length] for p in parts])
    added = torch.randn(qkv.shape[1:]).to(DEVICE, torch.float16) if bias else None
    keys, values = torch.full((2, those.n_blocks, kv_heads, 7, 20), torch.nan, dtype=torch.float16, device=DEVICE)
    flat = torch.cat([qkv.flatten(1), qkv[:2].flatten(1) * torch.nan])
    of_query, of_key = (torch.rand(2, 20) + 0.5).to(DEVICE, torch.float16)
    norms = HeadNorms(of_query, of_key, 1e-3) if normed else None
    q = write_kv(flat, keys, values, plan, rope, added if added is None else added.flatten(), norms)

    want = qkv.double() if added is None else qkv.double() + added.double()
    wanted = want.split([heads, kv_heads, kv_heads], dim=1)
    if norms is not None:
        normal = (x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() for x in wanted[:2])
        weights = (norms.query, norms.key)
        wanted = *(x * weight.double() for x, weight in zip(normal, weights, strict=True)), wanted[2]
    if rope is not None:
        positions = torch.cat([torch.arange(p.context, p.context + p.length) for p in parts]).to(DEVICE)
        wanted = turned(wanted[0], positions, rope), turned(wanted[1], positions, rope), wanted[2]
    slots = torch.from_numpy(host.slots).to(DEVICE)
    got = q[:tokens], keys[slots // 7, :, slots % 7], values[slots // 7, :, slots % 7]
    exact = rope is None and added is None and norms is None
    for mine, right in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine.double(), right, rtol=0 if exact else 1e-3, atol=0 if exact else 1e-3)
    for memory in (keys, values):  # nothing else was touched
        memory[slots // 7, :, slots % 7] = torch.nan
        assert memory.isnan().all()
