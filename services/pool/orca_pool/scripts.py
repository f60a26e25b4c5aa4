"""The pool's Lua scripts. Each is sent to Redis as: the numbers shared with Python, lua/prelude.lua, lua/NAME.lua."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Self

from .leases import GAP_SECONDS, LEASE_SECONDS, RENEW_SECONDS
from .records import Committed, Reason, Refusal
from .wire import FINISH, PACKET, TOKEN, TOKEN_ID

FOLDER = Path(__file__).parent / "lua"


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
    retention: seconds for which a request can be read after its end.
    delivery_length, control_length: entries that a stream keeps. An endpoint that falls further behind reads its tokens
    from `tokens:ID` instead.
    """

    lease: float = LEASE_SECONDS
    sweep_gap: float = GAP_SECONDS
    retention: float = 300.0
    delivery_length: int = 2048
    control_length: int = 256


def shared_numbers(constants: Constants) -> str:
    """The first lines of every script: each number that both Python and Lua use, as Lua locals."""
    return "\n".join(
        [
            "-- microseconds",
            f"local LEASE, SWEEP_GAP = {constants.lease * 1e6:.0f}, {constants.sweep_gap * 1e6:.0f}",
            f"local RENEWAL = {RENEW_SECONDS * 1e6:.0f}",
            "-- milliseconds",
            f"local RETENTION = {constants.retention * 1e3:.0f}",
            "-- entries of a stream",
            f"local DELIVERY_LENGTH, CONTROL_LENGTH = {constants.delivery_length}, {constants.control_length}",
            f"local REASON = {_table(Reason)}",
            f"local REFUSAL = {_table(Refusal)}",
            f"local COMMITTED = {_table(Committed)}",
            "-- formats of struct.pack",
            f"local PACKET, FINISH = '{PACKET.format}', '{FINISH.format}'",
            "-- bytes; the id comes first in a token",
            f"local TOKEN_SIZE, TOKEN_ID_SIZE = {TOKEN.size}, {TOKEN_ID.size}",
            "",
        ]
    )


def _table(numbers: type[IntEnum]) -> str:
    return "{ " + ", ".join(f"{number.name} = {number.value}" for number in numbers) + " }"


def sources() -> dict[str, str]:
    """The text of the Lua files by name, `prelude` among them."""
    return {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.lua"))}


def build(lua: Mapping[str, str], constants: Constants) -> dict[str, Script]:
    """The scripts by name, made of the texts of Lua files as `sources` gives them."""
    head = shared_numbers(constants) + lua["prelude"]
    return {name: Script.of(head + text) for name, text in lua.items() if name != "prelude"}
