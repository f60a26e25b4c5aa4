"""The gRPC door on a real pool. The test plays the engine."""

import asyncio
import hashlib
import os
import struct
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from endpoint.harness import (
    World,
    collect,
    detail_of,
    events_in,
    field_of,
    generation,
    ids_of,
    make_model,
    read,
    serving,
    text_of,
    tokens_of,
    until,
    world,
)
from endpoint.lines import lines_of
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from listening import listening

import orca_client
from orca.v1 import orca_pb2 as pb
from orca.v1.orca_pb2_grpc import OrcaStub
from orca_client import OrcaClient
from orca_client.channels import channel_options
from orca_common.address import split_address
from orca_common.errors import ErrorReason, Internal
from orca_endpoint.calls.events import Accepted, Finished, Token
from orca_pool.records import Committed, Reason

CODE = grpc.StatusCode


async def error_of(call: grpc.aio.Call) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(call)
    reason_of(caught.value)
    return caught.value


def reason_of(error: grpc.aio.AioRpcError) -> str:
    """The reason of an error. Every error at the door has one, but those that gRPC itself makes."""
    own = ("Failed to connect", "Deadline Exceeded")
    if any(sentence in (error.details() or "") for sentence in own):
        return ""
    info = detail_of(error, error_details_pb2.ErrorInfo())
    assert info.domain == "orca.serving"
    assert info.reason in set(ErrorReason) - {ErrorReason.UNSPECIFIED}
    return info.reason


async def test_a_stream(orca: World) -> None:
    call = orca.stub.Generate(pb.GenerateRequest(text="the pool", max_new_tokens=3, logprobs=True, request_id="one"))
    request = await orca.engine.claim()
    await orca.engine.answer(request, [300, 301, 302])
    responses = await collect(call)
    accepted, finished = responses[0].accepted, responses[-1].finished
    assert accepted.request_id == "one"
    assert accepted.input_tokens > 0
    assert ids_of(responses) == [300, 301, 302]
    tokens = tokens_of(responses)
    assert [t.logprob for t in tokens] == [-0.5] * 3
    assert [t.iteration for t in tokens] == [1, 2, 3]
    assert {t.engine for t in tokens} == {"engine-0"}
    assert finished.reason == pb.FINISH_REASON_LENGTH
    assert finished.output_tokens == 3
    times = finished.timings
    moments = [duration.ToMicroseconds() for duration in (times.claimed, times.first_token, times.finished)]
    assert 0 < moments[0] < moments[1] <= moments[2] < 10e6


async def test_what_is_there_together_is_one_message(orca: World) -> None:
    """The tokens of one packet, with the end if it is there; and everything of a request that has ended."""
    call = orca.stub.Generate(generation(max_new_tokens=6, request_id="together"))
    request = await orca.engine.claim()
    [accepted] = await read(call, 1)
    assert events_in(accepted) == 1
    await orca.engine.commit(request, 0, [10, 11])
    assert ids_of([await call.read()]) == [10, 11]  # type: ignore[list-item]
    await orca.engine.commit(request, 2, [12, 13, 14, 15], Reason.LENGTH)
    last = await call.read()
    assert isinstance(last, pb.GenerateResponse)
    assert ids_of([last]) == [12, 13, 14, 15]
    assert last.finished.output_tokens == 6
    for from_index in range(7):
        again = await collect(orca.stub.Resume(pb.ResumeRequest(request_id="together", from_index=from_index)))
        assert len(again) == 1
        assert [token.index for token in again[0].tokens] == list(range(from_index, 6))
        assert again[0].HasField("accepted")
        assert again[0].finished.output_tokens == 6


async def test_tokens_wait_for_one_another_where_asked(orca: World) -> None:
    """The first token comes at once, then three at a time, then what is left with the end. So does a resumed stream."""
    call = orca.stub.Generate(generation(request_id="three", stream_interval=3))
    request = await orca.engine.claim()
    await read(call, 1)
    await orca.engine.commit(request, 0, [10])
    assert ids_of([await call.read()]) == [10]  # type: ignore[list-item]
    for index in (1, 2, 3):
        await orca.engine.commit(request, index, [10 + index])
    assert ids_of([await call.read()]) == [11, 12, 13]  # type: ignore[list-item]
    call = orca.stub.Resume(pb.ResumeRequest(request_id="three", from_index=4, stream_interval=2))
    await read(call, 1)
    for index in (4, 5, 6, 7):
        await orca.engine.commit(request, index, [10 + index], Reason.LENGTH if index == 7 else None)
        if index in (5, 7):
            assert ids_of([await call.read()]) == [10 + index - 1, 10 + index]  # type: ignore[list-item]
    error = await error_of(orca.stub.Resume(pb.ResumeRequest(request_id="three", stream_interval=257)))
    assert field_of(error) == "stream_interval"
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await orca.stub.GenerateText(generation(stream_interval=257), timeout=5)
    assert field_of(refused.value) == "stream_interval", "what an answer that is not streamed does not need is checked"


async def test_with_stop_strings_no_token_waits(orca: World) -> None:
    """The engine runs until a stop string is found."""
    call = orca.stub.Generate(generation(stop=["never"], stream_interval=3))
    request = await orca.engine.claim()
    await read(call, 1)
    for index in range(3):
        await orca.engine.commit(request, index, [10 + index])
        assert ids_of([await call.read()]) == [10 + index]  # type: ignore[list-item]


async def test_packets_that_came_meanwhile_are_one_message(orca: World) -> None:
    """A client that is slower than its engine costs less for each token: nothing is sent one by one that is there."""
    ids = [10 + n for n in range(150)]
    async with await orca.serving.app.endpoint.generate(generation(max_new_tokens=150), None, {}) as call:
        pieces = call.pieces()
        assert len(await anext(pieces)) == 1
        request = await orca.engine.claim()
        for n in range(150):
            await orca.engine.commit(request, n, [ids[n]], Reason.LENGTH if n == 149 else None)
        await until(lambda: call.buffered == 150)
        piece = await anext(pieces)
        assert [event.token_id for event in piece if isinstance(event, Token)] == ids
        assert isinstance(piece[-1], Finished)


async def test_a_message_holds_at_most_256_tokens(redis_url: str, model: Path) -> None:
    """So that it stays far below the 4 MiB that clients accept, however much a resumed stream has to tell."""
    folder = make_model(model.parent / "long", positions=2048)
    async with world(redis_url, folder, slots=2048) as orca:
        ids = [10 + n % 400 for n in range(1000)]
        call = orca.stub.Generate(generation(max_new_tokens=1000, request_id="long"))
        request = await orca.engine.claim()
        await orca.engine.commit(request, 0, ids, Reason.LENGTH)
        assert ids_of(await collect(call)) == ids
        again = await collect(orca.stub.Resume(pb.ResumeRequest(request_id="long")))
        assert ids_of(again) == ids
        assert max(len(response.tokens) for response in again) <= 256
        assert len(again) == 4


async def test_events_before_an_error_are_sent(orca: World) -> None:
    """Tokens that came together with an end that is an error come before it."""
    async with await orca.serving.app.endpoint.generate(generation(request_id="over"), None, {}) as call:
        pieces = call.pieces()
        await anext(pieces)
        request = await orca.engine.claim()
        await orca.engine.commit(request, 0, [10])
        await orca.engine.commit(request, 1, [11], Reason.INTERNAL)
        await until(lambda: call.buffered == 2)
        assert [event.token_id for event in await anext(pieces) if isinstance(event, Token)] == [10, 11]
        with pytest.raises(Internal):
            await anext(pieces)


async def test_text_without_a_stream(orca: World) -> None:
    """GenerateText: the same request, one answer. The same id and body bring the answer again."""
    vocabulary = orca.serving.app.vocabulary
    assert vocabulary is not None
    ids = vocabulary.encode("naïve 東京")
    request = generation(max_new_tokens=len(ids) - 1, request_id="whole", logprobs=True, model="tiny")
    async with orca.background(lambda record: ids):
        streamed = await collect(orca.stub.Generate(generation(max_new_tokens=len(ids) - 1)))
        answer = await orca.stub.GenerateText(request)
        assert (await orca.stub.GenerateText(request)) == answer
    assert answer.request_id == "whole"
    assert answer.input_tokens == 3
    assert answer.text == text_of(streamed)
    assert list(answer.token_ids) == ids[:-1]
    assert list(answer.logprobs) == [-0.5] * (len(ids) - 1)
    assert answer.reason == pb.FINISH_REASON_LENGTH
    assert 0 < answer.timings.first_token.ToMicroseconds() <= answer.timings.finished.ToMicroseconds()
    async with orca.background(lambda record: [5]):
        plain = await orca.stub.GenerateText(generation(max_new_tokens=1))
    assert not plain.logprobs


async def test_a_cancelled_text_is_an_error(orca: World) -> None:
    """An answer is never a part of one."""
    call = asyncio.ensure_future(orca.stub.GenerateText(generation(request_id="part")))
    request = await orca.engine.claim()
    await orca.engine.commit(request, 0, [10])
    await orca.stub.Cancel(pb.CancelRequest(request_id="part"))
    with pytest.raises(grpc.aio.AioRpcError, match="was cancelled after 1 tokens") as caught:
        await call
    assert caught.value.code() is CODE.CANCELLED
    assert reason_of(caught.value) == "REQUEST_CANCELLED"


async def test_another_model(orca: World) -> None:
    """A model that is named is checked. It is no part of the body: there is one model here."""
    error = await error_of(orca.stub.Generate(generation(model="gpt-5")))
    assert (error.code(), reason_of(error)) == (CODE.NOT_FOUND, "UNKNOWN_MODEL")
    assert "'gpt-5' is not served here; 'tiny' is" in (error.details() or "")
    async with orca.background(lambda record: [10]):
        named = generation(max_new_tokens=1, model="tiny", request_id="named")
        assert ids_of(await collect(orca.stub.Generate(named))) == [10]
        assert ids_of(await collect(orca.stub.Generate(generation(max_new_tokens=1, request_id="named")))) == [10]


async def test_text_is_the_decoded_text(orca: World) -> None:
    text = "naïve café 東京 😀 grüße"
    vocabulary = orca.serving.app.vocabulary
    assert vocabulary is not None
    ids = vocabulary.encode(text)
    async with orca.background(lambda record: ids):
        responses = await collect(orca.stub.Generate(generation(max_new_tokens=len(ids))))
        short = await collect(orca.stub.Generate(generation(max_new_tokens=len(ids) - 1)))
    assert text_of(responses) == text
    assert responses[-1].finished.text == ""
    assert text.startswith(text_of(short).rstrip("\ufffd"))


async def test_no_logprobs_unless_asked(orca: World) -> None:
    async with orca.background(lambda record: [5]):
        responses = await collect(orca.stub.Generate(generation(max_new_tokens=1)))
    assert not tokens_of(responses)[0].HasField("logprob")


@pytest.mark.parametrize(
    ("fields", "ids", "reason"),
    [
        ({}, [5, 6, 0], pb.FINISH_REASON_EOS),
        ({"stop_token_ids": [6]}, [5, 6], pb.FINISH_REASON_STOP_TOKEN),
        ({"ignore_eos": True, "max_new_tokens": 3}, [5, 0, 0], pb.FINISH_REASON_LENGTH),
    ],
)
async def test_the_token_that_ends_it_is_delivered(
    orca: World, fields: dict[str, object], ids: list[int], reason: pb.FinishReason
) -> None:
    async with orca.background(lambda record: [*ids, 9, 9]):
        responses = await collect(orca.stub.Generate(generation(**fields)))  # type: ignore[arg-type]
    assert ids_of(responses) == ids
    assert responses[-1].finished.reason == reason
    assert responses[-1].finished.output_tokens == len(ids)


async def test_a_stop_string_over_tokens(orca: World) -> None:
    """The end is recorded in the pool. Tokens after the end are void for every reader."""
    vocabulary = orca.serving.app.vocabulary
    assert vocabulary is not None
    ids = vocabulary.encode("the pool 東京 and more and more")
    call = orca.stub.Generate(generation(max_new_tokens=40, stop=["東京"], request_id="stopping"))
    request = await orca.engine.claim()
    await orca.engine.commit(request, 0, ids[:-2])  # a packet with tokens after the stop string
    responses = await collect(call)
    assert text_of(responses) == "the pool "
    finished = responses[-1].finished
    assert finished.reason == pb.FINISH_REASON_STOP
    assert finished.output_tokens == len(ids_of(responses)) < len(ids)
    assert finished.timings.finished.ToMicroseconds() > 0
    assert await orca.engine.commit(request, len(ids) - 2, ids[-2:]) == Committed.GONE
    again = await collect(orca.stub.Resume(pb.ResumeRequest(request_id="stopping")))
    assert ids_of(again) == ids_of(responses)
    assert text_of(again) == "the pool "
    assert again[-1].finished.reason == pb.FINISH_REASON_STOP


async def test_resume_from_an_index(orca: World) -> None:
    """A request is resumed while it runs and after its end. The older call ends ABORTED."""
    first = orca.stub.Generate(generation(max_new_tokens=6, request_id="long", attempt=1))
    request = await orca.engine.claim()
    await orca.engine.commit(request, 0, [10, 11, 12])
    seen = await read(first, 4)
    assert ids_of(seen) == [10, 11, 12]
    digest = hashlib.sha1(struct.pack("<2I", 10, 11)).digest()
    second = orca.stub.Resume(pb.ResumeRequest(request_id="long", from_index=2, attempt=2, digest=digest))
    head = await read(second, 2)
    assert head[0].accepted.request_id == "long"
    assert (await error_of(first)).code() is CODE.ABORTED
    await orca.engine.commit(request, 3, [13, 14, 15], Reason.LENGTH)
    rest = [*head, *await collect(second)]
    assert ids_of(rest) == [12, 13, 14, 15]
    assert tokens_of(rest)[0].index == 2
    assert rest[-1].finished.output_tokens == 6
    ended = await collect(orca.stub.Resume(pb.ResumeRequest(request_id="long", from_index=5, attempt=3)))
    assert ids_of(ended) == [15]
    assert ended[-1].finished.reason == pb.FINISH_REASON_LENGTH
    older = await error_of(orca.stub.Resume(pb.ResumeRequest(request_id="long", attempt=2)))
    assert older.code() is CODE.ABORTED


async def test_resume_of_another_prefix(orca: World) -> None:
    async with orca.background(lambda record: [10, 11, 12, 13]):
        await collect(orca.stub.Generate(generation(max_new_tokens=4, request_id="other")))
    digest = hashlib.sha1(struct.pack("<2I", 10, 99)).digest()
    error = await error_of(orca.stub.Resume(pb.ResumeRequest(request_id="other", from_index=2, digest=digest)))
    assert error.code() is CODE.DATA_LOSS
    beyond = await error_of(orca.stub.Resume(pb.ResumeRequest(request_id="other", from_index=5)))
    assert beyond.code() is CODE.DATA_LOSS


async def test_the_text_of_a_resumed_stream_begins_at_zero(orca: World) -> None:
    """A stop string that began before from_index still ends the stream; a character that began there comes whole."""
    vocabulary = orca.serving.app.vocabulary
    assert vocabulary is not None
    ids = vocabulary.encode("grüße 😀 end")
    async with orca.background(lambda record: ids):
        whole = await collect(orca.stub.Generate(generation(max_new_tokens=len(ids), request_id="emoji")))
    for start in range(len(ids)):
        rest = await collect(orca.stub.Resume(pb.ResumeRequest(request_id="emoji", from_index=start)))
        assert text_of(rest) == "".join(t.text for t in tokens_of(whole)[start:]) + whole[-1].finished.text


async def test_on_another_endpoint(orca: World) -> None:
    async with serving(orca.redis_url, orca.name, orca.model) as other:
        first = orca.stub.Generate(generation(max_new_tokens=4, request_id="moved"))
        request = await orca.engine.claim()
        await orca.engine.commit(request, 0, [10, 11])
        seen = await read(first, 3)
        assert ids_of(seen) == [10, 11]
        second = other.stub.Resume(pb.ResumeRequest(request_id="moved", from_index=2))
        assert (await second.read()).HasField("accepted")  # type: ignore[union-attr]
        assert (await error_of(first)).code() is CODE.ABORTED
        await orca.engine.commit(request, 2, [12, 13], Reason.LENGTH)
        assert ids_of(await collect(second)) == [12, 13]


async def test_other_weights(orca: World) -> None:
    """What has tokens ends when no engine has their weights any more; what has none begins with the new ones."""
    await orca.engine.change_weights("old")
    begun = orca.stub.Generate(generation(max_new_tokens=4, request_id="begun", attempt=1))
    request = await orca.engine.claim()
    waits = orca.stub.Generate(generation(max_new_tokens=2, request_id="waits", attempt=1))
    assert (await read(waits, 1))[0].accepted.weights == ""
    await orca.engine.commit(request, 0, [10, 11])
    first = await read(begun, 3)
    assert (first[0].accepted.weights, ids_of(first)) == ("", [10, 11])
    await orca.engine.change_weights("new")
    error = await error_of(begun)
    assert (error.code(), reason_of(error)) == (CODE.ABORTED, "MODEL_CHANGED")
    again = orca.stub.Resume(pb.ResumeRequest(request_id="begun", attempt=2))
    assert (await read(again, 3))[0].accepted.weights == "old"
    assert reason_of(await error_of(again)) == "MODEL_CHANGED"
    request = await orca.engine.claim()
    assert (request.request_id, request.weights) == ("waits", "new")
    await orca.engine.answer(request, [20, 21])
    assert ids_of(await collect(waits)) == [20, 21]
    assert [engine.weights for engine in (await orca.stub.GetModel(pb.GetModelRequest())).engines] == ["new"]


async def test_cancel(orca: World) -> None:
    call = orca.stub.Generate(generation(request_id="unwanted"))
    request = await orca.engine.claim()
    await orca.engine.commit(request, 0, [10])
    assert (await orca.stub.Cancel(pb.CancelRequest(request_id="unwanted"))).alive
    responses = await collect(call)
    assert ids_of(responses) == [10]
    assert responses[-1].finished.reason == pb.FINISH_REASON_CANCELLED
    assert not (await orca.stub.Cancel(pb.CancelRequest(request_id="unwanted"))).alive
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await orca.stub.Cancel(pb.CancelRequest(request_id="nobody"))
    assert caught.value.code() is CODE.NOT_FOUND


@pytest.mark.usefixtures("punctual")
async def test_a_client_that_leaves(orca: World) -> None:
    """Without a grace the request ends at once. With a grace it goes on, and a Resume finds it."""
    call = orca.stub.Generate(generation(request_id="leaver"))
    request = await orca.engine.claim()
    await call.read()
    call.cancel()
    await orca.serving.quiet()
    assert await orca.engine.commit(request, 0, [10]) == Committed.GONE
    resumed = await error_of(orca.stub.Resume(pb.ResumeRequest(request_id="leaver")))
    assert resumed.code() is CODE.CANCELLED

    call = orca.stub.Generate(generation(request_id="back", max_new_tokens=1, detach_grace=Duration(seconds=20)))
    request = await orca.engine.claim()
    await call.read()
    call.cancel()
    await orca.serving.quiet()
    assert await orca.engine.commit(request, 0, [10], Reason.LENGTH) == Committed.OK
    assert ids_of(await collect(orca.stub.Resume(pb.ResumeRequest(request_id="back")))) == [10]


async def test_the_loop_of_the_readme_left_early(orca: World) -> None:
    """The client library cancels the request: no engine goes on with it."""

    def loop(client: OrcaClient) -> None:
        for event in client.generate([5, 6], max_new_tokens=8, request_id="readme"):
            if isinstance(event, orca_client.Token):
                break

    with OrcaClient(orca.serving.addresses["grpc"]) as client:
        reading = asyncio.create_task(asyncio.to_thread(loop, client))
        request = await orca.engine.claim()
        await orca.engine.commit(request, 0, [10])
        await reading
        await orca.serving.quiet()
    assert await orca.engine.commit(request, 1, [11]) == Committed.GONE


@pytest.mark.usefixtures("punctual")
async def test_a_client_that_leaves_while_it_is_submitted(orca: World) -> None:
    """Whenever the client leaves, no request stays behind."""
    for n in range(20):
        call = orca.stub.Generate(generation(request_id=f"hasty-{n}"))
        await asyncio.sleep(n * 0.0005)
        call.cancel()
    await orca.stub.GetModel(pb.GetModelRequest())  # it comes after all of them
    await until(lambda: not orca.serving.app._grpc.clients)
    await orca.serving.quiet()
    for n in range(20):
        assert await orca.pool.cancel(f"hasty-{n}") in {False, None}, "the request was alive"


async def test_a_deadline(orca: World) -> None:
    """The request ends at its deadline, in the pool too. Its answer is never a shortened one."""
    call = orca.stub.Generate(generation(request_id="late", detach_grace=Duration(seconds=60)), timeout=2)
    request = await orca.engine.claim()
    await orca.engine.commit(request, 0, [10])
    error = await error_of(call)
    assert error.code() is CODE.DEADLINE_EXCEEDED
    resumed = await error_of(orca.stub.Resume(pb.ResumeRequest(request_id="late")))
    assert resumed.code() is CODE.DEADLINE_EXCEEDED
    assert "the deadline that its caller set has passed" in (resumed.details() or "")
    past = await error_of(orca.stub.Generate(generation(), timeout=-1))
    assert past.code() is CODE.DEADLINE_EXCEEDED


async def test_the_same_id_again(orca: World) -> None:
    """The same body is Resume from 0, another body is refused."""
    request = generation(max_new_tokens=2, request_id="twice")
    async with orca.background(lambda record: [10, 11]):
        first = await collect(orca.stub.Generate(request))
        second = await collect(orca.stub.Generate(request))
    assert ids_of(first) == ids_of(second) == [10, 11]
    error = await error_of(orca.stub.Generate(generation(max_new_tokens=3, request_id="twice")))
    assert error.code() is CODE.ALREADY_EXISTS
    assert "another body" in (error.details() or "")


async def test_an_unknown_request(orca: World, monkeypatch: pytest.MonkeyPatch) -> None:
    error = await error_of(orca.stub.Resume(pb.ResumeRequest(request_id="nobody")))
    assert error.code() is CODE.NOT_FOUND
    monkeypatch.setattr("orca_endpoint.calls.call.HEALING", 0.1)
    error = await error_of(orca.stub.Resume(pb.ResumeRequest(request_id="nobody", from_index=3)))
    assert (error.code(), reason_of(error)) == (CODE.DATA_LOSS, "TOKENS_LOST"), "three tokens were shown"
    for request, field in [
        (pb.ResumeRequest(), "request_id"),
        (pb.ResumeRequest(request_id="a", digest=b"short"), "digest"),
        (pb.ResumeRequest(request_id="a", from_index=1 << 31), "from_index"),
        (pb.ResumeRequest(request_id="a", attempt=1 << 60), "attempt"),
    ]:
        error = await error_of(orca.stub.Resume(request))
        assert error.code() is CODE.INVALID_ARGUMENT
        assert field_of(error) == field


async def test_bad_input_names_its_field(orca: World) -> None:
    """The next request works."""
    generate = orca.serving.channel.unary_stream("/orca.v1.Orca/Generate")
    for sent, field in [
        (generation(max_new_tokens=0).SerializeToString(), "max_new_tokens"),
        (pb.GenerateRequest(text="x" * 1_100_000, max_new_tokens=1).SerializeToString(), "text"),
    ]:
        error = await error_of(generate(sent))
        assert error.code() is CODE.INVALID_ARGUMENT
        assert field_of(error) == field
        assert (error.details() or "").startswith(f"{field}: ")
    with pytest.raises(grpc.aio.AioRpcError, match=r"larger than max \(9437184 vs. 4194304\)") as caught:
        await collect(generate(b"x" * (9 << 20)))  # C-core's own answer
    assert caught.value.code() is CODE.RESOURCE_EXHAUSTED
    async with orca.background(lambda record: [10]):
        assert ids_of(await collect(orca.stub.Generate(generation(max_new_tokens=1)))) == [10]


def raw(request: pb.GenerateRequest, old: bytes = b"", new: bytes = b"") -> bytes:
    return request.SerializeToString().replace(old, new)


async def test_bytes_that_are_no_request(orca: World) -> None:
    """INVALID_ARGUMENT, not INTERNAL as stock gRPC would say; health checks too. The next request works."""
    generate = orca.serving.channel.unary_stream("/orca.v1.Orca/Generate")
    for sent in [
        raw(pb.GenerateRequest(text="ab"), b"ab", b"\xff\xfe"),
        raw(pb.GenerateRequest(request_id="ab"), b"ab", b"\xc3("),
        raw(generation(stop=["x", "ab"]), b"ab", b"\x80\x80"),
        b"\xff" * 20,
        raw(generation())[:-1],
        b"\x1a\x7f\x0a",
        b"\x0b\x0b\x0b",
    ]:
        error = await error_of(generate(sent))
        assert error.code() is CODE.INVALID_ARGUMENT
        assert field_of(error) == "message"
        assert reason_of(error) == "UNREADABLE_MESSAGE"
        sentence = "message: not a valid request of /orca.v1.Orca/Generate (text fields must be UTF-8)"
        assert error.details() == sentence
    check = orca.serving.channel.unary_unary("/grpc.health.v1.Health/Check")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await check(b"\xff\xff")
    assert caught.value.code() is CODE.INVALID_ARGUMENT
    async with orca.background(lambda record: [10]):
        assert ids_of(await collect(orca.stub.Generate(generation(max_new_tokens=1)))) == [10]


async def test_what_can_never_fit(orca: World) -> None:
    error = await error_of(orca.stub.Generate(generation([1, 2], 220)))
    assert (error.code(), reason_of(error)) == (CODE.FAILED_PRECONDITION, "TOO_LARGE")
    assert "needs 222 slots" in (error.details() or "")
    assert "the largest engine has 200" in (error.details() or "")


async def test_bounds_of_queue_and_calls(orca: World) -> None:
    """A full queue and a full endpoint answer RESOURCE_EXHAUSTED, which says when to try again."""
    async with serving(orca.redis_url, orca.name, orca.model, max_waiting=1, max_calls=2) as other:
        calls = [other.stub.Generate(generation(request_id="first"))]
        await calls[0].read()
        error = await error_of(other.stub.Generate(generation()))
        assert error.code() is CODE.RESOURCE_EXHAUSTED
        assert reason_of(error) == "QUEUE_FULL"
        assert "queue is full" in (error.details() or "")
        assert detail_of(error, error_details_pb2.RetryInfo()).retry_delay.ToSeconds() == 1
        await orca.engine.claim()
        calls.append(other.stub.Generate(generation(request_id="second")))
        await calls[1].read()
        error = await error_of(other.stub.Generate(generation()))
        assert error.code() is CODE.RESOURCE_EXHAUSTED
        assert reason_of(error) == "ENDPOINT_FULL"
        assert "2 streams" in (error.details() or "")


async def test_a_full_endpoint_has_room_for_a_resume(orca: World) -> None:
    """The streams of an endpoint that died come to the others, which may be full. Their room has an end too."""
    async with serving(orca.redis_url, orca.name, orca.model, max_calls=1) as full:
        first = full.stub.Generate(generation(max_new_tokens=1, request_id="first"))
        await first.read()
        orphan = orca.stub.Generate(generation(max_new_tokens=1, request_id="orphan"))
        await orphan.read()
        resumed = full.stub.Resume(pb.ResumeRequest(request_id="orphan", attempt=1 << 52))
        assert isinstance(await resumed.read(), pb.GenerateResponse)
        for refused in (
            full.stub.Generate(generation()),
            full.stub.Resume(pb.ResumeRequest(request_id="orphan", attempt=(1 << 52) + 1)),
        ):
            assert (await error_of(refused)).code() is CODE.RESOURCE_EXHAUSTED
        for token in (10, 11):
            await orca.engine.answer(await orca.engine.claim(), [token])
        assert ids_of(await collect(first)) == [10]
        assert ids_of(await collect(resumed)) == [11]


async def test_the_queue_position(orca: World) -> None:
    calls = []
    for position in range(3):
        calls.append(orca.stub.Generate(generation()))
        first = await calls[-1].read()
        assert isinstance(first, pb.GenerateResponse)
        assert first.accepted.queue_position == position


async def test_the_model(orca: World) -> None:
    model = await orca.stub.GetModel(pb.GetModelRequest())
    assert (model.name, model.vocab_size, model.max_positions) == ("tiny", 512, 256)
    assert list(model.eos_token_ids) == [0]
    assert model.has_tokenizer
    assert [(engine.id, engine.slots) for engine in model.engines] == [("engine-0", 200)]


async def test_health(orca: World) -> None:
    """Every service that is listed has its own status, and so has the server as a whole."""
    check = orca.serving.channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        health_pb2.HealthCheckRequest.SerializeToString,
        health_pb2.HealthCheckResponse.FromString,
    )

    async def status(service: str) -> int:
        return (await check(health_pb2.HealthCheckRequest(service=service))).status

    async with asyncio.timeout(30):
        while await status("orca.v1.Orca") != health_pb2.HealthCheckResponse.SERVING:
            pass
    for service in ["", *await services(orca)]:
        assert await status(service) == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await status("orca.v2.Orca")
    assert (caught.value.code(), reason_of(caught.value)) == (CODE.NOT_FOUND, "UNSUPPORTED")


async def test_an_unknown_method(orca: World) -> None:
    for path in ("/orca.v1.Orca/Nothing", "/a.B/C", "/"):
        error = await error_of(orca.serving.channel.unary_stream(path)(b""))
        assert (error.code(), reason_of(error)) == (CODE.UNIMPLEMENTED, "UNSUPPORTED")


V1, V1ALPHA = "grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection"


async def reflect(orca: World, version: str, *requests: bytes) -> list[reflection_pb2.ServerReflectionResponse]:
    parse = reflection_pb2.ServerReflectionResponse.FromString
    ask = orca.serving.channel.stream_stream(f"/{version}/ServerReflectionInfo", None, parse)
    return [answer async for answer in ask(iter(requests))]


async def question(orca: World, version: str, **fields: Any) -> reflection_pb2.ServerReflectionResponse:
    request = reflection_pb2.ServerReflectionRequest(**fields)
    [answer] = await reflect(orca, version, request.SerializeToString())
    assert answer.original_request == request
    return answer


async def services(orca: World) -> list[str]:
    answer = await question(orca, V1, list_services="")
    return [service.name for service in answer.list_services_response.service]


@pytest.mark.parametrize("version", [V1, V1ALPHA])
async def test_reflection(orca: World, version: str) -> None:
    """Services, messages and methods are found, with all files that they need; what is not known is an answer."""
    assert await services(orca) == ["grpc.health.v1.Health", V1ALPHA, "orca.v1.Orca"]
    for symbol in ("orca.v1.Orca", "orca.v1.Orca.Generate", "orca.v1.Token", "orca.v1.FinishReason", V1ALPHA):
        answer = await question(orca, version, file_containing_symbol=symbol)
        raw = answer.file_descriptor_response.file_descriptor_proto
        files = [FileDescriptorProto.FromString(file) for file in raw]
        assert files[0].package in symbol
        names = {file.name for file in files}
        assert all(needed in names for file in files for needed in file.dependency)
    for unknown in ({"file_containing_symbol": "orca.v1.Orca.Invent"}, {"file_by_filename": "a.proto"}):
        answer = await question(orca, version, **unknown)
        assert answer.error_response.error_code == CODE.NOT_FOUND.value[0]  # type: ignore[index]
    duration = await question(orca, version, file_by_filename="google/protobuf/duration.proto")
    assert duration.HasField("file_descriptor_response")
    numbers = await question(orca, version, all_extension_numbers_of_type="orca.v1.Token")
    assert numbers.all_extension_numbers_response.base_type_name == "orca.v1.Token"
    none = await question(orca, version)
    assert none.error_response.error_code == CODE.INVALID_ARGUMENT.value[0]  # type: ignore[index]


@pytest.mark.parametrize("version", [V1, V1ALPHA])
async def test_reflection_of_bytes_that_are_no_question(orca: World, version: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await reflect(orca, version, b"\xff\xff")
    assert caught.value.code() is CODE.INVALID_ARGUMENT
    assert reason_of(caught.value) == "UNREADABLE_MESSAGE"
    assert await services(orca)


async def test_the_log_tells_a_deadline_from_a_client_that_left(orca: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "orca_endpoint.calls.line")
    late = orca.stub.Generate(generation(request_id="late"), timeout=2)
    left = orca.stub.Generate(generation(request_id="left"), timeout=60)
    await left.read()
    left.cancel()
    with pytest.raises(grpc.aio.AioRpcError):
        await collect(late)
    await orca.serving.quiet()
    await until(lambda: len(lines_of(caplog)) == 2)
    ends = {line["request"]: (line["status"], line["reason"]) for line in lines_of(caplog)}
    assert ends == {"late": ("DEADLINE_EXCEEDED", "DEADLINE_PASSED"), "left": ("CANCELLED", "CLIENT_GONE")}


async def test_a_client_that_does_not_read(orca: World) -> None:
    """A slow reader's packets are dropped and re-read from the pool: memory is bounded, nothing is lost."""
    async with serving(orca.redis_url, orca.name, orca.model, call_buffer=16) as other:
        ids = [10 + n % 400 for n in range(150)]
        async with await other.app.endpoint.generate(generation(max_new_tokens=150), None, {}) as call:
            pieces = call.pieces()
            [accepted] = await anext(pieces)
            assert isinstance(accepted, Accepted)
            request = await orca.engine.claim()
            await orca.engine.commit(request, 0, ids[:1])
            [first] = await anext(pieces)
            assert isinstance(first, Token)
            assert first.token_id == ids[0]
            for n in range(1, 150):
                await orca.engine.commit(request, n, [ids[n]], Reason.LENGTH if n == 149 else None)
                assert call.buffered <= 16
            tokens = [event async for piece in pieces for event in piece]
        assert [event.token_id for event in tokens if isinstance(event, Token)] == ids[1:]
        assert isinstance(tokens[-1], Finished)


async def test_many_at_once(orca: World) -> None:
    async with orca.background(lambda record: [record.prompt_ids[0]] * 4):
        calls = [orca.stub.Generate(generation([1 + n], 4)) for n in range(30)]
        answers = await asyncio.gather(*(collect(call) for call in calls))
    assert [ids_of(answer) for answer in answers] == [[1 + n] * 4 for n in range(30)]


async def test_a_stream_outlives_its_connection_s_age(orca: World) -> None:
    """An aged connection ends when its streams have ended. New calls take a new one, without an error."""
    async with serving(orca.redis_url, orca.name, orca.model, connection_age=0.2) as other:
        call = other.stub.Generate(generation(max_new_tokens=2))
        request = await orca.engine.claim()
        await orca.engine.commit(request, 0, [10])
        first = await read(call, 2)
        states = [grpc.ChannelConnectivity.READY]
        while len(states) < 5:  # the connection grew old and another one was made, twice
            await other.stub.GetModel(pb.GetModelRequest())
            state = other.channel.get_state()
            if state is not states[-1]:
                states.append(state)
        await orca.engine.commit(request, 1, [11], Reason.LENGTH)
        assert ids_of([*first, *await collect(call)]) == [10, 11]


PING, ACK = 6, 1  # of HTTP/2: a frame's type, a flag


class Pings:
    """A TCP proxy that counts the pings of the client."""

    def __init__(self, address: str) -> None:
        self._address = split_address(address)
        self.count = 0

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(*self._address)
        back.write(await reader.readexactly(24))  # the preface of HTTP/2
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._count(reader, back))
                tasks.create_task(self._copy(there, writer))
        except* (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            for end in (writer, back):
                end.transport.abort()

    async def _count(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await reader.readexactly(9)
            writer.write(head + await reader.readexactly(int.from_bytes(head[:3], "big")))
            self.count += head[3] == PING and not head[4] & ACK

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)


async def test_a_client_may_ping_a_silent_stream(orca: World) -> None:
    """By default gRPC answers the third ping on a silent stream with GOAWAY, too_many_pings."""
    pings = Pings(orca.serving.addresses["grpc"])
    options = channel_options(1)
    async with (
        listening(pings.accept) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel,
    ):
        call = OrcaStub(channel).Generate(generation(max_new_tokens=1))
        request = await orca.engine.claim()
        accepted = await call.read()
        already = pings.count
        await until(lambda: pings.count >= already + 5, seconds=30)
        await orca.engine.commit(request, 0, [10], Reason.LENGTH)
        assert ids_of([accepted, *await collect(call)]) == [10]  # type: ignore[list-item]


def open_files() -> Counter[str]:
    """What this process has open by a path: no sockets, of which gRPC keeps some."""
    names = Counter[str]()
    for entry in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing's own
            names[os.readlink(f"/proc/self/fd/{entry}")] += 1
    return Counter({name: number for name, number in names.items() if name.startswith("/")})


async def test_leaving(orca: World) -> None:
    """A drain ends streams UNAVAILABLE after its bound. Their requests go on and are resumed elsewhere."""

    before = open_files()
    async with serving(orca.redis_url, orca.name, orca.model, drain_seconds=0.3) as other:
        call = other.stub.Generate(generation(max_new_tokens=2, request_id="drained"))
        request = await orca.engine.claim()
        await orca.engine.commit(request, 0, [10])
        seen = await read(call, 2)
        assert ids_of(seen) == [10]
        draining = asyncio.create_task(other.app.drain())
        await until(lambda: other.app.endpoint.draining)
        refused = await error_of(other.stub.Generate(generation()))
        assert refused.code() is CODE.UNAVAILABLE
        error = await error_of(call)
        assert (error.code(), reason_of(error)) == (CODE.UNAVAILABLE, "ENDPOINT_LEAVING")
        await draining
        assert await orca.engine.commit(request, 1, [11], Reason.LENGTH) == Committed.OK
    assert open_files() <= before
    rest = await collect(orca.stub.Resume(pb.ResumeRequest(request_id="drained", from_index=1)))
    assert ids_of(rest) == [11]


async def test_streams_are_handed_over(orca: World) -> None:
    """Another endpoint stays: a stream whose client will come back ends at once, the other one when it is done."""
    async with serving(orca.redis_url, orca.name, orca.model, drain_seconds=3600) as other:
        returning = other.stub.Generate(
            generation(max_new_tokens=2, request_id="returning", detach_grace=Duration(seconds=30))
        )
        first = await orca.engine.claim()
        await orca.engine.commit(first, 0, [10])
        await read(returning, 2)
        staying = other.stub.Generate(generation(max_new_tokens=2, request_id="staying"))
        second = await orca.engine.claim()
        await orca.engine.commit(second, 0, [20])
        await read(staying, 2)
        draining = asyncio.create_task(other.app.drain())
        error = await error_of(returning)
        assert (error.code(), reason_of(error)) == (CODE.UNAVAILABLE, "ENDPOINT_LEAVING")
        resumed = orca.stub.Resume(pb.ResumeRequest(request_id="returning", from_index=1))
        assert (await resumed.read()).HasField("accepted")
        await orca.engine.commit(first, 1, [11], Reason.LENGTH)
        assert ids_of(await collect(resumed)) == [11]
        await orca.engine.commit(second, 1, [21], Reason.LENGTH)
        assert ids_of(await collect(staying)) == [21]
        await draining


async def test_the_last_endpoint_keeps_its_streams(orca: World) -> None:
    """Nobody else could take them over."""
    call = orca.stub.Generate(generation(max_new_tokens=2, detach_grace=Duration(seconds=30)))
    request = await orca.engine.claim()
    await orca.engine.commit(request, 0, [10])
    await read(call, 2)
    draining = asyncio.create_task(orca.serving.app.drain())
    await until(lambda: orca.serving.app.endpoint.draining)
    await orca.engine.commit(request, 1, [11], Reason.LENGTH)
    assert ids_of(await collect(call)) == [11]
    await draining


async def test_a_drain_answers_unavailable_and_nothing_else(orca: World) -> None:
    """Clients that call all the time, whatever they hear. gRPC's own stop would answer some of them CANCELLED."""
    seen: set[grpc.StatusCode] = set()
    drained = asyncio.Event()

    async def keep_calling() -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]  # a connection of its own
        async with grpc.aio.insecure_channel(orca.serving.addresses["grpc"], options) as channel:
            while not drained.is_set():
                try:
                    await OrcaStub(channel).GetModel(pb.GetModelRequest())
                    seen.add(CODE.OK)
                except grpc.aio.AioRpcError as error:
                    seen.add(error.code())
                    await asyncio.sleep(0.01)

    async with asyncio.TaskGroup() as calling:
        for _ in range(12):
            calling.create_task(keep_calling())
        await until(lambda: CODE.OK in seen)
        await orca.serving.app.drain()
        await until(lambda: CODE.UNAVAILABLE in seen)
        drained.set()
    assert seen == {CODE.OK, CODE.UNAVAILABLE}
