"""Control messages for tests that drive a rank themselves: requests that begin, and requests that go on."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from orca.v1 import worker_pb2 as pb
from orca_scheduler.core import Member
from orca_scheduler.members import increment, initiation, put_members


class Begins(NamedTuple):
    """A request's admission, and its first iteration."""

    admission: pb.Admission
    member: Member


def begins(row: int, token_ids: Sequence[int], blocks: Iterable[int], **fields: Any) -> Begins:
    """A request with all its tokens. fields: others of its admission."""
    return Begins(pb.Admission(row=row, token_ids=token_ids, **fields), initiation(row, len(token_ids), blocks))


def iteration_of(
    new: Sequence[Begins] = (),
    rows: Sequence[int] = (),
    starts: Sequence[int] = (),
    tokens: Sequence[int] = (),
    **fields: Any,
) -> pb.Iteration:
    """An iteration of new requests, and of others with one token each.

    rows, starts, tokens: of the others; a scheduler that runs ahead gives no tokens. fields: others of the message.
    """
    iteration = pb.Iteration(**fields)
    iteration.admissions.extend(one.admission for one in new)
    given = tokens or [None] * len(rows)
    others = [increment(*one) for one in zip(rows, starts, given, strict=True)]
    put_members(iteration, [*(one.member for one in new), *others])
    return iteration
