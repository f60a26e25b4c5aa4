"""The bench of shares: a small tenant on a real stack, and its numbers."""

import pytest
import stacks  # noqa: F401  # its stacks begin warm

from orca_bench import shares
from orca_bench.shares import PARTS, First, measured, medians, parts, ratio
from orca_local.stack import DEMO_MODEL

STORY = {
    "seconds": 0.012,
    "parts": [
        {"kind": "places", "queued": True, "seconds": 0.002, "iterations": 1},
        {"kind": "claim", "queued": True, "seconds": 0.001, "iterations": 0},
        {"kind": "pipeline", "queued": False, "seconds": 0.003, "iterations": 1},
        {"kind": "run", "queued": False, "seconds": 0.005, "iterations": 1},
        {"kind": "commit", "queued": False, "seconds": 0.001, "iterations": 0},
    ],
}


def test_the_parts_are_the_whole_time() -> None:
    found = parts(First("r", 0.016), STORY)
    assert {name: round(found[name], 6) for name in (*PARTS, "iterations")} == {
        "doors": 4, "queue": 3, "wait": 3, "run": 5, "commit": 1, "iterations": 2
    }  # fmt: skip
    assert sum(found[name] for name in PARTS) == pytest.approx(found["first_token"])


def test_medians_and_the_ratio() -> None:
    each = [parts(First("r", seconds), STORY) for seconds in (0.016, 0.020, 0.018)]
    beside = medians(each)
    assert (beside["first_token"], beside["doors"], beside["iterations"]) == (18, 6, 2)
    alone = {"first_token": 6.0, "run": 2.0}
    assert ratio(alone, beside, 4.0) == {"ratio": 3.0, "of_the_engine": round((6 + 2 + 3) / 6, 2), "period": 4.0}


@pytest.mark.long
async def test_a_small_tenant_beside_a_large_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "BETWEEN", 0.0)
    alone, beside, both = await measured(str(DEMO_MODEL), 6, 40, 2, slots=8000)
    assert (alone["load"], alone["iterations"], alone["wait"] <= alone["first_token"]) == ("alone", 0, True)
    assert beside["load"] == "beside"
    assert beside["iterations"] > 0, "the engine was full"
    assert both["ratio"] == round(beside["first_token"] / alone["first_token"], 2)
    assert both["period"] > 0
