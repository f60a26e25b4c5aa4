"""Replays journals of live and simulated engines, those of the baselines' policies too."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from orca_common.errors import FailedPrecondition
from orca_scheduler.master import journal
from orca_scheduler.master.journal import CoreStep, Heading, LifeStep

from .baseline.selections import any_policy, core_of, is_baseline


class Difference(NamedTuple):
    """The first step of a journal that came out otherwise this time."""

    step: int
    event: Any
    recorded: tuple[Any, ...]
    again: tuple[Any, ...]


class Steps:
    """Steps a core and a lifecycle through a journal, and counts."""

    def __init__(self, path: Path) -> None:
        self._path, self.count = path, 0

    def __iter__(self) -> Iterator[Difference]:
        """Yields each step that differs. Raises FailedPrecondition for a file that is no journal."""
        try:
            heading = next(journal.read(self._path), None)
            if not isinstance(heading, Heading):
                raise FailedPrecondition(f"{self._path} is no journal")
            for step, again in self._again(heading):
                self.count += 1
                if step.actions != tuple(again):
                    yield Difference(self.count, step.event, step.actions, tuple(again))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise FailedPrecondition(f"{self._path} is no journal ({error})") from None

    def _again(self, heading: Heading) -> Iterator[tuple[CoreStep | LifeStep, Any]]:
        if not is_baseline(heading.numbers["policy"]):
            yield from journal.replay(self._path)
            return
        numbers = {name: value for name, value in heading.numbers.items() if name != "policy"}
        core = core_of(any_policy(heading.numbers["policy"]), **numbers)
        core.restore(heading.state)
        for line in journal.read(self._path):
            if isinstance(line, CoreStep):
                yield line, core.step(line.event)


def first_difference(path: Path) -> Difference | None:
    """The first event whose actions are other ones now. None: each gave the recorded actions again."""
    return next(iter(Steps(path)), None)
