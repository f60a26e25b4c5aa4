"""The accounting of an engine's Attention K/V memory (paper section 4.2, `n_rsrv` of Algorithm 1).

A slot holds the key and value of one token; a block is `block_size` slots in a row. A row is a request's place at the
engine, and has blocks in the order of its tokens. Ranks only follow these numbers.
"""

import heapq
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from orca_common.reservation import Reservation

from .request import Request


class Admitted(NamedTuple):
    """Where a request begins: in a row, behind positions whose keys and values are in blocks of other rows."""

    row: int
    computed: int  # those positions: they fill the blocks
    blocks: tuple[int, ...]


class Memory(Protocol):
    """Rows and blocks of one engine, with a rule for how many slots a request needs, and when."""

    @property
    def block_size(self) -> int: ...

    @property
    def n_slots(self) -> int: ...

    @property
    def grows(self) -> bool:
        """Whether rows get blocks after they have begun."""
        ...

    @property
    def free(self) -> int:
        """Slots in blocks that no row has."""
        ...

    @property
    def reserved(self) -> int:
        """`n_rsrv`: slots in blocks that rows have."""
        ...

    @property
    def spare(self) -> int:
        """Slots that must stay free when a request begins while others run."""
        ...

    def need(self, request: Request, count: int) -> int:
        """Slots that must be free for the request's next `count` positions: whole blocks; 0: its row has them."""
        ...

    def victims(self, request: Request, lacking: int, live: Sequence[Request]) -> dict[Request, int]:
        """The requests that give up their rows, so that `lacking` more slots are free for one that runs already; with
        the slots that each of them has.

        None where that cannot be. They are younger than it, which stands with them in `live`, and wait.
        """
        ...

    def room(self, waiting: Iterable[Request]) -> int:
        """Slots that are left for more requests when these have begun."""
        ...

    def admit(self, request: Request) -> Admitted:
        """A row for a request, with the blocks of other rows that have what it begins with."""
        ...

    def grow(self, row: int, slots: int) -> tuple[int, ...]:
        """Gives a row blocks behind those that it has. The caller has seen that they are free."""
        ...

    def release(self, row: int) -> None:
        """Takes a row and its blocks back, exactly once."""
        ...

    def rows(self) -> dict[int, tuple[int, ...]]:
        """Rows in use and their blocks."""
        ...

    def violations(self, requests: Sequence[Request]) -> list[str]:
        """Sentences about broken promises. requests: the live ones, in the policy's order."""
        ...

    def state(self) -> dict[str, Any]:
        """All of it as plain values."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Takes over the `state` of another one. It may have gone through JSON."""
        ...


class Slots:
    """The paper's memory: a request reserves slots for all its tokens at its first iteration. None is ever preempted.

    `n_slots` is rounded down to whole blocks.
    """

    grows = False

    def __init__(self, n_slots: int, block_size: int) -> None:
        self.block_size = block_size
        self.n_blocks = n_slots // block_size
        self._reservation = Reservation(block_size)
        self._free_blocks = list(range(self.n_blocks - 1, -1, -1))
        self._rows: dict[int, tuple[int, ...]] = {}
        self._owners: dict[int, int] = {}  # of each block that several rows have: how many
        self._free_rows: list[int] = []
        self._next_row = 0

    @property
    def n_slots(self) -> int:
        return self.n_blocks * self.block_size

    @property
    def free(self) -> int:
        return len(self._free_blocks) * self.block_size

    @property
    def reserved(self) -> int:
        return self.n_slots - self.free

    @property
    def spare(self) -> int:
        return 0

    def need(self, request: Request, count: int) -> int:
        if request.row is not None:
            return 0
        return self.whole(request)

    def whole(self, request: Request) -> int:
        """Slots for all the tokens that the request may have."""
        return self._reservation.upfront(request.arrived.input_tokens, request.arrived.max_new_tokens)

    def room(self, waiting: Iterable[Request]) -> int:
        return self.free - sum(self.need(request, request.remaining) for request in waiting)

    def victims(self, request: Request, lacking: int, live: Sequence[Request]) -> dict[Request, int]:
        return {}

    def admit(self, request: Request) -> Admitted:
        return Admitted(self.new_row(), 0, ())

    def new_row(self) -> int:
        if self._free_rows:
            row = heapq.heappop(self._free_rows)
        else:
            row, self._next_row = self._next_row, self._next_row + 1
        self._rows[row] = ()
        return row

    def grow(self, row: int, slots: int) -> tuple[int, ...]:
        count = -(-slots // self.block_size)
        assert count <= len(self._free_blocks), "selection reserved more than is free"
        blocks = tuple(self._free_blocks.pop() for _ in range(count))
        self._rows[row] += blocks
        return blocks

    def share(self, row: int, blocks: Sequence[int]) -> None:
        """Gives a row blocks that other rows have: their tokens are the same. They are free when no row has them."""
        for block in blocks:
            self._owners[block] = self._owners.get(block, 1) + 1
        self._rows[row] += tuple(blocks)

    def release(self, row: int) -> None:
        for block in reversed(self._rows.pop(row)):
            others = self._owners.pop(block, 1) - 1
            if others > 1:
                self._owners[block] = others
            if not others:
                self._free_blocks.append(block)
        heapq.heappush(self._free_rows, row)

    def rows(self) -> dict[int, tuple[int, ...]]:
        return dict(self._rows)

    def violations(self, requests: Sequence[Request]) -> list[str]:
        need = sum(self.whole(request) for request in requests if request.row is not None)
        return [f"{self.reserved} slots are reserved, live requests need {need}"] if self.reserved != need else []

    def state(self) -> dict[str, Any]:
        return {
            "n_slots": self.n_slots,
            "free_blocks": list(self._free_blocks),
            "rows": list(self._rows.items()),
            "owners": list(self._owners.items()),
            "free_rows": list(self._free_rows),
            "next_row": self._next_row,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.n_blocks = state["n_slots"] // self.block_size
        self._free_blocks, self._free_rows = list(state["free_blocks"]), list(state["free_rows"])
        self._rows = {row: tuple(blocks) for row, blocks in state["rows"]}
        self._owners, self._next_row = dict(state["owners"]), state["next_row"]
