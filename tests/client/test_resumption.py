"""The pure parts of the client: a request over many calls, patience, addresses, attempts."""

import hashlib
import random
import re
import struct
from typing import Any

import grpc
import pytest
from client.scripted import IDS, token
from google.protobuf.duration_pb2 import Duration
from hypothesis import given
from hypothesis import strategies as st

from orca.v1 import orca_pb2 as pb
from orca_client.addresses import SUSPECT, Addresses, targets_of
from orca_client.attempts import Attempts
from orca_client.channels import Channels
from orca_client.errors import (
    DataLoss,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    OrcaError,
    Unavailable,
    Unreachable,
)
from orca_client.events import Accepted, Event, Finished, Prompt, Token, message_of
from orca_client.patience import FIRST_WAIT, LONGEST_WAIT, SURE, Patience
from orca_client.resumption import Resumption

AWAY = Unavailable("away")


def patience(
    bound: float = 60, timeout: float | None = None, connect: float | None = None, fail_fast: bool = False
) -> Patience:
    return Patience(bound, 0, timeout, random.Random(0), connect=connect, fail_fast=fail_fast)


def served(request: pb.GenerateRequest | pb.ResumeRequest) -> list[pb.GenerateResponse]:
    """All responses of a sound endpoint to this request."""
    first = request.from_index if isinstance(request, pb.ResumeRequest) else 0
    tokens = [pb.GenerateResponse(tokens=[token(index, IDS[index])]) for index in range(first, len(IDS))]
    finished = pb.Finished(
        reason=pb.FINISH_REASON_EOS, output_tokens=len(IDS), text="!", timings=pb.Timings(finished=Duration(seconds=2))
    )
    accepted = pb.Accepted(request_id=request.request_id, input_tokens=3)
    return [pb.GenerateResponse(accepted=accepted), *tokens, pb.GenerateResponse(finished=finished)]


def joined(responses: list[pb.GenerateResponse], cuts: list[bool]) -> list[pb.GenerateResponse]:
    """The same with fewer messages: after each response, `cuts` tells whether the next one begins a message."""
    messages = responses[:1]
    for response, cut in zip(responses[1:], cuts, strict=False):
        if cut:
            messages.append(response)
        else:
            messages[-1].MergeFrom(response)
    return messages


@given(
    breaks=st.lists(st.integers(0, len(IDS) + 1), max_size=20),
    cuts=st.lists(st.booleans(), min_size=len(IDS) + 1, max_size=len(IDS) + 1),
)
def test_any_breaks(breaks: list[int], cuts: list[bool]) -> None:
    """Wherever calls break, whatever shares a message: the caller gets one Accepted, every token once, one Finished."""
    attempts = Attempts(lambda: 5_000)
    body = pb.GenerateRequest(request_id="mine", text="x", stream_interval=4)
    resumption = Resumption("mine", body, patience=patience(), next_attempt=attempts, stream_interval=4)
    events: list[Event] = []
    requests = []
    for count in [*breaks, len(IDS) + 2]:
        request = resumption.call(0).request
        requests.append(type(request)())
        requests[-1].CopyFrom(request)
        for response in joined(served(request), cuts)[:count]:
            resumption.take(response, 0)
            while (event := resumption.event()) is not None:
                events.append(event)
        if resumption.finished:
            break
        resumption.failed(AWAY, 0)
    assert [type(event) for event in events] == [Accepted, *[Token] * len(IDS), Finished]
    assert [event.token_id for event in events if isinstance(event, Token)] == IDS
    assert [request.attempt for request in requests] == list(range(5, 5 + len(requests)))
    assert {request.stream_interval for request in requests} == {4}
    kinds = [isinstance(request, pb.GenerateRequest) for request in requests]
    assert kinds == sorted(kinds, reverse=True)  # Generate until accepted, then Resume


@pytest.mark.parametrize("shown", [0, 1])
def test_a_request_that_the_server_has_lost(shown: int) -> None:
    """It is made again with the same id, unless a token of it was shown: the next ones might be others."""
    body = pb.GenerateRequest(request_id="mine", text="x")
    resumption = Resumption("mine", body, patience=patience(), next_attempt=Attempts(lambda: 5_000))
    for response in served(body)[: 1 + shown]:
        resumption.take(response, 0)
    while resumption.event() is not None:
        pass
    resumption.failed(AWAY, 0)
    assert isinstance(resumption.call(0).request, pb.ResumeRequest)
    lost = NotFound("request mine is not known")
    if shown:
        with pytest.raises(NotFound):
            resumption.failed(lost, 0)
        return
    assert resumption.failed(lost, 0) == 0
    assert isinstance(resumption.call(0).request, pb.GenerateRequest)
    resumption.take(served(body)[0], 0)
    resumption.failed(AWAY, 0)
    assert isinstance(resumption.call(0).request, pb.ResumeRequest), "the server knows it again"
    for response in served(body):
        resumption.take(response, 0)
    events = list(iter(resumption.event, None))
    assert [type(event) for event in events] == [Token] * len(IDS) + [Finished], "Accepted was shown before"


def test_a_request_that_is_lost_again_before_it_was_accepted() -> None:
    """An endpoint that knows no request would otherwise be sent it without end."""
    body = pb.GenerateRequest(request_id="mine", text="x")
    resumption = Resumption("mine", body, patience=patience(), next_attempt=Attempts(lambda: 5_000))
    resumption.take(served(body)[0], 0)
    assert isinstance(resumption.event(), Accepted)
    lost = NotFound("request mine is not known")
    assert resumption.failed(lost, 0) == 0
    assert isinstance(resumption.call(0).request, pb.GenerateRequest)
    with pytest.raises(NotFound):
        resumption.failed(lost, 0)


def test_a_resume_has_the_digest_of_what_was_seen() -> None:
    """By this process and by the one before it. Without `seen` there is nothing to compare."""

    def digest(count: int) -> bytes:
        return hashlib.sha1(struct.pack(f"<{count}I", *IDS[:count])).digest()

    for seen, before, after in ((IDS[:2], digest(2), digest(4)), (None, b"", b"")):
        resumption = Resumption("mine", None, patience=patience(), next_attempt=Attempts(), from_index=2, seen=seen)
        first = resumption.call(0).request
        assert isinstance(first, pb.ResumeRequest)
        assert (first.from_index, first.digest) == (2, before)
        for response in served(first)[:3]:
            resumption.take(response, 0)
        assert len(list(iter(resumption.event, None))) == 3
        resumption.failed(AWAY, 0)
        second = resumption.call(0).request
        assert isinstance(second, pb.ResumeRequest)
        assert (second.from_index, second.digest) == (4, after)


def test_messages_and_events_are_one() -> None:
    """An event holds everything that its message holds."""
    resumption = Resumption("mine", None, patience=patience(), next_attempt=Attempts())
    for response in served(pb.GenerateRequest(request_id="mine")):
        resumption.take(response, 0)
        event = resumption.event()
        assert event is not None
        assert message_of(event) in (response.accepted, *response.tokens, response.finished)
        assert resumption.event() is None


def test_logprobs_beyond_those_of_the_tokens() -> None:
    """The prompt comes once, although the call that brought it broke before token 0."""
    top = [pb.TopToken(token_id=7, text="a", logprob=-0.5), pb.TopToken(token_id=8, text="b", logprob=-1.5)]
    prompt = [pb.PromptToken(token_id=5, text="x"), pb.PromptToken(token_id=6, text="y", logprob=-2.0, top=top)]
    first = pb.Token(index=0, token_id=7, text="a", logprob=-0.5, iteration=1, engine="e", top=top)
    resumption = Resumption("mine", None, patience=patience(), next_attempt=Attempts())
    resumption.take(pb.GenerateResponse(prompt=prompt), 0)
    resumption.take(pb.GenerateResponse(prompt=prompt, tokens=[first]), 0)
    shown, token, end = resumption.event(), resumption.event(), resumption.event()
    assert isinstance(shown, Prompt)
    assert [(one.logprob, len(one.top)) for one in shown.tokens] == [(None, 0), (-2.0, 2)]
    assert message_of(shown) == pb.GenerateResponse(prompt=prompt)
    assert isinstance(token, Token)
    assert message_of(token) == first
    assert end is None


def test_a_newer_server() -> None:
    """An unknown event and an unknown reason, of a newer server, do not end the stream."""
    resumption = Resumption("mine", None, patience=patience(), next_attempt=Attempts())
    resumption.take(pb.GenerateResponse.FromString(b"\x7a\x02\x08\x01"), 0)
    assert resumption.event() is None
    resumption.take(pb.GenerateResponse.FromString(b"\x1a\x02\x08\x63"), 0)
    finished = resumption.event()
    assert isinstance(finished, Finished)
    assert finished.reason == "UNSPECIFIED"


def test_the_end_stays() -> None:
    """After DataLoss no further call is made."""
    resumption = Resumption("mine", None, patience=patience(), next_attempt=Attempts())
    resumption.take(pb.GenerateResponse(tokens=[token(2, 7), token(0, 7)]), 0)
    with pytest.raises(DataLoss):
        resumption.event()
    assert resumption.event() is None, "nothing that came after the hole is shown"
    assert resumption.ended
    with pytest.raises(DataLoss):
        resumption.call(0)


# -- patience
def test_waits_grow_and_are_jittered() -> None:
    patient = patience(bound=1e9)
    for n in range(20):
        longest = min(LONGEST_WAIT, FIRST_WAIT * 2**n)
        assert longest / 2 <= patient.failed(AWAY, 0) <= longest
    patient.progress()
    assert patient.failed(AWAY, 0) <= FIRST_WAIT


def test_the_bound_counts_only_outages() -> None:
    """Ten minutes in a queue, with an outage now and then, do not reach the bound; ten seconds of outage do."""
    patient = patience(bound=10)
    for minute in range(10):
        now = minute * 60.0
        patient.working(now)
        patient.failed(AWAY, now + 59.5)
    patient.progress()
    patient.failed(AWAY, 700)
    patient.working(704)  # 4 s
    patient.failed(AWAY, 800)
    with pytest.raises(Unavailable):
        patient.failed(AWAY, 806)  # and 6 s
    patient.progress()
    patient.failed(AWAY, 900)


def test_the_deadline_is_last() -> None:
    patient = patience(timeout=5)
    assert patient.remaining(1) == 4
    assert patient.failed(AWAY, 4.99) == pytest.approx(0.01)
    with pytest.raises(DeadlineExceeded, match=re.escape("the timeout of 5 s passed; the last try failed: away")):
        patient.remaining(5)
    assert patience().remaining(1e9) is None


def test_a_named_delay_is_kept() -> None:
    assert 3 <= patience(bound=1).refused(OrcaError("full"), 3, 1000) <= 4.5


def test_a_named_delay_is_no_outage() -> None:
    """An endpoint that says when to come back works: an hour of waiting for it leaves the bound as it was."""
    patient = patience(bound=10, connect=5)
    patient.failed(AWAY, 1)
    for now in range(2, 3600):
        patient.refused(OrcaError("full"), 1, now)
    patient.failed(AWAY, 3600)
    patient.failed(AWAY, 3607)  # 2 s before the hour, 7 s after it
    with pytest.raises(Unavailable):
        patient.failed(AWAY, 3608)


# -- addresses
def test_addresses() -> None:
    """An address that failed is avoided for a while, but used when no other is left."""
    addresses = Addresses(["a", "b", "c"], 1)
    assert [addresses.pick(0) for _ in range(4)] == ["b", "c", "a", "b"]
    addresses.failed("c", 10)
    assert [addresses.pick(10) for _ in range(3)] == ["a", "b", "a"]
    addresses.failed("a", 11)
    addresses.failed("b", 12)
    assert addresses.pick(12) == "c"  # failed longest ago
    assert addresses.pick(10 + SUSPECT) == "c"
    assert [addresses.pick(12 + SUSPECT) for _ in range(3)] == ["a", "b", "c"]


@pytest.mark.parametrize(
    "target",
    [
        "127.0.0.1:50051",
        "orca-endpoint:1",
        "[::1]:50051",
        "dns:///orca:50051",
        "ipv4:127.0.0.1:1,127.0.0.1:2",
        "unix:/s",
    ],
)
def test_targets(target: str) -> None:
    assert targets_of(target) == targets_of([target]) == [target]


@pytest.mark.parametrize(
    ("addresses", "problem"),
    [
        ([], "at least one is needed"),
        ("", "no host:port"),
        ("127.0.0.1", "no host:port"),
        ("http://127.0.0.1:8000/v1", "is a URL; give the endpoint's gRPC port as host:port, such as '127.0.0.1:50051'"),
        ("https://orca.example:443", "is a URL"),
        ("::1:50051", "stands in brackets"),
        ("a b:1", "no host:port"),
        (["127.0.0.1:1", None], "of type NoneType"),
        ([5], "of type int"),
    ],
)
def test_what_is_no_target(addresses: Any, problem: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(problem)) as raised:
        targets_of(addresses)
    assert raised.value.field == "addresses"


def test_nothing_ever_answered() -> None:
    """The bound of a client that nobody has answered yet is shorter. An answer of any kind lifts it."""
    patient = patience(bound=60, connect=5)
    patient.failed(AWAY, 4)
    with pytest.raises(Unavailable, match=re.escape("nothing answered within 5 s: away")):
        patient.failed(AWAY, 5)
    said = Unavailable("the pool is away")
    said.answered = True
    patient = patience(bound=60, connect=5)
    patient.failed(said, 1)
    patient.failed(AWAY, 50)
    with pytest.raises(Unavailable, match=re.escape("away")):
        patient.failed(AWAY, 60)
    patient = patience(bound=60, connect=5)
    patient.working(1)
    patient.failed(AWAY, 2)
    patient.failed(AWAY, 50)


def test_nobody_could_be_reached() -> None:
    """A library waits for endpoints that are about to start. A person at a terminal reads what is wrong at once."""
    surely, perhaps = Unreachable("nobody listens there"), Unreachable("it may be full", sure=False)
    for fail_fast, error, bound in ((False, surely, 5), (False, perhaps, 5), (True, surely, SURE), (True, perhaps, 5)):
        patient = patience(bound=60, connect=5, fail_fast=fail_fast)
        patient.failed(error, bound - 0.2)
        with pytest.raises(Unreachable, match=f"^{error}$"):
            patient.failed(error, bound)
    assert patience(bound=60, connect=5, fail_fast=True).failed(surely, 2.5) > 0, "an endpoint that is restarting"
    patient = patience(bound=60, connect=5, fail_fast=True)
    patient.failed(AWAY, 1)  # an address that says nothing may still answer
    patient.working(1)
    patient.failed(surely, 2)  # something has answered: it is waited for
    patient.failed(surely, 50)


class Failed(grpc.RpcError):
    """A call that failed before it reached anybody, or after."""

    def __init__(self, details: str, status: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> None:
        self._details, self._status = details, status

    def code(self) -> grpc.StatusCode:
        return self._status

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> tuple[()]:
        return ()


REFUSED = Failed("failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Connection refused")
CLOSED = Failed("failed to connect to all addresses; last error: UNAVAILABLE: ipv4:127.0.0.1:1: Socket closed")
SILENT = Failed("failed to connect to all addresses; last error: UNKNOWN: connection attempt timed out")
EXPIRED = Failed("Deadline Exceeded", grpc.StatusCode.DEADLINE_EXCEEDED)


def test_an_address_that_failed_is_avoided() -> None:
    channels = Channels(Addresses(["a:1", "b:1"], 0), (), lambda target: None)
    assert [channels.pick() for _ in range(4)] == ["a:1", "b:1"] * 2
    channels.error(EXPIRED, "a:1")
    assert [channels.pick() for _ in range(2)] == ["a:1", "b:1"], "its answer came too late, but it lives"
    channels.error(CLOSED, "a:1")
    assert [channels.pick() for _ in range(3)] == ["b:1"] * 3


def test_what_an_address_did_last_is_what_counts() -> None:
    channels = Channels(Addresses(["a:1", "b:1"], 0), (), lambda target: None)

    def told(failure: Failed, target: str) -> tuple[type[OrcaError], bool]:
        error = channels.error(failure, target)
        return type(error), isinstance(error, Unreachable) and error.sure

    assert told(REFUSED, "a:1") == (Unavailable, False)
    assert told(REFUSED, "b:1") == (Unreachable, True)
    assert told(CLOSED, "a:1") == (Unreachable, False)
    assert told(REFUSED, "b:1") == (Unreachable, False), "the other one may only be full"
    for other in (SILENT, EXPIRED):
        told(other, "a:1")
        assert told(REFUSED, "b:1") == (Unavailable, False), "the other one no longer refuses"
