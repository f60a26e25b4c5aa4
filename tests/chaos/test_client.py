"""The raw client resumes as the contract says, and finds each kind of broken promise."""

import asyncio
import hashlib
import struct
from collections.abc import Callable

import pytest
from client.scripted import FINISH, IDS, Act, Endpoint, Script

from orca.v1 import orca_pb2 as pb
from orca_chaos.client import Caller, Lost, Poisoned, Stream, Violation
from orca_chaos.load import Load
from orca_chaos.oracle import Known
from orca_chaos.rounds import first_of
from orca_common.errors import (
    Aborted,
    Cancelled,
    DataLoss,
    ErrorReason,
    Internal,
    NotFound,
    OrcaError,
    ResourceExhausted,
    Unavailable,
)

REQUEST = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1]), max_new_tokens=len(IDS), ignore_eos=True)
OTHER = [IDS[0], IDS[1] + 1, *IDS[2:]]


async def play(
    *acts: Act,
    wanted: list[int] | None = IDS,
    leave_at: int | None = None,
    came: Callable[[Stream], None] = lambda stream: None,
) -> tuple[Stream, Script]:
    """Runs one stream against a script."""
    script = Script(*acts)
    endpoint = Endpoint("only", script)
    await endpoint.server.start()
    caller = Caller([endpoint.address])

    def left(stream: Stream) -> None:
        nonlocal leave_at
        came(stream)
        if leave_at is not None and len(stream.tokens) > leave_at:
            leave_at = None
            stream.leave(2)

    stream = Stream(caller, REQUEST, wanted, left)
    try:
        async with asyncio.timeout(30):
            await stream.run()
    finally:
        await caller.close()
        await endpoint.server.stop(0)
    return stream, script


async def test_it_resumes_from_the_first_token_not_seen() -> None:
    acts = (
        Act(0, Unavailable("x"), accept=False),
        Act(3, Unavailable("x")),
        Act(5, ResourceExhausted("full", 1)),
        FINISH,
    )
    stream, script = await play(*acts)
    assert stream.tokens == IDS
    assert [type(seen.request) for seen in script.calls] == [pb.GenerateRequest] * 2 + [pb.ResumeRequest] * 2
    assert [seen.request.from_index for seen in script.calls[2:]] == [3, 5]
    attempts = [seen.request.attempt for seen in script.calls]
    assert attempts == sorted(set(attempts))
    seen = [struct.pack(f"<{count}I", *IDS[:count]) for count in (3, 5)]
    assert [call.request.digest for call in script.calls[2:]] == [hashlib.sha1(one).digest() for one in seen]


async def test_it_leaves_and_reads_tokens_again() -> None:
    stream, script = await play(Act(4, "hang"), FINISH, leave_at=3)
    assert stream.tokens == IDS
    assert script.calls[1].request.from_index == 2


async def test_only_new_tokens_are_news() -> None:
    """A stream that was accepted, or that reads its tokens again, still waits: pauses ended there too early."""
    news = []
    acts = (Act(2, Unavailable("x")), Act(2, Unavailable("x")), Act(4, "hang"), FINISH)
    stream, script = await play(*acts, leave_at=3, came=lambda stream: news.append(len(stream.tokens)))
    assert len(script.calls) == 4
    assert news == sorted(set(news))
    assert stream.tokens == IDS


@pytest.mark.parametrize(
    ("acts", "sentence"),
    [
        ([Act(6, "finish", first=1)], "token 1 came where 0 was due"),
        ([Act(3, Unavailable("x")), Act(6, "finish", first=2)], "token 2 came where 3 was due"),
        ([Act(6, "finish", ids=OTHER)], "undisturbed it is another"),
        ([Act(4, "finish")], "ended after 4 of 6 tokens"),
        ([Act(4, "return")], "without `finished`"),
        ([Act(2, Unavailable("x")), Act(0, NotFound("x"), accept=False)], "NOT_FOUND"),
        ([Act(2, DataLoss("x"))], "DATA_LOSS"),
        ([Act(2, Cancelled("x"))], "CANCELLED"),
        ([Act(2, Unavailable("x")), Act(2, Aborted("x"))], "ABORTED"),
        ([Act(2, "raise")], "UNKNOWN"),
    ],
)
async def test_a_broken_promise_is_found(acts: list[Act], sentence: str) -> None:
    with pytest.raises(Violation, match=sentence):
        await play(*acts)


@pytest.mark.parametrize(
    ("end", "kind"),
    [
        (Internal("lost", reason=ErrorReason.ENGINES_LOST), Poisoned),
        (Internal("lost"), Violation),
        (DataLoss("lost"), Lost),
    ],
)
async def test_ends_that_may_be_allowed_have_names(end: OrcaError, kind: type[Violation]) -> None:
    with pytest.raises(Violation) as raised:
        await play(Act(2, end))
    assert type(raised.value) is kind


async def test_a_load_that_cannot_begin_tells_why() -> None:
    """It ended as if it had been cancelled, and `orca chaos` with status 0."""
    endpoint = Endpoint("only", Script(Act(6, "finish", ids=OTHER)))
    await endpoint.server.start()
    caller = Caller([endpoint.address])
    try:
        with pytest.raises(BaseExceptionGroup) as raised:
            async with asyncio.timeout(30), Load(caller, [Known(REQUEST, tuple(IDS))], seed=1, streams=1):
                pass
    finally:
        await caller.close()
        await endpoint.server.stop(0)
    assert "undisturbed it is another" in str(first_of(raised.value))


async def test_a_token_that_changes_is_found_without_knowing_it() -> None:
    with pytest.raises(Violation, match="came again as"):
        await play(Act(4, "hang"), Act(6, "finish", ids=[*IDS[:3], 5, *IDS[4:]]), wanted=None, leave_at=3)
