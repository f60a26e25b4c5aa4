"""Checks the report of an iteration before anything believes it: a rank that is wrong must not end its scheduler.

A scheduler drives many engines. What a rank tells is checked against the batch that it was given, once, as it comes; a
wrong report is a verdict on that rank, and its engine forms again.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, count, repeat
from operator import attrgetter
from typing import NamedTuple

from orca.v1 import worker_pb2 as pb
from orca_common.scores import TOP, size_of_prompt

from ..core.core import Member
from .output import Held


def problem_of(
    report: pb.IterationReport,
    members: Sequence[Member],
    drafts: Sequence[int],
    held: Mapping[int, Held],
    vocabulary: int,
) -> str | None:
    """Returns the end of a sentence about a wrong report, None for a right one.

    members: those of the iteration. drafts: theirs, one after the other. held: the requests by claim.
    vocabulary: tokens of the model.
    """
    ends = [member for member in members if member.outputs]
    tokens, made = report.token_ids, report.made  # each look at a field of a message takes 0.1 us
    if made and len(made) != len(ends):
        return f"has numbers of tokens of {len(made)} requests, not of {len(ends)}"
    places = sum(made) if made else len(ends)
    if len(tokens) != places:
        return f"has {len(tokens)} tokens for {len(ends)} requests"
    if len(report.logprobs) not in (0, places):
        return f"has {len(report.logprobs)} logprobs for {len(ends)} requests"
    absent = [*report.not_finite, *report.stuck, *report.waiting]
    without = set(absent)
    if absent and max(absent) >= places:
        return f"names token {max(absent)} of {places}"
    if len(without) < len(absent):
        return "names a place without a token twice"
    if made and (problem := _problem_of_drafts(report, ends, drafts, without)):
        return problem
    if tokens and max(tokens) >= vocabulary and any(t >= vocabulary for n, t in enumerate(tokens) if n not in without):
        return f"has a token {max(tokens)} of a vocabulary of {vocabulary}"
    if report.tops or any(map(attrgetter("top_size"), held.values())):
        claims = [member.claim for member, n in zip(ends, made or repeat(1), strict=False) for _ in range(n)]
        if problem := _problem_of_tops(report, claims, held, without, vocabulary):
            return problem
    return _problem_of_prompts(report, members, held) if report.prompts else None


def first_tokens(report: pb.IterationReport, members: Sequence[Member]) -> dict[int, int]:
    """For each claim with outputs, the place in a right report at which its tokens begin, in the iteration's order."""
    claims = [member.claim for member in members if member.outputs]
    return dict(zip(claims, accumulate(report.made, initial=0) if report.made else count(), strict=False))


class Made(NamedTuple):
    """The tokens of a right report, as `BatchReturned` has them."""

    made: tuple[tuple[int, ...], ...]
    stuck: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()


def made_of(report: pb.IterationReport, firsts: Collection[int]) -> Made:
    """The tokens of a right report. firsts: of `first_tokens`."""
    tokens = tuple(report.token_ids)
    made: list[tuple[int, ...]] = list(zip(tokens, strict=True))
    if report.made:
        made = [tokens[first : first + size] for first, size in zip(firsts, report.made, strict=True)]
    without = {*report.not_finite, *report.stuck, *report.waiting}
    if not without:
        return Made(tuple(made))
    places = [(place, first) for place, first in enumerate(firsts) if first in without]
    for place, _ in places:
        made[place] = ()
    stuck = tuple(place for place, first in places if first in report.stuck)
    return Made(tuple(made), stuck, tuple(place for place, first in places if first in report.waiting))


def _problem_of_drafts(
    report: pb.IterationReport, ends: Sequence[Member], drafts: Sequence[int], without: set[int]
) -> str | None:
    """Each of these members has at least one token, and further ones behind drafts that were right."""
    at = drafted = 0
    for member, made in zip(ends, report.made, strict=True):
        if not 1 <= made <= member.outputs:
            return f"has {made} tokens of a request that makes 1 to {member.outputs}"
        if list(report.token_ids[at : at + made - 1]) != list(drafts[drafted : drafted + made - 1]):
            return "has tokens behind a draft that was wrong"
        if made > 1 and not without.isdisjoint(range(at, at + made)):
            return "has tokens beside a place that has no token"
        at += made
        drafted += member.drafts
    return None


def _problem_of_tops(
    report: pb.IterationReport, claims: Sequence[int], held: Mapping[int, Held], without: set[int], vocabulary: int
) -> str | None:
    """Each request that asks for the most probable tokens has them, and no other."""
    found: dict[int, bytes] = {}
    for one in report.tops:
        if one.index >= len(claims) or one.index in found:
            return f"has the top logprobs of token {one.index} of {len(claims)}, or twice"
        found[one.index] = one.scores
    for place, claim in enumerate(claims):
        if claim not in held or place in without:
            continue  # it is gone, or it has no token
        scores, size = found.get(place, b""), held[claim].top_size
        if len(scores) != size:
            return f"has {len(scores)} bytes of top logprobs where {size} were asked for"
        if scores and any(token >= vocabulary for token, _ in TOP.iter_unpack(scores)):
            return f"has top logprobs of a token beyond {vocabulary}"
    return None


def _problem_of_prompts(report: pb.IterationReport, members: Sequence[Member], held: Mapping[int, Held]) -> str | None:
    seen = set[int]()
    for part in report.prompts:
        if part.index >= len(members) or part.index in seen:
            return f"has the logprobs of prompt {part.index} of {len(members)}, or twice"
        seen.add(part.index)
        member = members[part.index]
        if (one := held.get(member.claim)) is None:
            continue
        size, places = size_of_prompt(one.record.sampling), _scored(member, len(one.record.prompt_ids))
        if not size or len(part.scores) > places * size or len(part.scores) % size:
            return f"has {len(part.scores)} bytes of a prompt's logprobs, {size} for each of {places} tokens at most"
    return None


def _scored(member: Member, prompt: int) -> int:
    """How many tokens of a prompt its part scores: those behind its own tokens, and at its beginning the first one."""
    return max(min(member.start + member.count + 1, prompt) - (member.start + 1 if member.start else 0), 0)
