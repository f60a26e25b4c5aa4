"""Makes the lines that a scheduler streams to the live page: its engines as they are, and its journals' latest lines.

They are made in the reader's thread; without a reader, they cost nothing.
"""

from collections.abc import Callable, Iterable
from typing import Any

from .master.journal import DECODER, ENCODER
from .master.master import EngineMaster
from .master.output import Held
from .master.recent import Kept, Recent

IDLE_LINES = 5  # turns without an event after which a line is sent all the same; for failures alone each one is


class Live:
    """Makes readers of one scheduler. Everything is called in threads of the status port."""

    def __init__(
        self,
        name: str,
        recent: Recent,
        masters: Callable[[], Iterable[EngineMaster]],
        queue: Callable[[], tuple[int, float] | None],
        show_prompts: bool,
    ) -> None:
        """show_prompts: the token ids of prompts and answers are in the lines, too."""
        self._name, self._recent, self._masters, self._queue = name, recent, masters, queue
        self._show_prompts = show_prompts

    def reader(self, failures_alone: bool) -> Callable[[], bytes]:
        """Returns a function that gives the next line at each call; an empty one: nothing is new.

        failures_alone: for a page at which no browser looks now.
        """
        last, most = 0, 0 if failures_alone else IDLE_LINES
        first, quiet = True, most

        def read() -> bytes:
            nonlocal last, quiet, first
            found = self._recent.after(last, failures_alone)
            quiet += 1
            if not found and quiet < most:
                return b""
            last, quiet = found[-1].number if found else last, 0
            line = self._state() | {"events": [event_of(kept, self._show_prompts) for kept in found]}
            if first and not failures_alone:
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
        held = {m.engine: [_held(one, self._show_prompts) for one in m.held()] for m in self._masters()}
        rows = {master.engine: _rows(master) for master in self._masters()}
        return {"held": held, "rows": rows}


def event_of(kept: Kept, show_prompts: bool) -> dict[str, Any]:
    """A journal's line for a reader: the ids of tokens are in it only where prompts may be shown; otherwise 0 is. The
    same holds for digests of prompts."""
    line = DECODER.decode(kept.line)
    if not show_prompts:
        event = line.get("event", ["", {}])
        if event[0] == "Arrived":
            for arrival in event[1]["requests"]:
                del arrival["prefix"]  # a reader that guesses a prompt can make its digests
        for _, fields in [event, *line.get("actions", [])]:
            fields.pop("made", None)
            fields.pop("keys", None)
            for columns in (fields.get("members", {}), fields.get("outcomes", {})):
                if "token" in columns:
                    columns["token"] = [None if token is None else 0 for token in columns["token"]]
    return {"number": kept.number, "at": kept.at, "engine": kept.engine, "term": kept.term, "line": line}


def _held(held: Held, show_prompts: bool) -> dict[str, Any]:
    """A claimed request: numbers, and the id that its client gave it."""
    claimed, record = held.claimed, held.record
    return {
        "claim": claimed.claim,
        "id": claimed.request_id,
        "input": len(record.prompt_ids),
        "max_new": record.max_new_tokens,
        "made": len(held.token_ids()),
        "submitted": claimed.submitted / 1e6,
    } | ({"text": held.text()} if show_prompts else {})


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
