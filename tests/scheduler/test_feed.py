"""The feed of a scheduler: what it tells, what it never tells unasked, and that it does not grow."""

import json

from orca_scheduler.core.core import BatchReturned, Commit, EngineLost, EngineReady, Outcome
from orca_scheduler.core.request import Reason
from orca_scheduler.lifecycle.events import Confirmed, Say, Suspected
from orca_scheduler.lifecycle.suspicions import Kind, Suspicion
from orca_scheduler.master.feed import LIVES, STEPS, EngineFeed, Feed, encoded

SECRET = 314159  # a token id


def returned(iteration: int) -> tuple[BatchReturned, list[Commit]]:
    event = BatchReturned(1.0, iteration, (SECRET,))
    return event, [Commit(iteration, (Outcome(4, 0, SECRET, Reason.EOS),))]


def test_tokens_are_told_only_where_prompts_may_be_shown() -> None:
    for show in (False, True):
        feed = Feed(show)
        EngineFeed(feed, "engine-0", 1).step(*returned(1))
        (entry,) = feed.after(0, lives_alone=False)
        told = json.dumps(encoded(entry, show))
        assert (str(SECRET) in told) == show
        assert json.loads(told)["ended"] == [[4, "EOS"]]


def ready() -> tuple[Feed, EngineFeed]:
    """An engine that forms, makes tokens twice, and is lost."""
    feed = Feed(False)
    engine = EngineFeed(feed, "engine-0", 1)
    for event in (EngineReady(1.0, 64, 1), returned(1)[0], returned(2)[0], EngineLost(2.0)):
        engine.step(event, [])
    return feed, engine


def test_lives_outlast_steps_and_both_have_an_end() -> None:
    feed = Feed(False)
    engine = EngineFeed(feed, "engine-0", 1)
    suspicion = Suspected(1.0, 1, Suspicion(1, Kind.GONE, "has ended"), 7)
    engine.life_step(suspicion, [Say("rank lost", "it has ended")])
    engine.life_step(Confirmed(1.0, 1), [])  # nothing that a reader wants
    for n in range(2 * STEPS):
        engine.step(*returned(n))
    found = feed.after(0, lives_alone=False)
    assert len(found) == STEPS + 1
    assert [entry.number for entry in found] == sorted(entry.number for entry in found)
    (life,) = feed.after(0, lives_alone=True)
    line = encoded(life, False)
    assert (line["rank"], line["kind"], line["said"]) == (1, "has ended", [["rank lost", "it has ended"]])
    assert not feed.after(life.number, lives_alone=True)
    feed, engine = ready()
    assert [type(entry.what.event).__name__ for entry in feed.after(0, lives_alone=True)] == [
        *("EngineReady", "BatchReturned", "EngineLost")
    ], "readers of failures alone can say how long streams paused"
    for _ in range(2 * LIVES):
        engine.life_step(suspicion, [])
    assert len(feed.after(0, lives_alone=True)) == LIVES
