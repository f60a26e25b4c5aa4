"""A start waits for what may heal, and ends with the sentence of what can never work."""

import asyncio
import time
from pathlib import Path

import pytest

from orca_common.errors import FailedPrecondition
from orca_local import waiting
from orca_local.child import Child
from orca_local.waiting import Waiting


class Refusing(Child):
    """A process that lives, and refuses for some looks."""

    def __init__(self, looks: int) -> None:
        super().__init__("supervisor", "supervisor-0", (), {}, Path("/dev/null"))
        self.looks = looks

    @property
    def pid(self) -> int | None:
        return 1

    def refused(self) -> str | None:
        self.looks -= 1
        return "model: it has no such weights" if self.looks >= 0 else None


async def test_a_refusal_that_is_taken_back_ends_nothing() -> None:
    """A rank that is fenced while it forms says that it cannot, until another process stands in its place."""
    child, said = Refusing(looks=3), list[str]()
    left = iter(["rank 0 starts", "rank 0 loads 1 of 9", "rank 0 loads 2 of 9", "rank 0 loads 3 of 9", None])
    async with asyncio.timeout(20):
        await Waiting([child], said.append, lambda state: None).until(lambda: next(left))
    assert child.looks < 0


async def test_a_refusal_that_stands_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "SURE", 0.3)
    began = time.monotonic()
    with pytest.raises(FailedPrecondition, match=r"^model: it has no such weights$"):
        await Waiting([Refusing(looks=10**6)], print, print).until(lambda: "rank 0 starts")
    assert time.monotonic() - began >= 0.3


async def test_states_are_said_once() -> None:
    """A line a state on a screen that scrolls; all that counts on where it is written over."""
    said, shown = list[str](), list[str]()
    left = iter(["rank 0 starts", "rank 0 loads 1 of 9", "rank 0 loads 2 of 9", "rank 0 loads 2 of 9", None])
    await Waiting([], said.append, shown.append).until(lambda: next(left))
    assert said == ["waiting: rank 0 starts", "waiting: rank 0 loads 1 of 9"]
    assert shown == ["rank 0 starts", "rank 0 loads 1 of 9", "rank 0 loads 2 of 9"]


async def test_a_process_that_ends_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("no memory\n")
    child = Child("endpoint", "endpoint-0", (), {}, tmp_path / "log")
    with pytest.raises(FailedPrecondition, match=r"^endpoint-0 ended: no memory$"):
        await Waiting([child], print, print).until(lambda: "endpoint-0 starts")
