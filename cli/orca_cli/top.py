"""`orca top`: a live view of what runs, in the terminal; a key explains the request under the cursor."""

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from orca_cli import explaining
from orca_cli.looking import EngineSight, Look, engines, look, mean, ports, rate
from orca_common.errors import FailedPrecondition, NotFound

HELP = "up/down choose · enter explains · esc goes back · q ends"
ARROWS = {b"\x1b[A": "up", b"\x1b[B": "down", b"\x1bOA": "up", b"\x1bOB": "down"}
KEYS = {b"k": "up", b"j": "down", b"\r": "explain", b"\n": "explain", b"e": "explain", b"q": "end", b"\x1b": "back"}
BAR = 10  # columns


@dataclass
class View:
    """The screen: the list of requests with its cursor, or the story of one."""

    folder: Path | None
    schedulers: Sequence[str]
    before: Look
    now: Look
    chosen: str | None = None  # the request under the cursor
    story: list[str] = field(default_factory=list[str])  # of the request that is explained

    def looked(self, now: Look) -> None:
        self.before, self.now = self.now, now

    @property
    def cursor(self) -> int:
        names = [one["request"] for one in self.now.requests]
        return names.index(self.chosen) if self.chosen in names else 0

    def press(self, key: str) -> None:
        """Takes a key. One that means nothing here is ignored."""
        requests = self.now.requests
        if key == "back":
            self.story = []
        elif requests and key in ("up", "down") and not self.story:
            n = min(max(self.cursor + (1 if key == "down" else -1), 0), len(requests) - 1)
            self.chosen = requests[n]["request"]
        elif requests and key == "explain" and not self.story:
            self.chosen = requests[self.cursor]["request"]
            self.explain()

    def explain(self) -> None:
        """Asks for the story of the request under the cursor."""
        assert self.chosen is not None
        try:
            told = explaining.explanation(self.chosen, self.folder, self.schedulers)
            self.story = explaining.lines(told)
        except NotFound as gone:
            self.story = [str(gone)]

    def drawn(self, height: int) -> Group:
        """Draws the view on this number of lines."""
        if self.story:
            return Group(*(Text(line, overflow="fold") for line in self.story), Text(HELP, style="dim"))
        sights = engines(self.before, self.now)
        room = max(height - 9 - 2 * len(sights), 3)  # the head may have two lines, and so may the stages of an engine
        silent = [Text(f"no answer from {sentence}", style="red") for sentence in self.now.silent]
        return Group(self._head(), *silent, engine_table(sights), self._requests(room), Text(HELP, style="dim"))

    def _head(self) -> Text:
        before, now = self.before, self.now
        waiting, oldest = now.most("orca_num_requests_waiting"), now.most("orca_queue_oldest_age_seconds")
        first = mean(before, now, "orca_time_to_first_token_seconds")
        between = mean(before, now, "orca_inter_token_latency_seconds")
        ended = rate(before, now, "orca_request_success_total")
        failed = rate(before, now, "orca_request_errors_total") + rate(before, now, "orca_refusals_total")
        parts = [
            f"queue {waiting:.0f}" + (f" (oldest {oldest:.1f} s)" if waiting else ""),
            f"{rate(before, now, 'orca_generation_tokens_total'):.0f} tokens/s",
            f"{ended:.1f} requests/s",
            f"{failed:.1f} errors/s",
            f"first token {milliseconds(first)}",
            f"between tokens {milliseconds(between)}",
        ]
        return Text("   ".join(part.replace(" ", "\N{NO-BREAK SPACE}") for part in parts), style="bold")

    def _requests(self, room: int) -> Table:
        table = Table(box=None, pad_edge=False, expand=True)
        table.add_column("the oldest requests", overflow="ellipsis", no_wrap=True, ratio=1)
        for column in ("engine", "age", "tokens", "of", "iterations", "state"):
            justify = "left" if column in ("engine", "state") else "right"
            table.add_column(column, justify=justify, no_wrap=True, min_width=len(column))
        first = max(self.cursor - room + 1, 0)
        clock = time.time()
        for n, one in enumerate(self.now.requests[first : first + room], first):
            numbers = (f"{one['tokens']}", f"{one['max_new_tokens']}", f"{one['iterations']}")
            age = f"{max(clock - one['submitted'], 0):.1f} s"
            style = "reverse" if n == self.cursor else ""
            table.add_row(one["request"], one["engine"], age, *numbers, one["state"], style=style)
        return table


def milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.0f} ms"


def engine_table(sights: Sequence[EngineSight]) -> Table:
    """A line for each engine. Of a stage's bar the full part is busy, and the thin part a bubble."""
    table = Table(box=None, pad_edge=False, expand=True)
    for column in ("engine", "running", "batch", "in flight", "slots", "iterations/s", "tokens/s", "stages"):
        left, folds = column in ("engine", "stages"), column == "stages"  # a narrow terminal folds the stages alone
        table.add_column(column, justify="left" if left else "right", no_wrap=not folds, min_width=len(column))
    for sight in sights:
        if sight.trouble is not None:
            table.add_row(sight.name, *([""] * 6), sight.trouble, style="red")
            continue
        shares = zip(sight.busy, sight.bubble, strict=True)
        stages = "  ".join(f"{bar(busy, idle)} {busy:.0%} busy {idle:.0%} bubble" for busy, idle in shares)
        slots = f"{sight.reserved}/{sight.slots}"
        rates = f"{sight.iterations:.1f}", f"{sight.tokens:.0f}"
        table.add_row(sight.name, str(sight.running), f"{sight.batch:.1f}", str(sight.in_flight), slots, *rates, stages)
    return table


def bar(busy: float, bubble: float) -> str:
    full, thin = round(busy * BAR), round(bubble * BAR)
    return ("█" * full + "░" * thin).ljust(BAR, "·")[:BAR]


def read_keys(read: bytes) -> list[str]:
    """Names the keys in what a terminal has sent."""
    found: list[str] = []
    while read:
        known = read[:3] if read[:3] in ARROWS else read[:1]
        found.append((ARROWS | KEYS).get(known, ""))
        read = read[len(known) :]
    return [key for key in found if key]


@contextmanager
def keyboard() -> Iterator[int]:
    """The terminal, which sends each key at once. Ctrl-C stays a signal."""
    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)
    tty.setcbreak(number)
    try:
        yield number
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)


def run(folder: Path | None, given: Sequence[str], interval: float) -> None:
    """Shows the view until q or Ctrl-C. Raises FailedPrecondition without a terminal, or when nothing runs."""
    if not sys.stdin.isatty() or not sys.stdout.isatty():
        raise FailedPrecondition("orca top needs a terminal; orca status prints once")
    first = look(ports(folder, given))
    view = View(folder, given, first, first)
    console = Console(highlight=False, markup=False)

    def drawn() -> Group:
        return view.drawn(console.height)

    with keyboard() as number, Live(drawn(), console=console, screen=True, auto_refresh=False) as live:
        due = time.monotonic() + interval
        while True:
            ready, _, _ = select.select([number], [], [], max(due - time.monotonic(), 0))
            if ready:
                for key in read_keys(os.read(number, 64)):
                    if key == "end":
                        return
                    view.press(key)
            else:
                view.looked(look(ports(folder, given)))
                if view.story:
                    view.explain()
                due = time.monotonic() + interval
            live.update(drawn(), refresh=True)
