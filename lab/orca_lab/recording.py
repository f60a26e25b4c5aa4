"""An engine's day in its journal: arrivals, lengths, ends, and the times of stages, hops, host and claims."""

import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orca_common.errors import FailedPrecondition
from orca_scheduler.core.core import Action, Adopted, Arrived, BatchReturned, Commit, Event, ScheduleBatch
from orca_scheduler.master import journal
from orca_scheduler.master.journal import CoreStep, Heading, Note

from .cost import Calibrated, Load, errors_of, fit, load_of
from .timeline import Times
from .workload import Asked

LEAST = 20  # iterations with reports that a fit needs


@dataclass
class _Request:
    submitted: float
    claimed: float
    input_tokens: int
    limit: int
    first: float = 0.0
    ended: float = 0.0
    tokens: int = 0


@dataclass
class Recording:
    """One journal, in seconds of the wall clock."""

    path: Path
    numbers: dict[str, Any] = field(default_factory=dict[str, Any])  # max_bs, n_workers, ..
    slots: int = 0
    loads: dict[int, Load] = field(default_factory=dict[int, Load])  # by iteration
    issued: dict[int, float] = field(default_factory=dict[int, float])
    returned: dict[int, float] = field(default_factory=dict[int, float])
    times: dict[int, dict[int, Times]] = field(
        default_factory=dict[int, dict[int, Times]]
    )  # .. and stage; tensor rank 0
    _requests: dict[str, _Request] = field(default_factory=dict[str, _Request])

    @classmethod
    def read(cls, path: Path) -> "Recording":
        """Raises FailedPrecondition for a file that is no journal, or has too little in it."""
        found = cls.of(path)
        if not found.slots or len(found.times) < LEAST:
            raise FailedPrecondition(f"{path} has {len(found.times)} iterations with reports; {LEAST} are needed")
        return found

    @classmethod
    def of(cls, path: Path) -> "Recording":
        """Reads all that a journal has by now. Raises FailedPrecondition for another file."""
        found = cls(path)
        try:
            found._read()
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise FailedPrecondition(f"{path} is no journal ({error})") from None
        return found

    def _read(self) -> None:
        offset, names, submitted = 0.0, dict[int, str](), dict[int, float]()
        for line in journal.read(self.path):
            names |= journal.named_in(line)
            match line:
                case Heading():
                    offset = line.wall / 1e9 - line.now
                    self.numbers = line.numbers
                case Note({"formed": _, "slots": slots}):
                    self.slots = slots
                case Note({"submitted": moments}):
                    submitted |= {int(claim): moment / 1e6 for claim, moment in moments.items()}
                case Note({"iteration": iteration, "times": times}):
                    reports = [Times(*values) for values in times]
                    self.times[iteration] = {one.stage: one for one in reports if not one.tensor_rank}
                case CoreStep(event, actions):
                    if isinstance(event, Arrived):
                        self._arrived(event, offset, names, submitted)
                    self._step(event, actions, event.now + offset, names)
                case _:
                    pass

    def _arrived(self, event: Arrived, offset: float, names: dict[int, str], submitted: dict[int, float]) -> None:
        for one in event.requests:
            moment = submitted.get(one.claim, event.now + offset)
            name = names.get(one.claim, str(one.claim))
            if name not in self._requests:
                self._requests[name] = _Request(moment, event.now + offset, one.input_tokens, one.max_new_tokens)

    def _step(self, event: Event, actions: Sequence[Action], moment: float, names: dict[int, str]) -> None:
        match event:
            case BatchReturned(iteration=iteration):
                self.returned[iteration] = moment
            case Adopted(policy=policy):
                self.numbers |= {"policy": policy}
            case _:
                pass
        for action in actions:
            match action:
                case ScheduleBatch():
                    self.loads[action.iteration] = load_of(action.members)
                    self.issued[action.iteration] = moment
                case Commit():
                    for outcome in action.outcomes:
                        request = self._requests.get(names.get(outcome.claim, str(outcome.claim)))
                        if request is None or outcome.token is None:
                            continue
                        request.tokens += 1
                        request.first = request.first or moment
                        request.ended = moment
                case _:
                    pass

    # -- what follows

    @property
    def asked(self) -> list[Asked]:
        """All requests, in the order of their claims, as they were asked for, with the output tokens that they got."""
        every = self._requests.values()
        return [Asked(one.submitted, one.input_tokens, one.tokens, limit=one.limit) for one in every]

    @property
    def requests(self) -> list[tuple[Asked, float, float]]:
        """Each request that got tokens, with the moments of its first and last token; the first arrives at 0."""
        pairs = zip(self.asked, self._requests.values(), strict=True)
        found = sorted(((asked, one) for asked, one in pairs if one.tokens), key=lambda pair: pair[0].at)
        start = found[0][0].at if found else 0.0
        return [(asked._replace(at=asked.at - start), one.first - start, one.ended - start) for asked, one in found]

    @property
    def moments(self) -> list[tuple[float, float]]:
        """When each request that got tokens was claimed, and when its last token returned, in the order of claims."""
        return [(one.claimed, one.ended) for one in self._requests.values() if one.tokens]

    @property
    def stages(self) -> int:
        return 1 + max(stage for stages in self.times.values() for stage in stages)

    @property
    def claim(self) -> float:
        """Seconds from a submission to a claim: the median of requests that found a place, and nothing else waiting.
        Without one of them the shortest that there was."""
        requests = list(self._requests.values())
        begun, ended = sorted(one.claimed for one in requests), sorted(one.ended for one in requests if one.ended)
        asked = sorted(one.submitted for one in requests)
        waits, at_once = list[float](), list[float]()
        for one in requests:
            waits.append(max(0.0, one.claimed - one.submitted))
            before = bisect_left(asked, one.submitted)
            running = before - bisect_right(ended, one.submitted)
            if bisect_right(begun, one.submitted) == before and running < self.numbers["max_bs"]:
                at_once.append(waits[-1])
        return statistics.median(at_once) if at_once else min(waits, default=0.0)

    def cost(self) -> tuple[Calibrated, list[tuple[float, float]]]:
        """Costs fitted to half of the iterations, and for each stage its errors on the other half: the mean of the
        relative errors, and that of the sum."""
        known = sorted(self.times.keys() & self.loads.keys())
        coefficients, errors = list[tuple[float, ...]](), list[tuple[float, float]]()
        for stage in range(self.stages):
            seconds = [self._busy(iteration, stage) for iteration in known]
            loads = [self.loads[iteration] for iteration in known]
            found = fit(loads[::2], seconds[::2])
            coefficients.append(found)
            errors.append(errors_of(found, loads[1::2], seconds[1::2]))
        return Calibrated(tuple(coefficients), self._host(known), self._hop(known)), errors

    def _busy(self, iteration: int, stage: int) -> float:
        times = self.times[iteration][stage]
        return max(1, times.sent - times.taken - times.waited) / 1e9

    def _host(self, known: Sequence[int]) -> float:
        """The seconds from the tokens of the last stage to the scheduler, and from there to stage 0, which is free."""
        last, free, there, back = self.stages - 1, 0, list[float](), list[float]()
        for iteration in known:
            times = self.times[iteration]
            ready = max(round(self.issued[iteration] * 1e9), free)
            there.append((times[0].taken - ready) / 1e9)
            free = times[0].sent
            if iteration in self.returned:
                back.append(self.returned[iteration] - times[last].sent / 1e9)
        return max(0.0, statistics.median(there)) + max(0.0, statistics.median(back) if back else 0.0)

    def _hop(self, known: Sequence[int]) -> float:
        """The seconds from a stage's end to the start of the next one, which was waiting or has just been free."""
        ways, free = list[float](), [0] * self.stages
        for iteration in known:
            for stage, times in sorted(self.times[iteration].items()):
                if stage and (before := self.times[iteration][stage - 1].sent) >= free[stage]:
                    ways.append((times.started - before) / 1e9)
                free[stage] = times.sent
        return max(0.0, statistics.median(ways)) if ways else 0.0
