"""Draws spans as a waterfall, from the answers of Jaeger's query API (`/api/traces/ID`)."""

import json
from html import escape
from typing import Any

NAMES, BARS, ROW, TOP = 330, 560, 22, 72  # widths of both columns, height of a row, height of the head: pixels
LEGEND = 515
COLOURS = {"orca-endpoint": "#3f51b5", "orca-scheduler": "#00838f", "orca-worker": "#ef6c00"}
STYLE = """
text { font: 12.5px system-ui, "DejaVu Sans", sans-serif; fill: #1b1f24 }
.head { font-size: 14px; font-weight: 600 } .small { font-size: 11px; fill: #57606a } .grid { stroke: #e3e6ec }
.link { stroke: #8a94a6; stroke-dasharray: 3 3 }
"""


def waterfall(title: str, below: str, answers: list[dict[str, Any]]) -> str:
    """The picture of several traces. `answers`: elements of "data"; the first is the request's trace, the others are
    those that its spans link to."""
    rows = [row for trace in answers for row in _rows(trace)]
    start = min(span["startTime"] for span, _, _ in rows)
    whole = max(span["startTime"] + span["duration"] for span, _, _ in rows) - start
    width, height = NAMES + BARS + 20, TOP + ROW * len(rows) + 20
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"><title>{escape(title)}</title>',
        f"<style>{STYLE}</style>",
        f'<text x="10" y="20" class="head">{escape(title)}</text>',
        f'<text x="10" y="38" class="small">{escape(below)}</text>',
    ]
    for part in range(5):
        x = NAMES + BARS * part / 4
        anchor = "end" if part == 4 else "start"
        parts.append(f'<path class="grid" d="M{x:.0f} {TOP - 6} V{height - 14}"/>')
        parts.append(
            f'<text x="{x:.0f}" y="{TOP - 10}" class="small" text-anchor="{anchor}">{_time(whole * part / 4)}</text>'
        )
    for number, (span, depth, service) in enumerate(rows):
        y = TOP + ROW * number
        left = NAMES + BARS * (span["startTime"] - start) / whole
        long = max(1.5, BARS * span["duration"] / whole)
        name = f"{span['operationName']}{_detail(span)}"
        links = any(r["refType"] == "FOLLOWS_FROM" for r in span["references"])
        if depth == 0 and number:
            parts.append(f'<path class="link" d="M10 {y - 2} H{width - 10}"/>')
        parts.append(f'<text x="{10 + 16 * depth}" y="{y + 14}">{escape(name)}{" ⇄" if links else ""}</text>')
        parts.append(
            f'<rect x="{left:.1f}" y="{y + 4}" width="{long:.1f}" height="12" rx="2" fill="{COLOURS[service]}"/>'
        )
        after = left + long + 5
        inside = after < NAMES + BARS - 60
        parts.append(
            f'<text x="{after if inside else left - 5:.0f}" y="{y + 14}" class="small" '
            f'text-anchor="{"start" if inside else "end"}">{_time(span["duration"])}</text>'
        )
    legend = "".join(
        f'<rect x="{LEGEND + 128 * n}" y="10" width="12" height="12" rx="2" fill="{colour}"/>'
        f'<text x="{LEGEND + 17 + 128 * n}" y="20">{name}</text>'
        for n, (name, colour) in enumerate(COLOURS.items())
    )
    return "\n".join([*parts, legend, "</svg>\n"])


def _rows(trace: dict[str, Any]) -> list[tuple[dict[str, Any], int, str]]:
    """The spans of a trace in the order of the picture, each with its depth and its service."""
    spans = sorted(trace["spans"], key=lambda span: (span["startTime"], span["spanID"]))
    ids = {span["spanID"] for span in spans}
    below: dict[str | None, list[dict[str, Any]]] = {}
    for span in spans:
        parents = [r["spanID"] for r in span["references"] if r["refType"] == "CHILD_OF" and r["spanID"] in ids]
        below.setdefault(parents[0] if parents else None, []).append(span)
    found: list[tuple[dict[str, Any], int, str]] = []

    def add(parent: str | None, depth: int) -> None:
        for span in below.get(parent, []):
            found.append((span, depth, trace["processes"][span["processID"]]["serviceName"]))
            add(span["spanID"], depth + 1)

    add(None, 0)
    return found


def _detail(span: dict[str, Any]) -> str:
    tags = {tag["key"]: tag["value"] for tag in span["tags"]}
    match span["operationName"]:
        case "orca.iteration":
            return f" {tags['orca.iteration']}: {len(_list(tags['orca.members']))} in the batch"
        case "orca.stage":
            return f" {tags['orca.stage']}, tensor rank {tags['orca.tensor_rank']}"
        case "orca.request":
            return f": {tags['orca.tokens']} tokens, {tags['orca.reason']}"
        case "orca.engine":
            return f": {tags['orca.engine']}"
        case _:
            return ""


def _list(value: Any) -> list[Any]:
    """Jaeger tells a list as its JSON."""
    return json.loads(value) if isinstance(value, str) else value


def _time(microseconds: float) -> str:
    return f"{microseconds / 1000:.1f} ms" if microseconds else "0"
