"""Charts as SVG: panels in rows, each with curves and bands, or with groups of bars."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

COLOURS = (
    *("#3f51b5", "#c2410c", "#0f766e", "#a21caf", "#57606a", "#b45309"),
    *("#0284c7", "#be123c", "#65a30d", "#7c2d12", "#111827", "#db2777"),
)
STYLE = """
text { font: 13px system-ui, "DejaVu Sans", sans-serif; fill: #1b1f24 }
.head { font-size: 15px; font-weight: 600 } .tick { font-size: 11.5px; fill: #57606a }
.grid { stroke: #dde1e8; stroke-width: 1 } .frame { fill: none; stroke: #9aa2b1 }
"""
WIDTH, HEIGHT = 460, 400  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 80, 14, 74, 56  # margins of its plot
LEGEND, ENTRY = 22, 150  # height of a line of the legend, and width of what is in it
COLUMNS = 3  # of panels
LETTER = 10  # width of a title's letter, about


@dataclass(frozen=True)
class Spot:
    """A point of a curve, with the lowest and highest of what it is the mean of. `open`: drawn as a ring."""

    x: float
    y: float
    low: float
    high: float
    open: bool = False


@dataclass(frozen=True)
class Curve:
    name: str
    spots: Sequence[Spot]
    dashed: bool = False


@dataclass(frozen=True)
class Bars:
    """A bar for each group, with its lowest and highest value; None: a missing entry."""

    name: str
    values: Sequence[tuple[float, float, float] | None]


@dataclass(frozen=True)
class Panel:
    title: str
    across: str  # the axes' labels
    up: str
    curves: Sequence[Curve] = ()
    bars: Sequence[Bars] = ()
    groups: Sequence[str] = ()  # names of the bars' groups
    line: float | None = None  # a level to mark
    line_label: str = field(default="")


def draw(title: str, panels: Sequence[Panel], note: str = "") -> str:
    """The picture."""
    names = list(dict.fromkeys(one.name for panel in panels for one in (*panel.curves, *panel.bars)))
    colours = {name: COLOURS[n % len(COLOURS)] for n, name in enumerate(names)}
    columns = min(COLUMNS, len(panels))
    width, below = max(WIDTH * columns, LETTER * len(title)), HEIGHT * -(-len(panels) // columns)
    per_line = max(1, (width - LEFT) // ENTRY)
    lines = -(-len(names) // per_line)
    height = below + LEGEND * (lines + bool(note))
    parts = [text(width / 2, 24, title, "head")]
    for n, panel in enumerate(panels):
        inner = _bars(panel, colours) if panel.bars else _curves(panel, colours)
        place = f"{WIDTH * (n % columns)} {HEIGHT * (n // columns)}"
        parts.append(f'<g transform="translate({place})">' + "\n".join(inner) + "</g>")
    dashed = {curve.name for panel in panels for curve in panel.curves if curve.dashed}
    for n, name in enumerate(names):
        x, y = LEFT + ENTRY * (n % per_line), below + LEGEND * (n // per_line)
        dash = ' stroke-dasharray="5 3"' if name in dashed else ""
        parts.append(f'<path d="M{x} {y} h22" stroke="{colours[name]}" stroke-width="3"{dash}/>')
        parts.append(text(x + 28, y + 4, name, anchor="start"))
    if note:
        parts.append(text(LEFT, height - 10, note, "tick", "start"))
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"><title>{escape(title)}</title>'
    ground = f'<rect width="{width}" height="{height}" fill="#fff"/>'
    return "\n".join([head, f"<style>{STYLE}</style>", ground, *parts, "</svg>\n"])


def _frame(panel: Panel) -> list[str]:
    middle = (TOP + HEIGHT - BOTTOM) / 2
    box = f'width="{WIDTH - LEFT - RIGHT}" height="{HEIGHT - TOP - BOTTOM}"'
    return [
        text((LEFT + WIDTH - RIGHT) / 2, TOP - 12, panel.title),
        f'<rect class="frame" x="{LEFT}" y="{TOP}" {box}/>',
        text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 20, panel.across),
        text(18, middle, panel.up, more=f'transform="rotate(-90 18 {middle:.1f})"'),
    ]


def _curves(panel: Panel, colours: dict[str, str]) -> list[str]:
    """Draws curves; both axes are logarithmic."""
    spots = [spot for curve in panel.curves for spot in curve.spots]
    across = decades_of(min(spot.x for spot in spots), max(spot.x for spot in spots))
    levels = [panel.line] if panel.line is not None else []
    up = decades_of(min(spot.low for spot in spots), max([*(spot.high for spot in spots), *levels]))

    def x(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log(value / across[0]) / math.log(across[-1] / across[0])

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * math.log(value / up[0]) / math.log(up[-1] / up[0])

    parts = _frame(panel)
    for step in across:
        parts.append(f'<path class="grid" d="M{x(step):.1f} {TOP} V{HEIGHT - BOTTOM}"/>')
        parts.append(text(x(step), HEIGHT - BOTTOM + 16, f"{step:g}", "tick"))
    for step in up:
        parts.append(f'<path class="grid" d="M{LEFT} {y(step):.1f} H{WIDTH - RIGHT}"/>')
        parts.append(text(LEFT - 6, y(step) + 4, f"{step:g}", "tick", "end"))
    if panel.line is not None:
        level = y(panel.line)
        parts.append(f'<path d="M{LEFT} {level:.1f} H{WIDTH - RIGHT}" stroke="#57606a" stroke-dasharray="2 4"/>')
        parts.append(text(WIDTH - RIGHT - 4, level - 5, panel.line_label, "tick", "end"))
    for curve in panel.curves:
        colour, dash = colours[curve.name], ' stroke-dasharray="5 3"' if curve.dashed else ""
        places = [(x(spot.x), y(spot.y), y(spot.low), y(spot.high)) for spot in curve.spots]
        outline = [(a, low) for a, _, low, _ in places] + [(a, high) for a, _, _, high in reversed(places)]
        parts.append(f'<polygon points="{_points(outline)}" fill="{colour}" fill-opacity="0.16"/>')
        way = " L".join(f"{a:.1f} {b:.1f}" for a, b, _, _ in places)
        parts.append(f'<path d="M{way}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        for spot, (a, b, _, _) in zip(curve.spots, places, strict=True):
            fill = "#fff" if spot.open else colour
            parts.append(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.5" fill="{fill}" stroke="{colour}"/>')
    return parts


def _bars(panel: Panel, colours: dict[str, str]) -> list[str]:
    """Groups of bars over a linear axis from 0."""
    highest = max(high for bars in panel.bars for value in bars.values if value for *_, high in (value,))
    up = ticks_of(highest)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / up[-1]

    parts = _frame(panel)
    for step in up:
        parts.append(f'<path class="grid" d="M{LEFT} {y(step):.1f} H{WIDTH - RIGHT}"/>')
        parts.append(text(LEFT - 6, y(step) + 4, f"{step:g}", "tick", "end"))
    group = (WIDTH - LEFT - RIGHT) / len(panel.groups)
    one = group * 0.84 / len(panel.bars)
    for place, name in enumerate(panel.groups):
        begin = LEFT + group * (place + 0.08)
        parts.append(text(begin + group * 0.42, HEIGHT - BOTTOM + 16, name, "tick"))
        for n, bars in enumerate(panel.bars):
            value, left = bars.values[place], begin + one * n
            if value is None:
                parts.append(text(left + one / 2, HEIGHT - BOTTOM - 4, "×", "tick"))
                continue
            mean, low, high = value
            box = f'width="{one * 0.9:.1f}" height="{y(0) - y(mean):.1f}" fill="{colours[bars.name]}"'
            parts.append(f'<rect x="{left:.1f}" y="{y(mean):.1f}" {box}/>')
            if high > low:
                parts.append(f'<path d="M{left + one * 0.45:.1f} {y(low):.1f} V{y(high):.1f}" stroke="#1b1f24"/>')
    return parts


def _points(places: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in places)


def ticks_of(highest: float) -> list[float]:
    """About five round numbers from 0 to at least `highest`."""
    raw = highest / 5
    power = 10 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw)
    return [step * n for n in range(math.ceil(highest / step - 1e-9) + 1)]


def decades_of(lowest: float, highest: float) -> list[float]:
    """1, 2 and 5 times the powers of ten around lowest and highest."""
    powers = range(math.floor(math.log10(lowest)) - 1, math.ceil(math.log10(highest)) + 2)
    steps = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
    below = max(step for step in steps if step <= lowest)
    above = min(step for step in steps if step >= highest)
    return [step for step in steps if below <= step <= max(above, 2 * below)]


def text(x: float, y: float, content: str, kind: str = "", anchor: str = "middle", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}" {more}>{escape(content)}</text>'
