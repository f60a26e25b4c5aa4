"""The latency-throughput curve as SVG: normalized latency over the requests per second that a server sustained.

Solid lines are medians, dashed ones the 99th percentile. Latency has a logarithmic scale: it explodes where a server is
full, and the part before that is the one to compare.
"""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from orca_lab.chart import COLOURS, STYLE, decades_of, text, ticks_of

WIDTH, HEIGHT = 760, 460
LEFT, RIGHT, TOP, BOTTOM = 76, 24, 58, 62  # margins of the plot


class Point(NamedTuple):
    """One rate of one server."""

    throughput: float  # requests per second
    median: float  # normalized latency, ms
    p99: float


def curves(lines: Sequence[Mapping[str, Any]]) -> dict[str, list[Point]]:
    """The points of each engine, in the order of their rates. Lines without a rate, or without an answer, have none."""
    found: dict[str, list[Point]] = {}
    for line in sorted((line for line in lines if "rate" in line), key=lambda line: line["rate"]):
        median, p99 = line["normalized_latency_ms_p50"], line["normalized_latency_ms_p99"]
        if median is not None:
            found.setdefault(line["engine"], []).append(Point(line["requests_per_s"], median, p99))
    return found


def draw(lines: Sequence[Mapping[str, Any]], title: str = "Latency and throughput") -> str:
    """The picture. Raises ValueError when the lines have no point."""
    found = curves(lines)
    points = [point for each in found.values() for point in each]
    if not points:
        raise ValueError("no line has a rate and a latency")
    across = ticks_of(max(point.throughput for point in points))
    up = decades_of(min(point.median for point in points), max(point.p99 for point in points))

    def x(throughput: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * throughput / across[-1]

    def y(latency: float) -> float:
        share = math.log(latency / up[0]) / math.log(up[-1] / up[0])
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share

    parts = [text(LEFT, 24, title, "head", "start")]
    for step in across:
        parts.append(f'<path class="grid" d="M{x(step):.1f} {TOP} V{HEIGHT - BOTTOM}"/>')
        parts.append(text(x(step), HEIGHT - BOTTOM + 18, f"{step:g}", "tick"))
    for step in up:
        parts.append(f'<path class="grid" d="M{LEFT} {y(step):.1f} H{WIDTH - RIGHT}"/>')
        parts.append(text(LEFT - 8, y(step) + 4, f"{step:g}", "tick", "end"))
    parts.append(
        f'<rect class="frame" x="{LEFT}" y="{TOP}" width="{WIDTH - LEFT - RIGHT}" height="{HEIGHT - TOP - BOTTOM}"/>'
    )
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 18, "sustained requests per second"))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    turned = f'transform="rotate(-90 20 {middle:.1f})"'
    parts.append(text(20, middle, "normalized latency, ms per token", more=turned))
    at = LEFT
    for n, (name, each) in enumerate(found.items()):
        colour = COLOURS[n % len(COLOURS)]
        for values, dash in (([p.median for p in each], ""), ([p.p99 for p in each], ' stroke-dasharray="5 4"')):
            way = " L".join(f"{x(p.throughput):.1f} {y(value):.1f}" for p, value in zip(each, values, strict=True))
            parts.append(f'<path d="M{way}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        parts += [f'<circle cx="{x(p.throughput):.1f}" cy="{y(p.median):.1f}" r="3.5" fill="{colour}"/>' for p in each]
        parts.append(f'<path d="M{at} 42 h22" stroke="{colour}" stroke-width="2"/>')
        parts.append(text(at + 28, 46, name, anchor="start"))
        at += 48 + 8 * len(name)
    parts.append(text(WIDTH - RIGHT, 24, "solid: median, dashed: 99th percentile", "tick", "end"))
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"><title>{escape(title)}</title>'
    ground = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>'
    return "\n".join([head, f"<style>{STYLE}</style>", ground, *parts, "</svg>\n"])
