"""Failures as stories: found, judged, formed again, and for how long the streams paused. Pure: no clock, no I/O."""

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

KEPT = 20
STILL = 5.0  # seconds before a failure in which tokens must have come, for the pause to begin with them
SURE = ("has ended", "has been silent", "makes no progress")  # suspicions that say more than those before them


@dataclass(slots=True)
class Incident:
    """One failure of one engine. Times are seconds; None: it has not come so far."""

    number: int
    engine: str
    at: float  # when it was found, on the wall's clock
    kind: str  # "rank" or "scheduler"
    what: str
    why: str = ""  # the verdict
    verdict: float | None = None  # from what was found to the verdict
    formed: float | None = None  # from the verdict until the engine ran again
    streams: int = 0  # that had to wait
    pause: float | None = None  # between the last tokens before and the first after
    over: bool = False


@dataclass(slots=True)
class Watch:
    """One engine, as far as failures are concerned."""

    found: tuple[float, str] | None = None  # when something first spoke against a rank, and what
    name: str = ""  # of that rank
    open: Incident | None = None
    judged: float = 0.0
    returned: float | None = None  # when tokens came last
    driver: str = ""  # the scheduler that drives it


@dataclass(slots=True)
class Incidents:
    """Folds the events of all engines."""

    all: deque[Incident] = field(default_factory=lambda: deque[Incident](maxlen=KEPT))
    _watches: dict[str, Watch] = field(default_factory=dict[str, Watch])
    _number: int = 0

    def event(self, event: Mapping[str, Any], rank_names: list[str]) -> Incident | None:
        """Takes a line of an engine's journal. Returns the incident that it changed."""
        at, watch = event["at"], self._watch(event["engine"])
        match event["line"]:
            case {"life": ["Suspected", {"suspicion": [int(rank), str(kind), _]}]}:
                if watch.found is None or kind in SURE:
                    name = rank_names[rank] if rank < len(rank_names) else f"rank {rank}"
                    since = watch.found[0] if watch.found is not None else at
                    watch.found, watch.name = (since, f"{name} {kind}"), name
                return self._take_verdicts(event, watch)
            case {"life": _}:
                return self._take_verdicts(event, watch)
            case {"event": ["EngineLost", _], "actions": actions}:
                given_back = [fields["requests"] for name, fields in actions if name == "GiveBack"]
                return self._lost(sum(map(len, given_back)), watch)
            case {"event": ["EngineReady", _]}:
                watch.found, watch.name = None, ""
                if watch.open is None:
                    return None
                watch.open.formed = at - watch.judged
                watch.open.over = not watch.open.streams
                return self._close_if_over(watch)
            case {"event": ["BatchReturned", _]}:
                return self._returned(at, watch)
            case _:
                return None

    def driver_gone(self, engine: str, scheduler: str, at: float, requests: int) -> Incident | None:
        """The scheduler that drives an engine has left without a word."""
        watch = self._watch(engine)
        if watch.open is not None or watch.driver not in ("", scheduler):
            return None
        watch.judged, watch.driver = at, scheduler
        watch.open = self._new(engine, at, "scheduler", f"the scheduler of {engine} is silent")
        watch.open.streams = requests
        return watch.open

    def driven(self, engine: str, scheduler: str, runs: bool, at: float) -> Incident | None:
        """A scheduler says that it drives an engine, and whether that runs."""
        watch = self._watch(engine)
        before, watch.driver = watch.driver, scheduler
        if watch.open is None or before in ("", scheduler) or not runs or watch.open.formed is not None:
            return None
        watch.open.formed = at - watch.judged
        watch.open.over = not watch.open.streams
        return self._close_if_over(watch)

    def _watch(self, engine: str) -> Watch:
        return self._watches.setdefault(engine, Watch())

    def _new(self, engine: str, at: float, kind: str, what: str) -> Incident:
        self._number += 1
        incident = Incident(self._number, engine, at, kind, what)
        self.all.append(incident)
        return incident

    def _take_verdicts(self, event: Mapping[str, Any], watch: Watch) -> Incident | None:
        at, changed = event["at"], None
        for what, why in [(f["what"], f["why"]) for name, f in event["line"]["actions"] if name == "Say"]:
            if what == "rank lost":
                since, found = watch.found or (at, f"{event['engine']} lost its ranks")
                sure = next((kind for kind in SURE if kind in why), None)
                if watch.name and sure is not None:  # a supervisor's table, or a clock, said more than the first doubt
                    found = f"{watch.name} {sure}"
                if watch.open is None:
                    watch.open = self._new(event["engine"], since, "rank", found)
                watch.open.why, watch.judged = why, at
                watch.open.verdict = at - since if watch.found else None
                changed = watch.open
            elif what == "engine cannot form" and watch.open is not None:
                watch.open.why, changed = f"cannot form: {why}", watch.open
        return changed

    def _lost(self, streams: int, watch: Watch) -> Incident | None:
        if watch.open is None:
            return None
        watch.open.streams = max(watch.open.streams, streams)
        return watch.open

    def _returned(self, at: float, watch: Watch) -> Incident | None:
        before, watch.returned = watch.returned, at
        if watch.open is None or watch.open.formed is None:
            return None
        seen = before is not None and before > watch.open.at - STILL
        watch.open.pause = at - (before if before is not None and seen else watch.open.at)
        watch.open.over = True
        return self._close_if_over(watch)

    def _close_if_over(self, watch: Watch) -> Incident | None:
        incident = watch.open
        if incident is not None and incident.over:
            watch.open, watch.found, watch.name = None, None, ""
        return incident


def plain(incident: Incident) -> dict[str, Any]:
    """An incident as plain values."""
    return asdict(incident)
