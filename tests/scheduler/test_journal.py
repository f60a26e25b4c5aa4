"""The journal: what it records replays to the same actions, whatever happened to its file."""

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scheduler.world import EOS, WORD, Asked, World, storm

from orca_scheduler import journal as module
from orca_scheduler.core import Arrived, BatchReturned, Cancelled, Core, Drain, EngineLost, EngineReady, Event, Tick
from orca_scheduler.journal import Journal, decode, encode, read, replay
from orca_scheduler.request import Arrival

Encoded = list[list[Any]]


def write(path: Path, world: World) -> None:
    """Steps a fresh core through a world's events and keeps its journal, with notes between."""
    core = world.fresh()
    journal = Journal(path, core)
    for n, (event, _) in enumerate(world.record):
        journal.step(event, core.step(event))
        if n % 3 == 0:
            journal.note(event=n, claims={1: "näme"})
    journal.close()


def replayed(path: Path) -> list[tuple[Event, Encoded, Encoded]]:
    return [(step.event, step.actions, again) for step, again in replay(path)]


def as_json(world: World) -> list[tuple[Event, Encoded]]:
    return [(event, json.loads(json.dumps([encode(action) for action in actions]))) for event, actions in world.record]


@settings(max_examples=60, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 32), steps=st.integers(0, 120))
def test_replay_gives_the_same_actions(tmp_path: Path, seed: int, steps: int) -> None:
    """Events come out as they went in, actions as the live core gave them."""
    world = storm(random.Random(seed), steps)
    write(tmp_path / "journal.jsonl", world)
    steps_again = replayed(tmp_path / "journal.jsonl")
    assert [(event, recorded) for event, recorded, _ in steps_again] == as_json(world)
    assert all(recorded == again for _, recorded, again in steps_again)


@settings(max_examples=60, deadline=None, database=None)
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


@settings(max_examples=60, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_torn_file_replays_up_to_the_tear(tmp_path: Path, data: st.DataObject) -> None:
    """The writer was killed: the file ends anywhere, even in its first line or before it."""
    world = storm(random.Random(7), 40)
    path = tmp_path / "journal.jsonl"
    write(path, world)
    whole = path.read_bytes()
    torn = whole[: data.draw(st.integers(0, len(whole)))]
    path.write_bytes(torn)
    events = [line for line in torn.split(b"\n")[:-1] if line.startswith(b'{"event"')]
    steps = replayed(path)
    assert len(steps) == len(events)
    assert [(event, recorded) for event, recorded, _ in steps] == as_json(world)[: len(events)]
    assert all(recorded == again for _, recorded, again in steps)


def test_a_tear_within_a_character(tmp_path: Path) -> None:
    """Names are the clients': the last line may end in half of a letter."""
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, Core(2, 3, 16))
    journal.step(Tick(0.0), [])
    journal.note(claims={1: "näme"})
    journal.close()
    whole = path.read_bytes()
    note = whole.index(b'{"note"')
    for end in range(note, len(whole)):
        path.write_bytes(whole[:end])
        assert [event for event, _, _ in replayed(path)] == [Tick(0.0)]


@pytest.mark.parametrize("kept", [0, 1, 20])
def test_a_journal_without_its_first_line_is_empty(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "journal.jsonl"
    write(path, storm(random.Random(1), 5))
    path.write_bytes(path.read_bytes()[:kept])
    assert replayed(path) == []


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def rewrite(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def first_token(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The first return whose tokens were all committed: none is void."""
    for line in lines:
        if line.get("event", [""])[0] == "BatchReturned":
            for name, *fields in line["actions"]:
                if name == "Commit" and [outcome[2] for outcome in fields[1]] == line["event"][3]:
                    return line
    raise AssertionError("the storm has no token")


def change_a_token(lines: list[dict[str, Any]]) -> None:
    first_token(lines)["event"][3][0] += 100


def change_an_action(lines: list[dict[str, Any]]) -> None:
    first_token(lines)["actions"][0][2][0][1] += 1


def change_an_arrival(lines: list[dict[str, Any]]) -> None:
    """One more input token, for somebody who runs at once."""
    arrival = next(line for line in lines if line.get("event", [""])[0] == "Arrived" and line["actions"])
    arrival["event"][2][0][2] += 1


def change_the_slots(lines: list[dict[str, Any]]) -> None:
    next(line for line in lines if line.get("event", [""])[0] == "EngineReady")["event"][3] += 1000


def drop_an_arrival(lines: list[dict[str, Any]]) -> None:
    lines.remove(next(line for line in lines if line.get("event", [""])[0] == "Arrived" and line["actions"]))


@pytest.mark.parametrize(
    "change", [change_a_token, change_an_action, change_an_arrival, change_the_slots, drop_an_arrival]
)
def test_a_changed_journal_is_detected(tmp_path: Path, change: Callable[[list[dict[str, Any]]], None]) -> None:
    """Another event gives other actions than recorded, or cannot be: its batch never was."""
    path = tmp_path / "journal.jsonl"
    for seed in range(10):
        write(path, storm(random.Random(seed), 60))
        lines = lines_of(path)
        change(lines)
        rewrite(path, lines)
        try:
            same = all(recorded == again for _, recorded, again in replayed(path))
        except (AssertionError, IndexError):
            same = False
        assert not same


@pytest.mark.parametrize("seed", range(6))
def test_a_full_journal_goes_on_in_a_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """The last two files stay, and each replays by itself: a new one begins with the core's state."""
    limit = 6000
    monkeypatch.setattr(module, "LIMIT", limit)
    world = storm(random.Random(seed), 400)
    write(tmp_path / "journal.jsonl", world)
    assert {path.name for path in tmp_path.iterdir()} == {"journal.jsonl", "journal.1.jsonl"}
    older, newer = replayed(tmp_path / "journal.1.jsonl"), replayed(tmp_path / "journal.jsonl")
    assert older
    assert all(recorded == again for _, recorded, again in older + newer)
    everything = as_json(world)
    assert [(event, recorded) for event, recorded, _ in older + newer] == everything[-len(older + newer) :]
    longest = max(len(line) for path in tmp_path.iterdir() for line in path.read_text().splitlines())
    for path in tmp_path.iterdir():
        assert path.stat().st_size <= limit + 2 * longest
    assert (tmp_path / "journal.1.jsonl").stat().st_size > limit


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
    journal = Journal(path, core)
    for event, _ in world.record[at:]:
        journal.step(event, core.step(event))
    journal.close()
    steps = replayed(path)
    assert [(event, recorded) for event, recorded, _ in steps] == as_json(world)[at:]
    assert all(recorded == again for _, recorded, again in steps)


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


def test_below_the_limit_there_is_one_file(tmp_path: Path) -> None:
    write(tmp_path / "journal.jsonl", storm(random.Random(0), 200))
    assert [path.name for path in tmp_path.iterdir()] == ["journal.jsonl"]


def test_notes_are_read_and_change_nothing(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, Core(2, 3, 16, 1))
    journal.note(claims={5: "a"})
    journal.close()
    heading, note = list(read(path))
    assert heading["core"] == {"max_bs": 2, "n_workers": 3, "block_size": 16, "run_ahead": 1}
    assert note == {"note": {"claims": {"5": "a"}}}
    assert replayed(path) == []


EVENTS: list[Event] = [
    EngineReady(1.5, 100, 1 << 60),
    Arrived(0.1, ()),
    Arrived(0.1, (Arrival(1 << 50, 2, 3, 4), Arrival(5, 6, 7, 8, 2, (9, 10), (11,), 12.25))),
    BatchReturned(0.1 + 0.2, 7, (1, 2, 3)),
    Cancelled(1e9 + 1e-7, (1, 2)),
    EngineLost(0.25),
    Drain(0.25),
    Tick(0.25),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_events_come_through_json_unchanged(event: Event) -> None:
    again = decode(json.loads(json.dumps(encode(event))))
    assert again == event
    assert hash(again) == hash(event)  # tuples all the way down


def test_the_command(tmp_path: Path) -> None:
    """`python -m orca_scheduler.journal FILE`"""
    path = tmp_path / "journal.jsonl"
    world = storm(random.Random(3), 60)
    write(path, world)
    command = [sys.executable, "-m", "orca_scheduler.journal", str(path)]
    good = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (good.returncode, good.stdout) == (0, f"{len(world.record)} events gave the same actions\n")
    lines = lines_of(path)
    change_a_token(lines)
    rewrite(path, lines)
    bad = subprocess.run(command, capture_output=True, text=True, check=False)
    assert bad.returncode == 1
    assert "BatchReturned" in bad.stderr
    assert "and gives" in bad.stderr
