"""Tells an explanation: a sentence for each part, and the whole as JSON."""

from collections.abc import Mapping
from typing import Any

import msgspec

from orca_pool.records import Standing

from .explanation import Explanation, Kind, Part
from .history import SECOND

NAMED = 3  # requests that a sentence names at most


def title(story: Explanation) -> str:
    """The sentence above all parts."""
    took, tokens = duration(story.end - story.submitted), counted(story.tokens, "token")
    engines = " and ".join(dict.fromkeys(story.engines))
    match story.state:
        case "queued":
            place = f", now at position {story.position_now}" if story.position_now else ""
            told = f"{story.request} has waited in the queue for {took}{place}"
        case "running" | "claimed":
            told = f"{story.request} runs on {engines}: {took} since it came, {tokens}"
        case state:
            where = f" on {engines}" if engines else " in the queue"
            told = f"{story.request} {state} after {took}{where}, with {tokens}"
    return told + _prefix(story)


def _prefix(story: Explanation) -> str:
    """Which engine had its prefix, and who came before it as it waited for that engine."""
    if not story.prefix_at:
        return ""
    overtaken = f"; {counted(story.overtaken, 'request')} overtook it as it waited for that" if story.overtaken else ""
    return f"; {story.prefix_at} had the keys and values of its prompt's beginning{overtaken}"


def sentence(part: Part) -> str:
    """Tells one part of a request's time."""
    took, engine = duration(part.end - part.begin), part.engine
    iterations = counted(part.iterations, "iteration")
    where = "in the queue" if part.queued else f"at {engine}"
    ahead = f", behind {counted(part.ahead, 'request')}" if part.ahead else ""
    match part.kind:
        case Kind.FORMING:
            return f"waited {took} {where} until {engine} was formed{f': {part.why}' if part.why else ''}"
        case Kind.PLACES:
            return f"waited {took} {where}, {iterations}, while {engine} had all the requests that it takes{ahead}"
        case Kind.SLOTS:
            return (
                f"waited {took} {where}, {iterations} of {engine}, for slots{_held_by(part.by, part.iterations)}{ahead}"
            )
        case Kind.PREFIX:
            return f"waited {took} {where} for {engine}, which had the keys and values of its prompt's beginning{ahead}"
        case Kind.CLAIM:
            return f"waited {took} {where} until {engine} had claimed it{ahead}"
        case Kind.TAKEN_OVER:
            return f"waited {took} until another scheduler had taken {engine} over"
        case Kind.FULL:
            return f"waited {took} {where}, {iterations}, for max_bs: requests before it filled the batch"
        case Kind.POSITIONS:
            return f"waited {took} {where}, {iterations}, for positions: requests before it had all of an iteration"
        case Kind.PREEMPTED:
            held = _held_by(part.by, part.iterations)
            return f"gave up its slots for an earlier request, and waited {took} {where}, {iterations}, for slots{held}"
        case Kind.PIPELINE:
            return f"waited {took} {where}: as many batches were in flight as there may be"
        case Kind.BEHIND:
            return f"waited {took} {where} until the pool had kept what was made before"
        case Kind.SCHEDULER:
            return f"waited {took} {where} for the scheduler"
        case Kind.PULL:
            return f"waited {took} {where}, {iterations}, for its keys and values from the engine that had begun it"
        case Kind.RUN:
            return f"ran {took} in {_numbered(part)} of {engine}: {_computed(part)}"
        case Kind.LOST:
            return f"ran {took} in {_numbered(part)} of {engine}, which never returned"
        case Kind.COMMIT:
            return f"waited {took} until its end was in the pool"
        case Kind.UNSEEN:
            return f"spent {took} of which no journal tells"


def duration(ns: int) -> str:
    """A time for people: in ms below a second."""
    seconds = ns / SECOND
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.3f} s" if seconds < 100 else f"{seconds:.0f} s"


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count:,} {noun}s"


def _held_by(by: Mapping[str, int], iterations: int) -> str:
    if not by:
        return ""
    named = [name if count >= iterations else f"{name} ({count})" for name, count in list(by.items())[:NAMED]]
    more = [f"{len(by) - NAMED} more"] if len(by) > NAMED else []
    return f" held by {_listed([*named, *more])}"


def _listed(words: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _numbered(part: Part) -> str:
    if part.iterations == 1:
        return f"iteration {part.first}"
    return f"{counted(part.iterations, 'iteration')} ({part.first} to {part.last})"


def _computed(part: Part) -> str:
    """The work of its iterations, and the sizes of their batches."""
    work: list[str] = []
    if part.initiations:
        work.append(f"{counted(part.initiations, 'initiation')} of {counted(part.positions, 'position')}")
    if increments := part.iterations - part.initiations:
        work.append(counted(increments, "increment"))
    small, large = part.batches
    sizes = f"a batch of {large}" if part.iterations == 1 else f"batches of {f'{small} to ' * (small < large)}{large}"
    return f"{' and '.join(work)}, in {sizes}"


def as_json(story: Explanation, standing: Standing | None) -> dict[str, Any]:
    """The whole explanation for programs: moments in seconds since its submission. standing: the pool's word."""

    def at(moment: int) -> float:
        return (moment - story.submitted) / SECOND

    parts: list[dict[str, Any]] = [
        {
            "kind": str(part.kind),
            "sentence": sentence(part),
            "begin": at(part.begin),
            "seconds": part.seconds,
            "engine": part.engine or None,
            "queued": part.queued,
            "iterations": part.iterations,
            "first": part.first,
            "last": part.last,
            "by": dict(part.by),
            "ahead": part.ahead,
        }
        for part in story.parts
    ]
    return {
        "request": story.request,
        "state": story.state,
        "sentence": title(story),
        "submitted": story.submitted / SECOND,
        "seconds": story.seconds,
        "unseen": story.unseen,
        "position": story.position,
        "position_now": story.position_now,
        "tokens": story.tokens,
        "engines": list(story.engines),
        "prefix_at": story.prefix_at or None,
        "overtaken": story.overtaken,
        "parts": parts,
        "pool": msgspec.to_builtins(standing),
    }


def standing_of(told: Mapping[str, Any]) -> Standing | None:
    """The pool's word in what `as_json` has made."""
    return msgspec.convert(told["pool"], Standing | None)
