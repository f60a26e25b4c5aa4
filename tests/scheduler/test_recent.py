"""The memory of the last steps: its readers, its bounds, and that no token is in the live page's lines unasked."""

import json
import time
from collections.abc import Sequence
from typing import Any

import pytest
from scheduler.life_script import fresh_lifecycle

from orca_common.block_keys import keys_of, root_of
from orca_scheduler.core.core import (
    Action,
    Arrived,
    BatchReturned,
    Commit,
    Core,
    EngineLost,
    EngineReady,
    Member,
    Outcome,
    ScheduleBatch,
)
from orca_scheduler.core.request import Arrival, Reason
from orca_scheduler.core.selection import Stop
from orca_scheduler.lifecycle.events import Confirmed, Say, Suspected
from orca_scheduler.lifecycle.suspicions import Kind, Suspicion
from orca_scheduler.live import event_of
from orca_scheduler.master.journal import Journal
from orca_scheduler.master.recent import LASTING, OVERHEAD, SECTIONS, STEPS, Kept, Recent

SECRET = 1_314_159_265  # a token id that no time holds
DIGEST = "c0ffee" * 5 + "11"  # the key of a block
SUSPECTED = Suspected(1.0, 1, Suspicion(1, Kind.GONE, "has ended"), 7)


def journal(recent: Recent, engine: str = "engine-0", term: int = 1) -> Journal:
    return Journal(None, Core(2, 1, 16), fresh_lifecycle(), term, recent=recent.of(engine))


def returned(iteration: int) -> tuple[BatchReturned, list[Action]]:
    event = BatchReturned(1.0, iteration, ((SECRET,), ()), offered=(2, 0), keys=((0, DIGEST),))
    member = Member(4, 0, 3, 2, 2, (), SECRET)
    outcomes = Outcome(4, 0, SECRET, Reason.EOS), Outcome(5, 0, None, Reason.NOT_FINITE)
    return event, [Commit(iteration, outcomes), ScheduleBatch(iteration + 1, (member,), 0, (), 16, Stop.POOL)]


def names(found: Sequence[Kept]) -> list[str]:
    lines = [json.loads(kept.line) for kept in found]
    return [(line.get("event") or line.get("life"))[0] for line in lines]


@pytest.mark.parametrize("show", [False, True])
def test_tokens_are_told_only_where_prompts_may_be_shown(show: bool) -> None:
    recent = Recent(1 << 20)
    journal(recent).core_step(*returned(1))
    (kept,) = recent.after(0, failures_alone=False)
    line = event_of(kept, show)
    assert [secret in json.dumps(line) for secret in (str(SECRET), DIGEST)] == [show, show]
    assert (line["engine"], line["term"]) == ("engine-0", 1)
    commit, batch = (fields for _, fields in line["line"]["actions"])
    assert [token is None for token in commit["outcomes"]["token"]] == [False, True], "who got a token is no secret"
    assert commit["outcomes"]["finish"] == ["EOS", "NOT_FINITE"]
    assert batch["members"]["claim"] == [4]


@pytest.mark.parametrize("show", [False, True])
def test_what_requests_begin_with_is_told_only_where_prompts_may_be_shown(show: bool) -> None:
    """Digests tell one who guesses a prompt that it is right."""
    recent, keys = Recent(1 << 20), keys_of(root_of("a"), [SECRET] * 16, 16)
    arrival = Arrival(4, 4, 17, 3, prefix=keys)
    journal(recent).core_step(Arrived(1.0, (arrival,)), [])
    (kept,) = recent.after(0, failures_alone=False)
    line = event_of(kept, show)
    assert (keys[1] in json.dumps(line)) == show
    (request,) = line["line"]["event"][1]["requests"]
    assert (request["claim"], request["input_tokens"]) == (4, 17)


def test_failures_outlast_steps_and_both_have_an_end() -> None:
    recent = Recent(SECTIONS << 14)
    written = journal(recent)
    written.life_step(SUSPECTED, [Say("rank lost", "it has ended")])
    written.life_step(Confirmed(1.0, 1), [])  # nothing that a reader wants
    for n in range(2 * STEPS):
        written.core_step(*returned(n))
    found = recent.after(0, failures_alone=False)
    assert names(found)[0] == "Suspected"
    assert len(found) <= STEPS + 1
    assert [kept.number for kept in found] == sorted({kept.number for kept in found})
    assert sum(len(line) for line in recent.lines(0)["engine-0"]) < (SECTIONS + 1) << 14
    (life,) = recent.after(0, failures_alone=True)
    assert not recent.after(life.number, failures_alone=True)
    for _ in range(2 * LASTING):
        written.life_step(SUSPECTED, [])
    assert len(recent.after(0, failures_alone=True)) == LASTING


def test_readers_of_failures_alone_can_say_how_long_streams_paused() -> None:
    recent = Recent(1 << 20)
    written = journal(recent)
    for event in (EngineReady(1.0, 64, 1), returned(1)[0], returned(2)[0], EngineLost(2.0)):
        written.core_step(event, [])
    assert names(recent.after(0, failures_alone=True)) == ["EngineReady", "BatchReturned", "EngineLost"]


def test_a_heading_larger_than_a_section_comes_seldom() -> None:
    """A core with thousands of requests has one of megabytes. With each step, it took 60 ms an iteration."""
    core, recent, steps = Core(64, 1, 16), Recent(1 << 13), 1000
    core.step(EngineReady(0.0, 1 << 16, 1))
    core.step(Arrived(0.0, tuple(Arrival(claim, claim, 10, 1000) for claim in range(64))))
    written = Journal(None, core, fresh_lifecycle(), recent=recent.of("engine-0"))
    headings = set(recent.lines(0)["engine-0"])
    (size,) = map(len, headings)
    assert size > 1 << 13
    for n in range(steps):
        written.core_step(*returned(n))
        lines = recent.lines(0)["engine-0"]
        headings |= {line for line in lines if line.startswith(b'{"core"')}
        assert sum(map(len, lines)) < 5 * size
    assert 2 < len(headings) < steps * (OVERHEAD + max(len(kept.line) for kept in recent.after(0, False))) / size + 2


@pytest.mark.parametrize("heading", [100, 6000, 12000, 16000, 20000])
def test_sections_keep_within_the_share(heading: int) -> None:
    """Headings of a tenth of it and more made it larger by one of them."""
    size, line = SECTIONS << 13, b"l" * 100
    memory = Recent(size).of("engine-0")
    memory.begin(b"h" * heading, 1)
    most = 0
    for _ in range(10 * size // len(line)):
        memory.add(line, lasting=False)
        lines = memory.lines(0)
        most = max(most, sum(map(len, lines)) + OVERHEAD * lines.count(line))
        if memory.full:
            memory.begin(b"h" * heading, 1)
    assert size // 2 < most <= max(size, 4 * heading) + SECTIONS * (OVERHEAD + len(line))


def test_a_reader_goes_on_where_it_was() -> None:
    """Over sections, engines and terms; each line comes once."""
    recent = Recent(SECTIONS << 12)
    one, other = journal(recent, "engine-0"), journal(recent, "engine-1")
    found, last = list[Kept](), 0
    for n in range(200):
        (one if n % 3 else other).core_step(*returned(n))
        if n == 100:
            one = journal(recent, "engine-0", term=2)
        if n % 7 == 0:
            found += recent.after(last, failures_alone=False)
            last = found[-1].number
    found += recent.after(last, failures_alone=False)
    iterations = [json.loads(kept.line)["event"][1]["iteration"] for kept in found]
    assert iterations == list(range(200))
    assert {(kept.engine, kept.term) for kept in found} == {("engine-0", 1), ("engine-0", 2), ("engine-1", 1)}


def test_a_note_for_memory_alone_is_in_no_file(tmp_path: Any) -> None:
    recent, path = Recent(1 << 20), tmp_path / "journal-engine-0-1.jsonl"
    written = Journal(path, Core(2, 1, 16), fresh_lifecycle(), 1, recent=recent.of("engine-0"))
    written.remember(texts={4: [[SECRET], []]})
    written.close()
    assert str(SECRET) not in path.read_text()
    (kept,) = recent.after(0, failures_alone=False)
    assert event_of(kept, True)["line"] == {"note": {"texts": {"4": [[SECRET], []]}}}


def test_a_reader_gets_all_that_may_have_come_since_a_moment() -> None:
    recent = Recent(1 << 20)
    memory = recent.of("engine-0")
    memory.begin(b"one", 1)
    memory.add(b"a", lasting=False)
    since = time.time_ns()
    memory.begin(b"two", 1)
    memory.add(b"b", lasting=False)
    assert recent.lines(since) == {"engine-0": [b"one", b"a", b"two", b"b"]}
    assert recent.lines(time.time_ns()) == {"engine-0": [b"two", b"b"]}
