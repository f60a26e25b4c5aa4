"""The members of a batch on the wire, and two kinds of them for those who drive ranks without a core."""

from collections.abc import Iterable, Sequence
from typing import Any

from orca.v1 import worker_pb2 as pb
from orca_common.protocol import NO_TOKEN

from ..core.core import Member


def put_members(message: pb.Iteration, members: Sequence[Member], drafts: Sequence[int] = ()) -> None:
    """Writes members into an iteration's control message, and the blocks that their rows get.

    drafts: the tokens, of all members that have some, one after the other.
    """
    if not members:
        return
    columns: Any = zip(*members, strict=True)  # in C: four lists of members' fields take twice as long
    _, rows, starts, counts, outputs, new_blocks, tokens, shared = columns
    message.rows.extend(rows)
    message.starts.extend(starts)
    message.counts.extend(counts)
    message.outputs.extend(outputs)
    if None not in tokens:
        message.tokens.extend(tokens)
    elif tokens.count(None) < len(tokens):
        message.tokens.extend([NO_TOKEN if token is None else token for token in tokens])
    if any(new_blocks):
        for row, blocks, others in zip(rows, new_blocks, shared, strict=True):
            if blocks:
                message.growths.add(row=row, blocks=blocks, shared=others)
    message.drafts.extend(drafts)


def initiation(row: int, tokens: int, blocks: Iterable[int]) -> Member:
    """A request that begins in a row of its own, with all its tokens, and gets these blocks. Its claim is row + 1."""
    return Member(row + 1, row, 0, tokens, outputs=1, new_blocks=tuple(blocks), token=None)


def increment(row: int, start: int, token: int | None = None) -> Member:
    """The request of `initiation` goes on with its token at position `start`; None: the ranks have it."""
    return Member(row + 1, row, start, 1, outputs=1, new_blocks=(), token=token)
