"""The pool's Lua scripts. Each is sent to Redis as: the numbers shared with Python and lua/prelude.lua, as far as it
needs them, and lua/NAME.lua."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import NamedTuple, Self

from .leases import GAP_SECONDS, KEEP_SECONDS, LEASE_SECONDS, RENEW_SECONDS
from .records import Committed, Reason, Refusal
from .wire import ADDRESS, CONTENT, FINISH, KEY_SIZE, READY, RECORD_OVERHEAD, TOKEN, TOKEN_ID

FOLDER = Path(__file__).parent / "lua"

# The meaning of the keys. A release whose keys have another one is refused (`pool.Pool`): raise it with every change
# that older scripts would not understand.
SCHEMA = 1

# With Redis's `maxmemory` reached, these do not run: they bring new work. All others finish what is there.
NEW_WORK = frozenset(["submit", "change_adapters"])


@dataclass(frozen=True, slots=True)
class Script:
    """A script's text, and its SHA-1: the name under which Redis keeps a script that it has seen."""

    text: str
    sha: str

    @classmethod
    def of(cls, text: str) -> Self:
        return cls(text, hashlib.sha1(text.encode()).hexdigest())


@dataclass(frozen=True, slots=True)
class Constants:
    """The limits that the scripts are made with. All services of a release must use the same; only tests choose others.

    lease, sweep_gap: seconds, see `leases.py`.
    retention: seconds for which a request can be read after its end. retain_requests, retain_bytes: so many ended
    requests are kept at most, and so many of their bytes in Redis. The oldest go first.
    delivery_length: entries that an endpoint has not read yet. One that falls further behind reads its tokens from
    `tokens:ID` instead. 300 engines at 50 iterations a second make it wait for 4 s before that.
    control_length: hints that an engine's stream keeps.
    overtakings, prefix_wait: requests that may overtake one which waits for the engine that has its prefix, and seconds
    for which it may wait; then any engine takes it.
    keep: seconds for which a request that was handed over waits for an engine that decodes; then it begins again.
    adapter_grace: seconds for which endpoints may still name an adapter that was replaced or unloaded.
    """

    lease: float = LEASE_SECONDS
    sweep_gap: float = GAP_SECONDS
    retention: float = 300.0
    retain_requests: int = 100_000
    retain_bytes: int = 1 << 30
    delivery_length: int = 65536
    control_length: int = 256
    overtakings: int = 8
    prefix_wait: float = 0.5
    keep: float = KEEP_SECONDS
    adapter_grace: float = 10.0

    @property
    def long_outage(self) -> float:
        """Seconds without the pool after which `retention` begins anew: fewer take little of it from a client."""
        return max(self.lease, self.retention / 10)


def shared_numbers(constants: Constants) -> str:
    """The first lines of every script: each number that both Python and Lua use, as Lua locals."""
    return "\n".join(
        [
            "-- microseconds",
            f"local LEASE, SWEEP_GAP = {constants.lease * 1e6:.0f}, {constants.sweep_gap * 1e6:.0f}",
            f"local PREFIX_WAIT, KEEP = {constants.prefix_wait * 1e6:.0f}, {constants.keep * 1e6:.0f}",
            f"local ADAPTER_GRACE = {constants.adapter_grace * 1e6:.0f}",
            f"local RENEWAL = {RENEW_SECONDS * 1e6:.0f}",
            f"local RETENTION, LONG_OUTAGE = {constants.retention * 1e6:.0f}, {constants.long_outage * 1e6:.0f}",
            "-- ended requests, and bytes; what a request takes beside its record and tokens",
            f"local RETAIN_REQUESTS, RETAIN_BYTES = {constants.retain_requests}, {constants.retain_bytes}",
            f"local RECORD_OVERHEAD = {RECORD_OVERHEAD}",
            f"local OVERTAKINGS, KEY_SIZE = {constants.overtakings}, {KEY_SIZE}",
            f"local SCHEMA = '{SCHEMA}'",
            "-- entries of a stream; as text, since Redis takes 0.3 us to write a number for each command",
            f"local DELIVERY_LENGTH, CONTROL_LENGTH = '{constants.delivery_length}', '{constants.control_length}'",
            f"local REASON = {_table(Reason)}",
            f"local REFUSAL = {_table(Refusal)}",
            f"local COMMITTED = {_table(Committed)}",
            "-- formats of struct.pack",
            f"local ADDRESS, CONTENT, FINISH = '{ADDRESS.format}', '{CONTENT.format}', '{FINISH.format}'",
            f"local READY = '{READY}'",
            "-- bytes; the id comes first in a token",
            f"local TOKEN_SIZE, TOKEN_ID_SIZE, ADDRESS_SIZE = {TOKEN.size}, {TOKEN_ID.size}, {ADDRESS.size}",
            "",
        ]
    )


def _table(numbers: type[IntEnum]) -> str:
    return "{ " + ", ".join(f"{number.name} = {number.value}" for number in numbers) + " }"


def sources() -> dict[str, str]:
    """The text of the Lua files by name, `prelude` among them."""
    return {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.lua"))}


@cache
def standard(constants: Constants) -> dict[str, Script]:
    """The scripts by name. Made once, which takes 30 ms."""
    return build(sources(), constants)


def build(lua: Mapping[str, str], constants: Constants) -> dict[str, Script]:
    """The scripts by name, made of the texts of Lua files as `sources` gives them.

    `submit_known` is `submit` for a Redis without memory: its caller gives no record, so it only attaches.
    """
    texts = {**lua, "submit_known": lua["submit"]}
    statements = _statements(shared_numbers(constants) + texts.pop("prelude"))
    return {name: Script.of(_first_line(name) + _with_heads(statements, text)) for name, text in texts.items()}


class _Statement(NamedTuple):
    """A statement of the scripts' head: the local names that it defines, and all words in it."""

    text: str
    defines: set[str]
    words: set[str]


def _statements(head: str) -> list[_Statement]:
    """Each begins at the margin, with `local` or `do`. Comments are left out."""
    lines = [line for line in head.splitlines() if line and not line.lstrip().startswith("--")]
    statements: list[_Statement] = []
    for text in re.split(r"\n(?=local |do$)", "\n".join(lines), flags=re.MULTILINE):
        defines = re.match(r"local (?:function )?([\w, ]+)", text)
        statements.append(_Statement(text, _words(defines[1]) if defines else set(), _words(text)))
    return statements


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


def _with_heads(statements: list[_Statement], text: str) -> str:
    """The script with the statements that it needs: Redis runs them at each call, and all of them cost 12 us.

    A line `-- head` in a script is where those come that only the text below it needs: what returns above it does not
    pay for them.
    """
    parts: list[str] = []
    there: set[str] = set()
    for part in re.split(r"^-- head\n", text, flags=re.MULTILINE):
        needed = [statement for statement in _needed(statements, part) if statement not in there]
        parts += [*(f"{statement}\n" for statement in needed), part]
        there.update(needed)
    return "".join(parts)


def _needed(statements: list[_Statement], text: str) -> list[str]:
    """The statements without names, and those with names that the text, or a statement which is needed, has."""
    words, kept = _words(text), list[str]()
    for statement in reversed(statements):
        if not statement.defines or statement.defines & words:
            kept.append(statement.text)
            words |= statement.words
    return kept[::-1]


def _first_line(name: str) -> str:
    return "#!lua\n" if name in NEW_WORK else "#!lua flags=allow-oom\n"
