"""Writes a simulation in the schema of live journals (docs/journal.md), so that every tool for journals reads it.

The clock begins at 0, also the wall's, so equal simulations write equal bytes.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from orca_scheduler.core.core import Action, Arrived, Event
from orca_scheduler.lifecycle.lifecycle import Lifecycle
from orca_scheduler.lifecycle.places import Shape
from orca_scheduler.master.journal import ENCODER, encode, lifecycle_state, path_of

from .simulator import Engine, Ran
from .workload import Workload

TERM = 1


class Recorder:
    """The journals of a simulation's engines, one file each. `listener` and `watch` are for `Simulation`."""

    def __init__(self, folder: Path, engines: Sequence[Engine], workload: Workload) -> None:
        self._workload = workload
        names = [f"engine-{n}" for n in range(len(engines))]
        self.paths = [path_of(folder, name, TERM) for name in names]
        self._files: list[BinaryIO] = [path.open("wb") for path in self.paths]
        for number, (name, engine) in enumerate(zip(names, engines, strict=True)):
            self._begin(number, name, engine)

    def _begin(self, number: int, name: str, engine: Engine) -> None:
        core, shape = engine.core(), Shape(1, engine.cost.stages, 1, engine.block_size, run_ahead=engine.run_ahead)
        heading = {
            "core": {
                "max_bs": core.limits.max_bs,
                "n_workers": core.n_workers,
                "block_size": core.block_size,
                "run_ahead": core.run_ahead,
                "policy": core.policy.name,
                **({"role": core.role} if core.role else {}),
            },
            "state": core.state(),
            "lifecycle": lifecycle_state(Lifecycle(name, shape, None)),
            "term": TERM,
            "clock": {"now": 0.0, "wall": 0},
            "claims": {},
        }
        self._write(number, heading)
        formed = {"formed": 1, "slots": engine.memory_slots, "tp": 1, "pp": engine.cost.stages, "now": 0.0, "wall": 0}
        self._write(number, {"note": formed})

    def listener(self, engine: int, event: Event, actions: Sequence[Action]) -> None:
        """Records a step of an engine's core."""
        if isinstance(event, Arrived):
            claims = [one.claim for one in event.requests]
            note = {
                "now": event.now,
                "claims": {claim: f"request-{claim}" for claim in claims},
                "submitted": {claim: round(self._workload[claim - 1].at * 1e6) for claim in claims},
            }
            self._write(engine, {"note": note})
        self._write(engine, {"event": encode(event), "actions": [encode(action) for action in actions]})

    def watch(self, ran: Ran) -> None:
        """Records what its stages report of an iteration: they wait for nothing but each other."""
        times = [
            [stage, 0, *(round(at * 1e9) for at in (a, a, a, b, b)), 0, 0, 0] for stage, (a, b) in enumerate(ran.stages)
        ]
        self._write(ran.engine, {"note": {"iteration": ran.batch.iteration, "times": times}})

    def _write(self, engine: int, line: dict[str, Any]) -> None:
        self._files[engine].write(ENCODER.encode(line) + b"\n")

    def close(self) -> None:
        for file in self._files:
            file.close()
