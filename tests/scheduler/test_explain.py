"""An explanation is the whole of a request's time: over random journals, and for each way a request can go."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler.life_script import fresh_lifecycle
from scheduler.world import EOS, WORD, Asked, World, storm

from orca_pool.records import Reason, Standing, Times
from orca_scheduler.core.core import (
    Action,
    Arrived,
    BatchReturned,
    Commit,
    Core,
    EngineLost,
    EngineReady,
    Event,
    Pulled,
    ScheduleBatch,
)
from orca_scheduler.core.request import Arrival
from orca_scheduler.core.roles import Role
from orca_scheduler.core.sets import policy_named
from orca_scheduler.explain.explanation import Explanation, Kind, explain
from orca_scheduler.explain.history import SECOND, History
from orca_scheduler.explain.telling import as_json, sentence, title
from orca_scheduler.master.journal import CoreStep, Heading, Line, Named, Note, lifecycle_state

WALL = 1_700_000_000 * SECOND  # when the events' clock was at 0


def name_of(arrival: int) -> str:
    return f"request-{arrival}"


def heading(world: "World | Record", now: float, term: int = 1) -> Heading:
    core = world.fresh()
    numbers = {
        "max_bs": core.limits.max_bs,
        "n_workers": core.n_workers,
        "block_size": core.block_size,
        "run_ahead": core.run_ahead,
        "policy": core.policy.name,
    }
    wall = WALL + round(now * SECOND)
    return Heading(numbers, core.state(), lifecycle_state(fresh_lifecycle()), term, now, wall, {})


def journal(world: "World | Record", times: Sequence[float], submitted: dict[int, int]) -> Iterator[Line]:
    """A world's events at these times. submitted: by arrival number, in microseconds of the pool's clock."""
    yield heading(world, times[0])
    for now, (event, actions) in zip(times, world.record, strict=True):
        if isinstance(event, Arrived):
            claims = {str(one.claim): name_of(one.arrival) for one in event.requests}
            since = {str(one.claim): submitted[one.arrival] for one in event.requests}
            yield Note({"claims": claims, "submitted": since, "now": now})
        if isinstance(event, EngineLost):
            yield Note({"lost": "rank 1 has ended", "now": now, "wall": WALL + round(now * SECOND)})
        yield CoreStep(replace(event, now=now), tuple(actions))


def wall(now: float) -> int:
    return WALL + round(now * SECOND)


def ends(record: Sequence[tuple[Event, Sequence[Action]]]) -> Iterator[tuple[int, int]]:
    """Each claim that the core ended, and the number of the event."""
    for n, (_, actions) in enumerate(record):
        for action in actions:
            if isinstance(action, Commit):
                yield from ((one.claim, n) for one in action.outcomes if one.finish is not None)


def whole(story: Explanation) -> None:
    """The parts follow each other from the submission to the end, and each has a sentence."""
    moments = [story.submitted, *(part.end for part in story.parts)]
    assert [part.begin for part in story.parts] == moments[:-1]
    assert moments[-1] == story.end
    assert sum(part.end - part.begin for part in story.parts) == story.end - story.submitted
    assert all(part.end > part.begin and sentence(part) for part in story.parts)
    told = as_json(story, None)
    assert abs(sum(part["seconds"] for part in told["parts"]) - told["seconds"]) < 1e-6
    assert title(story)


@settings(max_examples=40, database=None)
@given(seed=st.integers(0, 1 << 32), steps=st.integers(1, 150))
def test_the_parts_are_the_whole_time(seed: int, steps: int) -> None:
    """Whatever happened to it: every request's parts have no gap, and its iterations are those that it was in."""
    draw = random.Random(seed)
    world = storm(draw, steps)
    clock, times = 0.0, []
    for _ in world.record:
        clock += draw.choice((0.0, draw.uniform(0, 0.1)))
        times.append(clock)
    first = dict[int, float]()
    claims = dict[int, int]()  # claim -> arrival
    for now, (event, _) in zip(times, world.record, strict=True):
        if isinstance(event, Arrived):
            for one in event.requests:
                first.setdefault(one.arrival, now)
                claims[one.claim] = one.arrival
    submitted = {arrival: round(wall(now) / 1000) - draw.randint(0, 200_000) for arrival, now in first.items()}
    history = History("engine-0")
    history.take(journal(world, times, submitted))
    ran = dict.fromkeys(first, 0)
    over = dict[int, float]()
    for _, actions in world.record:
        for action in actions:
            if isinstance(action, ScheduleBatch):
                for member in action.members:
                    ran[claims[member.claim]] += 1
    for claim, n in ends(world.record):
        over[claims[claim]] = times[n]
    for arrival in first:
        story = explain(name_of(arrival), [history], None, wall(clock))
        assert story is not None
        whole(story)
        assert story.submitted == submitted[arrival] * 1000
        if arrival in over:
            assert story.end == wall(over[arrival])
        counted = sum(part.iterations for part in story.parts if part.kind in (Kind.RUN, Kind.LOST))
        assert counted <= ran[arrival]
    assert explain("stranger", [history], None, wall(clock)) is None


def story_of(
    of: "World | Record", arrival: int, submitted: dict[int, int], standing: Standing | None, now: float | None
) -> Explanation:
    """The explanation of a request by a journal whose events come each 0.1 s after the one before. now: of its end."""
    times = [n / 10 for n in range(len(of.record))]
    story = explain(name_of(arrival), [history_of(of, submitted)], standing, wall(times[-1] if now is None else now))
    assert story is not None
    whole(story)
    return story


def history_of(of: "World | Record", submitted: dict[int, int]) -> History:
    history = History("engine-0")
    history.take(journal(of, [n / 10 for n in range(len(of.record))], submitted))
    return history


class Told:
    """A world whose requests come from a queue that was there before: every event 0.1 s after the one before."""

    def __init__(self, max_bs: int, slots: int, n_workers: int = 1) -> None:
        self.world = World(max_bs, n_workers, 4)
        self.slots = slots
        self.submitted: dict[int, int] = {}

    def explain(self, arrival: int, standing: Standing | None = None, now: float | None = None) -> Explanation:
        return story_of(self.world, arrival, self.submitted, standing, now)


def told(story: Explanation) -> list[str]:
    return [sentence(part) for part in story.parts]


def standing(**values: object) -> Standing:
    usual = Standing("waiting", 1, 8, 3, "", 0, 0, None, Times(0, 0, 0, 0), 0)
    return usual._replace(**values)


def micros(now: float) -> int:
    return wall(now) // 1000


def test_slots_that_another_request_holds() -> None:
    one = Told(max_bs=2, slots=16)
    one.submitted = {1: micros(0), 2: micros(0.1)}
    world = one.world
    world.form(16)  # 0.0
    world.arrive(Asked(4, 5))  # 0.1: takes 12 of the 16 slots
    for _ in range(5):
        world.back(WORD)  # 0.2 to 0.6
    world.arrive(Asked(4, 2))  # 0.7: claimed as soon as there is room
    world.back(WORD)
    world.back(EOS)
    story = one.explain(2)
    assert told(story) == [
        "waited 500.0 ms in the queue, 5 iterations of engine-0, for slots held by request-1",
        "waited 100.0 ms in the queue until engine-0 had claimed it",
        "ran 200.0 ms in 2 iterations (6 to 7) of engine-0: 1 initiation of 4 positions and 1 increment, "
        "in batches of 1",
    ]
    assert (story.state, story.tokens, story.position) == ("finished", 2, 1)


class Record:
    """A core with a policy, and its events, each 0.1 s after the one before."""

    def __init__(self, max_bs: int, policy: str, role: Role = Role.MIXED) -> None:
        self._policy, self._max_bs, self._role = policy_named(policy), max_bs, role
        self.core, self.record = self.fresh(), list[tuple[Event, list[Action]]]()

    def fresh(self) -> Core:
        return Core(self._max_bs, 1, 4, policy=self._policy, role=self._role)

    def step(self, event: Event) -> None:
        self.record.append((event, self.core.step(event)))

    def back(self) -> None:
        (flight,) = self.core.in_flight
        self.step(BatchReturned(0.0, flight.iteration, ((WORD,),) * sum(outputs > 0 for outputs in flight.outputs)))

    def explain(self, arrival: int) -> Explanation:
        return story_of(self, arrival, {1: micros(0), 2: micros(0)}, None, None)


@pytest.mark.parametrize("done", [True, False])
def test_a_pull_ends_before_its_request_runs(done: bool) -> None:
    """Whether the keys and values have come or not. It waits for the only place of a batch since then."""
    one = Record(1, "paper", Role.DECODE)
    one.step(EngineReady(0.0, 64, 1))
    one.step(Arrived(0.0, (Arrival(1, 1, 4, 4, 1, elsewhere=4),)))  # 0.1
    one.step(Pulled(0.0, 1, done=True))
    one.step(Arrived(0.0, (Arrival(2, 2, 4, 2, 1, elsewhere=4),)))  # 0.3
    one.step(Pulled(0.0, 2, done))  # 0.4
    for _ in range(4):
        one.back()  # 0.5 to 0.8: three of the first request
    story = one.explain(2)
    assert [(part.kind, part.begin) for part in story.parts[-3:]] == [
        (Kind.PULL, wall(0.3)),
        (Kind.FULL, wall(0.4)),
        (Kind.RUN, wall(0.7)),
    ]


def test_the_positions_of_an_iteration() -> None:
    """Prompts in parts of at most 8 positions. The second waits until the first leaves some of them."""
    one = Record(2, "stall-free,positions=8")
    one.step(EngineReady(0.0, 64, 1))
    one.step(Arrived(0.0, (Arrival(1, 1, 16, 3), Arrival(2, 2, 6, 1))))
    for _ in range(3):
        one.back()
    assert told(one.explain(1))[1:] == [
        "ran 300.0 ms in 3 iterations (1 to 3) of engine-0: 2 initiations of 16 positions and 1 increment, "
        "in batches of 1 to 2"
    ]
    assert told(one.explain(2))[1:] == [
        "waited 200.0 ms at engine-0, 2 iterations, for positions: requests before it had all of an iteration",
        "ran 100.0 ms in iteration 3 of engine-0: 1 initiation of 6 positions, in a batch of 2",
    ]


def test_a_request_that_gave_up_its_slots() -> None:
    one = Record(2, "kv=on-demand")
    one.step(EngineReady(0.0, 16, 1))
    one.step(Arrived(0.0, (Arrival(1, 1, 7, 5), Arrival(2, 2, 7, 5))))
    for _ in range(6):
        one.back()
    assert told(one.explain(2))[2:4] == [
        "gave up its slots for an earlier request, and waited 300.0 ms at engine-0, 3 iterations, "
        "for slots held by request-1",
        "ran 100.0 ms in iteration 6 of engine-0: 1 initiation of 9 positions, in a batch of 1",
    ]


def test_the_room_is_the_memorys() -> None:
    """With blocks on demand: without the slots that are kept free, and with what those need that gave theirs up."""
    one = Record(3, "kv=on-demand")
    one.step(EngineReady(0.0, 40, 1))
    one.step(Arrived(0.0, (Arrival(1, 1, 7, 20), Arrival(2, 2, 7, 20), Arrival(3, 3, 6, 20))))
    preempted = 0
    for n in range(60):
        if not one.core.in_flight:
            break
        one.back()
        history = history_of(one, {1: 0, 2: 0, 3: 0})
        waiting = [request for request in one.core.requests if request.row is None]
        assert history.states[-1].room == max(0, one.core.memory.room(waiting)), n
        preempted += any(request.preemptions and request.row is None for request in one.core.requests)
    assert preempted


def test_places_and_the_queue_before_it() -> None:
    """It waits for max_bs while it is the last of three."""
    one = Told(max_bs=1, slots=64)
    one.submitted = {1: micros(0), 2: micros(0), 3: micros(0.05)}
    world = one.world
    world.form(64)  # 0.0
    world.arrive(Asked(2, 2))  # 0.1
    world.back(WORD)
    world.back(WORD)  # 0.3
    world.arrive(Asked(2, 1))  # 0.4
    world.back(WORD)  # 0.5
    world.arrive(Asked(2, 1))  # 0.6
    world.back(WORD)
    story = one.explain(3)
    assert [(part.kind, round(part.seconds, 3), part.iterations, part.ahead) for part in story.parts] == [
        (Kind.CLAIM, 0.05, 0, 2),
        (Kind.PLACES, 0.2, 2, 1),
        (Kind.CLAIM, 0.1, 0, 1),
        (Kind.PLACES, 0.1, 1, 0),
        (Kind.CLAIM, 0.1, 0, 0),
        (Kind.RUN, 0.1, 1, 0),
    ]
    assert story.position == 3


def test_a_recovery() -> None:
    one = Told(max_bs=2, slots=64)
    one.submitted = {1: micros(0)}
    world = one.world
    world.form(64)
    world.arrive(Asked(4, 3))  # 0.1
    world.back(WORD)  # 0.2
    world.lose()  # 0.3
    world.form(64)  # 0.4
    world.again(0)  # 0.5
    world.back(WORD)
    world.back(WORD)
    story = one.explain(1)
    kinds = [(part.kind, part.queued) for part in story.parts]
    run = (Kind.RUN, False)
    assert kinds == [(Kind.CLAIM, True), run, (Kind.LOST, False), (Kind.FORMING, True), (Kind.CLAIM, True), run]
    assert told(story)[2:4] == [
        "ran 100.0 ms in iteration 2 of engine-0, which never returned",
        "waited 100.0 ms in the queue until engine-0 was formed: rank 1 has ended",
    ]
    assert story.engines == ("engine-0", "engine-0")
    assert " on engine-0" in title(story)
    assert "engine-0 and engine-0" not in title(story)
    assert story.tokens == 3


def one_that_runs(tokens: int = 9) -> Told:
    """An engine that takes one request at a time. One of this number of tokens arrived at 0.1 and runs at 0.2."""
    one = Told(max_bs=1, slots=64)
    one.submitted = {1: micros(0)}
    one.world.form(64)
    one.world.arrive(Asked(2, tokens))
    one.world.back(WORD)
    return one


def test_a_queued_request() -> None:
    """The pool alone knows it."""
    one = one_that_runs()
    one.world.back(WORD)  # 0.3
    waits = standing(position=4, times=Times(micros(0.15), 0, 0, 0))
    story = one.explain(3, waits, now=0.4)
    assert (story.state, story.position_now) == ("queued", 4)
    assert told(story) == [
        "waited 250.0 ms in the queue, 2 iterations, while engine-0 had all the requests that it takes"
    ]


def test_a_request_that_was_claimed_since_the_pool_was_asked() -> None:
    """Journals are read after the pool. A scheduler that died leaves a stay without an end: then the pool is right."""
    one = one_that_runs()
    for asked, said in ((0.05, ("running", None)), (0.15, ("queued", 1))):
        story = one.explain(1, standing(times=Times(micros(0), 0, 0, 0), now=micros(asked)))
        assert (story.state, story.position_now) == said


def test_ends_that_the_pool_alone_knows() -> None:
    for reason, state in [(Reason.CANCELLED, "cancelled"), (Reason.DEADLINE, "expired"), (Reason.NEVER_FITS, None)]:
        one = one_that_runs()
        ended = standing(position=0, state="ended", reason=reason, times=Times(micros(0.1), 0, 0, micros(0.15)))
        story = one.explain(3, ended)
        assert story.state == (state or "failed (NEVER_FITS)")
        assert story.seconds == 0.05


def test_a_request_that_ran_and_was_cancelled() -> None:
    one = one_that_runs()
    one.world.cancel(1)  # 0.3
    ended = standing(position=0, state="ended", reason=Reason.CANCELLED, times=Times(micros(0), 0, 0, micros(0.31)))
    story = one.explain(1, ended)
    assert (story.state, story.seconds, story.tokens) == ("cancelled", 0.31, 1)
    assert one.explain(1).state == "ended"


def test_an_id_that_came_twice_means_the_last_request() -> None:
    one = Told(max_bs=1, slots=64)
    world = one.world
    world.form(64)
    world.arrive(Asked(2, 1))
    world.back(WORD)
    world.arrive(Asked(2, 1))
    world.back(WORD)
    one.submitted = {1: micros(0), 2: micros(0.25)}
    times = [n / 10 for n in range(len(world.record))]
    lines = [
        Note({**line.values, "claims": dict.fromkeys(line.values["claims"], "again")})
        if isinstance(line, Note)
        else line
        for line in journal(world, times, one.submitted)
    ]
    history = History("engine-0")
    history.take(lines)
    story = explain("again", [history], None, wall(1))
    assert story is not None
    assert story.submitted == micros(0.25) * 1000


def test_an_x_request_id_means_the_request_that_ended_last() -> None:
    one = Told(max_bs=1, slots=64)
    one.world.form(64)
    one.world.arrive(Asked(2, 1), Asked(2, 1))
    one.world.back(WORD)
    one.world.back(WORD)
    one.submitted = {1: micros(0), 2: micros(0)}
    times = [n / 10 for n in range(len(one.world.record))]
    lines = [
        Note({**line.values, "exchanges": dict.fromkeys(line.values["claims"], "mine")})
        if isinstance(line, Note)
        else line
        for line in journal(one.world, times, one.submitted)
    ]
    history = History("engine-0")
    history.take(lines)
    story = explain("mine", [history], None, wall(1))
    assert story is not None
    assert (story.request, story.state) == (name_of(2), "finished")
    assert explain("another", [history], None, wall(1)) is None
    first = explain(name_of(1), [history], None, wall(1))
    assert first is not None
    assert first.request == name_of(1)


def test_another_scheduler_takes_the_engine_over() -> None:
    """The second term's journal goes on with the same claim."""
    one = one_that_runs(tokens=3)
    history = History("engine-0")
    history.take(journal(one.world, [0.0, 0.1, 0.2], one.submitted))
    again = World(1, 1, 4)
    again.form(64)
    again.arrive(Asked(2, 2))
    again.back(WORD)
    again.back(WORD)
    second = list(journal(again, [2.0, 2.1, 2.2, 2.3], {1: micros(0)}))
    first_line = second[0]
    assert isinstance(first_line, Heading)
    history.take([replace(first_line, term=2, claims={1: Named(name_of(1), micros(0))}), *second[1:]])
    story = explain(name_of(1), [history], None, wall(3))
    assert story is not None
    whole(story)
    assert [part.kind for part in story.parts] == [Kind.CLAIM, Kind.RUN, Kind.LOST, Kind.TAKEN_OVER, Kind.RUN]


def test_a_heading_of_another_release_is_read() -> None:
    """Requests in its state have fields that are not known here."""
    one, stories = one_that_runs(tokens=3), list[Explanation | None]()
    known = one.world.core.state()
    requests = [
        request | {"offer": [7], "arrived": request["arrived"] | {"tail": [5]}} for request in known["requests"]
    ]
    assert requests
    for state in (known, known | {"requests": requests}):
        history = History("engine-0")
        line = replace(heading(one.world, 0.5), state=state, claims={1: Named(name_of(1), micros(0))})
        history.take([line])
        stories.append(explain(name_of(1), [history], None, wall(3)))
    assert stories[0] == stories[1]
    assert stories[0] is not None


def test_a_turn_that_waited_for_the_engine_of_its_prefix() -> None:
    """It went to another engine in the end, and requests were taken before it meanwhile."""
    one = one_that_runs(tokens=1)
    lines = [
        Note({**line.values, "prefix_at": {"1": ["engine-1", 3]}}) if isinstance(line, Note) else line
        for line in journal(one.world, [0.0, 0.1, 0.2], one.submitted)
    ]
    history = History("engine-0")
    history.take(lines)
    story = explain(name_of(1), [history], None, wall(1))
    assert story is not None
    whole(story)
    assert told(story)[0] == (
        "waited 100.0 ms in the queue for engine-1, which had the keys and values of its prompt's beginning"
    )
    assert title(story).endswith(
        "; engine-1 had the keys and values of its prompt's beginning; 3 requests overtook it as it waited for that"
    )
    assert as_json(story, None)["overtaken"] == 3
