"""`orca demo`: shows how four requests share iterations (paper section 3.1, Figure 4)."""

import asyncio
from dataclasses import dataclass, field
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from orca_client import AsyncOrcaClient, Finished, Token
from orca_scheduler.master.journal import read, request_names, scheduled

COLOURS = ("cyan", "magenta", "yellow", "green")
SEED = 11  # the same text in every run
SHOWN = (
    3  # iterations at the beginning and at the end of those with the same requests; others are left out of the table
)


@dataclass
class Actor:
    """One of the demo's requests, and its state."""

    name: str
    prompt: str
    max_new_tokens: int
    after: int  # the request is sent when the first request has this many tokens
    text: str = ""
    request_id: str = ""
    tokens: int = 0
    ended: str = "not sent yet"
    iterations: list[int] = field(default_factory=list)


CAST = (
    Actor("x1", "def read(self, size=-1):\n", 64, 0),
    Actor("x2", "import os\nimport sys\n", 12, 3),
    Actor("x3", "class Queue:\n    def __init__(self, maxsize=0):\n", 16, 3),
    Actor("x4", "for i in range(", 6, 14),
)


def panels(actors: tuple[Actor, ...]) -> Columns:
    """The requests side by side, prompts dim and generated text bright."""
    shown = []
    for actor, colour in zip(actors, COLOURS, strict=True):
        body = Text(actor.prompt, style="dim") + Text(actor.text, style=colour)
        title = f"[{colour}]{actor.name}[/] {actor.tokens}/{actor.max_new_tokens}"
        shown.append(Panel(body, title=title, subtitle=actor.ended, width=38, height=11))
    return Columns(shown)


async def play(addresses: list[str], console: Console) -> tuple[Actor, ...]:
    """Sends each request at its moment, and streams all side by side."""
    actors = tuple(Actor(a.name, a.prompt, a.max_new_tokens, a.after) for a in CAST)
    reached = [asyncio.Event() for _ in actors]

    async with AsyncOrcaClient(addresses) as client:
        with Live(panels(actors), console=console, refresh_per_second=12) as live:

            async def act(actor: Actor, cue: asyncio.Event) -> None:
                await cue.wait()
                actor.ended = "waiting"
                stream = client.generate(
                    actor.prompt,
                    max_new_tokens=actor.max_new_tokens,
                    temperature=0.7,
                    seed=SEED,
                    ignore_eos=True,
                )
                actor.request_id = stream.request_id
                async for event in stream:
                    match event:
                        case Token():
                            actor.text += event.text
                            actor.tokens += 1
                            actor.iterations.append(event.iteration)
                            actor.ended = f"iteration {event.iteration}"
                            for other, due in zip(actors, reached, strict=True):
                                if actor is actors[0] and actor.tokens >= other.after:
                                    due.set()
                        case Finished():
                            actor.text += event.text
                            actor.ended = f"FINISHED: {event.reason.lower()}"
                        case _:
                            pass
                    live.update(panels(actors))

            reached[0].set()
            await asyncio.gather(*(act(actor, cue) for actor, cue in zip(actors, reached, strict=True)))
    console.print()
    return actors


def batches(run_dir: Path) -> list[dict[str, Any]]:
    """The iterations in the journals of a run: number, what each member ran by request id, reserved slots."""
    found = []
    for path in sorted(run_dir.glob("journal-*.jsonl")):
        journal = list(read(path))
        names = request_names(journal)
        for batch in scheduled(journal):
            ran = {names[m.claim]: (m.phase.value, m.count) for m in batch.members}
            found.append({"iteration": batch.iteration, "members": ran, "reserved": batch.reserved})
    return found


def iteration_table(actors: tuple[Actor, ...], iterations: list[dict[str, Any]]) -> Table:
    """One line per iteration: which request ran in which phase, the rows of the flat batch, the reserved slots."""
    table = Table(title="iterations of engine-0: each line is one run of all layers over one batch")
    table.add_column("no.", justify="right")
    for actor, colour in zip(actors, COLOURS, strict=True):
        table.add_column(actor.name, style=colour, justify="center")
    table.add_column("batch", justify="right")
    table.add_column("slots", justify="right")
    alike = [list(same) for _, same in groupby(iterations, key=lambda entry: entry["members"])]
    for entry in chain.from_iterable(
        same if len(same) <= 2 * SHOWN else [*same[:SHOWN], None, *same[-SHOWN:]] for same in alike
    ):
        if entry is None:
            table.add_row("…")
            continue
        cells, rows = [], 0
        for actor in actors:
            phase, length = entry["members"].get(actor.request_id, ("", 0))
            rows += length
            cells.append({"initiation": f"initiate {length}", "increment": "increment", "": "·"}[phase])
        table.add_row(str(entry["iteration"]), *cells, f"[{rows}, H]", str(entry["reserved"]))
    return table


LEGEND = (
    "[bold]Iteration-level scheduling:[/] a request joins at the next iteration after its arrival and leaves when it "
    "is done; none waits for the longest. [bold]Selective batching:[/] all tokens of an iteration, of different "
    "requests, phases and positions, run as one flat batch \\[ΣL, H] through every linear layer; attention alone is "
    "split by request. [bold]Slots[/] are reserved for a request's prompt at its first iteration, for its tokens as "
    "they come, and released at its end."
)
