"""Feeds become one picture: requests with their stories, slots, iterations, failures; and browsers that fold changes
have the same picture as those that get all of it."""

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from ui.feeds import ENGINE, START, Feed, batch, request, timed

from orca_ui.picture import ITERATIONS, Picture

ADDRESS = "127.0.0.1:1"


class Browser:
    """Does what store.js does, in Python."""

    def __init__(self) -> None:
        self.parts: dict[str, Any] = {}

    def take(self, message: dict[str, Any]) -> None:
        message = json.loads(json.dumps(message))
        for name in ("rows", "iterations"):
            message[name] = {engine: part for engine, part in message.get(name, {}).items() if part}
        if message.get("whole"):
            self.parts = {"rows": {}, "iterations": {}, "requests": {}, "incidents": {}}
        for name in ("queue", "schedulers", "engines"):
            self.parts[name] = message[name]
        for name, key in (("requests", "n"), ("incidents", "number")):
            self.parts[name] |= {one[key]: one for one in message.get(name, ())}
        for engine, rows in message.get("rows", {}).items():
            known = self.parts["rows"].setdefault(engine, {})
            known |= rows
            self.parts["rows"][engine] = {row: one for row, one in known.items() if one is not None}
        self.parts["rows"] = {engine: rows for engine, rows in self.parts["rows"].items() if rows}
        for engine, iterations in message.get("iterations", {}).items():
            known = self.parts["iterations"].setdefault(engine, [])
            last = known[-1]["stages"][0][0] if known else 0
            known += [one for one in iterations if one["stages"][0][0] > last]
            del known[: max(0, len(known) - ITERATIONS)]


def test_a_request_s_story() -> None:
    feed, picture = Feed(), Picture()
    at = START
    events = [
        {"at": at + 0.5, "claimed": [request(7, "one", at)]},
        {"at": at + 0.6, "core": "Arrived", "arrived": [7], "batches": [batch(1, (7, 0, 0, 5, [0, 1]))]},
        timed(1, at + 0.6),
        {"at": at + 0.7, "core": "BatchReturned", "made": [7], "batches": [batch(2, (7, 0, 5, 1, []))]},
        {"at": at + 1.0, "core": "BatchReturned", "made": [7], "ended": [[7, "LENGTH"]]},
    ]
    picture.line(ADDRESS, feed.line(*events[:4], held={}), at + 0.8)
    whole = picture.whole(at + 0.8)
    (found,) = whole["requests"]
    assert (found["letter"], found["state"], found["made"], found["iterations"]) == ("A", "running", 1, 2)
    assert whole["rows"] == {ENGINE: {0: [found["n"], [[0, 2]]]}}
    (iteration,) = whole["iterations"][ENGINE]
    assert (iteration["n"], iteration["members"]) == (1, [(found["n"], 0, 5)])
    picture.line(ADDRESS, feed.line(events[4]), at + 1.0)
    (found,) = picture.changes(at + 1.0)["requests"]
    assert [(round(when - at, 3), what) for when, what, _ in found["story"]] == [
        *((0.0, "queued"), (0.5, "claimed"), (0.6, "started"), (0.7, "first token"), (1.0, "ended"))
    ]
    assert (found["state"], found["reason"], round(found["gap"], 3)) == ("ended", "LENGTH", 0.3)


def test_a_killed_rank_is_a_story_with_its_times() -> None:
    feed, picture = Feed(), Picture()
    at = START
    running = [request(n, f"r{n}", at) for n in range(3)]
    members = [(n, n, 0, 5, [n]) for n in range(3)]
    picture.line(
        ADDRESS,
        feed.line(
            {"at": at, "claimed": running},
            {"at": at, "core": "Arrived", "batches": [batch(1, *members)]},
            {"at": at + 1.0, "core": "BatchReturned", "made": [0, 1, 2]},
            {"at": at + 1.20, "life": "Suspected", "rank": 0, "kind": "lost a neighbour"},
            {"at": at + 1.25, "life": "Suspected", "rank": 1, "kind": "has ended"},
            {"at": at + 1.31, "life": "Wake", "said": [["rank lost", "stage 1 rank 0 has ended"]]},
            {"at": at + 1.31, "core": "EngineLost", "given_back": [0, 1, 2], "hit": 2},
            held={},
        ),
        at + 1.4,
    )
    (story,) = picture.changes(at + 1.4)["incidents"]
    assert story["what"] == f"rank 1 of {ENGINE} (stage 1) has ended", "the sure suspicion, at the time of the first"
    assert (story["at"], round(story["verdict"], 3), story["streams"], story["over"]) == (at + 1.2, 0.11, 3, False)
    assert picture.whole(at + 1.4)["rows"] == {ENGINE: {}}
    again = [request(n + 10, f"r{n}", at, made=1) for n in range(3)]
    picture.line(
        ADDRESS,
        feed.line(
            {"at": at + 1.60, "core": "EngineReady"},
            {"at": at + 1.60, "claimed": again},
            {"at": at + 1.80, "core": "BatchReturned", "made": [10, 11, 12]},
        ),
        at + 1.9,
    )
    changes = picture.changes(at + 1.9)
    (story,) = changes["incidents"]
    assert (round(story["formed"], 3), round(story["pause"], 3), story["over"]) == (0.29, 0.8, True)
    assert {one["letter"] for one in changes["requests"]} == {"A", "B", "C"}, "requests keep their letters"
    assert "given back" in [what for _, what, _ in changes["requests"][0]["story"]]


def test_a_scheduler_that_is_silent_and_the_one_that_follows() -> None:
    picture, at = Picture(), START
    picture.line(ADDRESS, Feed("first").line({"at": at, "claimed": [request(1, "one", at)]}, held={}), at)
    picture.away(ADDRESS, "is silent", at + 2)
    picture.away(ADDRESS, "cannot be reached", at + 3)
    (story,) = picture.changes(at + 3)["incidents"]
    assert (story["kind"], story["streams"], story["over"]) == ("scheduler", 1, False)
    second = Feed("second", term=2)
    assert "given back" not in [what for _, what, _ in picture.whole(at + 3)["requests"][0]["story"]]
    picture.line("127.0.0.1:2", second.line({"at": at + 4.0, "core": "EngineReady"}), at + 4)
    picture.line("127.0.0.1:2", second.line({"at": at + 4.5, "core": "BatchReturned", "made": []}), at + 4.5)
    (story,) = picture.changes(at + 5)["incidents"]
    assert (story["formed"], story["pause"], story["over"]) == (2.0, 2.5, True)
    old = Feed("first").line()
    picture.line(ADDRESS, old, at + 6)
    assert picture.whole(at + 6)["engines"][ENGINE]["scheduler"] == "second", "an old master has nothing to say"


def test_events_that_come_twice_count_once() -> None:
    """A feed that is read again begins with what is kept."""
    picture, at = Picture(), START
    line = Feed().line(
        {"at": at, "claimed": [request(1, "one", at)]},
        {"at": at, "core": "Arrived", "batches": [batch(1, (1, 0, 0, 5, [0]))]},
        {"at": at + 1, "core": "BatchReturned", "made": [1]},
        held={},
    )
    picture.line(ADDRESS, line, at)
    before = picture.whole(at)
    picture.line(ADDRESS, line, at)
    assert picture.whole(at) == before


def test_a_page_that_begins_to_look_later_counts_no_token_twice() -> None:
    """The first line has what is held now, and the events that are kept, which led there."""
    picture, at = Picture(), START
    made = [{"at": at + n, "core": "BatchReturned", "made": [1]} for n in range(3)]
    held = {ENGINE: [request(1, "one", at, made=7)]}
    picture.line(ADDRESS, Feed().line(*made, held=held, rows={ENGINE: [[1, 0, [3]]]}), at)
    whole = picture.whole(at)
    assert [(one["made"], one["state"]) for one in whole["requests"]] == [(7, "running")]
    assert whole["rows"] == {ENGINE: {0: [1, [[3, 1]]]}}


def test_a_rest_forgets_all_but_failures_and_what_is_kept_comes_again() -> None:
    """While no browser looks, feeds report failures alone; a reader in full then begins with what is kept."""
    picture, feed, at = Picture(), Feed(), START
    first = [{"at": at, "claimed": [request(1, "one", at)]}, {"at": at + 1, "core": "BatchReturned", "made": [1]}]
    loss = [
        {"at": at + 2, "life": "Suspected", "rank": 0, "kind": "has ended"},
        {"at": at + 2, "life": "Wake", "said": [["rank lost", "it has ended"]]},
    ]
    kept = feed.line(*first, held={ENGINE: [request(1, "one", at, made=1)]})
    picture.line(ADDRESS, kept, at + 1)
    picture.rest()
    later = feed.line(*loss)
    picture.line(ADDRESS, later, at + 2)
    whole = picture.whole(at + 2)
    assert (len(whole["requests"]), len(whole["incidents"])) == (0, 1)
    picture.line(ADDRESS, later | {"events": kept["events"] + later["events"], "held": {ENGINE: []}}, at + 3)
    whole = picture.whole(at + 3)
    assert [one["id"] for one in whole["requests"]] == ["one"]
    assert len(whole["incidents"]) == 1, "each failure counts once"


STEPS = st.lists(st.sampled_from(["arrive", "batch", "return", "end", "lose", "tick", "again"]), max_size=60)


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_changes_add_up_to_the_whole(steps: list[str]) -> None:
    """Whatever happens, and whenever a browser gets the whole picture meanwhile."""
    feed, picture, browser = Feed(), Picture(), Browser()
    picture.line(ADDRESS, feed.line(held={}), START)
    browser.take(picture.whole(START))
    at, claims, number = START, list[int](), 0
    for n, step in enumerate(steps):
        at += 0.01
        events: list[dict[str, Any]] = []
        match step:
            case "arrive":
                claims.append(n)
                events = [{"at": at, "claimed": [request(n, f"r{n}", at)]}]
            case "batch" if claims:
                number += 1
                members = [(claim, row, 0, 5, [row]) for row, claim in enumerate(claims)]
                events = [{"at": at, "core": "Arrived", "batches": [batch(number, *members)]}, timed(number, at)]
            case "return":
                events = [{"at": at, "core": "BatchReturned", "made": list(claims)}]
            case "end" if claims:
                events = [{"at": at, "core": "BatchReturned", "made": [], "ended": [[claims.pop(0), "EOS"]]}]
            case "lose":
                events = [{"at": at, "core": "EngineLost", "given_back": list(claims), "hit": 0}]
                claims.clear()
            case "again":
                browser.take(picture.whole(at))
            case _:
                browser.take(picture.changes(at))
        picture.line(ADDRESS, feed.line(*events), at)
    browser.take(picture.changes(at))
    fresh = Browser()
    fresh.take(picture.whole(at))
    assert browser.parts == fresh.parts
