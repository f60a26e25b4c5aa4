"""Draws the pictures of docs/ as SVG: `python docs/pictures/draw.py` writes all of them beside this file.

A walk is a sequence: columns are processes, rows are moments, an arrow is a message. A row is one of

    ("a", "b", "text")   a message from a to b
    ("a", "text")        what a does by itself
    "text"               a line across the picture
"""

import json
import sys
from html import escape
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from waterfall import waterfall

from orca_bench.plot import draw as curve

FOLDER = Path(__file__).parent
STYLE = """
text { font: 13px system-ui, "DejaVu Sans", sans-serif; fill: #1b1f24 }
.head { font-weight: 600 } .small { font-size: 11.5px; fill: #444c56 } .band { font-size: 12px; fill: #57606a }
.box { fill: #eef2ff; stroke: #3f51b5 } .note { fill: #f6f8fa; stroke: #c4cad6 }
.life { stroke: #b6bccb; stroke-dasharray: 3 4 }
.arrow { stroke: #3f51b5; stroke-width: 1.5; fill: none; marker-end: url(#tip) }
"""
TIP = (
    '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" orient="auto">'
    '<path d="M0 1 L9 5 L0 9 z" fill="#3f51b5"/></marker></defs>'
)

Row = tuple[str, str, str] | tuple[str, str] | str


def text(x: float, y: float, content: str, kind: str = "", anchor: str = "middle") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" class="{kind}">{escape(content)}</text>'


def svg(width: float, height: float, parts: list[str], title: str) -> str:
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"><title>{escape(title)}</title>'
    return "\n".join([head, f"<style>{STYLE}</style>", TIP, *parts, "</svg>\n"])


def sequence(title: str, columns: list[tuple[str, str]], rows: list[Row], wide: int = 176, high: int = 40) -> str:
    """`columns`: name and what stands below it."""
    at = {name: 90 + n * wide for n, (name, _) in enumerate(columns)}
    width, top = 90 + (len(columns) - 1) * wide + 90, 66
    bottom = top + high * len(rows) + 14
    parts = [f'<path class="life" d="M{x} {top - 8} V{bottom}"/>' for x in at.values()]
    for name, below in columns:
        parts.append(f'<rect class="box" x="{at[name] - 80}" y="10" width="160" height="46" rx="6"/>')
        parts += [text(at[name], 29, name, "head"), text(at[name], 47, below, "small")]
    for n, row in enumerate(rows):
        y = top + high * n + 26
        if isinstance(row, str):
            parts.append(f'<path class="life" d="M10 {y - 4} H{width - 10}"/>')
            parts += [label(width / 2, y, row, "band")]
        elif len(row) == 2:
            name, content = row
            x, span = at[name], min(7.1 * len(content) + 16, width - 8)
            left = max(4, min(x - span / 2, width - span - 4))
            parts.append(
                f'<rect class="note" x="{left:.0f}" y="{y - 17}" width="{span:.0f}" height="25" rx="4"/>'
                + text(left + span / 2, y, content, "small")
            )
        else:
            start, end, content = row
            parts.append(label((at[start] + at[end]) / 2, y, content, "small"))
            parts.append(f'<path class="arrow" d="M{at[start]} {y + 6} H{at[end]}"/>')
    return svg(width, bottom + 8, parts, title)


def label(x: float, y: float, content: str, kind: str) -> str:
    """A text with a white ground, so that lines behind it do not cross it."""
    span = 6.4 * len(content) + 6
    ground = f'<rect x="{x - span / 2:.0f}" y="{y - 11:.0f}" width="{span:.0f}" height="15" fill="#fff"/>'
    return ground + text(x, y, content, kind)


def house() -> str:
    """The services and what goes between them."""
    boxes = [
        (300, 20, "client", "orca_client, gRPC, OpenAI's library, curl"),
        (300, 125, "endpoint", "text ↔ tokens, stop strings; shows what is committed"),
        (300, 230, "request pool (Redis)", "queue, records, tokens, leases: on disk before it is answered"),
        (300, 335, "scheduler", "the pure core (Algorithm 1) and lifecycle; an engine master"),
        (300, 440, "engine: pp stages × tp ranks", "controller, GPU thread, K/V slots"),
    ]
    ways = [
        ("Generate, Resume, Cancel", "accepted, token, finished"),
        ("submit, attach", "delivery"),
        ("commit: one an iteration", "claim: the oldest that fit"),
        ("control plane: one small message", "token ids"),
    ]
    parts: list[str] = []
    for x, y, name, below in boxes:
        parts.append(f'<rect class="box" x="{x - 230}" y="{y}" width="460" height="58" rx="8"/>')
        parts += [text(x, y + 25, name, "head"), text(x, y + 45, below, "small")]
    for n, (down, up) in enumerate(ways):
        y = 78 + 105 * n
        first, second = (f"M230 {y} V{y + 45}", f"M370 {y + 47} V{y + 2}")
        if n == 2:  # the scheduler asks, and the pool answers
            first, second = (f"M230 {y + 47} V{y + 2}", f"M370 {y} V{y + 45}")
        parts += [f'<path class="arrow" d="{first}"/>', f'<path class="arrow" d="{second}"/>']
        parts += [text(220, y + 29, down, "small", "end"), text(380, y + 29, up, "small", "start")]
    parts.append('<path class="arrow" d="M530 462 C 590 440, 590 500, 532 478"/>')
    parts.append(text(588, 466, "tensors", "small", "start") + text(588, 482, "(data plane)", "small", "start"))
    return svg(680, 515, parts, "Orca's services")


CLIENT, ENDPOINT, POOL = ("client", "orca_client"), ("endpoint", "one process"), ("pool", "Redis, Lua scripts")
MASTER, STAGE0, LAST = ("master", "in a scheduler"), ("stage 0", "tensor rank 0"), ("last stage", "tensor rank 0")

PICTURES = {
    "house": house(),
    "request-in": sequence(
        "A request in",
        [CLIENT, ENDPOINT, POOL, MASTER, STAGE0, LAST],
        [
            ("client", "endpoint", "1 Generate"),
            ("endpoint", "2 validate, tokenize"),
            ("endpoint", "pool", "3 submit"),
            ("pool", "4 on disk, in the queue"),
            ("endpoint", "client", "5 accepted"),
            ("pool", "master", "6 hint: requests wait"),
            ("master", "pool", "7 claim"),
            ("master", "8 core.step: select, reserve"),
            ("master", "stage 0", "9 Iteration (Run)"),
            ("stage 0", "last stage", "10 Relay: at once"),
            ("stage 0", "11 GPU thread: flat batch"),
            ("stage 0", "last stage", "12 hidden states"),
        ],
    ),
    "token-out": sequence(
        "A token out",
        [LAST, MASTER, POOL, ENDPOINT, CLIENT],
        [
            ("last stage", "1 sample"),
            ("last stage", "master", "2 IterationReport"),
            ("master", "3 core.step: Commit"),
            ("master", "last stage", "4 the next batch first"),
            ("master", "pool", "5 commit: all rows"),
            ("pool", "6 append, end, deliver"),
            ("pool", "endpoint", "7 delivery entry"),
            ("endpoint", "8 ids to text, stop strings"),
            ("endpoint", "client", "9 token"),
        ],
    ),
    "rank-death": sequence(
        "A rank's death",
        [("rank", "the one that dies"), ("survivor", "another rank"), ("supervisor", "of the pod"), MASTER, POOL],
        [
            ("rank", "1 killed"),
            ("rank", "supervisor", "2 its pidfd is readable"),
            ("supervisor", "master", "3 rank table without it"),
            ("supervisor", "rank", "4 the fork server makes another"),
            ("survivor", "5 its operation fails: PeerLost"),
            ("survivor", "master", "6 peer lost (doubtful)"),
            ("master", "7 verdict: names the rank"),
            ("master", "pool", "8 give back, confirm the lease"),
            ("master", "supervisor", "9 Fence: until it has ended"),
            "the next life",
            ("master", "pool", "10 a fresh epoch"),
            ("master", "survivor", "11 Form (weights are kept)"),
            ("master", "pool", "12 claim, with the tokens"),
        ],
        wide=200,
    ),
    "takeover": sequence(
        "A takeover",
        [("old master", "dies, or freezes"), ("new master", "another scheduler"), POOL, ("ranks", "of the engine")],
        [
            ("old master", "1 renews no more"),
            ("new master", "pool", "2 looks: the counter stood for 1.5 s"),
            ("new master", "pool", "3 acquire: a higher term"),
            ("new master", "pool", "4 renew, holding: epoch and claims"),
            ("new master", "ranks", "5 Hello with the new term"),
            ("ranks", "old master", "6 its lanes end: FAILED_PRECONDITION"),
            ("ranks", "new master", "7 they stand alike: the epoch is kept"),
            ("new master", "8 all rows are initiated again"),
            ("new master", "pool", "9 commit, from the pool's count on"),
            "the old master wakes",
            ("old master", "pool", "10 renew, commit: an old term"),
            ("old master", "11 deposed: it stops, and kills no rank"),
        ],
        wide=230,
    ),
    "trace": waterfall(
        "One request in Jaeger, on two stages of two tensor ranks",
        "drawn from the answers of Jaeger's query API; not Jaeger's own page. ⇄ links to other traces",
        json.loads((FOLDER / "trace.json").read_text()),
    ),
    # Measured: the lines of `orca bench serve`, with the servers' names.
    "serving": curve([json.loads(line) for line in (FOLDER / "serving.jsonl").read_text().splitlines()]),
}


def main() -> None:
    for name, picture in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(picture)


if __name__ == "__main__":
    main()
