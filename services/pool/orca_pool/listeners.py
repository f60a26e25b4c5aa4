"""A master's record of its requests' listeners: so it makes most packets itself, and Redis only passes them on.

`listeners:ENGINE` has a number that moves with each change (`engine:ID`, field `listeners`). A commit names the number
at which its packets were right. Where the number is another one, the script makes all packets itself, and tells the
listeners that it found. So a wrong guess costs Redis's time and nothing else.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .link import Argument
from .records import CommitAnswer, CommitRow, Committed
from .wire import ADDRESS, CONTENT, TOKEN, ready_row

MOST_READY = 2_000  # in a commit: Lua unpacks each into three of its 8,000 places


class Listener(NamedTuple):
    """The listener to a request. endpoint: "" without a listener. address: the first bytes of all packets to the call.

    key: of the request's tokens, behind its size.
    """

    endpoint: bytes
    address: bytes
    key: bytes

    @classmethod
    def of(cls, stored: bytes, tokens: bytes) -> "Listener":
        """Reads a value of `listeners:ENGINE`. tokens: how the keys of all tokens begin."""
        _, id_size = ADDRESS.unpack_from(stored)
        behind = ADDRESS.size + id_size
        key = tokens + stored[ADDRESS.size : behind]
        return cls(stored[behind:], stored[:behind], len(key).to_bytes(2, "little") + key)


@dataclass(slots=True)
class Listeners:
    """The listeners of one engine's requests, by claim number, as they were when `number` was theirs. tokens: how the
    keys of all tokens begin."""

    tokens: bytes
    number: bytes = b""  # empty: none is known
    known: dict[int, Listener] = field(default_factory=dict[int, Listener])

    def arguments(self, rows: Sequence[CommitRow]) -> tuple[list[Argument], list[int]]:
        """The arguments of commit.lua after the term, and for each row that is sent its place in `rows`.

        The rows whose packets are made here come first.
        """
        size, pack = TOKEN.size, CONTENT.pack
        once = len({row.request_id for row in rows}) == len(rows)
        known = self.known if once else {}  # rows of one request stay in their order
        ready: list[int] = []
        others: list[int] = []
        packed: list[bytes] = []
        packets: dict[bytes, list[bytes]] = {}
        for place, row in enumerate(rows):
            _, claim, base, tokens, finish, tops, prompt, _, handed = row
            listener = known.get(claim) if len(ready) < MOST_READY else None
            # The first token is noted in the record, and an end has its times from there.
            if listener is None or not base or not tokens or finish is not None or tops or prompt or handed:
                others.append(place)
                continue
            ready.append(place)
            endpoint, address, key = listener
            packed += ready_row(base, key, tokens)
            if endpoint:
                parts = packets.setdefault(endpoint, [])
                parts += (address, pack(base, len(tokens) // size, 0, 0), tokens)
        order, rest = ready + others, [rows[place] for place in others]
        claims = struct.pack(f"<{len(order)}d", *[rows[place].claim for place in order])
        bases = struct.pack(f"<{len(others)}i", *[row.base for row in rest])
        args: list[Argument] = [self.number, len(rows), len(ready), len(packets), claims, bases, b"".join(packed)]
        for endpoint, parts in packets.items():
            args += (endpoint, b"".join(parts))
        for row in rest:
            args += (row.request_id, row.tokens)
        for n, row in enumerate(rest, len(ready) + 1):
            if row.finish is not None or row.tops or row.prompt or row.cached or row.handed:
                reason = "" if row.finish is None else int(row.finish)
                args += (n, reason, row.tops, row.prompt, row.cached, row.handed)
        return args, order

    def answered(
        self,
        rows: Sequence[CommitRow],
        order: Sequence[int],
        answer: tuple[int, bytes, bytes, list[bytes | None], bytes, *tuple[int, ...]],
    ) -> CommitAnswer:
        """Learns from commit.lua's answer to `arguments`, and says what it means for the rows."""
        needs, before, after, told, ended_at, *others = answer
        if before != self.number:
            self.known.clear()
        self.number = after
        for place, stored in zip(order[len(order) - len(told) :], told, strict=True):
            if stored is not None:
                self.known[rows[place].claim] = Listener.of(stored, self.tokens)
        answers, gone = list[int]([Committed.OK] * len(rows)), Committed.GONE
        for n, said in zip(others[::2], others[1::2], strict=True):
            answers[order[n - 1]] = said
        for row, said in zip(rows, answers, strict=True):
            if row.finish is not None or row.handed or said == gone:
                self.known.pop(row.claim, None)
        return CommitAnswer(answers, needs, int(ended_at or 0))

    def claimed(self, before: bytes, after: bytes) -> None:
        """Learns that a claim moved the number. It only added listeners, so what is known stays right."""
        if before == self.number:
            self.number = after
