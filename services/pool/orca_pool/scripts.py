"""The pool's Lua scripts: lua/NAME.lua, each after its constants and lua/prelude.lua."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

FOLDER = Path(__file__).parent / "lua"


@dataclass(frozen=True, slots=True)
class Script:
    """A script's text, and the name under which Redis keeps it once it has seen it."""

    text: str
    sha: str

    @classmethod
    def of(cls, text: str) -> Self:
        return cls(text, hashlib.sha1(text.encode()).hexdigest())


@dataclass(frozen=True, slots=True)
class Constants:
    """What the scripts are made with; all services of a release use the same. Times in seconds.

    lease: an endpoint or scheduler that did not renew for so long is dead.
    sweep_gap: a sweep that comes later than this after the one before saw an outage, and only renews all leases.
    retention: how long a request can be read after its end.
    delivery_length, control_length: entries kept in a stream. An endpoint that is further behind reads `tokens:ID`.
    """

    lease: float = 1.5
    sweep_gap: float = 0.75
    retention: float = 300.0
    delivery_length: int = 2048
    control_length: int = 256

    def lua(self) -> str:
        return (
            f"local LEASE, SWEEP_GAP, RETENTION = {self.lease * 1e6:.0f}, {self.sweep_gap * 1e6:.0f}, "
            f"{self.retention * 1e3:.0f}\n"
            f"local DELIVERY_LENGTH, CONTROL_LENGTH = {self.delivery_length}, {self.control_length}\n"
        )


def sources() -> dict[str, str]:
    """The Lua files by name, `prelude` among them."""
    return {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.lua"))}


def build(lua: Mapping[str, str], constants: Constants) -> dict[str, Script]:
    """Scripts by name from such files."""
    head = constants.lua() + lua["prelude"]
    return {name: Script.of(head + text) for name, text in lua.items() if name != "prelude"}
