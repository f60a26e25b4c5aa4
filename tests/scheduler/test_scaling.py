"""How many engines there should be: the pure machine, alone and in a loop with engines that it gets."""

import math
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orca_scheduler.scaling import FILLED, Bounds, Load, Scaling, Seen, Wish

BOUNDS = Bounds(least=1, most=4, queue_age=5.0, up_seconds=60.0, down_seconds=300.0, finish_seconds=100.0)
PLACES, SLOTS, EACH = 8, 1024, 100  # of an engine; slots that a request reserves


def load(requests: int, *, finishing: bool = False) -> Load:
    return Load(requests, 0 if finishing else PLACES, EACH * requests, SLOTS)


def seen(now: float, *requests: int, waiting: int = 0, oldest: float = 0.0, finishing: int = 0) -> Seen:
    """Engines that hold these numbers of requests; the last `finishing` of them know that they are to begin nothing."""
    count = len(requests)
    loads = {n: load(held, finishing=n >= count - finishing) for n, held in enumerate(requests)}
    return Seen(now, count, count - finishing, waiting, oldest, loads)


def counts(wish: Wish) -> tuple[int, int]:
    return wish.engines, wish.beginning


def after(scaling: Scaling, first: Seen, seconds: float) -> Wish:
    """The wish when all has been like this for some seconds."""
    scaling.step(first)
    return scaling.step(replace(first, now=first.now + seconds))


def test_an_old_queue_brings_another_engine() -> None:
    wish = after(Scaling(BOUNDS), seen(0, 8, waiting=3, oldest=5.1), 60)
    assert wish == Wish(2, 2, "the first request of the queue has waited for 5.1 s")


@pytest.mark.parametrize(
    ("now", "requests", "waiting", "oldest"),
    [(60, (8,), 3, 5.0), (59, (8,), 3, 9.0), (60, (8, 8, 8, 8), 9, 99.0)],
    ids=["the queue is young", "there has just been a change", "there are as many as there may be"],
)
def test_there_is_no_other_engine(now: float, requests: tuple[int, ...], waiting: int, oldest: float) -> None:
    engines = len(requests)
    wish = after(Scaling(BOUNDS), seen(0, *requests, waiting=waiting, oldest=oldest), now)
    assert counts(wish) == (engines, engines)


def test_no_engine_is_added_while_none_is_up() -> None:
    """It would not help: the first one is being loaded, or cannot form."""
    first = Seen(0, 1, 1, 5, 400.0, {})
    assert counts(after(Scaling(BOUNDS), first, 1000)) == (1, 1)
    down = {0: Load(0, 0, 0, SLOTS)}
    assert counts(after(Scaling(BOUNDS), replace(first, loads=down), 1000)) == (1, 1)


@pytest.mark.parametrize(("waiting", "engines"), [(1, 3), (8, 3), (9, 4), (16, 4), (1000, 4)])
def test_a_long_queue_brings_as_many_as_it_fills(waiting: int, engines: int) -> None:
    """At most twice as many as there are."""
    wish = after(Scaling(replace(BOUNDS, most=99)), seen(0, 8, 8, waiting=waiting, oldest=9), 60)
    assert counts(wish) == (engines, engines)


def test_an_engine_goes_when_one_less_has_had_room_for_long_and_it_has_finished() -> None:
    scaling = Scaling(BOUNDS)
    assert counts(after(scaling, seen(0, 3, 3), 299)) == (2, 2)
    assert counts(scaling.step(seen(300, 3, 3))) == (2, 1)
    assert counts(scaling.step(seen(301, 3, 3))) == (2, 1)  # no engine knows of it yet
    assert counts(scaling.step(seen(302, 5, 1, finishing=1))) == (2, 1)
    # Its scheduler has not seen it yet: it may begin a request at any moment.
    assert counts(scaling.step(Seen(303, 2, 1, 0, 0.0, {0: load(6), 1: load(0)}))) == (2, 1)
    assert counts(scaling.step(seen(304, 6, 0, finishing=1))) == (1, 1)


def test_an_engine_goes_with_what_it_has_when_its_time_is_over() -> None:
    scaling = Scaling(BOUNDS)
    assert counts(after(scaling, seen(0, 3, 3), 300)) == (2, 1)
    assert counts(scaling.step(seen(301, 3, 3, finishing=1))) == (2, 1)
    assert counts(scaling.step(seen(400, 3, 3, finishing=1))) == (2, 1)
    assert counts(scaling.step(seen(401, 3, 3, finishing=1))) == (1, 1)


def test_an_engine_that_finishes_begins_again_when_the_queue_gets_old() -> None:
    scaling = Scaling(BOUNDS)
    assert counts(after(scaling, seen(0, 3, 3), 300)) == (2, 1)
    assert counts(scaling.step(seen(301, 8, 3, waiting=4, oldest=6, finishing=1))) == (2, 2)
    assert counts(scaling.step(seen(302, 3, 3))) == (2, 2)  # and the time begins anew
    assert counts(scaling.step(seen(601, 3, 3))) == (2, 2)
    assert counts(scaling.step(seen(602, 3, 3))) == (2, 1)


@pytest.mark.parametrize("moment", [seen(150, 8, 5), seen(150, 1, 1, waiting=5), seen(150, 1, 1, oldest=6)])
def test_one_moment_without_room_begins_the_time_anew(moment: Seen) -> None:
    scaling = Scaling(BOUNDS)
    scaling.step(seen(0, 1, 1))
    scaling.step(moment)
    assert counts(after(scaling, seen(151, 1, 1), 299)) == (2, 2)
    assert counts(scaling.step(seen(451, 1, 1))) == (2, 1)


def test_an_engine_stays_whose_slots_the_others_lack() -> None:
    """Few requests may reserve much."""
    loads = {0: Load(1, PLACES, 500, SLOTS), 1: Load(1, PLACES, 500, SLOTS)}
    assert counts(after(Scaling(BOUNDS), Seen(0, 2, 2, 0, 0.0, loads), 999)) == (2, 2)


def test_engines_that_are_not_up_are_no_room() -> None:
    scaling = Scaling(BOUNDS)
    loads = {0: Load(0, 0, 0, SLOTS), 1: load(3)}
    assert counts(after(scaling, Seen(0, 2, 2, 0, 0.0, loads), 999)) == (2, 2)
    large = {0: Load(1, PLACES, 500, SLOTS), 1: Load(0, 0, 0, SLOTS), 2: Load(1, PLACES, 500, SLOTS)}
    assert counts(after(Scaling(BOUNDS), Seen(0, 3, 3, 0, 0.0, large), 999)) == (3, 3)
    dead = {0: load(3), 1: Load(0, 0, 0, SLOTS)}
    assert counts(after(scaling, Seen(1000, 2, 2, 0, 0.0, dead), 300)) == (2, 1)
    assert counts(scaling.step(Seen(1301, 2, 1, 0, 0.0, dead))) == (1, 1)


def test_the_bounds_hold_whatever_the_load() -> None:
    bounds = replace(BOUNDS, least=2, most=3)
    assert counts(Scaling(bounds).step(seen(0, 0))) == (2, 2)
    assert counts(Scaling(bounds).step(Seen(0, 0, 0, 0, 0.0, {}))) == (2, 2)
    assert Scaling(bounds).step(seen(0, 1, 1, finishing=1)) == Wish(2, 2, "there are to be 2 to 3 engines")
    assert counts(after(Scaling(bounds), seen(0, 0, 0), 999)) == (2, 2)
    scaling = Scaling(bounds)
    assert counts(scaling.step(seen(0, 8, 8, 8, 8, 8, waiting=9, oldest=9))) == (5, 3)
    assert counts(scaling.step(seen(1, 8, 8, 8, 0, 0, waiting=9, oldest=9, finishing=2))) == (3, 3)


def test_another_scheduler_goes_on_with_engines_that_finish() -> None:
    assert counts(Scaling(BOUNDS).step(seen(0, 3, 1, finishing=1))) == (2, 1)
    assert counts(Scaling(BOUNDS).step(seen(0, 3, 0, finishing=1))) == (1, 1)


# -- any history


LOADS = st.builds(
    lambda requests, up: Load(requests, PLACES if up else 0, EACH * requests if up else 0, SLOTS),
    st.integers(0, 2 * PLACES),
    st.sampled_from([True, True, True, False]),
)
LOOKS = st.lists(
    st.tuples(
        st.floats(0, 200),  # seconds since the look before
        st.booleans(),  # whether the wish of the look before was granted
        st.integers(0, 40),
        st.sampled_from([0.0, 1.0, 5.0, 6.0, 100.0]),
        st.lists(LOADS, max_size=8),
    ),
    max_size=60,
)


@given(st.integers(0, 8), LOOKS)
def test_any_history(engines: int, looks: list[tuple[float, bool, int, float, list[Load]]]) -> None:
    """Whatever is seen: bounds, one change in its time, and no engine goes that has not finished or had its time."""
    bounds = replace(BOUNDS, least=2, most=6)
    scaling, now, beginning, changed, told = Scaling(bounds), 0.0, engines, 0.0, math.inf
    wish = Wish(engines, beginning)
    for seconds, granted, waiting, oldest, loads in looks:
        now += seconds
        if granted and wish != (engines, beginning, wish.why):
            if wish.engines != engines:
                changed = now
            if wish.beginning < beginning:
                told = now
            engines, beginning = wish.engines, wish.beginning
        view = Seen(now, engines, beginning, waiting, oldest, dict(enumerate(loads)))
        wish = scaling.step(view)
        assert min(bounds.least, engines) <= wish.beginning <= wish.engines <= max(bounds.most, engines)
        assert wish.engines >= bounds.least
        assert bool(wish.why) == (counts(wish) != (engines, beginning))
        if wish.engines > engines:
            assert wish.engines <= bounds.most
            assert engines < bounds.least or (oldest > bounds.queue_age and now - changed >= bounds.up_seconds)
            assert wish.engines <= max(2 * engines, bounds.least)
        if wish.engines < engines:
            assert beginning == wish.engines  # all knew before
            last = [load for number, load in enumerate(loads[:engines]) if number >= beginning]
            idle = not any(load.requests for load in last)
            assert idle or now - told >= bounds.finish_seconds - 1e-6
        if wish.beginning < beginning and engines <= bounds.most:
            assert now - changed >= bounds.down_seconds
            assert oldest <= bounds.queue_age


# -- in a loop with engines


@dataclass
class Cluster:
    """Engines that come up after a time, and take all requests of a constant load that they have places for."""

    rising: float  # seconds that an engine takes to come up
    engines: int = 1
    beginning: int = 1
    came: list[float] = field(default_factory=lambda: [-1e9])  # when each engine's pods came
    history: list[int] = field(default_factory=list)

    def look(self, now: float, demand: int, old_since: float | None) -> Seen:
        up = [n for n in range(self.engines) if now - self.came[n] >= self.rising]
        loads, left = dict[int, Load](), demand
        for n in up:
            begins = n < self.beginning
            held = min(left, PLACES) if begins else 0
            left -= held
            loads[n] = load(held, finishing=not begins)
        oldest = now - old_since if left and old_since is not None else 0.0
        return Seen(now, self.engines, self.beginning, left, oldest, loads)

    def grant(self, wish: Wish, now: float) -> None:
        self.came = [*self.came[: wish.engines], *[now] * (wish.engines - self.engines)]
        if wish.engines != self.engines:
            self.history.append(wish.engines)
        self.engines, self.beginning = wish.engines, wish.beginning


LOOKS_OF_A_LOAD = 400  # in 4000 s all engines but one go, one after the other


@settings(max_examples=30)
@given(st.integers(0, 5 * PLACES), st.floats(1, 500), st.integers(0, 5 * PLACES))
def test_a_constant_load_gets_its_engines_once(first: int, rising: float, second: int) -> None:
    """After any load before, the number of engines goes up or down, never both, and rests where all requests fit."""
    cluster, scaling, now = Cluster(rising), Scaling(replace(BOUNDS, most=8)), 0.0
    for demand in (first, second):
        cluster.history = [cluster.engines]
        old_since: float | None = None
        for _ in range(LOOKS_OF_A_LOAD):
            now += 10.0
            view = cluster.look(now, demand, old_since)
            old_since = (now if old_since is None else old_since) if view.waiting else None
            cluster.grant(scaling.step(view), now)
        steps = [b - a for a, b in zip(cluster.history, cluster.history[1:], strict=False)]
        assert steps == sorted(steps, key=lambda step: step < 0), cluster.history  # up before down
        # While engines take longer than up_seconds to come, more of them are asked for than stay.
        assert rising > BOUNDS.up_seconds or len({step > 0 for step in steps}) < 2, cluster.history
        assert demand <= cluster.engines * PLACES
        assert cluster.engines == 1 or demand > FILLED * (cluster.engines - 1) * PLACES
