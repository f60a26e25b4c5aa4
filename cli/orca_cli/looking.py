"""Looks at running services for `orca top`: their metrics and requests, and the changes between two looks."""

import time
import urllib.request
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from orca_cli import runs
from orca_common.errors import FailedPrecondition
from orca_local import status_port

SECONDS = 2.0  # for one answer
WINDOW = 0.5  # of `load`
Values = Mapping[str, Mapping[tuple[str, ...], float]]  # name -> values of the labels in their order -> sum


@dataclass(frozen=True)
class Look:
    """All that the status ports said at one moment."""

    at: float  # of the monotonic clock
    silent: tuple[str, ...]  # sentences about those that did not
    schedulers: tuple[dict[str, Any], ...]  # what their /readyz says
    requests: tuple[dict[str, Any], ...]  # the oldest first
    reasons: Mapping[str, str | None] = field(
        default_factory=dict[str, str | None]
    )  # of each port: why it is not ready
    values: Values = field(default_factory=dict[str, dict[tuple[str, ...], float]])

    def value(self, name: str, *labels: str) -> float:
        """The sum of the values whose first labels are these."""
        return sum(value for key, value in self.values.get(name, {}).items() if key[: len(labels)] == labels)

    def most(self, name: str) -> float:
        return max(self.values.get(name, {}).values(), default=0.0)


def ports(folder: Path | None, given: Sequence[str]) -> list[str]:
    """Returns the status ports to look at: those given, or those of a run. Raises FailedPrecondition without any."""
    if given:
        return list(given)
    assert folder is not None
    rows = runs.processes(folder)
    found = [row["status"] for row in rows if row["role"] in ("endpoint", "scheduler") and row["status"]]
    if not found:
        raise FailedPrecondition(f"nothing runs in {folder}")
    return found


def load(folder: Path) -> str:
    """The load of a run in a line, or why it is not known. Takes WINDOW seconds, in which tokens are counted."""
    try:
        return load_of(ports(folder, ()))
    except FailedPrecondition:
        return "not known yet"


def load_of(addresses: Sequence[str]) -> str:
    """The load of the services behind these status ports, in a line."""
    before = look(addresses)
    time.sleep(WINDOW)
    now = look(addresses)
    if now.silent:
        return f"not known: no answer from {now.silent[0]}"
    sights = engines(before, now)
    waiting, oldest = now.most("orca_num_requests_waiting"), now.most("orca_queue_oldest_age_seconds")
    recoveries = now.value("orca_recoveries_total")
    parts = (
        f"{waiting:.0f} waiting" + (f" (the oldest for {oldest:.1f} s)" if waiting else ""),
        f"{sum(sight.running for sight in sights)} running",
        f"{sum(sight.reserved for sight in sights)} of {sum(sight.slots for sight in sights)} slots",
        f"{rate(before, now, 'orca_engine_tokens_total'):.0f} tokens/s",
        f"{recoveries:.0f} recover{'y' if recoveries == 1 else 'ies'}",
    )
    return ", ".join(parts)


def state_of(addresses: Sequence[str]) -> tuple[list[str], bool]:
    """A line for each status port and each engine that a scheduler there knows, and the load; whether all are ready."""
    seen = look(addresses)
    troubles = dict(seen.reasons)
    for said in seen.schedulers:
        troubles |= said["engines"]
    lines = [f"{name}: {why or 'ready'}" for name, why in troubles.items()]
    return [*lines, f"load: {load_of(addresses)}"], not any(troubles.values())


def look(addresses: Sequence[str]) -> Look:
    """Asks all ports at the same time."""
    with ThreadPoolExecutor(len(addresses)) as pool:
        answers = list(pool.map(_ask, addresses))
    sums: defaultdict[str, defaultdict[tuple[str, ...], float]] = defaultdict(lambda: defaultdict(float))
    schedulers: list[dict[str, Any]] = []
    requests: list[dict[str, Any]] = []
    silent: list[str] = []
    reasons: dict[str, str | None] = {}
    for address, answer in zip(addresses, answers, strict=True):
        if isinstance(answer, str):
            silent.append(f"{address}: {answer}")
            reasons[address] = answer
            continue
        said, listed, text = answer
        reasons[address] = said["reason"]
        if "engines" in said:
            schedulers.append(said)
        requests += listed
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                key = tuple(sample.labels.values())
                if sample.name in ("orca_num_requests_waiting", "orca_queue_oldest_age_seconds"):
                    sums[sample.name][key] = max(sums[sample.name][key], sample.value)  # all see the same queue
                elif sample.name.startswith("orca_"):
                    sums[sample.name][key] += sample.value
    requests.sort(key=lambda one: one["submitted"])
    return Look(time.monotonic(), tuple(silent), tuple(schedulers), tuple(requests), reasons, sums)


def _ask(address: str) -> tuple[dict[str, Any], list[dict[str, Any]], str] | str:
    """Returns one port's readiness, requests and metrics, or why it does not answer."""
    try:
        said = status_port.ask(address, seconds=SECONDS)
        listed = status_port.ask(address, "/requests", SECONDS)["requests"] if "engines" in said else []
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=SECONDS) as answer:
            return said, listed, answer.read().decode()
    except OSError as error:
        return str(error)


@dataclass(frozen=True)
class EngineSight:
    """An engine now, and its rates since the look before."""

    name: str
    trouble: str | None  # why it serves nothing
    running: int
    batch: float  # requests in a batch, the mean; 0 without an iteration
    in_flight: int
    reserved: int
    slots: int
    iterations: float  # a second
    tokens: float  # a second
    busy: tuple[float, ...]  # the share of its stages' time
    bubble: tuple[float, ...]  # and that in which a batch was in flight, but not there


def engines(before: Look, now: Look) -> list[EngineSight]:
    """Returns the engines, by name."""
    found: dict[str, str | None] = {}
    for said in now.schedulers:
        found |= said["engines"]
    return [_engine(name, found[name], before, now) for name in sorted(found)]


def _engine(name: str, trouble: str | None, before: Look, now: Look) -> EngineSight:
    seconds = max(now.at - before.at, 1e-3)

    def grown(metric: str, *labels: str) -> float:
        return max(now.value(metric, name, *labels) - before.value(metric, name, *labels), 0.0)

    iterations = grown("orca_batch_size_count")
    stages = sorted({key[1] for key in now.values.get("orca_stage_busy_seconds_total", {}) if key[0] == name}, key=int)
    busy = [min(grown("orca_stage_busy_seconds_total", stage) / seconds, 1.0) for stage in stages]
    active = min(grown("orca_engine_active_seconds_total") / seconds, 1.0)
    reserved, free = (int(now.value("orca_slots", name, state)) for state in ("reserved", "free"))
    return EngineSight(
        name,
        trouble,
        int(now.value("orca_num_requests_running", name)),
        grown("orca_batch_size_sum") / iterations if iterations else 0.0,
        int(now.value("orca_batches_in_flight", name)),
        reserved,
        reserved + free,
        iterations / seconds,
        grown("orca_engine_tokens_total") / seconds,
        tuple(busy),
        tuple(max(active - share, 0.0) for share in busy),
    )


def rate(before: Look, now: Look, metric: str) -> float:
    """A counter's growth, a second."""
    return max(now.value(metric) - before.value(metric), 0.0) / max(now.at - before.at, 1e-3)


def mean(before: Look, now: Look, metric: str) -> float | None:
    """The mean of a histogram's new observations; None without any."""
    count = now.value(f"{metric}_count") - before.value(f"{metric}_count")
    return (now.value(f"{metric}_sum") - before.value(f"{metric}_sum")) / count if count > 0 else None
