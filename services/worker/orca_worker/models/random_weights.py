"""Weights that are made instead of read: those of a checkpoint whose config.json has `orca_random_weights`, a seed.

Each number depends on the seed, the tensor's name and the number's place in the whole tensor alone, so every cut of a
model into ranks, on any device, has the same weights. The generator is counter-based: SplitMix64's (Steele et al.,
"Fast splittable pseudorandom number generators", OOPSLA'14).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from math import prod

import torch
from torch import Tensor

from ..iteration.model import Loading
from ..partition import Slice
from .weights import WeightSource

SPREAD = 0.02  # their standard deviation: GPT-2's training begins with it
CHUNK, CHUNK_OF_GPU = 1 << 18, 1 << 24  # numbers that are made at once; 2 MiB, which a cache holds
STEP, FIRST, SECOND = (n - (1 << 64) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))  # signed


class RandomWeights(WeightSource):
    """`WeightSource` without files. The numbers of a tensor are uniform around 0, or around 1 where it scales a
    norm."""

    def __init__(
        self,
        seed: int,
        slices: Mapping[str, Slice],
        dtype: torch.dtype,
        device: torch.device,
        loading: Loading | None = None,
        spread: float = SPREAD,
    ) -> None:
        self._spread = spread
        self._seed, self._slices, self._dtype, self._device = seed, slices, dtype, device
        self._loading = loading or Loading()
        self._loading.read = 0
        self._loading.whole = sum(part.elements for part in slices.values()) * dtype.itemsize
        self.bytes_read, self.bytes_made = 0, 0

    def find(self, name: str, dtype: torch.dtype | None = None) -> Tensor | None:
        part = self._slices.get(name)
        if part is None:
            return None
        tensor = torch.empty(part.elements, dtype=dtype or self._dtype, device=self._device)
        key = int.from_bytes(hashlib.sha256(f"{self._seed} {name}".encode()).digest()[:8], "little", signed=True)
        middle = float(name.endswith(".weight") and len(part.shape) == 1)
        for begin, places in places_of(part, self._device):
            tensor[begin : begin + len(places)] = numbers(places, key, self._spread) + middle
        self.bytes_made += part.elements * self._dtype.itemsize
        self._loading.read = self.bytes_made
        return tensor.view(part.size)


def places_of(part: Slice, device: torch.device) -> Iterator[tuple[int, Tensor]]:
    """The places [n] int64 of a slice's elements in the whole tensor, in pieces, and the number of the first one."""
    along = torch.cat([torch.arange(one.start, one.stop, device=device) for one in part.ranges])
    whole, inner = part.shape[part.axis], prod(part.shape[part.axis + 1 :])
    chunk = CHUNK if device.type == "cpu" else CHUNK_OF_GPU
    for begin in range(0, part.elements, chunk):
        place = torch.arange(begin, min(begin + chunk, part.elements), device=device)
        if len(along) < whole:
            line, column = place // inner, place % inner
            place = (line // len(along) * whole + along[line % len(along)]) * inner + column
        yield begin, place


def numbers(places: Tensor, key: int, spread: float) -> Tensor:
    """places [n] int64 -> [n] float32 of the mean 0 and the standard deviation `spread`. Overwrites the places."""
    mixed = places.mul_(STEP).add_(key)
    mixed.bitwise_xor_(_shifted(mixed, 30)).mul_(FIRST)
    mixed.bitwise_xor_(_shifted(mixed, 27)).mul_(SECOND)
    odd = _shifted(mixed, 40).mul_(2).add_(1 - (1 << 24))  # a float32 holds it exactly
    return odd.float().mul_(spread * 3**0.5 / (1 << 24))


def _shifted(x: Tensor, bits: int) -> Tensor:
    """x [n] int64 as unsigned numbers, shifted to the right."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)
