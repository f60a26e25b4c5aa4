"""The accounting of an engine's Attention K/V memory (paper section 4.2, `n_rsrv` of Algorithm 1).

A slot holds the key and value of one token; a block is `block_size` slots in a row. A row is a request's place at the
engine, and has blocks in the order of its tokens. Ranks only follow these numbers.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from orca_common.reservation import Reservation

from .prefix import Index
from .request import Request


class Admitted(NamedTuple):
    """A request's beginning: its row, and its blocks."""

    row: int
    blocks: tuple[int, ...]
    shared: int = 0  # how many of them, the first ones, have keys and values already: it begins behind those


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
        """Slots in blocks that no row has, those included whose keys and values are kept meanwhile."""
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

    def victims(
        self, request: Request, lacking: int, live: Sequence[Request], beginning: Sequence[Request]
    ) -> dict[Request, int]:
        """The requests that give up their rows, so that `lacking` more slots are free for one that runs already; with
        the slots that become free by each of them. beginning: those that begin in the same batch.

        None where that cannot be. They are younger than it, which stands with them in `live`, and wait.
        """
        ...

    def room(self, waiting: Sequence[Request], leaving: Sequence[int] = ()) -> int:
        """Slots that are left for more requests when these rows are released, and the requests that wait have begun."""
        ...

    def match(self, request: Request) -> int:
        """The position at which a request would begin now: before it are blocks whose keys and values are there."""
        ...

    def admit(self, requests: Sequence[Request]) -> list[Admitted]:
        """Rows for requests that begin together: none is given room by taking away what another begins behind.

        Each begins at its `computed`, which is what `match` said. The caller has seen that their slots are free.
        """
        ...

    def fill(self, request: Request, positions: int) -> int:
        """The iteration that is being made computes a request's positions up to this number, and none of them is a
        draft: later ones may begin with its full blocks. Returns how many of those have a key."""
        ...

    def spoil(self, row: int) -> None:
        """No later request begins with the keys and values in a row's blocks."""
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
        """The memory's state as plain values."""
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
        self._index = Index()  # empty where no request has keys
        # Of requests that wait, by claim: how many blocks they would begin behind, and `Index.removed` at that time.
        self._matched: dict[int, tuple[int, int]] = {}
        self._free_rows: list[int] = []
        self._next_row = 0

    @property
    def n_slots(self) -> int:
        return self.n_blocks * self.block_size

    @property
    def free(self) -> int:
        return (len(self._free_blocks) + len(self._index.unused)) * self.block_size

    @property
    def reserved(self) -> int:
        return self.n_slots - self.free

    @property
    def spare(self) -> int:
        return 0

    def need(self, request: Request, count: int) -> int:
        if request.row is not None:
            return 0
        return self.size(request) - self._held(request)

    def size(self, request: Request) -> int:
        """Slots that a request has when it begins: here, for all the tokens that it may have."""
        return self.whole(request)

    def whole(self, request: Request) -> int:
        """Slots for all the tokens that the request may have."""
        return self._reservation.upfront(request.arrived.input_tokens, request.arrived.max_new_tokens)

    def _held(self, request: Request) -> int:
        """Slots that a request would begin with and other rows have: it takes none of the free ones for them."""
        if not request.computed:
            return 0
        return sum(block not in self._index.unused for block in self._behind(request)) * self.block_size

    def _behind(self, request: Request) -> list[int]:
        """The blocks of the index behind which a request begins."""
        return self._index.longest(request.keys[: request.computed // self.block_size + 1])

    def room(self, waiting: Sequence[Request], leaving: Sequence[int] = ()) -> int:
        free = self.free + sum(self.gains(leaving, waiting))
        return free - sum(self.need(request, request.remaining) for request in waiting)

    def victims(
        self, request: Request, lacking: int, live: Sequence[Request], beginning: Sequence[Request]
    ) -> dict[Request, int]:
        return {}

    def gains(self, rows: Iterable[int], beginning: Iterable[Request] = ()) -> Iterator[int]:
        """Slots that become free as one row after the other is released, and these requests begin."""
        owners = dict[int, int]()
        for request in beginning:
            for block in self._behind(request):
                owners[block] = owners.get(block, self._owners.get(block, 1)) + 1
        for row in rows:
            gained = 0
            for block in self._rows[row]:
                owners[block] = owners.get(block, self._owners.get(block, 1)) - 1
                gained += not owners[block]
            yield gained * self.block_size

    def match(self, request: Request) -> int:
        if not request.keys:
            return 0
        # Its last known position is computed in any case.
        most = min((request.known - 1) // self.block_size, len(request.keys) - 1)
        index, (blocks, removed) = self._index, self._matched.get(request.claim, (0, 0))
        blocks = index.reach(request.keys, blocks if removed == index.removed else 0, most)
        self._matched[request.claim] = blocks, index.removed
        return blocks * self.block_size

    def admit(self, requests: Sequence[Request]) -> list[Admitted]:
        begun = list[tuple[int, int]]()
        self._matched.clear()  # of those that begin now; the others' are found again
        for request in requests:
            row, shared = self.new_row(), request.computed // self.block_size
            if shared:
                self.share(row, self._behind(request))
            begun.append((row, shared))
        for request, (row, shared) in zip(requests, begun, strict=True):
            self.grow(row, self.size(request) - shared * self.block_size)
        return [Admitted(row, self._rows[row], shared) for row, shared in begun]

    def new_row(self) -> int:
        if self._free_rows:
            row = heapq.heappop(self._free_rows)
        else:
            row, self._next_row = self._next_row, self._next_row + 1
        self._rows[row] = ()
        return row

    def grow(self, row: int, slots: int) -> tuple[int, ...]:
        count, free = -(-slots // self.block_size), self._free_blocks
        assert count * self.block_size <= self.free, "selection reserved more than is free"
        blocks = tuple([free.pop() if free else self._index.evict() for _ in range(count)])
        self._rows[row] += blocks
        return blocks

    def share(self, row: int, blocks: Sequence[int]) -> None:
        """Gives a row blocks of the index, or of other rows: their tokens are the same."""
        for block in blocks:
            if block in self._index.unused:
                del self._index.unused[block]
            else:
                self._owners[block] = self._owners.get(block, 1) + 1
        self._rows[row] += tuple(blocks)

    def fill(self, request: Request, positions: int) -> int:
        assert request.row is not None
        full = min(positions // self.block_size, len(request.keys) - 1)
        blocks = self._rows[request.row][request.filled : full]
        self._free_blocks += self._index.put(request.keys[request.filled + 1 : full + 1], blocks)
        return full

    def spoil(self, row: int) -> None:
        self._index.forget(self._rows[row])

    def release(self, row: int) -> None:
        for block in reversed(self._rows.pop(row)):
            others = self._owners.pop(block, 1) - 1
            if others > 1:
                self._owners[block] = others
            elif not others and not self._index.let_go(block):
                self._free_blocks.append(block)
        heapq.heappush(self._free_rows, row)

    def rows(self) -> dict[int, tuple[int, ...]]:
        return dict(self._rows)

    def violations(self, requests: Sequence[Request]) -> list[str]:
        need = sum(self.whole(request) for request in requests if request.row is not None)
        held = sum(map(len, self._rows.values())) * self.block_size
        return [f"{held} slots are reserved, live requests need {need}"] if held != need else []

    def state(self) -> dict[str, Any]:
        return {
            "n_slots": self.n_slots,
            "free_blocks": list(self._free_blocks),
            "rows": list(self._rows.items()),
            "owners": list(self._owners.items()),
            "index": self._index.state(),
            "free_rows": list(self._free_rows),
            "next_row": self._next_row,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.n_blocks = state["n_slots"] // self.block_size
        self._matched.clear()
        self._free_blocks, self._free_rows = list(state["free_blocks"]), list(state["free_rows"])
        self._rows = {row: tuple(blocks) for row, blocks in state["rows"]}
        self._owners, self._next_row = dict(state["owners"]), state["next_row"]
        if "index" in state:  # not in journals of releases that kept none
            self._index.restore(state["index"])
