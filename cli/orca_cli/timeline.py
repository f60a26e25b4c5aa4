"""Shows a run for `orca timeline`: its stages as in the paper's Figure 8, and what they spent their time on."""

from datetime import datetime
from pathlib import Path

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from orca_lab.timeline import Life, Run, blocks, drawable, filled, label, letters, planes, shares
from orca_scheduler.master.journal import files_in

COLOURS = ("on dark_blue", "on dark_green", "on dark_magenta", "on dark_cyan", "on grey37", "on dark_red")
LIVES = 10  # shown of an engine at most
NAMED = 12  # requests named below the drawing at most
LEGEND = (
    "A block: the stage ran one iteration of the requests with these letters; the same batch has the same colour. "
    "·: it ran nothing."
)


def drawing(run: Run, life: Life, count: int, columns: int) -> Group:
    """Draws the last `count` iterations, or as many as fit, in `columns` columns: one line per stage, a block for each
    batch while it was busy."""
    margin = len(f"stage {life.pp - 1} ")
    width = max(columns - margin, 20)
    drawn = drawable(life, count, width)
    begin = min(t.started for t in drawn[0].times.values())
    end = max(t.sent for t in drawn[-1].times.values())
    names = letters(member.claim for iteration in drawn for member in iteration.members)
    batches: dict[str, str] = {}  # label -> colour
    lines = []
    for stage in range(life.pp):
        line = Text(f"stage {stage} ".ljust(margin), style="bold")
        column = 0
        for block in blocks(life, stage, begin, end, width):
            if block.iteration.number < drawn[0].number:
                continue
            line.append("·" * (block.first - column), style="dim")
            name, size = label(block.iteration, names), block.last - block.first
            colour = batches.setdefault(name, COLOURS[len(batches) % len(COLOURS)])
            line.append(name[: size - 1].center(size - 1) + "▏" if size > 1 else name[:1], style=f"white {colour}")
            column = block.last
        line.append("·" * (width - column), style="dim")
        lines.append(line)
    known = [f"{letter} {run.names.get(claim, str(claim))}" for claim, letter in list(names.items())[:NAMED]]
    if len(names) > NAMED:
        known.append(f"and {len(names) - NAMED} more")
    asked = min(count, len(life.iterations))
    fewer = f"; {asked} would be too small to see" if len(drawn) < asked else ""
    below = (
        f"{(end - begin) / 1e6:.1f} ms, iterations {drawn[0].number} to {drawn[-1].number}{fewer}",
        "requests:",
        *(f"  {name}" for name in known),
        LEGEND,
    )
    return Group(*lines, *(Padding(Text(text, style="dim"), (0, 0, 0, margin)) for text in below))


def why_nothing(folder: Path, engine: str) -> str:
    """Returns why no iteration of this engine can be drawn."""
    if not folder.is_dir():
        return f"{folder}: there is no such folder"
    others = sorted({file.engine for file in files_in(folder)})
    if engine not in others and others:
        return f"--engine: {folder} holds no journal of {engine}; it has {', '.join(others)}"
    return f"{folder} holds no journal with an iteration of {engine}"


def life_table(run: Run) -> Table:
    """The engine's lives, oldest first. A new master, too, begins one, and numbers its iterations above all before."""
    shown = run.lives[-LIVES:]
    last = f", the last {LIVES}" if len(run.lives) > LIVES else ""
    title = f"{len(run.lives)} lives of {run.engine}{last}: one for each formation and each new master"
    table = Table(title=title, title_justify="left")
    for column in ("epoch", "from", "iterations", "how it ended"):
        table.add_column(column, justify="right" if column == "iterations" else "left")
    for life, after in zip(shown, [*shown[1:], None], strict=True):
        ended = life.lost or ("the last" if after is None else "another master took it over")
        began = datetime.fromtimestamp(life.formed / 1e9).strftime("%H:%M:%S")
        table.add_row(str(life.epoch), began, str(len(life.iterations)), ended)
    return table


def share_table(life: Life) -> Table:
    """The shares of each stage's time since the pipeline had filled."""
    begin, end = filled(life)
    table = Table(title=f"shares of {(end - begin) / 1e9:.2f} s, since the pipeline had filled", title_justify="left")
    for column in ("stage", "busy", "waiting for upstream", "waiting for scheduler", "no work"):
        table.add_column(column, justify="right")
    for stage, share in enumerate(shares(life)):
        parts = share.busy, share.upstream, share.scheduler, share.no_work
        table.add_row(str(stage), *(f"{part:.1%}" for part in parts))
    return table


def plane_table(life: Life) -> Table:
    """The control plane and the data plane, apart."""
    found = planes(life)
    table = Table(title=f"planes, {len(life.iterations)} iterations", title_justify="left")
    for column in ("", "mean of an iteration", *(("p50", "p99") if found.hops else ())):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row("control, all ranks", f"{found.control_bytes:.0f} bytes")
    table.add_row("data, all ranks", f"{found.data_bytes:.0f} bytes")
    for stage, (median, tail) in enumerate(found.hops):
        table.add_row(f"control hop {stage} to {stage + 1}", "", f"{median * 1e3:.2f} ms", f"{tail * 1e3:.2f} ms")
    if life.pp > 2:
        median, tail = found.whole_way
        table.add_row(f"control 0 to {life.pp - 1}", "", f"{median * 1e3:.2f} ms", f"{tail * 1e3:.2f} ms")
    return table
