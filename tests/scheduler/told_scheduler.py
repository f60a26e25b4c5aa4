"""The scheduler with candidates from standard input: one line of JSON says which there are from now on.

`replace` writes a line to standard output, and the test replaces the pods.
"""

import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from typing import Never

import msgspec

from orca_scheduler import app
from orca_scheduler.discovery.candidates import Candidate


class ToldDiscovery:
    """Candidates as the test tells them."""

    def __init__(self) -> None:
        self.unready: str | None = "the test has told no candidates yet"

    async def run(self, discovered: Callable[[Sequence[Candidate]], None]) -> Never:
        lines = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        while line := await lines.readline():
            self.unready = None
            discovered(msgspec.json.decode(line, type=list[Candidate]))
        await asyncio.Event().wait()
        raise AssertionError("nothing sets the event")

    async def replace(self, engine: str) -> None:
        print(json.dumps({"replace": engine}), flush=True)

    def unfinished(self, engine: str, seconds: float) -> None:
        print(json.dumps({"unfinished": engine}), flush=True)


def main() -> None:
    """Runs the scheduler."""
    app.discovery_of = lambda settings, refused: (ToldDiscovery(), None)
    app.main()


if __name__ == "__main__":
    main()
