"""Both clients against scripted endpoints: what reaches the caller, and what reaches the server."""

import asyncio
import hashlib
import json
import socket
import struct
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from client.conftest import Stage
from client.scripted import FINISH, IDS, Act, Face, Script, Threads, indexes, rest, take, without_attempt
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode, format_span_id, format_trace_id

import orca_client
from orca.v1 import orca_pb2 as pb
from orca_client import (
    Accepted,
    Cancelled,
    DataLoss,
    DeadlineExceeded,
    Finished,
    FinishReason,
    InvalidArgument,
    NotFound,
    Timings,
    Token,
    Unavailable,
    Unreachable,
    tls_credentials,
)
from orca_client.reach import CLOSES, CLOSES_TLS, NO_TLS, UNKNOWN_AUTHORITY
from orca_common import errors
from orca_common.address import split_address
from orca_local.authority import Authority

Connect = Callable[..., Any]
ALL = list(range(len(IDS)))
SHORT = {"connect_timeout": 0.3}
AWAY = errors.Unavailable("the request pool is away")


def digest(count: int) -> bytes:
    return hashlib.sha1(struct.pack(f"<{count}I", *IDS[:count])).digest()


async def test_stream(stage: Stage, face: Face, connect: Connect) -> None:
    """Every field of every event; every argument of the call."""
    script = Script()
    client = connect((await stage.endpoint(script)).address, metadata=[("authorization", "Bearer k")])
    stream = client.generate(
        [1, 2, 3],
        max_new_tokens=6,
        temperature=0.5,
        top_k=4,
        top_p=0.75,
        seed=2**64 - 1,
        stop=["\n"],
        stop_token_ids=[5],
        ignore_eos=True,
        logprobs=True,
        detach_grace=1.5,
        model="demo",
    )
    events = await rest(face, stream)
    assert events[0] == Accepted(stream.request_id, input_tokens=3, queue_position=1) == stream.accepted
    assert events[1] == Token(0, 100, " w0", -0.5, 10, "engine-0")
    assert events[-1] == Finished(FinishReason.LENGTH, 6, "!", Timings(0.5, 1, 2)) == stream.finished
    assert [event.token_id for event in events[1:-1] if isinstance(event, Token)] == IDS
    assert stream.tokens == events[1:-1]
    assert await face.run(stream.text) == " w0 w1 w2 w3 w4 w5!"  # it can be asked for after the end too
    [call] = script.calls
    expected = pb.GenerateRequest(
        request_id=stream.request_id,
        token_ids=pb.TokenIds(ids=[1, 2, 3]),
        max_new_tokens=6,
        sampling=pb.Sampling(temperature=0.5, top_k=4, top_p=0.75, seed=2**64 - 1),
        stop=["\n"],
        stop_token_ids=[5],
        ignore_eos=True,
        logprobs=True,
        model="demo",
    )
    expected.detach_grace.FromMilliseconds(1500)
    assert without_attempt(call.request) == expected
    assert call.request.attempt > 1_700_000_000_000_000
    assert len(stream.request_id) == 32
    assert call.remaining is None
    assert call.metadata["authorization"] == "Bearer k"


async def test_a_long_message(stage: Stage, face: Face, connect: Connect) -> None:
    """gRPC itself takes 4 MiB, and the logprobs of a long prompt are more."""
    long = "x" * (5 << 20)
    client = connect((await stage.endpoint(Script(Act(1, "finish", text=long)))).address)
    _, shown, _ = await rest(face, client.generate("x", max_new_tokens=1))
    assert isinstance(shown, Token)
    assert shown.text == long


async def test_defaults(stage: Stage, face: Face, connect: Connect) -> None:
    """A text prompt with defaults: greedy, and no optional field is sent. A request id that was given is kept."""
    script = Script()
    client = connect((await stage.endpoint(script)).address)
    assert await face.run(client.generate("Ünï", max_new_tokens=6, request_id="mine").text) == " w0 w1 w2 w3 w4 w5!"
    expected = pb.GenerateRequest(request_id="mine", text="Ünï", max_new_tokens=6, sampling=pb.Sampling())
    expected.detach_grace.FromSeconds(30)
    sent = without_attempt(script.calls[0].request)
    assert isinstance(sent, pb.GenerateRequest)
    assert sent.sampling == pb.Sampling()
    sent.ClearField("sampling")
    expected.ClearField("sampling")
    assert sent == expected


async def test_messages(stage: Stage, face: Face, connect: Connect) -> None:
    """A chat is a prompt like another one: its request resumes, and many can run at once."""
    script = Script(Act(upto=3, end="die"))
    first, second = await stage.endpoint(script, "a"), await stage.endpoint(script, "b")
    messages: list[Any] = [{"role": "system", "content": "é"}, {"role": "user", "content": "hi", "name": "Ann"}]
    client = connect(first.address, second.address)
    tool = {"type": "function", "function": {"name": "f"}}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages += [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c", "content": "5"}]
    tools = {"tools": [tool], "tool_choice": "required", "tool_names": ["f"], "one_tool_call": True}
    stream = client.generate(messages, max_new_tokens=0, template_kwargs={"enable_thinking": False}, **tools)
    assert indexes(await rest(face, stream)) == ALL
    generate, resume = script.calls
    assert isinstance(generate.request, pb.GenerateRequest)
    assert isinstance(resume.request, pb.ResumeRequest)
    assert generate.request.chat == pb.Chat(
        messages=[
            pb.ChatMessage(role="system", content="é"),
            pb.ChatMessage(role="user", content="hi", name="Ann"),
            pb.ChatMessage(role="assistant", tool_calls=json.dumps([call])),
            pb.ChatMessage(role="tool", tool_call_id="c", content="5"),
        ],
        template_kwargs='{"enable_thinking": false}',
        tools=json.dumps([tool]),
        tool_choice=pb.TOOL_CHOICE_REQUIRED,
        tool_names=["f"],
        one_tool_call=True,
    )


async def test_death_of_an_endpoint(stage: Stage, face: Face, connect: Connect) -> None:
    """The first endpoint dies in the middle of a stream. The second goes on after the last token seen."""
    script = Script(Act(upto=3, end="die"))
    first, second = await stage.endpoint(script, "a"), await stage.endpoint(script, "b")
    client = connect(first.address, second.address)
    stream = client.generate("x", max_new_tokens=6)
    events = await rest(face, stream)
    assert indexes(events) == ALL
    assert [type(event) for event in events] == [Accepted, *[Token] * 6, Finished]
    generate, resume = script.calls
    assert (generate.endpoint, resume.endpoint) == ("a", "b")
    assert without_attempt(resume.request) == pb.ResumeRequest(
        request_id=stream.request_id, from_index=3, digest=digest(3)
    )
    assert resume.request.attempt > generate.request.attempt


async def test_connection_reset(stage: Stage, face: Face, connect: Connect) -> None:
    """With a single address (as of a Kubernetes Service), that address is called again as often as needed."""
    script = Script(Act(upto=1), Act(upto=1), Act(upto=4))
    endpoint = await stage.endpoint(script)
    wire, address = await stage.wire(endpoint.address)
    reader = asyncio.create_task(rest(face, connect(address).generate("x", max_new_tokens=6)))
    for _ in range(3):
        await script.said.get()
        wire.cut()  # what is on its way is lost
    assert indexes(await reader) == ALL
    assert len(script.calls) == 4
    for call in script.calls:
        if isinstance(call.request, pb.ResumeRequest):
            seen = call.request.from_index
            assert call.request.digest == (digest(seen) if seen else b"")


async def test_frozen_endpoint(stage: Stage, face: Face, connect: Connect) -> None:
    """Keepalive notices an endpoint that is silent on an open connection."""
    script = Script(Act(upto=2))
    wires = {name: await stage.wire((await stage.endpoint(script, name)).address) for name in ("a", "b")}
    addresses = [address for _, address in wires.values()]
    stream = connect(*addresses, keepalive=0.3).generate("x", max_new_tokens=6)
    events = await take(face, stream, 3)
    silent = script.calls[-1].endpoint  # on a busy machine the other one may have been the first to answer
    wires[silent][0].freeze()
    assert indexes(events + await rest(face, stream)) == ALL
    assert script.calls[-1].endpoint != silent


async def test_not_yet_accepted(stage: Stage, face: Face, connect: Connect) -> None:
    """Until the request is accepted, the same Generate is sent again. Only its attempt grows."""
    script = Script(Act(accept=False, end=AWAY), Act(accept=False, end="die"), Act(accept=False, end=AWAY))
    first, second = await stage.endpoint(script, "a"), await stage.endpoint(script, "b")
    stream = connect(second.address, first.address).generate("x", max_new_tokens=6, seed=1)
    assert indexes(await rest(face, stream)) == ALL
    assert len(script.calls) == 4
    attempts = [call.request.attempt for call in script.calls]
    assert attempts == sorted(set(attempts))
    bodies = [without_attempt(call.request) for call in script.calls]
    assert all(isinstance(body, pb.GenerateRequest) and body == bodies[0] for body in bodies)


@pytest.mark.parametrize("end", ["return", "raise", "internal"])
async def test_broken_stream(stage: Stage, face: Face, connect: Connect, end: Any) -> None:
    """A call that ends without Finished, or with an error that Orca did not send, has a broken transport: resume."""
    script = Script(Act(upto=2, end=end))
    stream = connect((await stage.endpoint(script)).address).generate("x", max_new_tokens=6)
    assert indexes(await rest(face, stream)) == ALL
    assert [type(call.request) for call in script.calls] == [pb.GenerateRequest, pb.ResumeRequest]


@pytest.mark.parametrize(
    "refusal",
    [
        errors.InvalidArgument("sampling.top_p", "must be above 0 and at most 1; it is 7"),
        errors.FailedPrecondition("the request needs 9000 slots; the largest engine has 640"),
        errors.AlreadyExists("request mine is known with another body"),
        errors.NotFound("request mine is not known"),
        errors.ResourceExhausted("the queue is full", 2.5),
        errors.DeadlineExceeded("the deadline passed"),
        errors.Cancelled("the request was cancelled"),
        errors.Aborted("a newer call took over"),
        errors.DataLoss("the pool lost tokens"),
        errors.Internal("the request took its engine down three times", "0af7651916cd43dd8448eb211c80319c"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("upto", [0, 2])
async def test_refusals(stage: Stage, face: Face, connect: Connect, refusal: errors.OrcaError, upto: int) -> None:
    """Each server error raises its namesake here, with its sentence and fields. Nothing is sent again."""
    script = Script(Act(upto=upto, end=refusal, accept=upto > 0))
    stream = connect((await stage.endpoint(script)).address).generate("x", max_new_tokens=6)
    await take(face, stream, upto + 1 if upto else 0)
    kind = getattr(orca_client, type(refusal).__name__)
    with pytest.raises(kind) as raised:
        await face.next(stream)
    assert str(raised.value) == str(refusal)
    assert raised.value.__cause__ is None, "no traceback of grpc's comes before it"
    assert raised.value.code.name == refusal.code
    for field in ("field", "reason", "retry_after", "trace_id"):
        assert getattr(raised.value, field, None) == getattr(refusal, field, None)
    with pytest.raises(kind):
        await face.next(stream)  # the error stays
    await face.run(stream.close)
    assert len(script.calls) == 1
    assert script.cancelled == []


async def test_resume_timeout(stage: Stage, face: Face, connect: Connect) -> None:
    """The client tries again with growing pauses until the bound. Then it says how to go on."""
    script = Script(Act(upto=2, end=AWAY), *[Act(accept=False, end=AWAY)] * 100)
    stream = connect((await stage.endpoint(script)).address, resume_timeout=0.6).generate("x", max_new_tokens=6)
    await take(face, stream, 3)
    with pytest.raises(Unavailable, match="the request pool is away") as given_up:
        await face.next(stream)
    goes_on = f"resume('{stream.request_id}', 2) takes the request up while it lives"
    assert given_up.value.__notes__ == [f"{goes_on}; a longer resume_timeout waits longer"]
    assert 1 < len(script.calls) <= 7


async def test_nobody_there(stage: Stage, face: Face, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orca_client.patience.SURE", 0.3)
    gone = await stage.endpoint(Script())
    await gone.server.stop(0)
    for options in ({"connect_timeout": 600, "fail_fast": True}, {"connect_timeout": 0.3}):
        client = connect(gone.address, **options)
        with pytest.raises(Unreachable, match=f"^{gone.address}: nobody listens there$"):
            await face.next(client.generate("x", max_new_tokens=6))
    # The bound of a call with a timeout is the timeout: on a busy machine it may have passed before the next try.
    with pytest.raises((Unreachable, DeadlineExceeded), match=f"{gone.address}: nobody listens there"):
        await face.run(client.get_model, timeout=0.3)
    with pytest.raises(Unreachable, match=r"^nobody\.invalid:1: the name does not resolve$"):
        await face.run(connect("nobody.invalid:1", fail_fast=True).get_model)


async def test_an_endpoint_that_begins_later(
    stage: Stage, face: Face, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that starts during a rollout: nobody listens yet, where an impatient one would give up at once."""
    monkeypatch.setattr("orca_client.patience.SURE", 0.0)
    gone = await stage.endpoint(Script())
    await gone.server.stop(0)
    with pytest.raises(Unreachable):
        await face.next(connect(gone.address, fail_fast=True).generate("x", max_new_tokens=6))
    client, loop, refused = connect(gone.address), asyncio.get_running_loop(), asyncio.Event()
    error_of_call = client._channels.error

    def error(failure: grpc.RpcError, target: str) -> Exception:
        loop.call_soon_threadsafe(refused.set)
        return error_of_call(failure, target)

    monkeypatch.setattr(client._channels, "error", error)
    reader = asyncio.create_task(rest(face, client.generate("x", max_new_tokens=6)))
    await refused.wait()
    await stage.endpoint(Script(), port=split_address(gone.address)[1])
    assert indexes(await reader) == ALL


async def test_an_endpoint_that_is_full_for_a_while(
    stage: Stage, face: Face, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It closes connections, as one does that speaks TLS. Even an impatient client tries again."""
    monkeypatch.setattr("orca_client.patience.SURE", 0.0)
    wire, address = await stage.wire((await stage.endpoint(Script())).address)
    wire.closes = 2
    client = connect(address, fail_fast=True)
    assert indexes(await rest(face, client.generate("x", max_new_tokens=6))) == ALL
    assert wire.closes == 0


async def test_the_other_transport(
    stage: Stage, face: Face, connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC said "Socket closed", or a line of OpenSSL's, after the whole timeout."""
    monkeypatch.setattr("orca_client.patience.SURE", 0.3)
    authority = Authority(tmp_path)
    folder = authority.issue("endpoint", ["localhost", "127.0.0.1"], timedelta(days=1))
    stranger = Authority(tmp_path / "stranger").issue("client", ["localhost"], timedelta(days=1))
    endpoint = await stage.endpoint(Script())
    certificate = ((folder / "tls.key").read_bytes(), (folder / "tls.crt").read_bytes())
    server = grpc.aio.server()
    open_to_all = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([certificate]))
    authority_file = (folder / "ca.crt").read_bytes()
    mutual = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([certificate], authority_file, True))
    await server.start()
    trusts = grpc.ssl_channel_credentials(authority_file)
    cases = (
        (endpoint.address, trusts, NO_TLS, {}),
        (f"127.0.0.1:{open_to_all}", None, CLOSES, SHORT),
        (f"127.0.0.1:{open_to_all}", tls_credentials(stranger), UNKNOWN_AUTHORITY, {}),
        (f"127.0.0.1:{mutual}", trusts, CLOSES_TLS, SHORT),
    )
    try:
        for address, credentials, cause, bound in cases:
            with pytest.raises(Unreachable) as raised:
                await face.run(connect(address, credentials=credentials, fail_fast=True, **bound).get_model, timeout=60)
            assert str(raised.value) == f"{address}: {cause}"
    finally:
        await server.stop(0)


async def test_an_address_that_nobody_listens_at_beside_one_that_answers(
    stage: Stage, face: Face, connect: Connect
) -> None:
    gone, there = await stage.endpoint(Script()), await stage.endpoint(Script(FINISH))
    await gone.server.stop(0)
    assert (await face.run(connect(gone.address, there.address).get_model)).name == "demo"


async def test_an_endpoint_that_answered_is_waited_for(stage: Stage, face: Face, connect: Connect) -> None:
    """The shorter bound is for a client that never reached anybody. Endpoints that restart are waited for."""
    script = Script(FINISH, Act(accept=False, end="die"))
    endpoint = await stage.endpoint(script)
    client = connect(endpoint.address, connect_timeout=0)
    await rest(face, client.generate("x", max_new_tokens=6))
    reader = asyncio.create_task(rest(face, client.generate("x", max_new_tokens=6)))
    await script.said.get()
    await script.left.get()
    await stage.endpoint(script, "b", port=split_address(endpoint.address)[1])
    assert indexes(await reader) == ALL


async def test_a_span_for_each_request(stage: Stage, face: Face, connect: Connect) -> None:
    """Its context goes with every call of the request, over a resumption too; two requests have two contexts."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    script = Script(Act(upto=2, end=AWAY), FINISH, Act(end=errors.DataLoss("the pool lost tokens")), Act())
    client = connect((await stage.endpoint(script)).address, tracer=tracer, metadata=[("authorization", "Bearer k")])
    with tracer.start_as_current_span("caller") as caller:
        await rest(face, client.generate("x", max_new_tokens=6, request_id="whole"))
        with pytest.raises(DataLoss):
            await rest(face, client.generate("x", max_new_tokens=6))
        left = client.generate("x", max_new_tokens=6)
        await face.next(left)
        left.detach()
    whole, lost, gone, _ = exporter.get_finished_spans()
    sent = [call.metadata["traceparent"].split("-") for call in script.calls]
    for span, calls in ((whole, sent[:2]), (lost, sent[2:3]), (gone, sent[3:])):
        assert span.context is not None
        assert {(trace, parent) for _, trace, parent, _ in calls} == {
            (format_trace_id(span.context.trace_id), format_span_id(span.context.span_id))
        }
        assert span.parent is not None
        assert span.parent.span_id == caller.get_span_context().span_id
    assert {call.metadata["authorization"] for call in script.calls} == {"Bearer k"}
    assert dict(whole.attributes or {}) == {"orca.request_id": "whole", "orca.tokens": 6, "orca.reason": "LENGTH"}
    assert (whole.name, whole.kind, whole.status.status_code) == ("orca.generate", SpanKind.CLIENT, StatusCode.UNSET)
    assert (lost.attributes or {})["orca.reason"] == "TOKENS_LOST"
    assert (lost.status.status_code, lost.status.description) == (StatusCode.ERROR, "the pool lost tokens")
    assert (gone.attributes or {})["orca.reason"] == "LEFT"


async def test_metadata_of_one_request(stage: Stage, face: Face, connect: Connect) -> None:
    script = Script()
    client = connect((await stage.endpoint(script)).address)
    await rest(face, client.generate("x", max_new_tokens=6, metadata=[("x-tenant", "a")]))
    await rest(face, client.generate("x", max_new_tokens=6))
    assert [call.metadata.get("x-tenant") for call in script.calls] == ["a", None]


async def test_a_resumed_request_goes_to_its_model(stage: Stage, face: Face, connect: Connect) -> None:
    """A gateway chooses the release by this header. Another release knows nothing of the request."""
    script = Script()
    client = connect((await stage.endpoint(script)).address)
    await rest(face, client.generate("x", max_new_tokens=6, request_id="mine", model="demo"))
    await rest(face, client.resume("mine", model="demo", metadata=[("x-tenant", "a")]))
    assert [call.metadata.get("x-gateway-model-name") for call in script.calls] == ["demo", "demo"]
    assert script.calls[1].metadata["x-tenant"] == "a"


async def test_full_queue(stage: Stage, face: Face, connect: Connect) -> None:
    """With retry_when_full the client waits as the server says, and sends the same request again."""
    full = Act(accept=False, end=errors.ResourceExhausted("the queue is full", 0.01))
    script = Script(full, full)
    client = connect((await stage.endpoint(script)).address, retry_when_full=True)
    stream = client.generate("x", max_new_tokens=6)
    assert indexes(await rest(face, stream)) == ALL
    assert {call.request.request_id for call in script.calls} == {stream.request_id}
    assert len(script.calls) == 3


async def test_full_queue_until_the_deadline(stage: Stage, face: Face, connect: Connect) -> None:
    script = Script(*[Act(accept=False, end=errors.ResourceExhausted("the queue is full", 60))] * 2)
    client = connect((await stage.endpoint(script)).address, retry_when_full=True)
    with pytest.raises(DeadlineExceeded, match="the queue is full"):
        await face.next(client.generate("x", max_new_tokens=6, timeout=0.3))


async def test_deadline(stage: Stage, face: Face, connect: Connect) -> None:
    """The whole request has one deadline. Each call gets what is left of it."""
    script = Script(Act(upto=1, end=AWAY), Act(upto=2, end=AWAY), Act(upto=3, end="hang"))
    stream = connect((await stage.endpoint(script)).address).generate("x", max_new_tokens=6, timeout=3)
    for count in (2, 1, 1):
        await take(face, stream, count)
        await asyncio.sleep(0.1)  # the reader takes its time, which is the request's too
    with pytest.raises(DeadlineExceeded, match=r"the timeout of 3 s passed"):
        await face.next(stream)
    first, second, third = (call.remaining or 0 for call in script.calls)
    assert first < 3.1
    assert first - second > 0.05  # gRPC tells a timeout in hundredths of a second, rounded up
    assert second - third > 0.05
    assert third > 0


async def leave_loop(face: Face, stream: Any) -> None:
    """Reads an event in a `for` loop, and leaves the loop."""

    def loop() -> None:
        for _ in stream:
            break

    if isinstance(face, Threads):
        await asyncio.to_thread(loop)
    else:
        async for _ in stream:
            break


@pytest.mark.parametrize("how", ["loop", "drop", "close the client"])
async def test_leaving_cancels(stage: Stage, face: Face, connect: Connect, how: str) -> None:
    """The request of a stream that is left before its end is cancelled, before its call ends."""
    script = Script(Act(upto=2))
    client = connect((await stage.endpoint(script)).address)
    stream = client.generate("x", max_new_tokens=6)
    request_id = stream.request_id
    await script.said.get()
    if how == "loop":
        await leave_loop(face, stream)
        with pytest.raises(Cancelled, match="closed here"):
            await rest(face, stream)
    elif how == "drop":
        await face.next(stream)
        del stream
    else:
        await face.run(client.close)
    await script.left.get()
    assert script.cancelled == [request_id]


async def test_leaving_an_ended_stream_cancels_nothing(stage: Stage, face: Face, connect: Connect) -> None:
    """Neither after Finished nor after an error."""
    script = Script(FINISH, Act(upto=1, end=errors.DataLoss("the pool lost tokens")))
    client = connect((await stage.endpoint(script)).address)
    finished = client.generate("x", max_new_tokens=6)
    await rest(face, finished)
    failed = client.generate("x", max_new_tokens=6)
    with pytest.raises(DataLoss):
        await rest(face, failed)
    del finished, failed
    await face.run(client.close)
    assert script.cancelled == []


async def test_leaving_while_no_endpoint_answers(stage: Stage, face: Face, connect: Connect) -> None:
    """Closing the client does not wait for longer than its bound; nothing is raised."""
    script = Script(Act(upto=2))
    endpoint = await stage.endpoint(script)
    wire, address = await stage.wire(endpoint.address)
    client = connect(address)
    stream = client.generate("x", max_new_tokens=6)
    await take(face, stream, 3)
    wire.freeze()
    stream.leave()
    await face.run(client.close)
    assert script.cancelled == []


async def test_detaching_on_request(stage: Stage, face: Face, connect: Connect) -> None:
    """With on_leave="detach" a stream that is left ends its call without a Cancel. The request can be resumed."""
    script = Script(Act(upto=2), FINISH)
    client = connect((await stage.endpoint(script)).address)
    stream = client.generate("x", max_new_tokens=6, on_leave="detach")
    await leave_loop(face, stream)
    assert indexes(await take(face, stream, 2)) == ALL[:2]  # the loop was left, and not the stream
    request_id = stream.request_id
    await script.said.get()  # a call that ends before the endpoint hangs is not seen to be left
    del stream
    await script.left.get()
    assert script.cancelled == []
    assert indexes(await rest(face, client.resume(request_id, 2))) == ALL[2:]


async def test_dropping_detaches(stage: Stage, face: Face, connect: Connect) -> None:
    """The same when the stream is dropped."""
    script = Script(Act(upto=2))
    client = connect((await stage.endpoint(script)).address)
    stream = client.generate("x", max_new_tokens=6, on_leave="detach")
    request_id = stream.request_id
    await take(face, stream, 3)
    await script.said.get()
    del stream
    await script.left.get()
    assert script.cancelled == []
    resumed = client.resume(request_id, 2, seen=IDS[:2])
    assert indexes(await rest(face, resumed)) == ALL[2:]
    assert without_attempt(script.calls[1].request) == pb.ResumeRequest(
        request_id=request_id, from_index=2, digest=digest(2)
    )


async def test_detach_and_close_wake_the_reader(stage: Stage, face: Face, connect: Connect) -> None:
    """Both end the stream while it is read, and the reader gets Cancelled. Only close cancels the request."""
    script = Script(Act(), Act())
    client = connect((await stage.endpoint(script)).address)
    for close, cancels in ((False, 0), (True, 1)):
        stream = client.generate("x", max_new_tokens=6)
        await face.next(stream)
        reader = asyncio.create_task(face.next(stream))
        await script.said.get()
        if close:
            await face.run(stream.close)
        else:
            stream.detach()
        with pytest.raises(Cancelled, match="closed here"):
            await reader
        with pytest.raises(Cancelled, match="closed here"):
            await face.run(stream.text)
        await script.left.get()
        assert len(script.cancelled) == cancels
    assert len(script.calls) == 2


async def test_leaving_a_with_block_cancels(stage: Stage, face: Face, connect: Connect) -> None:
    script = Script(Act(upto=2), FINISH)
    client, loop = connect((await stage.endpoint(script)).address), asyncio.get_running_loop()

    def left() -> Any:
        with client.generate("x", max_new_tokens=6) as stream:
            next(stream)
            asyncio.run_coroutine_threadsafe(script.said.get(), loop).result()
        with client.generate("x", max_new_tokens=6) as whole:
            list(whole)
        return stream

    async def left_async() -> Any:
        async with client.generate("x", max_new_tokens=6) as stream:
            await anext(stream)
            await script.said.get()  # a call that ends before the endpoint hangs is not seen to be left
        async with client.generate("x", max_new_tokens=6) as whole:
            [event async for event in whole]
        return stream

    stream = await asyncio.to_thread(left) if isinstance(face, Threads) else await left_async()
    await script.left.get()
    assert script.cancelled == [stream.request_id]  # and not the request that had finished


async def test_cancel(stage: Stage, face: Face, connect: Connect) -> None:
    """The stream of a cancelled request finishes as CANCELLED, and text() raises instead of returning a part."""
    script = Script(Act(upto=2, end=AWAY), Act(upto=2, end="finish"))
    client = connect((await stage.endpoint(script)).address)
    stream = client.generate("x", max_new_tokens=6)
    await take(face, stream, 3)
    assert await face.run(stream.cancel)
    with pytest.raises(Cancelled, match="was cancelled after 2 tokens"):
        await face.run(stream.text)
    assert stream.finished.reason is FinishReason.CANCELLED
    assert script.cancelled == [stream.request_id]


async def test_unary_calls(stage: Stage, face: Face, connect: Connect) -> None:
    """GetModel and Cancel try another endpoint when one is away."""
    script = Script()
    gone, endpoint = await stage.endpoint(script), await stage.endpoint(script)
    await gone.server.stop(0)
    client = connect(gone.address, endpoint.address)
    model = await face.run(client.get_model)
    assert (model.name, model.vocab_size, model.eos_token_ids, model.has_tokenizer) == ("demo", 512, (1, 2), True)
    assert model.engines == (orca_client.Engine("engine-0", 2, 1, 640, 3, "0af7"),)
    assert await face.run(client.cancel, "some")
    with pytest.raises(NotFound, match="request unknown is not known"):
        await face.run(client.cancel, "unknown")


@pytest.mark.parametrize(
    ("act", "problem"),
    [
        (Act(upto=4, first=3), "token 3 came where 2 was due"),
        (Act(upto=2, first=0, ids=[100, 8]), "token 1 came where 2 was due"),
        (Act(upto=5, end="finish", first=5), "ended with 5 tokens, but 2 were shown"),
    ],
    ids=["gap", "another past", "too few"],
)
async def test_wrong_streams(stage: Stage, face: Face, connect: Connect, act: Act, problem: str) -> None:
    """Tokens that do not continue those that were shown raise DataLoss, and are not shown."""
    script = Script(Act(upto=2, end=AWAY), act)
    stream = connect((await stage.endpoint(script)).address).generate("x", max_new_tokens=6)
    await take(face, stream, 3)
    for _ in range(2):
        with pytest.raises(DataLoss, match=problem):
            await face.next(stream)
    assert len(script.calls) == 2


async def test_tokens_again(stage: Stage, face: Face, connect: Connect) -> None:
    """Tokens that come a second time are not shown again."""
    script = Script(Act(upto=4, end=AWAY), Act(upto=6, first=1, end="finish"))
    stream = connect((await stage.endpoint(script)).address).generate("x", max_new_tokens=6)
    assert indexes(await rest(face, stream)) == ALL


async def test_resume_unknown_past(stage: Stage, face: Face, connect: Connect) -> None:
    """Without the ids of the tokens seen, no digest is sent, and none after a failure either."""
    script = Script(Act(upto=4, end=AWAY))
    client = connect((await stage.endpoint(script)).address)
    assert indexes(await rest(face, client.resume("mine", 2))) == ALL[2:]
    assert [(call.request.from_index, call.request.digest) for call in script.calls] == [(2, b""), (4, b"")]
    with pytest.raises(InvalidArgument, match="number of tokens seen"):
        client.resume("mine", 2, seen=[1])


async def test_spread(stage: Stage, face: Face, connect: Connect) -> None:
    """Requests go to one address after the other."""
    script = Script()
    endpoints = [await stage.endpoint(script, name) for name in "abc"]
    client = connect(*(endpoint.address for endpoint in endpoints))
    for _ in range(4):
        await rest(face, client.generate("x", max_new_tokens=6))
    assert [call.endpoint for call in script.calls] == list("abca")


async def test_a_name_with_several_addresses(stage: Stage, face: Face, connect: Connect) -> None:
    """As of a headless Service: calls go to all of its endpoints, and past those that left or never answer."""
    script = Script()
    first, second = await stage.endpoint(script, "a"), await stage.endpoint(script, "b")
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel accepts connections, and nobody answers
        addresses = [f"127.0.0.1:{silent.getsockname()[1]}", first.address, second.address]
        client = connect("ipv4:" + ",".join(addresses))
        while {call.endpoint for call in script.calls} != {"a", "b"}:
            assert indexes(await rest(face, client.generate("x", max_new_tokens=6))) == ALL
        await first.server.stop(0)
        script.calls.clear()
        for _ in range(4):
            assert indexes(await rest(face, client.generate("x", max_new_tokens=6))) == ALL
        assert {call.endpoint for call in script.calls} == {"b"}


async def test_calls_are_balanced_over_the_addresses_of_a_name(stage: Stage, face: Face, connect: Connect) -> None:
    """One after the other, so that no endpoint gets more than another."""
    script = Script()
    endpoints = [await stage.endpoint(script, name) for name in "abc"]
    client = connect("ipv4:" + ",".join(endpoint.address for endpoint in endpoints))
    while {call.endpoint for call in script.calls} != set("abc"):
        await rest(face, client.generate("x", max_new_tokens=6))
    script.calls.clear()
    for _ in range(12):
        await rest(face, client.generate("x", max_new_tokens=6))
    assert Counter(call.endpoint for call in script.calls) == Counter("abc" * 4)


async def test_closing_the_client(stage: Stage, face: Face, connect: Connect) -> None:
    """A closed client's streams raise Cancelled. The client sends nothing any more."""
    script = Script(Act())
    client = connect((await stage.endpoint(script)).address)
    stream = client.generate("x", max_new_tokens=6, on_leave="detach")
    await face.next(stream)
    reader = asyncio.create_task(face.next(stream))
    await script.said.get()
    await face.run(client.close)
    with pytest.raises(Cancelled, match="closed"):
        await reader
    await script.left.get()
    with pytest.raises(Cancelled, match="the client was closed"):
        client.generate("x", max_new_tokens=6)
    with pytest.raises(Cancelled, match="the client was closed"):
        await face.run(client.get_model)
    assert script.cancelled == []


async def test_started_before_it_is_read(stage: Stage, face: Face, connect: Connect) -> None:
    """A request is sent before its stream is read, so several run at the same time."""
    script = Script(Act(upto=6), Act(upto=6))
    client = connect((await stage.endpoint(script)).address)
    streams = [client.generate("x", max_new_tokens=6) for _ in range(2)]
    await script.said.get()
    await script.said.get()
    assert len({stream.request_id for stream in streams}) == 2


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("max_new_tokens", {"max_new_tokens": -1}),
        ("sampling.top_k", {"top_k": 2**32}),
        ("sampling.seed", {"seed": -1}),
        ("sampling.temperature", {"temperature": "hot"}),
        ("stop_token_ids", {"stop_token_ids": [1, 2**40]}),
        ("prompt", {"prompt": b"bytes"}),
        ("prompt", {"prompt": bytearray(b"bytes")}),
        ("prompt", {"prompt": 5}),
        ("prompt", {"prompt": None}),
        ("token_ids.ids", {"prompt": ["a", "b"]}),
        ("timeout", {"timeout": -1}),
        ("timeout", {"timeout": float("nan")}),
        ("timeout", {"timeout": "soon"}),
        ("text", {"prompt": "half a \udce9"}),
        ("messages[0].content", {"prompt": [{"role": "user", "content": 5}]}),
        ("messages[0].weight", {"prompt": [{"role": "user", "content": "a", "weight": "1"}]}),
        ("messages[1]", {"prompt": [{"role": "user", "content": "a"}, 5]}),
        ("template_kwargs", {"template_kwargs": {"a": 1}}),
        ("tools", {"tools": [{}]}),
        ("tools", {"prompt": [{"role": "user", "content": "a"}], "tools": [object()]}),
        ("tool_choice", {"prompt": [{"role": "user", "content": "a"}], "tool_choice": "any"}),
        ("template_kwargs", {"prompt": [{"role": "user", "content": "a"}], "template_kwargs": {"a": object()}}),
        ("token_ids.ids", {"prompt": [1, -1]}),
        ("detach_grace", {"detach_grace": float("inf")}),
        ("detach_grace", {"detach_grace": float("nan")}),
        ("on_leave", {"on_leave": "stay"}),
    ],
)
async def test_what_the_wire_cannot_hold(connect: Connect, field: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument) as raised:
        connect("127.0.0.1:1").generate(**{"prompt": "x", "max_new_tokens": 1, **arguments})
    assert raised.value.field == field
    assert str(raised.value).startswith(f"{field}: ")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"max_new_tokens": "5"}, "max_new_tokens: must be a whole number from 0 to 4294967295; it is '5'"),
        ({"seed": -1}, "sampling.seed: must be a whole number from 0 to 18446744073709551615; it is -1"),
        ({"temperature": "hot"}, "sampling.temperature: must be a number; it is 'hot'"),
        ({"stop": ["\udcff"]}, "stop: not valid Unicode: it holds a lone surrogate"),
        ({"stop": [3]}, "stop: must be a string or several of them; it is [3]"),
        ({"stop_token_ids": ["a" * 200]}, f"stop_token_ids: must be token ids; it is ['{'a' * 98}.."),
        ({"on_leave": "stay"}, 'on_leave: must be "cancel" or "detach"; it is \'stay\''),
    ],
)
async def test_it_says_what_a_field_needs(connect: Connect, arguments: dict[str, Any], sentence: str) -> None:
    """The words were Python's: bad argument type for built-in operation."""
    with pytest.raises(InvalidArgument) as raised:
        connect("127.0.0.1:1").generate(**{"prompt": "x", "max_new_tokens": 1, **arguments})
    assert str(raised.value) == sentence


async def test_an_argument_that_is_none(connect: Connect) -> None:
    """The sentence named a class that no caller knows."""
    with pytest.raises(TypeError, match=r"^generate\(\) got an unexpected keyword argument 'max_tokens'"):
        connect("127.0.0.1:1").generate("x", max_tokens=1)
    with pytest.raises(TypeError, match=r"^generate\(\) missing 1 required keyword-only argument: 'max_new_tokens'$"):
        connect("127.0.0.1:1").generate("x")


async def test_an_impatient_reader(stage: Stage) -> None:
    """asyncio only: gRPC ends the call of a cancelled read. The next read resumes, and nothing is lost."""
    script = Script(Act(upto=2), Act(upto=2), FINISH)
    async with orca_client.AsyncOrcaClient((await stage.endpoint(script)).address) as client:
        stream = client.generate("x", max_new_tokens=6)
        events = [await anext(stream) for _ in range(3)]
        for _ in range(2):
            reader = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)  # until it reads
            await script.said.get()
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader
            await script.left.get()
        events += [event async for event in stream]
    assert indexes(events) == ALL
    assert [type(call.request) for call in script.calls] == [pb.GenerateRequest, pb.ResumeRequest, pb.ResumeRequest]


async def test_wrong_credentials_are_told_at_once(stage: Stage, face: Face, connect: Connect) -> None:
    """Nothing is sent again."""
    script = Script(Act(accept=False, end=errors.Unauthenticated("no API key")))
    with pytest.raises(orca_client.Unauthenticated, match="no API key"):
        await face.next(connect((await stage.endpoint(script)).address).generate("x", max_new_tokens=6))
    assert len(script.calls) == 1


async def test_an_unknown_status_is_a_plain_error(stage: Stage, face: Face, connect: Connect) -> None:
    """A status outside the error tree raises OrcaError with that code, and nothing is sent again."""

    class OutOfRange(errors.OrcaError):
        code = "OUT_OF_RANGE"

    script = Script(Act(accept=False, end=OutOfRange("too far")))
    with pytest.raises(orca_client.OrcaError, match="too far") as raised:
        await face.next(connect((await stage.endpoint(script)).address).generate("x", max_new_tokens=6))
    assert type(raised.value) is orca_client.OrcaError
    assert raised.value.code is grpc.StatusCode.OUT_OF_RANGE
    assert len(script.calls) == 1
