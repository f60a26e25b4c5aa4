"""Feeds become one picture: requests, slots, iterations, failures; and browsers that fold changes
have the same picture as those that get all of it."""

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from ui.feeds import (
    ENGINE,
    START,
    Feed,
    arrived,
    asked,
    batch,
    held,
    lost,
    ready,
    returned,
    step,
    suspected,
    timed,
    verdict,
)

from orca_scheduler.core.core import Cancelled
from orca_scheduler.core.request import Reason
from orca_scheduler.lifecycle.suspicions import Kind
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


def test_a_request_from_its_claim_to_its_end() -> None:
    feed, picture = Feed(), Picture()
    at = START
    events = [
        (at + 0.5, asked({7: "one"}, at)),
        (at + 0.6, arrived(7, actions=[batch(1, (7, 0, 0, 5, (0, 1)))])),
        timed(1, at + 0.6),
        (at + 0.7, returned(7, actions=[batch(2, (7, 0, 5, 1, ()))])),
        (at + 1.0, returned(7, index=1, ended=[(7, Reason.LENGTH)])),
    ]
    picture.line(ADDRESS, feed.line(timed(9, at), held={}), at)  # it began before the page looked
    picture.line(ADDRESS, feed.line(*events[:4], held={}), at + 0.8)
    whole = picture.whole(at + 0.8)
    (found,) = whole["requests"]
    assert (found["letter"], found["state"], found["made"], found["iterations"]) == ("A", "running", 1, 2)
    assert (found["id"], found["input"], found["max_new"], found["submitted"]) == ("one", 5, 8, at)
    assert picture.id_of(found["n"]) == "one"
    assert whole["rows"] == {ENGINE: {0: [found["n"], [[0, 2]]]}}
    (iteration,) = whole["iterations"][ENGINE]
    assert (iteration["n"], iteration["members"]) == (1, [(found["n"], 0, 5)])
    assert [[round(moment - at, 3) for moment in stage] for stage in iteration["stages"]] == [
        *([0.6, 0.61, 0.61], [0.61, 0.62, 0.62])
    ]
    picture.line(ADDRESS, feed.line(events[4]), at + 1.0)
    (found,) = picture.changes(at + 1.0)["requests"]
    moments = [round(found[name] - at, 3) for name in ("began", "first", "ended")]
    assert moments == [0.6, 0.7, 1.0]
    assert (found["state"], found["reason"], round(found["gap"], 3)) == ("ended", "LENGTH", 0.3)


def test_texts_are_followed_where_they_are_shown() -> None:
    feed, picture = Feed(), Picture()
    texts = {"note": {"texts": {"7": [[1, 2, 3, 4, 5], [9]]}}}
    events = [(START, asked({7: "one", 8: "two"}, START)), (START, texts), (START, arrived(7, 8, made=1))]
    picture.line(ADDRESS, feed.line(*events, (START, returned(7, 8, index=1)), held={}), START)
    one, two = picture.whole(START)["requests"]
    assert (one["text"], two["text"]) == (True, False)
    assert picture.tokens_of(one["n"]) == ([1, 2, 3, 4, 5], [9, 0])
    assert picture.tokens_of(two["n"]) is None


def test_a_killed_rank_is_a_story_with_its_times() -> None:
    feed, picture = Feed(), Picture()
    at, names = START, {n: f"r{n}" for n in range(3)}
    members = [(n, n, 0, 5, (n,)) for n in range(3)]
    picture.line(
        ADDRESS,
        feed.line(
            (at, asked(names, at)),
            (at, arrived(*names, actions=[batch(1, *members)])),
            (at + 1.0, returned(0, 1, 2)),
            (at + 1.20, suspected(0, Kind.PEER_LOST)),
            (at + 1.25, suspected(1, Kind.GONE)),
            (at + 1.31, verdict("stage 1 rank 0 has ended")),
            (at + 1.31, lost(0, 1, 2)),
            held={},
        ),
        at + 1.4,
    )
    (story,) = picture.changes(at + 1.4)["incidents"]
    assert story["what"] == f"rank 1 of {ENGINE} (stage 1) has ended", "the sure suspicion, at the time of the first"
    assert (story["at"], round(story["verdict"], 3), story["streams"], story["over"]) == (at + 1.2, 0.11, 3, False)
    assert picture.whole(at + 1.4)["rows"] == {ENGINE: {}}
    again = {n + 10: name for n, name in names.items()}
    picture.line(
        ADDRESS,
        feed.line(
            (at + 1.60, ready()),
            (at + 1.60, asked(again, at)),
            (at + 1.60, arrived(*again, made=1)),
            (at + 1.80, returned(*again, index=1)),
        ),
        at + 1.9,
    )
    changes = picture.changes(at + 1.9)
    (story,) = changes["incidents"]
    assert (round(story["formed"], 3), round(story["pause"], 3), story["over"]) == (0.29, 0.8, True)
    assert {one["letter"] for one in changes["requests"]} == {"A", "B", "C"}, "requests keep their letters"
    assert {one["made"] for one in changes["requests"]} == {2}


def test_a_scheduler_that_is_silent_and_the_one_that_follows() -> None:
    picture, at = Picture(), START
    running = [(at, asked({1: "one"}, at)), (at, arrived(1, actions=[batch(1, (1, 0, 0, 5, (0,)))]))]
    picture.line(ADDRESS, Feed("first").line(*running, held={}), at)
    picture.away(ADDRESS, "is silent", at + 2)
    picture.away(ADDRESS, "cannot be reached", at + 3)
    (story,) = picture.changes(at + 3)["incidents"]
    assert (story["kind"], story["streams"], story["over"]) == ("scheduler", 1, False)
    second = Feed("second", term=2)
    assert picture.whole(at + 3)["requests"][0]["state"] == "running"
    picture.line("127.0.0.1:2", second.line((at + 4.0, ready())), at + 4)
    assert picture.whole(at + 4)["requests"][0]["state"] == "claimed", "it begins again"
    picture.line("127.0.0.1:2", second.line((at + 4.5, returned())), at + 4.5)
    (story,) = picture.changes(at + 5)["incidents"]
    assert (story["formed"], story["pause"], story["over"]) == (2.0, 2.5, True)
    old = Feed("first").line()
    picture.line(ADDRESS, old, at + 6)
    assert picture.whole(at + 6)["engines"][ENGINE]["scheduler"] == "second", "an old master has nothing to say"


def test_a_request_that_ended_elsewhere_was_cancelled() -> None:
    feed, picture = Feed(), Picture()
    ended = step(Cancelled(0.0, (1,)))
    events = [(START, asked({1: "one"}, START)), (START, arrived(1)), (START + 1, ended)]
    picture.line(ADDRESS, feed.line(*events, held={}), START + 1)
    (found,) = picture.whole(START + 1)["requests"]
    assert (found["state"], found["reason"], found["ended"]) == ("ended", "CANCELLED", START + 1)


def test_events_that_come_twice_count_once() -> None:
    """A feed that is read again begins with what is kept."""
    picture, at = Picture(), START
    line = Feed().line(
        (at, asked({1: "one"}, at)),
        (at, arrived(1, actions=[batch(1, (1, 0, 0, 5, (0,)))])),
        (at + 1, returned(1)),
        held={},
    )
    picture.line(ADDRESS, line, at)
    before = picture.whole(at)
    picture.line(ADDRESS, line, at)
    assert picture.whole(at) == before


def test_a_page_that_begins_to_look_later_counts_no_token_twice() -> None:
    """The first line has what is held now, and the events that are kept, which led there."""
    picture, at = Picture(), START
    made = [(at + n, returned(1, index=5 + n)) for n in range(3)]
    known = {ENGINE: [held(1, "one", at, made=7, text=[[1], [0] * 7])]}
    picture.line(ADDRESS, Feed().line(*made, held=known, rows={ENGINE: [[1, 0, [3]]]}), at)
    whole = picture.whole(at)
    assert [(one["made"], one["state"]) for one in whole["requests"]] == [(8, "running")]
    assert picture.tokens_of(1) == ([1], [0] * 8)
    assert whole["rows"] == {ENGINE: {0: [1, [[3, 1]]]}}


def test_a_request_whose_name_is_kept_no_more_is_left_out() -> None:
    picture = Picture()
    picture.line(ADDRESS, Feed().line((START, arrived(1)), (START, returned(1)), held={}), START)
    assert picture.whole(START)["requests"] == []


def test_a_rest_forgets_all_but_failures_and_what_is_kept_comes_again() -> None:
    """While no browser looks, feeds report failures alone; a reader in full then begins with what is kept."""
    picture, feed, at = Picture(), Feed(), START
    first = [(at, asked({1: "one"}, at)), (at, arrived(1)), (at + 1, returned(1))]
    loss = [(at + 2, suspected(0, Kind.GONE)), (at + 2, verdict("it has ended"))]
    kept = feed.line(*first, held={ENGINE: [held(1, "one", at, made=1)]})
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


@settings(max_examples=60)
@given(STEPS)
def test_changes_add_up_to_the_whole(steps: list[str]) -> None:
    """Whatever happens, and whenever a browser gets the whole picture meanwhile."""
    feed, picture, browser = Feed(), Picture(), Browser()
    picture.line(ADDRESS, feed.line(held={}), START)
    browser.take(picture.whole(START))
    at, claims, number = START, list[int](), 0
    for n, what in enumerate(steps):
        at += 0.01
        events: list[tuple[float, dict[str, Any]]] = []
        match what:
            case "arrive":
                claims.append(n)
                events = [(at, asked({n: f"r{n}"}, at)), (at, arrived(n))]
            case "batch" if claims:
                number += 1
                members = [(claim, row, 0, 5, (row,)) for row, claim in enumerate(claims)]
                events = [(at, arrived(actions=[batch(number, *members)])), timed(number, at)]
            case "return":
                events = [(at, returned(*claims, index=n))]
            case "end" if claims:
                events = [(at, returned(ended=[(claims.pop(0), Reason.EOS)]))]
            case "lose":
                events = [(at, lost(*claims))]
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
