"""Split attention against float64, one query at a time; and the same bits whatever the batch."""

from functools import cache

import pytest
import torch
from kernels.requests_in_blocks import Part, Requests
from kernels.triton_device import DEVICE, EPSILON, INTERPRETED, TYPES

from orca_kernels.triton import attention
from orca_kernels.triton.plan import Bounds

TOTALS = [1, 15, 16, 17, 300, 520]
SHAPES = {  # heads, key/value heads, head size, block size
    "plain": (1, 1, 64, 16),
    "grouped, odd": (6, 2, 20, 7),
    "one for all": (20, 1, 8, 1),  # more heads than an increment's tile has rows
    "one group": (3, 1, 20, 7),
}
BATCHES = {
    "increments in one split": [Part(0, 0), Part(1, 14), Part(2, 15), Part(3, 16), Part(4, 255)],
    "increments in many": [Part(0, 0), Part(2, 15), Part(4, 256), Part(5, 519)],
    "initiations": [Part(0, 0), Part(1, 0, 15), Part(2, 0, 16), Part(3, 0, 17), Part(4, 0, 40)],
    "mixed, and a chunk": [Part(5, 250, 20), Part(3, 16), Part(4, 256), Part(2, 0, 16)],
}
# On a GPU all; in the interpreter, which is slow, each shape in one type.
FEW = [("plain", torch.float16), ("one for all", torch.float16), ("grouped, odd", torch.float32)]
SHAPES_AND_TYPES = (
    FEW if INTERPRETED else [(shape, dtype) for shape in SHAPES if shape != "one group" for dtype in TYPES]
)


@cache
def requests(shape: str, dtype: torch.dtype) -> Requests:
    heads, kv_heads, size, block_size = SHAPES[shape]
    return Requests(
        TOTALS,
        heads=heads,
        kv_heads=kv_heads,
        size=size,
        block_size=block_size,
        dtype=dtype,
        device=DEVICE,
    )


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("shape", "dtype"), SHAPES_AND_TYPES)
def test_agrees_with_float64(shape: str, batch: str, dtype: torch.dtype) -> None:
    parts, those = BATCHES[batch], requests(shape, dtype)
    for part, result in zip(parts, those.attend(parts), strict=True):
        torch.testing.assert_close(result.double(), those.expected(part), rtol=0, atol=max(2 * EPSILON[dtype], 5e-6))


# In the interpreter the window of one key, and one within a split, are seen in the batch that has all phases.
WINDOWS = [
    (window, batch)
    for window in (1, 7, 40, 257)
    for batch in BATCHES
    if not INTERPRETED or window in (7, 257) or batch.startswith("mixed")
]


@pytest.mark.parametrize(("window", "batch"), WINDOWS)
def test_a_window(batch: str, window: int) -> None:
    """It ends within tiles, within splits, and is longer than all of some requests."""
    parts, those = BATCHES[batch], requests("grouped, odd", torch.float32)
    for part, result in zip(parts, those.attend(parts, window=window), strict=True):
        torch.testing.assert_close(result.double(), those.expected(part, window), rtol=0, atol=5e-6)


@pytest.mark.parametrize("shape", ["one group", "one for all"])
def test_a_prefix_lm(shape: str) -> None:
    """Prompts that end within tiles and in a second split; increments see no more than without a prompt."""
    long = 280 if shape == "one group" or not INTERPRETED else 40
    parts = [Part(0, 0, 1, 1), Part(2, 0, 16, 9), Part(3, 0, 17, 17), Part(4, 0, long, long - 10), Part(5, 519, 1, 300)]
    those = requests(shape, torch.float16 if INTERPRETED and shape == "one for all" else torch.float32)
    results = those.attend(parts)
    for part, result in zip(parts, results, strict=True):
        bound = max(2 * EPSILON[result.dtype], 5e-6)
        torch.testing.assert_close(result.double(), those.expected(part), rtol=0, atol=bound)
    for position in (long - 10, long - 5):
        (alone,) = those.attend([Part(4, position, 1, long - 10)])
        assert torch.equal(alone[0], results[3][position])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "window", "dtype"),
    [
        (*shape, dtype)
        for n, shape in enumerate([(1, 1, 33), (3, 1, 0)])
        for dtype in ([TYPES[n]] if INTERPRETED else TYPES)
    ],
)
def test_a_row_is_the_same_bits_whatever_the_batch(heads: int, kv_heads: int, dtype: torch.dtype, window: int) -> None:
    """Alone and beside others, as an increment, in an initiation, in a chunk; in one split and in two."""
    those = Requests([300, 17, 290], heads=heads, kv_heads=kv_heads, size=20, block_size=7, dtype=dtype, device=DEVICE)
    initiation = those.attend([Part(0, 0, 40)], window=window)[0]
    chunk = those.attend([Part(1, 16), Part(0, 230, 45)], window=window)[1]
    known = {0: initiation[0], 15: initiation[15], 33: initiation[33], 255: chunk[25], 256: chunk[26], 274: chunk[44]}
    for position, row in known.items():
        alone = those.attend([Part(0, position)], window=window)[0]
        beside = those.attend([Part(1, 14), Part(0, position), Part(2, 289)], window=window)[1]
        mixed = those.attend([Part(1, 0, 17), Part(0, position)], window=window)[1]
        for other in (alone, beside, mixed):
            assert torch.equal(other[0], row), position


@pytest.mark.parametrize("shape", ["grouped, odd", "one for all"])
def test_a_padded_plan(shape: str) -> None:
    """As for a CUDA graph, whose bounds are larger than its batch: the same bits, and nothing else is written."""
    those = requests(shape, torch.float16)
    group = those.heads // those.kv_heads
    parts = [Part(1, 14), Part(4, 255)]
    bounds = Bounds.of_increments(5, 600, group=group, block_size=those.block_size)
    for result, padded in zip(those.attend(parts), those.attend(parts, bounds), strict=True):
        assert torch.equal(result, padded)
    parts = [Part(2, 0, 16), Part(3, 16)]
    exact = those.plan(parts).bounds
    bounds = Bounds(4, exact.tokens + 3, exact.tiles + 2, exact.blocks + 5, exact.keys + 300, increments_only=False)
    for result, padded in zip(those.attend(parts), those.attend(parts, bounds), strict=True):
        assert torch.equal(result, padded)


@pytest.mark.parametrize("window", [0, 300])
def test_shares_of_the_splits_do_not_change_bits(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program takes one split, two of three, or all; with a window it begins at the first that is seen."""
    those = Requests([17, 700], heads=2, kv_heads=1, size=20, block_size=7, dtype=torch.float16, device=DEVICE)
    parts = [Part(0, 16), Part(1, 699)]
    each = those.attend(parts, window=window)
    for programs in (4, 1):
        monkeypatch.setattr(attention, "PROGRAMS", programs)
        for one, other in zip(each, those.attend(parts, window=window), strict=True):
            assert torch.equal(one, other), programs


def test_programs_do_not_grow_with_the_positions_of_a_model() -> None:
    """Tiles that fill a device alone have one share each; one long request has a program for each split."""
    for positions in (4096, 131072, 1 << 20):
        splits = Bounds.of_increments(32, positions, group=4, block_size=16).splits
        assert 32 * 8 * attention.shares(32, 8, splits) == min(32 * 8 * splits, attention.PROGRAMS)
        assert attention.shares(64, 32, splits) == 1
    assert attention.shares(1, 8, 12) == 12
