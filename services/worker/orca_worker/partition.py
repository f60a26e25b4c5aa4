"""The geometry of an engine of tensor x pipeline ranks, whatever its model (paper sections 4.1 and 6, Figure 6).

The layers of the model are shared by the stages, the insides of a layer by the tensor ranks of its stage. Which tensors
are cut, and along which axis, is up to the model's family (`models/*/layers.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from orca_common.errors import FailedPrecondition

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "auto": 2}  # auto: float32 only on an old CPU without kernels
SCALE_BYTES = 4  # of keys and values in codes: a float32 for each token and head


def head_bytes(head_size: int, item: int) -> int:
    """Bytes of a head's keys, or values, of one token. Items of one byte are codes, which have a scale."""
    return head_size * item + (SCALE_BYTES if item == 1 else 0)


@dataclass(frozen=True)
class Types:
    """The types of a rank's numbers. `weights`: of all that `quantize` leaves; `kv`: of keys and values, also int8;
    `activations`: of what a matrix multiplies, at least where the machine has an instruction for it."""

    weights: str
    kv: str
    activations: str

    @classmethod
    def of(cls, dtype: str, kv: str | None = None) -> Types:
        """Types of a model that is all in one type, but for keys and values where another one is given for them."""
        return cls(dtype, kv or dtype, dtype)

    def kv_bytes(self, head_size: int) -> int:
        """Bytes of a head's keys, or values, of one token."""
        return head_bytes(head_size, 1 if self.kv == "int8" else ITEM_BYTES[self.kv])


def share(n: int, parts: int, index: int) -> range:
    """Part `index` of n things in a row: n // parts of them, and one more for the first n % parts."""
    each, more = divmod(n, parts)
    start = index * each + min(index, more)
    return range(start, start + each + (index < more))


@dataclass(frozen=True)
class Place:
    """A rank's place in its engine."""

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    stage: int = 0
    tensor_rank: int = 0

    @property
    def ranks(self) -> int:
        """The number of ranks in the engine."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def index(self) -> int:
        """The rank's number in the engine: stage-major, then by tensor rank."""
        return self.stage * self.tensor_parallel + self.tensor_rank

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.pipeline_parallel - 1

    @property
    def samples(self) -> bool:
        """Whether it is the one rank that makes tokens of the logits."""
        return self.is_last and self.tensor_rank == 0

    def layers(self, count: int) -> range:
        """The layers that its stage runs of the model's `count`, in order.

        A remainder goes to the first stages, because the last one also has the final norm, the head and the sampling.
        """
        return share(count, self.pipeline_parallel, self.stage)

    def tensor_share(self, n: int) -> range:
        """The rank's share of n things of its stage, such as heads."""
        return share(n, self.tensor_parallel, self.tensor_rank)


SINGLE = Place()


@dataclass(frozen=True)
class Slice:
    """A part of a tensor: `ranges` along one axis, put together in this order, and the whole of all other axes."""

    name: str  # of the tensor, without a prefix
    shape: tuple[int, ...]  # of the whole tensor
    axis: int
    ranges: tuple[range, ...]

    @property
    def size(self) -> tuple[int, ...]:
        """The shape of the slice."""
        return (*self.shape[: self.axis], sum(map(len, self.ranges)), *self.shape[self.axis + 1 :])

    @property
    def elements(self) -> int:
        return prod(self.size)

    def runs(self) -> Iterator[tuple[int, int]]:
        """The slice as runs of elements that lie together in the whole tensor, in order: (first element, count)."""
        inner = prod(self.shape[self.axis + 1 :])
        first, count = 0, 0
        for outer in range(prod(self.shape[: self.axis])):
            start = outer * self.shape[self.axis]
            for part in self.ranges:
                begin = (start + part.start) * inner
                if begin != first + count:
                    if count:
                        yield first, count
                    first, count = begin, 0
                count += len(part) * inner
        if count:
            yield first, count


def check_stages(layers: int, tensor_parallel: int, pipeline_parallel: int) -> None:
    """Raises FailedPrecondition with a sentence when a model of this number of layers has no such stages."""
    tp, pp = tensor_parallel, pipeline_parallel
    if tp < 1 or pp < 1:
        raise FailedPrecondition(f"an engine of {tp} x {pp} ranks (tp x pp): each must be at least 1")
    if layers < pp:
        raise FailedPrecondition(f"pp {pp}: {layers} layers are too few for {pp} stages")


@dataclass(frozen=True)
class RankShare:
    """One rank's part of a model."""

    stage: int
    tensor_rank: int
    layers: range
    slices: Mapping[str, Slice]
    weight_bytes: int
    slot_bytes: int  # keys and values of one token
