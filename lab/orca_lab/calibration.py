"""A calibration: costs fitted to a live run, with what they were measured on, in one JSON file; and the guard.

A number of a machine that others use is worthless: one busy process on two cores makes iterations 1.8 to 3.5 times
longer. So each live run is compared with a calibration of the same layout, and marked where it was disturbed.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from orca_common.errors import FailedPrecondition

from .cost import TERMS, Calibrated, Load
from .recording import Recording
from .timeline import Times

SLOWER = 0.10  # than the calibration, in sum
FOREIGN = 0.05  # of the cores' time
LATE = 0.02  # seconds of delay of a client itself, at the 99th percentile, above which its load is another one


@dataclass(frozen=True)
class Calibration:
    """Costs of a layout. `errors`: of each stage on the half of the iterations that was held out, the mean of the
    relative errors and that of the sum. `way_in` and `way_out`: seconds from a client to the scheduler, where nothing
    else waits, and from the last stage's tokens back to the client. `about`: how it was made."""

    cost: Calibrated
    errors: tuple[tuple[float, float], ...]
    way_in: float
    way_out: float
    slots: int
    iterations: int
    about: Mapping[str, Any]

    @classmethod
    def of(cls, recording: Recording, ways: tuple[float, float], about: Mapping[str, Any]) -> "Calibration":
        """ways: in, and out."""
        cost, errors = recording.cost()
        return cls(cost, tuple(errors), *ways, recording.slots, len(recording.times), about)

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self) | {"terms": TERMS}, indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> "Calibration":
        """Raises FailedPrecondition where the file is no calibration."""
        try:
            values = json.loads(path.read_text())
            if tuple(values.pop("terms")) != TERMS:
                raise ValueError("its terms are another release's")
            cost = values.pop("cost")
            cost["coefficients"] = tuple(map(tuple, cost["coefficients"]))
            errors = tuple((mean, total) for mean, total in values.pop("errors"))
            return cls(cost=Calibrated(**cost), errors=errors, **values)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise FailedPrecondition(
                f"calibration: {path} cannot be read ({error}); `orca lab calibrate` makes one"
            ) from None

    @property
    def engines(self) -> int:
        """Engines of the layout, which ran beside each other."""
        return self.about.get("engines", 1)

    def predicted(self, loads: Iterable[Load]) -> float:
        """Seconds of all stages for these iterations."""
        stages = range(self.cost.stages)
        return sum(self.cost.stage(stage, load) for load in loads for stage in stages)


def measured(times: Iterable[Mapping[int, Times]]) -> float:
    """Seconds of all stages, without their waits. times: of each iteration, by stage."""
    return sum((t.sent - t.taken - t.waited) / 1e9 for stages in times for t in stages.values())


def disturbed(predicted: float, took: float, foreign: float, late: float = 0.0) -> str:
    """Why a run was disturbed; "" for one that counts.

    predicted and took: seconds of its iterations in sum, by a calibration of the same layout and as measured; both 0
    without a calibration. foreign: the share of the cores' time that processes took which are not of the run. late:
    seconds by which arrivals lagged their plan, at the 99th percentile.
    """
    found = list[str]()
    if predicted and took / predicted - 1 > SLOWER:
        found.append(f"its iterations took {took / predicted - 1:+.0%} against the calibration")
    if foreign > FOREIGN:
        found.append(f"other processes took {foreign:.0%} of the cores' time")
    if late > LATE:
        found.append(f"arrivals were {late * 1e3:.0f} ms late at p99")
    return " and ".join(found)
