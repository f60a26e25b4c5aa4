"""A sample of the simulator's seeds, that a seed always gives the same run, and that broken code is found.

`make simulate` runs many seeds.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from properties import examples
from simulator.processes import Violation
from simulator.simulation import Simulation

from orca_endpoint.calls.delivery import Delivery
from orca_scheduler.core.core import Action, BeginHere, Core, Pulled
from orca_scheduler.master.master import EngineMaster
from orca_scheduler.master.output import Outputs
from orca_scheduler.scheduler import Scheduler

_pulled = Core._pulled


def pulled_in_any_case(core: Core, event: Pulled) -> list[Action]:
    return _pulled(core, replace(event, done=True))


def says_nothing(master: EngineMaster, action: BeginHere) -> None:
    pass


SEEDS = range(examples(32))
# What is taken out of the real code, and the faults under which that shows (None: those that the seed draws).
OUTAGES = ("redis stands still", "redis fails over")
BROKEN: dict[str, tuple[type, str, Callable[..., Any], tuple[str, ...] | None]] = {
    "calls attach again under a new incarnation": (Delivery, "_resync_all", lambda self: None, None),
    "rows whose commit was not answered are sent again": (Outputs, "unanswered", lambda self, rows: None, OUTAGES),
    "a lease is taken only after it stood still": (Scheduler, "_free", lambda self, engine, state, now: True, ()),
    "who kept a request's blocks lets go of them": (Core, "_let_go", lambda self, claims: None, ()),
    "the blocks of a pull that has failed are let go": (
        EngineMaster,
        "_begin_here",
        says_nothing,
        ("pulls fail",),
    ),
    "a request whose pull has failed begins again": (Core, "_pulled", pulled_in_any_case, ("pulls fail",)),
}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_seed(seed: int) -> None:
    Simulation(seed).run()


def test_a_run_replays() -> None:
    """The same seed gives the same trace, the time and all answers included."""
    runs = [Simulation(3), Simulation(3)]
    for run in runs:
        run.run()
    assert runs[0].world.steps > 1000
    assert runs[0].world.digest == runs[1].world.digest


@pytest.mark.parametrize("rule", BROKEN)
def test_broken_code_is_found(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, name, broken, faults = BROKEN[rule]
    monkeypatch.setattr(kind, name, broken)
    with pytest.raises(Violation):
        _run_all(range(40), faults)


def _run_all(seeds: range, faults: tuple[str, ...] | None) -> None:
    for seed in seeds:
        Simulation(seed, kinds=faults).run()
