"""`orca demo --kill`: one slow stream, and beside it the commands that kill the processes which make it."""

import asyncio
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from orca_client import AsyncOrcaClient, Finished, Token

SECONDS = 0.25  # of an iteration: so slow that a reader can choose a process, and see where its stream pauses
TOKENS = 240  # a minute
LOOK = 0.2  # seconds between looks at the processes
SENTENCE = "Kill any of them, in another terminal. The stream pauses, and goes on with the next token."


@dataclass
class Watched:
    """The stream, and the processes that were seen."""

    text: str = ""
    tokens: int = 0
    longest: float = 0.0  # seconds between two tokens
    ended: str = ""
    pids: dict[str, int] = field(default_factory=dict)  # by the name of a process
    killed: list[str] = field(default_factory=list)  # names, in the order in which they were replaced

    def look(self, run_dir: Path) -> None:
        """Reads what runs now."""
        for process in json.loads((run_dir / "processes.json").read_text()):
            name, pid = named(process), process["pid"]
            if pid is not None and self.pids.get(name, pid) != pid:
                self.killed.append(name)
            if pid is not None:
                self.pids[name] = pid

    def shown(self) -> Group:
        table = Table("process", "command", box=None, padding=(0, 2))
        for name, pid in self.pids.items():
            table.add_row(name, f"kill -9 {pid}")
        pause = f"longest pause {self.longest:.1f} s" if self.tokens > 1 else "waiting"
        title = f"{self.tokens} tokens, {pause}, {len(self.killed)} killed {self.ended}".rstrip()
        return Group(Panel(Text(self.text), title=title), table, Text(SENTENCE))


def named(process: dict[str, Any]) -> str:
    """A name for people."""
    return f"rank {process['rank']}" if process["role"] == "rank" else process.get("name") or process["role"]


async def play(addresses: list[str], run_dir: Path, console: Console, tokens: int = TOKENS) -> Watched:
    """Streams slowly, and shows the commands meanwhile. Returns what was seen."""
    watched, last = Watched(), time.monotonic()
    watched.look(run_dir)
    async with AsyncOrcaClient(addresses) as client:
        with Live(watched.shown(), console=console, auto_refresh=False) as live:

            async def refresh() -> None:
                while True:
                    await asyncio.sleep(LOOK)
                    watched.look(run_dir)
                    live.update(watched.shown(), refresh=True)

            looking = asyncio.create_task(refresh())
            try:
                async for event in client.generate([1, 2, 3], max_new_tokens=tokens, ignore_eos=True):
                    now = time.monotonic()
                    if isinstance(event, Token):
                        watched.longest = max(watched.longest, now - last) if watched.tokens else 0.0
                        watched.text, watched.tokens, last = watched.text + event.text, event.index + 1, now
                    elif isinstance(event, Finished):
                        watched.ended = "and whole"
                    live.update(watched.shown(), refresh=True)
            finally:
                looking.cancel()
                await asyncio.gather(looking, return_exceptions=True)
    return watched
