"""The journal: what it records replays to the same actions, whatever happened to its file."""

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from properties import examples
from scheduler.life_script import REPLACED, RETIRED, SCRIPT, UNFINISHED, fresh_lifecycle
from scheduler.world import EOS, WORD, Asked, World, storm

from orca_scheduler.core.core import (
    Action,
    Adopted,
    Arrived,
    BatchReturned,
    BeginHere,
    Cancelled,
    Commit,
    Core,
    Drain,
    EngineLost,
    EngineReady,
    Event,
    GiveBack,
    HandedOver,
    HandOver,
    LetGo,
    Measured,
    Member,
    Outcome,
    Pull,
    Pulled,
    ScheduleBatch,
    Tick,
)
from orca_scheduler.core.request import Arrival, Reason
from orca_scheduler.core.selection import Stop
from orca_scheduler.lifecycle.events import LifeAction, LifeEvent, Opened, Suspected
from orca_scheduler.lifecycle.lifecycle import Lifecycle, State
from orca_scheduler.lifecycle.suspicions import Kind
from orca_scheduler.master import journal as module
from orca_scheduler.master.journal import (
    CoreStep,
    Heading,
    Journal,
    LifeStep,
    Named,
    Note,
    decode,
    encode,
    files_in,
    lifecycle_state,
    parse,
    path_of,
    read,
    replay,
    restored_lifecycle,
)
from orca_scheduler.master.recent import SECTIONS, Recent

PROPERTY = settings(max_examples=examples(80), database=None)

Step = CoreStep | LifeStep


def write(path: Path, world: World, script: Sequence[LifeEvent] = SCRIPT) -> list[Step]:
    """Steps a fresh core through a world's events, with a lifecycle beside it, and keeps their journal with notes.

    Returns the steps that it has written.
    """
    core, life = world.fresh(), fresh_lifecycle()
    journal = Journal(path, core, life)
    steps: list[Step] = []
    count = len(world.record)
    for n, (event, _) in enumerate(world.record):
        steps.append(core_step(journal, core, event))
        for life_event in script[n * len(script) // count : (n + 1) * len(script) // count]:
            steps.append(life_step(journal, life, life_event))
        if n % 3 == 0:
            journal.note(event=n, claims={1: "näme"})
    journal.close()
    return steps


def core_step(journal: Journal, core: Core, event: Event) -> CoreStep:
    actions = core.step(event)
    journal.core_step(event, actions)
    return CoreStep(event, tuple(actions))


def life_step(journal: Journal, life: Lifecycle, event: LifeEvent) -> LifeStep:
    actions = life.step(event)
    journal.life_step(event, actions)
    return LifeStep(event, tuple(actions))


def core_steps(world: World) -> list[CoreStep]:
    return [CoreStep(event, tuple(actions)) for event, actions in world.record]


def replayed(path: Path) -> list[tuple[Step, tuple[Action | LifeAction, ...]]]:
    """Each recorded step with the actions that came out this time."""
    return [(step, tuple(again)) for step, again in replay(path)]


def recorded(path: Path) -> list[Step]:
    """The steps of a journal, all of which replay to the same actions."""
    steps = replayed(path)
    assert all(step.actions == again for step, again in steps)
    return [step for step, _ in steps]


@settings(PROPERTY, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 32), steps=st.integers(0, 120))
def test_replay_gives_the_same_actions(tmp_path: Path, seed: int, steps: int) -> None:
    """Events come out as they went in, actions as the live core and lifecycle gave them; some life events are lost."""
    draw = random.Random(seed)
    world = storm(draw, steps)
    script = [event for event in SCRIPT if draw.random() < 0.9]
    written = write(tmp_path / "journal.jsonl", world, script)
    assert [step for step in written if isinstance(step, CoreStep)] == core_steps(world)
    assert [step.event for step in written if isinstance(step, LifeStep)] == script
    assert recorded(tmp_path / "journal.jsonl") == written


@PROPERTY
@given(seed=st.integers(0, 1 << 32), steps=st.integers(0, 150))
def test_a_core_goes_on_from_its_state(seed: int, steps: int) -> None:
    """Another core takes over a state that went through JSON, at any event, and does what the first one did."""
    world = storm(random.Random(seed), 150)
    at = min(steps, len(world.record))
    first, second = world.fresh(), world.fresh()
    for event, _ in world.record[:at]:
        first.step(event)
    state = json.dumps(first.state())
    second.restore(json.loads(state))
    assert json.dumps(second.state()) == state
    for event, actions in world.record[at:]:
        assert second.step(event) == actions
    assert json.dumps(first.state()) == state, "the two share something"


@settings(PROPERTY, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_torn_file_replays_up_to_the_tear(tmp_path: Path, data: st.DataObject) -> None:
    """The writer was killed: the file ends anywhere, in a line of either machine, even in its first line or before."""
    path = tmp_path / "journal.jsonl"
    written = write(path, storm(random.Random(7), 40))
    whole = path.read_bytes()
    torn = whole[: round(data.draw(st.floats(0, 1)) * len(whole))]  # its heading has clocks: no length twice
    path.write_bytes(torn)
    whole_steps = [line for line in torn.split(b"\n")[:-1] if line.startswith((b'{"event"', b'{"life"'))]
    assert recorded(path) == written[: len(whole_steps)]


def test_a_tear_in_every_kind_of_line(tmp_path: Path) -> None:
    """Wherever the last line is cut, the steps before it are read and replayed, and nothing after them."""
    path = tmp_path / "journal.jsonl"
    core, life = Core(2, 3, 16), fresh_lifecycle()
    journal = Journal(path, core, life)
    written: list[Step] = [
        core_step(journal, core, EngineReady(0.0, 64, 1)),
        life_step(journal, life, Opened(0.0, 3, (7,), True)),
        core_step(journal, core, Arrived(0.0, (Arrival(7, 1, 2, 3),))),
    ]
    journal.note(claims={7: "näme"})
    written.append(life_step(journal, life, SCRIPT[1]))
    journal.close()
    whole = path.read_bytes()
    kinds = [b'{"core"', b'{"event"', b'{"life"', b'{"event"', b'{"note"', b'{"life"']
    lines = whole.splitlines(keepends=True)
    assert [line.partition(b":")[0] for line in lines] == kinds
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        count = sum(line.startswith((b'{"event"', b'{"life"')) for line in whole[:end].split(b"\n")[:-1])
        assert recorded(path) == written[:count]
        assert len(list(read(path))) == whole[:end].count(b"\n")


def test_a_tear_within_a_character(tmp_path: Path) -> None:
    """Request ids are the clients': the last line may end in half of a letter."""
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, Core(2, 3, 16), fresh_lifecycle())
    journal.core_step(Tick(0.0), [])
    journal.note(claims={1: "näme"})
    journal.close()
    whole = path.read_bytes()
    note = whole.index(b'{"note"')
    for end in range(note, len(whole)):
        path.write_bytes(whole[:end])
        assert recorded(path) == [CoreStep(Tick(0.0), ())]


@pytest.mark.parametrize("kept", [0, 1, 20])
def test_a_journal_without_its_first_line_is_empty(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "journal.jsonl"
    write(path, storm(random.Random(1), 5))
    path.write_bytes(path.read_bytes()[:kept])
    assert recorded(path) == []


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def rewrite(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def first_token(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The first return whose tokens were all committed: none is void."""
    for line in lines:
        if line.get("event", [""])[0] == "BatchReturned":
            tokens = [token for made in line["event"][1]["made"] for token in made or [None]]
            for name, fields in line["actions"]:
                if name == "Commit" and None not in tokens and fields["outcomes"].get("token") == tokens:
                    return line
    raise AssertionError("the storm has no token")


def change_a_token(lines: list[dict[str, Any]]) -> None:
    first_token(lines)["event"][1]["made"][0][0] += 100


def change_an_action(lines: list[dict[str, Any]]) -> None:
    commit = next(action for action in first_token(lines)["actions"] if action[0] == "Commit")
    commit[1]["outcomes"]["base"][0] += 1


def change_an_arrival(lines: list[dict[str, Any]]) -> None:
    """One more input token, for a request that runs at once."""
    arrival = next(line for line in lines if line.get("event", [""])[0] == "Arrived" and line["actions"])
    arrival["event"][1]["requests"][0]["input_tokens"] += 1


def change_the_slots(lines: list[dict[str, Any]]) -> None:
    next(line for line in lines if line.get("event", [""])[0] == "EngineReady")["event"][1]["iteration"] += 1000


def drop_an_arrival(lines: list[dict[str, Any]]) -> None:
    lines.remove(next(line for line in lines if line.get("event", [""])[0] == "Arrived" and line["actions"]))


def life_line(lines: list[dict[str, Any]], event: str) -> dict[str, Any]:
    return next(line for line in lines if line.get("life", [""])[0] == event)


def change_an_epoch(lines: list[dict[str, Any]]) -> None:
    life_line(lines, "EpochGiven")["life"][1]["epoch"] += 1


def change_a_verdict(lines: list[dict[str, Any]]) -> None:
    life_line(lines, "Wake")["actions"][0][1]["why"] += "."


def drop_a_suspicion(lines: list[dict[str, Any]]) -> None:
    """The only one that says that rank 1 has ended."""
    lines.remove(next(line for line in lines if "life" in line and Kind.GONE in str(line["life"])))


def change_the_shape(lines: list[dict[str, Any]]) -> None:
    lines[0]["lifecycle"]["shape"]["slots"] = 64


CHANGES = [
    change_a_token,
    change_an_action,
    change_an_arrival,
    change_the_slots,
    drop_an_arrival,
    change_an_epoch,
    change_a_verdict,
    drop_a_suspicion,
    change_the_shape,
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_journal_is_detected(tmp_path: Path, change: Callable[[list[dict[str, Any]]], None]) -> None:
    """Another event gives other actions than recorded, or cannot be: its batch never was."""
    path = tmp_path / "journal.jsonl"
    for seed in range(10):
        write(path, storm(random.Random(seed), 60))
        lines = lines_of(path)
        change(lines)
        rewrite(path, lines)
        try:
            same = all(step.actions == again for step, again in replayed(path))
        except (AssertionError, IndexError):
            same = False
        assert not same


@pytest.mark.parametrize("seed", range(6))
def test_a_full_journal_goes_on_in_a_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """The last two files stay, and each replays by itself: a new one begins with the states of both machines."""
    limit = 6000
    monkeypatch.setattr(module, "LIMIT", limit)
    written = write(tmp_path / "journal.jsonl", storm(random.Random(seed), 400))
    assert {path.name for path in tmp_path.iterdir()} == {"journal.jsonl", "journal.1.jsonl"}
    older, newer = recorded(tmp_path / "journal.1.jsonl"), recorded(tmp_path / "journal.jsonl")
    assert older
    assert older + newer == written[-len(older + newer) :]
    longest = max(len(line) for path in tmp_path.iterdir() for line in path.read_text().splitlines())
    for path in tmp_path.iterdir():
        assert path.stat().st_size <= limit + 2 * longest
    assert (tmp_path / "journal.1.jsonl").stat().st_size > limit


def test_a_journal_goes_on_after_any_step_of_either_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step fills its file: each file holds one step at most, and begins in the state in which it was made."""
    monkeypatch.setattr(module, "LIMIT", 0)
    world = storm(random.Random(5), 60)
    core, life = world.fresh(), fresh_lifecycle()
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, core, life)
    older = path.with_suffix(".1.jsonl")
    for n, life_event in enumerate(SCRIPT):
        if n < len(world.record):
            step = core_step(journal, core, world.record[n][0])
            journal.flush()
            assert recorded(older) == [step]
        step = life_step(journal, life, life_event)
        assert recorded(older) == [step]
    journal.close()
    (heading,) = read(path)
    assert isinstance(heading, Heading)
    assert restored_lifecycle(heading.lifecycle) == life
    assert recorded(path) == []


def test_a_core_goes_on_with_a_batch_ahead(tmp_path: Path) -> None:
    """A file that begins while requests are in two batches, one of them cancelled: slots and rows are freed once."""
    world = World(2, 1, 4, run_ahead=1)
    world.form(16)
    world.arrive(Asked(2, 5), Asked(2, 5, eos=True))
    world.cancel(1)
    assert [world.lives[claim].in_flight for claim in (1, 2)] == [2, 2]
    at = len(world.record)
    world.back(WORD, EOS)
    world.arrive(Asked(2, 3))
    world.quiesce()
    core = world.fresh()
    for event, _ in world.record[:at]:
        core.step(event)
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, core, fresh_lifecycle())
    for event, _ in world.record[at:]:
        core_step(journal, core, event)
    journal.close()
    assert recorded(path) == core_steps(world)[at:]


def test_a_drained_core_goes_on_drained() -> None:
    world = World(2, 2, 4, run_ahead=1)
    world.form(64)
    world.arrive(Asked(2, 5))
    world.drain()
    again = world.fresh()
    again.restore(json.loads(json.dumps(world.core.state())))
    world.back(WORD)
    world.arrive(Asked(2, 5))
    assert [again.step(event) for event, _ in world.record[-2:]] == [actions for _, actions in world.record[-2:]]
    assert again.n_scheduled == 1


def test_a_journal_of_an_older_form_is_read_and_not_replayed(tmp_path: Path) -> None:
    """Its core made keys of tokens that it had. For people it tells the same; fields that are gone are passed over."""
    path = tmp_path / "journal.jsonl"
    write(path, storm(random.Random(2), 60))
    _, *now = read(path)
    lines = lines_of(path)
    del lines[0]["state"]["form"]
    for line in lines[1:]:
        for name, fields in [line.get("event", ["", {}]), *line.get("actions", [])]:
            if name == "Arrived":
                for arrival in fields["requests"]:
                    arrival["tail"] = [7]
            elif name == "BatchReturned":
                fields["offers"] = [[7]] * len(fields["made"])
            elif name == "ScheduleBatch":
                fields["members"]["drafts"] = [[]] * len(fields["members"]["claim"])
    rewrite(path, lines)
    _, *then = read(path)
    assert then == now
    with pytest.raises(ValueError, match="has form 1: the release that wrote it replays it, this one form 2"):
        replayed(path)


def test_below_the_limit_there_is_one_file(tmp_path: Path) -> None:
    write(tmp_path / "journal.jsonl", storm(random.Random(0), 200))
    assert [path.name for path in tmp_path.iterdir()] == ["journal.jsonl"]


def test_of_old_terms_only_so_many_files_and_bytes_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new term removes the oldest files of its engine's earlier terms, and no other engine's."""

    def begin(engine: str, term: int) -> None:
        Journal(path_of(tmp_path, engine, term), Core(2, 3, 16), fresh_lifecycle(), term).close()

    def terms() -> list[tuple[str, int, bool]]:
        return [(file.engine, file.term, file.older) for file in files_in(tmp_path)]

    monkeypatch.setattr(module, "OLDER_FILES", 3)
    begin("a-1", 7)
    for term in range(8, 12):
        begin("a", term)
    path_of(tmp_path, "a", 9).replace(tmp_path / "journal-a-9.1.jsonl")
    begin("a", 9)  # of a scheduler that still believes in an old term
    assert terms() == [
        ("a", 8, False),
        ("a", 9, True),
        ("a", 9, False),
        ("a", 10, False),
        ("a", 11, False),
        ("a-1", 7, False),
    ]
    begin("a", 12)
    assert terms() == [("a", 9, False), ("a", 10, False), ("a", 11, False), ("a", 12, False), ("a-1", 7, False)]
    monkeypatch.setattr(module, "OLDER", path_of(tmp_path, "a", 12).stat().st_size)
    begin("a", 13)
    assert terms() == [("a", 12, False), ("a", 13, False), ("a-1", 7, False)]


def test_a_heading_says_whose_requests_they_are_and_when(tmp_path: Path) -> None:
    path = path_of(tmp_path, "a", 5)
    before = time.time_ns(), time.monotonic()
    Journal(path, Core(2, 3, 16), fresh_lifecycle(), 5, lambda: {3: Named("näme", 77)}).close()
    after = time.time_ns(), time.monotonic()
    (heading,) = read(path)
    assert isinstance(heading, Heading)
    assert (heading.term, heading.claims) == (5, {3: Named("näme", 77)})
    assert before[0] <= heading.wall <= after[0]
    assert before[1] <= heading.now <= after[1]
    assert module.request_names([heading]) == {3: "näme"}


@pytest.mark.parametrize("share", [0, 4000, 1 << 20])
def test_memory_has_the_latest_lines(share: int) -> None:
    """In sections that begin with a heading; never more than its share and a section's last line beyond it."""
    world = storm(random.Random(3), 300)
    recent = Recent(share).of("engine-0")
    core = world.fresh()
    journal = Journal(None, core, fresh_lifecycle(), recent=recent)
    for event, _ in world.record:
        core_step(journal, core, event)
        assert isinstance(parse(recent.lines(0)[0]), Heading)
    events = [line.event for line in map(parse, recent.lines(0)) if isinstance(line, CoreStep)]
    assert events == [event for event, _ in world.record][len(world.record) - len(events) :]
    sections = sum(isinstance(parse(line), Heading) for line in recent.lines(0))
    assert sections <= SECTIONS
    assert (len(events) == len(world.record)) == (share == 1 << 20)
    last = recent.lines(time.time_ns())
    assert last == recent.lines(0)[-len(last) :], "what ended before is left out"
    assert isinstance(parse(last[0]), Heading)


def test_a_step_that_waited_for_the_pool_says_so(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, Core(2, 3, 16), fresh_lifecycle())
    journal.core_step(Tick(0.0), [], late=0.25)
    journal.core_step(Tick(0.0), [])
    journal.close()
    _, late, usual = read(path)
    assert (late, usual) == (CoreStep(Tick(0.0), (), 0.25), CoreStep(Tick(0.0), ()))


def test_only_its_owner_may_read_it(tmp_path: Path) -> None:
    """The token ids of answers are in it."""
    path = tmp_path / "j.jsonl"
    Journal(path, Core(2, 3, 16), fresh_lifecycle()).close()
    assert path.stat().st_mode & 0o777 == 0o600


def test_notes_are_read_and_change_nothing(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    core, life = Core(2, 3, 16, 1), fresh_lifecycle()
    journal = Journal(path, core, life)
    journal.note(claims={5: "a"})
    journal.close()
    heading, note = list(read(path))
    assert isinstance(heading, Heading)
    assert heading.numbers == {"max_bs": 2, "n_workers": 3, "block_size": 16, "run_ahead": 1, "policy": "paper"}
    assert heading.state == json.loads(json.dumps(core.state()))
    assert restored_lifecycle(heading.lifecycle) == life
    assert note == Note({"claims": {"5": "a"}})
    assert recorded(path) == []


# -- values through JSON


EVENTS: list[Event] = [
    Adopted(1.5, "balanced,positions=128"),
    EngineReady(1.5, 100, 1 << 60),
    Arrived(0.1, ()),
    Arrived(0.1, (Arrival(1 << 50, 2, 3, 4), Arrival(5, 6, 7, 8, 2, (9, 10), (11,), 12.25))),
    BatchReturned(0.1 + 0.2, 7, ((1,), (), (2, 3)), (1,)),
    BatchReturned(0.5, 8, ((1,), (2, 3)), offered=(0, 3), keys=((1 << 50, "ab"), (2, "cd"))),
    Cancelled(1e9 + 1e-7, (1, 2)),
    EngineLost(0.25),
    Drain(0.25),
    Tick(0.25),
    Measured(0.25, 300),
    Pulled(0.25, 7, False),
    LetGo(0.25, (1 << 50, 7)),
]
MEMBERS = (
    Member(1 << 50, 3, 4, 9, outputs=0, new_blocks=(5, 6), token=None, shared=1),
    Member(2, 0, 4, 3, outputs=3, new_blocks=(), token=1234),
)
ACTIONS: list[Action] = [
    ScheduleBatch(1 << 60, MEMBERS, 1, (1, 2), 32, Stop.SLOTS.value),
    ScheduleBatch(7, MEMBERS[1:], 0, (), 32, "another policy's reason"),
    Commit(None, (Outcome(1, 0, None, Reason.DEADLINE),)),
    Commit(7, (Outcome(1, 0, 5, None), Outcome(2, 3, 0, Reason.EOS))),
    GiveBack(((1, True), (2, False))),
    HandOver((HandedOver(1 << 50, 3, 17), HandedOver(2, 0, 1))),
    Pull(8, 7, 1, 17, (5, 6), (2,)),
    BeginHere((1 << 50, 7), tried=False),
]


def through_json(value: Any) -> Any:
    return module.DECODER.decode(module.ENCODER.encode(value))


def unchanged(value: Any) -> None:
    """Equal, and of the same types all the way down: a repr tells tuples from lists, and names named tuples."""
    again = decode(through_json(encode(value)))
    assert again == value
    assert repr(again) == repr(value)


@pytest.mark.parametrize("value", [*EVENTS, *ACTIONS], ids=lambda value: type(value).__name__)
def test_events_and_actions_come_through_json_unchanged(value: Event | Action) -> None:
    unchanged(value)
    assert hash(decode(through_json(encode(value)))) == hash(value)


SCRIPTS = pytest.mark.parametrize(
    "script", [SCRIPT, REPLACED, UNFINISHED, RETIRED], ids=["script", "replaced", "unfinished", "retired"]
)


def test_every_kind_is_tried() -> None:
    """EVENTS and ACTIONS hold every kind of the core, the scripts of lifecycles every kind of theirs."""
    assert {type(event) for event in EVENTS} == set(get_args(Event))
    assert {type(action) for action in ACTIONS} == set(get_args(Action))
    events, actions, states = set[type[Any]](), set[type[Any]](), set[type[Any]]()
    for script in (SCRIPT, REPLACED, UNFINISHED, RETIRED):
        life = fresh_lifecycle()
        for event in script:
            states.add(type(life.state))
            events.add(type(event))
            actions.update(map(type, life.step(event)))
        states.add(type(life.state))
    assert events == set(get_args(LifeEvent))
    assert actions == set(get_args(LifeAction))
    assert states == set(get_args(State))
    assert {event.suspicion.kind for event in SCRIPT if isinstance(event, Suspected)} == set(Kind)


def test_every_kind_has_a_name_of_its_own() -> None:
    unions = (Event, Action, LifeEvent, LifeAction, State)
    kinds = {kind for union in unions for kind in get_args(union)}
    assert len(module.KINDS) == len(kinds), "decode would take one kind for another"


@SCRIPTS
def test_all_of_a_lifecycle_comes_through_json_unchanged(script: Sequence[LifeEvent]) -> None:
    """Every event, every action, and the state after every step."""
    life = fresh_lifecycle()
    unchanged(life.state)
    for event in script:
        for value in (event, *life.step(event), life.state):
            unchanged(value)


@SCRIPTS
def test_a_lifecycle_goes_on_from_its_state(script: Sequence[LifeEvent]) -> None:
    """At any step, in each of its states, another lifecycle takes over and does what the first one does."""
    actions = actions_of(fresh_lifecycle(), script)
    life = fresh_lifecycle()
    for n in range(len(script) + 1):
        values = lifecycle_state(life)
        written = json.dumps(values)
        for state in (values, json.loads(written)):
            again = restored_lifecycle(state)
            assert again == life
            assert repr(again) == repr(life)
            assert again.wake_at == life.wake_at
            assert actions_of(again, script[n:]) == actions[n:]
            assert json.dumps(lifecycle_state(life)) == written, "the two share something"
        actions_of(life, script[n : n + 1])


def actions_of(life: Lifecycle, events: Iterable[LifeEvent]) -> list[list[LifeAction]]:
    return [life.step(event) for event in events]


def test_the_command(tmp_path: Path) -> None:
    """`python -m orca_scheduler.master.journal FILE`"""
    path = tmp_path / "journal.jsonl"
    world = storm(random.Random(3), 60)
    written = write(path, world)
    command = [sys.executable, "-m", "orca_scheduler.master.journal", str(path)]
    good = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (good.returncode, good.stdout) == (0, f"{len(written)} events gave the same actions\n")
    lines = lines_of(path)
    change_a_token(lines)
    rewrite(path, lines)
    bad = subprocess.run(command, capture_output=True, text=True, check=False)
    assert bad.returncode == 1
    assert "BatchReturned" in bad.stderr
    assert "and gives" in bad.stderr


@pytest.mark.parametrize("by", ["a step", "a flush", "many notes", "the end"])
def test_a_full_disk_ends_the_journal_and_not_the_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, by: str
) -> None:
    path = tmp_path / "journal.jsonl"
    path.symlink_to("/dev/full")  # takes no byte: No space left on device
    life = fresh_lifecycle()
    journal = Journal(path, Core(2, 3, 16), life)
    match by:
        case "a step":
            journal.life_step(SCRIPT[0], life.step(SCRIPT[0]))
        case "a flush":
            journal.flush()
        case "many notes":
            for _ in range(100):
                journal.note(text="x" * 1000)
        case _:
            journal.close()
    journal.note(after="all")
    journal.flush()
    journal.close()
    assert [record.message for record in caplog.records] == ["journal given up"]


def test_a_journal_that_cannot_be_opened_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal(tmp_path / "nowhere" / "journal.jsonl", Core(2, 3, 16), fresh_lifecycle())
    journal.note(after="all")
    journal.close()
    assert [record.message for record in caplog.records] == ["journal given up"]
