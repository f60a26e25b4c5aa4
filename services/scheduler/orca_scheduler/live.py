"""Makes the lines that a scheduler streams to the live page: its engines as they are, and what has happened since.

They are made in the reader's thread; without a reader, they cost nothing.
"""

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from .master.feed import Feed, encoded, shown
from .master.master import EngineMaster

IDLE_LINES = 5  # turns without an event after which a line is sent all the same
ENCODER = msgspec.json.Encoder()


class Live:
    """Makes readers of one scheduler. Everything is called in threads of the status port."""

    def __init__(
        self,
        name: str,
        feed: Feed,
        masters: Callable[[], Iterable[EngineMaster]],
        queue: Callable[[], tuple[int, float] | None],
    ) -> None:
        self._name, self._feed, self._masters, self._queue = name, feed, masters, queue

    def reader(self, lives_alone: bool) -> Callable[[], bytes]:
        """Returns what gives the next line each time it is called; empty: there is nothing new.

        lives_alone: without steps of cores, for a page at which no browser looks now.
        """
        last, quiet = 0, IDLE_LINES
        first = True

        def read() -> bytes:
            nonlocal last, quiet, first
            entries = self._feed.after(last, lives_alone)
            quiet += 1
            if not entries and quiet < IDLE_LINES:
                return b""
            last, quiet = entries[-1].number if entries else last, 0
            line = self._state() | {"events": [encoded(entry, self._feed.show_prompts) for entry in entries]}
            if first and not lives_alone:
                line |= self._all()
            first = False
            return ENCODER.encode(line) + b"\n"

        return read

    def _state(self) -> dict[str, Any]:
        return {
            "scheduler": self._name,
            "queue": self._queue(),
            "engines": {master.engine: engine_state(master) for master in self._masters()},
        }

    def _all(self) -> dict[str, Any]:
        """Returns the requests and their blocks, for a reader that has not seen how they came."""
        held = {m.engine: [shown(h, self._feed.show_prompts) for h in m.held()] for m in self._masters()}
        rows = {master.engine: _rows(master) for master in self._masters()}
        return {"held": held, "rows": rows}


def engine_state(master: EngineMaster) -> dict[str, Any]:
    """An engine as its master has it at this moment, which another thread may be changing."""
    life, core, shape = master.lifecycle, master.core, master.shape
    places = shape.places()
    reserved, slots = master.slots
    return {
        "state": type(life.state).__name__,
        "why": life.unready,
        "term": master.term,
        "epoch": life.epoch,
        "tp": shape.tp,
        "pp": shape.pp,
        "pods": list(life.pods or ()),
        "ranks": [
            {"stage": places[n].stage, "tensor_rank": places[n].tensor_rank, "pod": places[n].pod}
            | {"host": known.host, "pid": known.pid, "iteration": known.iteration}
            for n, known in enumerate(list(life.known))
        ],
        "reserved": reserved,
        "slots": slots,
        "block_size": core.block_size,
        "max_batch_size": core.limits.max_bs,
        "in_flight": core.n_scheduled,
        "n_workers": core.n_workers,
        "policy": core.policy.name,
        "requests": len(core.requests),
    }


def _rows(master: EngineMaster) -> list[tuple[int, int, tuple[int, ...]]]:
    """Claim, row and blocks of each request that has a row."""
    blocks = master.core.memory.rows()
    rows = [(request.claim, request.row) for request in master.core.requests]
    return [(claim, row, blocks[row]) for claim, row in rows if row is not None and row in blocks]
