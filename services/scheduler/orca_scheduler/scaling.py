"""Chooses the number of engines: a pure machine, `step(seen) -> wish`, without a clock and without I/O.

More of them when the first request of the queue has waited for too long: at once as many as the queue fills, at most
twice as many as there are, and not again for `up_seconds`. Fewer when all requests have fitted into one engine less for
`down_seconds`. That engine first finishes what it began, while the others begin all that comes, and goes when it has
nothing left, or has had `finish_seconds`. When the queue gets old meanwhile, it begins requests again.

Engines are numbered, and the last ones go. All but the moments is in what was seen, so another scheduler can go on.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

FILLED = 0.75  # of the engines that stay, at most: with more, the first burst after one has gone would bring it back


@dataclass(frozen=True, slots=True)
class Bounds:
    """Within which engines, and after which seconds."""

    least: int
    most: int
    queue_age: float  # of the first request in the queue, above which there are too few engines
    up_seconds: float
    down_seconds: float
    finish_seconds: float


class Load(NamedTuple):
    """The load of one engine that has formed once."""

    requests: int  # that it has claimed
    places: int  # requests that it can run at a time; 0: it begins none now
    reserved: int  # slots
    slots: int


@dataclass(frozen=True, slots=True)
class Seen:
    """The queue and the engines, as they are known at a moment."""

    now: float
    engines: int  # whose pods there are to be
    beginning: int  # of them, those that may begin requests; the others finish what they began
    waiting: int  # requests in the queue
    oldest: float  # seconds for which the first of them has waited
    loads: Mapping[int, Load]  # by the engine's number

    def load(self, engines: range) -> list[Load]:
        return [self.loads[number] for number in engines if number in self.loads]


class Wish(NamedTuple):
    """The number of engines that there should be, and of those that should begin requests."""

    engines: int
    beginning: int
    why: str = ""  # a sentence, where something is to change


class Scaling:
    """Judges one look after the other."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._engines = -1  # that were seen last
        self._changed = 0.0  # since when this has been their number
        self._fits: float | None = None  # since when one engine less would do
        self._finishing: float | None = None  # since when the last ones finish

    def step(self, seen: Seen) -> Wish:
        """Judges the newest look. A wish that was not granted is repeated."""
        if seen.engines != self._engines:
            self._engines, self._changed, self._fits = seen.engines, seen.now, None
        least, most = self._bounds.least, self._bounds.most
        engines, beginning = seen.engines, min(max(seen.beginning, least), seen.engines)
        bounds = f"there are to be {least} to {most} engines"
        if engines < least:
            return Wish(least, least, bounds)
        old = seen.oldest > self._bounds.queue_age
        room = self._fits_into(seen, beginning if beginning < engines else engines - 1)
        self._fits = None if not room or old else seen.now if self._fits is None else self._fits
        if engines > most:
            return self._finish(seen, min(beginning, most), bounds)
        if old:
            return self._more(seen)
        if beginning < engines:
            return self._finish(seen, beginning, "the others have room for all requests")
        if self._fits is not None and seen.now - self._fits >= self._bounds.down_seconds:
            seconds = f"{self._bounds.down_seconds:g} s"
            return self._finish(seen, engines - 1, f"the others have had room for all requests for {seconds}")
        self._finishing = None
        return Wish(engines, engines, bounds if seen.beginning < engines else "")

    def _more(self, seen: Seen) -> Wish:
        """The queue is old. Engines that finish begin again at once; new ones only help when some engine is up."""
        self._finishing = None
        engines, why = seen.engines, f"the first request of the queue has waited for {seen.oldest:.1f} s"
        if seen.beginning < engines:
            return Wish(engines, engines, why)
        up = [load for load in seen.load(range(engines)) if load.places]
        if engines == self._bounds.most or not up or seen.now - self._changed < self._bounds.up_seconds:
            return Wish(engines, engines)
        held = sum(load.requests for load in up)  # the queue waits, so this is what these engines hold
        filled = math.ceil((held + seen.waiting) * len(up) / held) if held else engines + 1
        more = min(max(filled, engines + 1), 2 * engines, self._bounds.most)
        return Wish(more, more, why)

    def _finish(self, seen: Seen, beginning: int, why: str) -> Wish:
        """Has the last engines finish, and go when they have nothing left."""
        if seen.beginning > beginning:  # they do not know of it yet
            self._finishing = None
            return Wish(seen.engines, beginning, why)
        if self._finishing is None:
            self._finishing = seen.now
        last = seen.load(range(beginning, seen.engines))
        if not any(load.requests or load.places for load in last):  # with places one may still begin a request
            return Wish(beginning, beginning, f"{why}, and the last ones have none left")
        if seen.now - self._finishing >= self._bounds.finish_seconds:
            seconds = f"{self._bounds.finish_seconds:g} s"
            return Wish(beginning, beginning, f"{why}, and the last ones have had {seconds} to finish theirs")
        return Wish(seen.engines, beginning)

    def _fits_into(self, seen: Seen, engines: int) -> bool:
        """Whether all requests fit into the first engines, as far as these are up."""
        if engines < self._bounds.least:
            return False
        stay = [load for load in seen.load(range(engines)) if load.places]
        requests = sum(load.requests for load in seen.loads.values()) + seen.waiting
        reserved = sum(load.reserved for load in seen.loads.values())
        places, slots = sum(load.places for load in stay), sum(load.slots for load in stay)
        return requests <= FILLED * places and reserved <= FILLED * slots
