"""The picture holds the points of the lines, at the right places."""

import re
import xml.etree.ElementTree as ET
from typing import Any

import pytest

from orca_bench.plot import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Point, curves, decades_of, draw, ticks_of


def line(engine: str, rate: float, throughput: float, median: float | None, p99: float | None) -> dict[str, Any]:
    return {
        "engine": engine,
        "rate": rate,
        "requests_per_s": throughput,
        "normalized_latency_ms_p50": median,
        "normalized_latency_ms_p99": p99,
    }


LINES = [
    line("a & b", 4, 3.0, 100.0, 1000.0),
    line("a & b", 1, 1.0, 10.0, 20.0),
    line("other", 2, 2.0, 10.0, 10.0),
    line("other", 9, 0.0, None, None),  # nothing was answered
    {"engine": "orca", "case": "b1_32_32"},
]


def test_points_of_each_engine_by_rate() -> None:
    assert curves(LINES) == {
        "a & b": [Point(1.0, 10.0, 20.0), Point(3.0, 100.0, 1000.0)],
        "other": [Point(2.0, 10.0, 10.0)],
    }


def test_scales() -> None:
    assert ticks_of(3.0) == [0, 1, 2, 3]
    assert ticks_of(47) == [0, 10, 20, 30, 40, 50]
    assert ticks_of(0.04) == pytest.approx([0, 0.01, 0.02, 0.03, 0.04])
    assert decades_of(12, 90) == [10, 20, 50, 100]
    assert decades_of(5, 5) == [5, 10]


def test_points_stand_where_they_belong() -> None:
    picture = draw(LINES)
    root = ET.fromstring(picture)  # well-formed, the & in a name included
    circles = [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in root.iter("{http://www.w3.org/2000/svg}circle")]
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    third = (right - LEFT) / 3
    # throughput from 0 to 3, latency from 10 to 1000
    wanted = [(LEFT + third, bottom), (right, (TOP + bottom) / 2), (LEFT + 2 * third, bottom)]
    assert circles == [pytest.approx(point, abs=0.06) for point in wanted]
    assert {"a & b", "other"} <= {"".join(text.itertext()) for text in root.iter("{http://www.w3.org/2000/svg}text")}
    numbers = [float(n) for way in re.findall(r'<path d="M([^"h]*)"', picture) for n in re.findall(r"[\d.]+", way)]
    assert min(numbers) >= TOP
    assert max(numbers) <= WIDTH


def test_nothing_to_draw() -> None:
    with pytest.raises(ValueError, match="no line has a rate"):
        draw(LINES[-2:])
