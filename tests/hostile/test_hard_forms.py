"""Forms that are hard to follow, while others ask for small ones: a rank waits for none of them."""

import asyncio
import itertools
import time
from pathlib import Path
from typing import Any

import pytest
from endpoint.harness import generation
from hostile.stage import hostile
from stacks import Running, running
from worker.test_forms import json_model

SECONDS = 6.0
QUIET = 0.1  # seconds that a form may take all the same, by the quantile below
DEADLINE = 10.0
CALLS = 20  # honest calls at least

pytestmark = pytest.mark.long


async def test_answers_beside_forms_that_are_hard_to_follow(tmp_path: Path) -> None:
    """They take at most twice as long as beside as many forms that are easy, and no rank is lost."""

    async def honest(this: Running, seconds: float) -> float:
        """The time within which 95 % of the answers ended, with a form and without."""
        took, numbers, end = list[float](), itertools.count(), time.monotonic() + seconds
        while time.monotonic() < end or len(took) < CALLS:
            form: dict[str, Any] = {"regex": "[ab]{20}"} if next(numbers) % 2 else {"ignore_eos": True}
            began = time.monotonic()
            answer = await this.stub.GenerateText(generation(max_new_tokens=20, **form), timeout=DEADLINE)
            assert len(answer.token_ids) == 20
            took.append(time.monotonic() - began)
        return sorted(took)[int(0.95 * len(took))]

    async with running(tmp_path / "run", json_model(tmp_path / "model"), slots=8192, max_batch_size=32) as this:
        processes = [(one["role"], one["pid"]) for one in this.processes()]
        await honest(this, 0.1)
        took, answers = {"no attack": await honest(this, 2.0)}, dict[str, int]()
        for attack in ("easy-forms", "hard-forms"):
            attacking = asyncio.create_task(hostile(attack, this.grpc, 2 * SECONDS))
            took[attack] = await honest(this, 2 * SECONDS - 1)
            answers = (await attacking)["answers"]
        print({name: f"p95 {1000 * one:.0f} ms" for name, one in took.items()}, answers)
        assert took["hard-forms"] < max(2 * took["easy-forms"], QUIET)
        assert [(one["role"], one["pid"]) for one in this.processes()] == processes
        assert set(answers) <= {"status 0", "status 9"}, "some are too hard: FAILED_PRECONDITION"
