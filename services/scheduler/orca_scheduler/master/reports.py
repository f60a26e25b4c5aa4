"""Checks the report of an iteration before anything believes it: a rank that is wrong must not end its scheduler.

A scheduler drives many engines. What a rank tells is checked against the batch that it was given, once, as it comes; a
wrong report is a verdict on that rank, and its engine forms again.
"""

from collections.abc import Mapping, Sequence

from orca.v1 import worker_pb2 as pb
from orca_common.scores import TOP, size_of_prompt

from ..core.core import Member
from .output import Held


def problem_of(
    report: pb.IterationReport, members: Sequence[Member], held: Mapping[int, Held], vocabulary: int
) -> str | None:
    """Returns the end of a sentence about a wrong report, None for a right one.

    members: those of the iteration. held: the requests by claim. vocabulary: tokens of the model.
    """
    claims = [member.claim for member in members if member.samples]
    tokens, places = report.token_ids, len(claims)
    if len(tokens) != places:
        return f"has {len(tokens)} tokens for {places} requests"
    if report.logprobs and len(report.logprobs) != places:
        return f"has {len(report.logprobs)} logprobs for {places} requests"
    without = {*report.not_finite, *report.stuck, *report.waiting}
    if without and max(without) >= places:
        return f"names request {max(without)} of {places}"
    if tokens and max(tokens) >= vocabulary and any(t >= vocabulary for n, t in enumerate(tokens) if n not in without):
        return f"has a token {max(tokens)} of a vocabulary of {vocabulary}"
    return _problem_of_tops(report, claims, held, without, vocabulary) or _problem_of_prompts(report, members, held)


def _problem_of_tops(
    report: pb.IterationReport, claims: Sequence[int], held: Mapping[int, Held], without: set[int], vocabulary: int
) -> str | None:
    """Each request that asks for the most probable tokens has them, and no other."""
    found: dict[int, bytes] = {}
    for one in report.tops:
        if one.index >= len(claims) or one.index in found:
            return f"has the top logprobs of request {one.index} of {len(claims)}, or twice"
        found[one.index] = one.scores
    for place, claim in enumerate(claims):
        if claim not in held or place in without:
            continue  # it is gone, or it has no token
        scores, size = found.get(place, b""), held[claim].top_size
        if len(scores) != size:
            return f"has {len(scores)} bytes of top logprobs where {size} were asked for"
        if any(token >= vocabulary for token, _ in TOP.iter_unpack(scores)):
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
        size = size_of_prompt(one.record.sampling)
        if not size or len(part.scores) > member.count * size or len(part.scores) % size:
            return (
                f"has {len(part.scores)} bytes of a prompt's logprobs, {size} for each of {member.count} tokens at most"
            )
    return None
