"""The members of a batch on the wire, and two kinds of them for those who drive ranks without a core."""

from collections.abc import Iterable, Sequence

from orca.v1 import worker_pb2 as pb
from orca_common.protocol import NO_TOKEN

from ..core.core import Member


def put_members(message: pb.Iteration, members: Sequence[Member]) -> None:
    """Writes members into an iteration's control message, and the blocks that their rows get."""
    message.rows.extend([member.row for member in members])
    message.starts.extend([member.start for member in members])
    message.counts.extend([member.count for member in members])
    message.outputs.extend([member.outputs for member in members])
    if any(member.token is not None for member in members):
        message.tokens.extend([NO_TOKEN if member.token is None else member.token for member in members])
    for member in members:
        if member.new_blocks:
            message.growths.add(row=member.row, blocks=member.new_blocks, shared=member.shared)
        if member.drafts:
            message.drafts.extend(member.drafts)


def initiation(row: int, tokens: int, blocks: Iterable[int]) -> Member:
    """A request that begins in a row of its own, with all its tokens, and gets these blocks. Its claim is row + 1."""
    return Member(row + 1, row, 0, tokens, outputs=1, new_blocks=tuple(blocks), token=None)


def increment(row: int, start: int, token: int | None = None) -> Member:
    """The request of `initiation` goes on with its token at position `start`; None: the ranks have it."""
    return Member(row + 1, row, start, 1, outputs=1, new_blocks=(), token=token)
