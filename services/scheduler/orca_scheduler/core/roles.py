"""Which engines compute prompts, and which go on with them (docs/roles.md).

Sources: Patel et al., "Splitwise" (2311.18677), and Zhong et al., "DistServe" (2401.09670).
"""

import re
from enum import StrEnum
from typing import NamedTuple


class Role(StrEnum):
    """Which phases of requests an engine runs."""

    MIXED = ""  # both
    PREFILL = "prefill"  # initiations: each request leaves with its first token
    DECODE = "decode"  # increments: requests come with their keys and values


class Roles(NamedTuple):
    """The number of engines of each role, in the order of their numbers. None of either: all are mixed."""

    prefill: int = 0
    decode: int = 0

    @classmethod
    def parse(cls, text: str) -> "Roles":
        """Reads "prefill=N,decode=M"; "" and "mixed" have no roles. Raises ValueError."""
        if text in ("", "mixed"):
            return cls()
        counts = dict[str, int]()
        for word in text.split(","):
            role, equals, count = word.partition("=")
            if role not in cls._fields or not equals or not re.fullmatch("[0-9]{1,6}", count):
                raise ValueError(f"roles: {text!r} is not mixed, nor like prefill=1,decode=1: {word!r}")
            if role in counts:
                raise ValueError(f"roles: {role} stands twice in {text!r}")
            counts[role] = int(count)
        for role, phase in (("prefill", "computes prompts"), ("decode", "goes on with what was begun")):
            if not counts.get(role):
                raise ValueError(f"roles: {text!r} has no engine that {phase}: {role} must be 1 or more")
        return cls(**counts)

    def __str__(self) -> str:
        return f"prefill={self.prefill},decode={self.decode}" if self.engines else "mixed"

    @property
    def engines(self) -> int:
        """The number of engines that there must be; 0: any number."""
        return self.prefill + self.decode

    def of(self, engine: str) -> Role | None:
        """The role of an engine, whose name ends with its number; None: it is one too many."""
        if not self.engines:
            return Role.MIXED
        number = int(engine.rpartition("-")[2])
        if number >= self.engines:
            return None
        return Role.PREFILL if number < self.prefill else Role.DECODE
