"""The places of an engine's ranks: stages x tensor ranks, laid out over pods."""

from dataclasses import dataclass
from typing import NamedTuple


class Place(NamedTuple):
    """A rank's place in its engine, and the process and pod in it."""

    stage: int
    tensor_rank: int
    pod: int  # index of the engine's pod
    local_rank: int  # its number in the pod


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape in which an engine is formed."""

    tp: int
    pp: int
    ranks_per_pod: int  # all of one stage
    block_size: int  # slots in a block
    slots: int | None = None  # None: as many as the smallest rank's memory holds
    run_ahead: int = 0
    hands_over: bool = False  # what it has begun goes on at other engines

    @property
    def ranks(self) -> int:
        return self.tp * self.pp

    @property
    def pods(self) -> int:
        return self.ranks // self.ranks_per_pod

    @property
    def name(self) -> str:
        """The shape in the chart's words, on the StatefulSet of the workers."""
        return f"tp{self.tp}-pp{self.pp}-gpus{self.ranks_per_pod}"

    def places(self) -> tuple[Place, ...]:
        """The ranks, stage-major, then by tensor rank: the order in which pods hold them."""
        per_pod = self.ranks_per_pod
        return tuple(Place(n // self.tp, n % self.tp, n // per_pod, n % per_pod) for n in range(self.ranks))

    def whole_blocks(self, slots: int) -> int:
        """So many slots, rounded down to whole blocks."""
        return slots // self.block_size * self.block_size
