"""The bench of policies: its loads on a real stack, and its report."""

import re
from pathlib import Path

import pytest
import stacks  # noqa: F401  # its stacks begin warm
from checkpoints import make_gpt2

from orca_bench import policies
from orca_bench.policies import COLUMNS, LOADS, POLICIES, measured, ratios, report
from orca_local.stack import DEMO_MODEL
from orca_scheduler.core.sets import policy_named

TOKENS = 100  # of a request of `copies` or `fresh`


def test_the_report_has_medians_of_the_rounds() -> None:
    lines = [
        {"policy": policy, "load": load, **dict.fromkeys(COLUMNS, base + n)}
        for policy, base in (("paper", 10), ("balanced", 1000))
        for load in ("chat", "long")
        for n in (0, 5, 1)
    ]
    table, picture = report(lines)
    rows = [re.split(r" *\| *", line)[1:-1] for line in table.splitlines()]
    assert rows[2:] == [
        [load, f"`{policy}`", *[value] * len(COLUMNS)]
        for load in ("chat", "long")
        for policy, value in (("paper", "11"), ("balanced", "1,001"))
    ]
    assert picture.startswith("<svg")
    assert picture.count("balanced") >= 1


def test_ratios_are_of_the_same_round() -> None:
    lines = [
        {"policy": policy, "load": "long", "seed": seed, **dict.fromkeys(COLUMNS, seed * times)}
        for seed in (3, 5, 8)
        for policy, times in (("paper", 10), ("balanced", 10 + seed))
    ]
    assert ratios(lines).splitlines()[2:] == [
        "| long | `balanced` | " + " | ".join(["1.500 (1.300 to 1.800)"] * len(COLUMNS)) + " |"
    ]


@pytest.mark.long
async def test_iterations_with_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text that repeats itself takes fewer iterations than tokens, other text hardly."""
    monkeypatch.setattr(policies, "IN_TURN", 1)
    iterations = dict[str, int]()
    async for line in measured("drafts=ngram", ["copies", "fresh"], 1, model=str(DEMO_MODEL), slots=8000):
        assert (line["errors"], line["output_tokens"]) == (0, TOKENS)
        iterations[line["load"]] = line["iterations"]
    assert iterations["copies"] < 0.9 * TOKENS
    assert iterations["fresh"] > 0.9 * TOKENS


@pytest.mark.long
async def test_conversations_are_computed_less_where_blocks_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers of a turn are in the prompt of the next one."""
    monkeypatch.setattr(policies, "CONVERSATIONS", 3)
    model = make_gpt2(tmp_path / "model", heads=2, layers=1, hidden=16, vocab=97, positions=512, seed=3)
    positions = dict[str, int]()
    for policy in ("paper", "prefix=tenant"):
        (line,) = [one async for one in measured(policy, ["chat"], 1, model=str(model), slots=4000)]
        assert (line["requests"], line["errors"], line["output_tokens"]) == (12, 0, 12 * 40)
        positions[policy] = line["positions"]
    assert positions["prefix=tenant"] < 0.6 * positions["paper"]


@pytest.mark.parametrize("policy", POLICIES)
def test_its_policies_are_there(policy: str) -> None:
    assert policy_named(policy)
    assert "paper" in LOADS
