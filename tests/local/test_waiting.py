"""A start waits for what may heal, and ends with the sentence of what can never work."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from orca_common.errors import FailedPrecondition
from orca_local import waiting
from orca_local.child import Child
from orca_local.waiting import SURE, Waiting


class Refusing(Child):
    """A process that lives, and refuses at some of the looks. They are 0.4 s apart on a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, looks: str) -> None:
        """looks: `R` for a look at which it refuses."""
        super().__init__("supervisor", "supervisor-0", (), {}, Path("/dev/null"))
        self.looks = looks
        self.now = 0.0
        monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(waiting, "LOOK", 0.0)

    @property
    def pid(self) -> int | None:
        return 1

    def refused(self) -> str | None:
        self.now += 0.4
        look, self.looks = self.looks[:1], self.looks[1:]
        return "model: it has no such weights" if look == "R" else None


async def test_a_refusal_that_is_taken_back_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is fenced while it forms says that it cannot, until another process stands in its place."""
    child = Refusing(monkeypatch, "RR....RR....R")
    await Waiting([child], print, print).until(lambda: "rank 0 starts" if child.looks else None)


async def test_a_refusal_that_stands_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    child = Refusing(monkeypatch, 9 * "R")
    with pytest.raises(FailedPrecondition, match=r"^model: it has no such weights$"):
        await Waiting([child], print, print).until(lambda: "rank 0 starts" if child.looks else None)
    assert SURE < child.now <= SURE + 0.8


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
