"""Another setting for a recorded day: arrivals, lengths and ends from a journal, costs fitted to its stage reports.

The recorded setting is always predicted first, and its errors stand above the answers. A cancelled request ends where
it ended in the record.
"""

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from .baseline.selections import any_policy
from .cost import Calibrated
from .recording import Recording
from .simulator import Delays, Engine, Ran, Simulation
from .timeline import percentile
from .workload import Asked


class Outcome(NamedTuple):
    """The measures of a run. Times in seconds; rates per second."""

    throughput: float  # requests
    normalized: float  # median
    normalized_p99: float
    first_token: float  # median
    span: float

    @classmethod
    def of(cls, requests: Iterable[tuple[Asked, float, float]]) -> "Outcome":
        """Summarizes requests, each with the moments of its first and last token."""
        every = list(requests)
        normalized = [(ended - asked.at) / asked.output_tokens for asked, _, ended in every]
        first = statistics.median(first - asked.at for asked, first, _ in every)
        span = max(ended for *_, ended in every) - every[0][0].at
        return cls(len(every) / span, statistics.median(normalized), percentile(normalized, 0.99), first, span)


@dataclass(frozen=True)
class Setting:
    """A setting of an engine; what it leaves out is the record's."""

    max_bs: int
    pp: int
    slots: int
    policy: str
    run_ahead: int = 0

    def __str__(self) -> str:
        return f"max_bs {self.max_bs}, pp {self.pp}, {self.slots} slots, {self.policy}"


class Answer(NamedTuple):
    """A prediction. `extrapolated`: why it lies outside of the record's range; empty where it does not."""

    setting: Setting
    outcome: Outcome
    mean_batch: float
    extrapolated: str


class WhatIf:
    """Predicts settings for one recording."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.cost, self.fit_errors = recording.cost()
        self.requests = recording.requests
        self.recorded = Outcome.of(self.requests)
        numbers = recording.numbers
        self.setting = Setting(
            numbers["max_bs"], recording.stages, recording.slots, numbers["policy"], numbers["run_ahead"]
        )
        self._workload = [asked for asked, *_ in self.requests]

    def predict(self, setting: Setting) -> Answer:
        """Simulates the day with a setting. Raises FailedPrecondition where a request does not fit, ValueError for a
        policy that there is not."""
        cost, block = self._cost(setting.pp), self.recording.numbers["block_size"]
        policy = any_policy(setting.policy)
        engine = Engine(cost, setting.slots, setting.max_bs, policy, block, setting.run_ahead)
        ran = _Largest()
        delays = Delays(claim=self.recording.claim, ahead=False)
        result = Simulation([engine], delays, watch=ran.watch).run(self._workload)
        outcome = Outcome.of((one.asked, one.first, one.ended) for one in result.requests)
        return Answer(setting, outcome, result.mean_batch, self._beyond(setting, ran))

    def errors(self, answer: Answer) -> Iterator[tuple[str, float]]:
        """The relative errors of a prediction of the recorded setting, with their signs."""
        for name, said, was in zip(Outcome._fields, answer.outcome, self.recorded, strict=True):
            yield name, said / was - 1

    def _cost(self, pp: int) -> Calibrated:
        """The fitted cost; for another number of stages all work is divided evenly."""
        if pp == self.cost.stages:
            return self.cost
        whole = [sum(terms) for terms in zip(*self.cost.coefficients, strict=True)]
        return replace(self.cost, coefficients=(tuple(one / pp for one in whole),) * pp)

    def _beyond(self, setting: Setting, ran: "_Largest") -> str:
        loads = self.recording.loads.values()
        rows, context = max(load.rows for load in loads), max(load.context for load in loads)
        said = [
            *([f"pp {setting.pp} was not recorded"] if setting.pp != self.cost.stages else []),
            *([f"batches of {ran.rows}, recorded up to {rows}"] if ran.rows > rows else []),
            *([f"context of {ran.context}, recorded up to {context}"] if ran.context > 1.05 * context else []),
        ]
        return "; ".join(said)


class _Largest:
    """The largest batch of a simulation."""

    def __init__(self) -> None:
        self.rows = self.context = 0

    def watch(self, ran: Ran) -> None:
        self.rows, self.context = max(self.rows, ran.load.rows), max(self.context, ran.load.context)


def settings_of(
    base: Setting, max_bs: Sequence[int], pp: Sequence[int], slots: int | None, policy: Sequence[str]
) -> list[Setting]:
    """All combinations of what was asked for; the record's values where nothing was."""
    return [
        replace(base, max_bs=one, pp=stages, slots=slots or base.slots, policy=name)
        for name in policy or [base.policy]
        for stages in pp or [base.pp]
        for one in max_bs or [base.max_bs]
    ]
