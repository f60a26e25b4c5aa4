"""Charts hold every spot and bar, at the right places."""

import xml.etree.ElementTree as ET

import pytest

from orca_lab.chart import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Bars, Curve, Panel, Spot, draw

SVG = "{http://www.w3.org/2000/svg}"


def test_curves_stand_on_logarithmic_axes() -> None:
    spots = [Spot(1, 10, 10, 20), Spot(10, 1000, 500, 1000, open=True)]
    picture = ET.fromstring(draw("a & b", [Panel("one", "x", "y", [Curve("c < d", spots)], line=100, line_label="l")]))
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    circles = [(float(c.attrib["cx"]), float(c.attrib["cy"]), c.attrib["fill"]) for c in picture.iter(f"{SVG}circle")]
    assert [circle[:2] for circle in circles] == [
        pytest.approx((LEFT, bottom), abs=0.06),
        pytest.approx((right, TOP), abs=0.06),
    ]
    assert circles[1][2] == "#fff"
    texts = {"".join(one.itertext()) for one in picture.iter(f"{SVG}text")}
    assert {"a & b", "one", "x", "y", "c < d", "l", "1", "10", "1000"} <= texts


def test_bars_stand_on_zero_and_a_missing_one_is_marked() -> None:
    bars = [Bars("a", [(4.0, 3.0, 5.0), None]), Bars("b", [(2.0, 2.0, 2.0), (5.0, 5.0, 5.0)])]
    panels = [Panel(f"panel {n}", "x", "y", bars=bars, groups=["1", "2"]) for n in range(4)]
    picture = ET.fromstring(draw("bars", panels, "a note"))
    groups = list(picture.iter(f"{SVG}g"))
    assert [one.attrib["transform"] for one in groups] == [
        f"translate({x} {y})" for x, y in ((0, 0), (WIDTH, 0), (2 * WIDTH, 0), (0, HEIGHT))
    ]
    boxes = [one for one in groups[0].iter(f"{SVG}rect") if one.attrib.get("class") != "frame"]
    whole = HEIGHT - TOP - BOTTOM
    assert [float(one.attrib["height"]) for one in boxes] == pytest.approx([whole * n / 5 for n in (4, 2, 5)], abs=0.06)
    assert sum("".join(one.itertext()) == "×" for one in groups[0].iter(f"{SVG}text")) == 1
