"""Bad input over gRPC and HTTP: the status, message and field of each. No process ends, the next request works."""

import asyncio
import json
import math
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest
import pytest_asyncio
from checkpoints import make_timed
from google.rpc import error_details_pb2, status_pb2
from stacks import Running, generation, running

from orca.v1 import orca_pb2 as pb
from orca_scheduler.master.journal import scheduled

pytestmark = pytest.mark.asyncio(loop_scope="module")
INVALID, FAILED = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION
POSITIONS, SLOTS = 512, 256


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    folder = tmp_path_factory.mktemp("bad-input")
    model = make_timed(folder / "model", seconds=0.01, positions=POSITIONS, tokenizer=True)
    async with running(folder / "run", model, slots=SLOTS) as started:
        yield started


def sampling(**fields: Any) -> pb.GenerateRequest:
    return generation([1, 2], 4, sampling=pb.Sampling(**fields))


# request -> status, field (None: the whole message), a part of the sentence
GRPC_CASES: dict[str, tuple[pb.GenerateRequest, grpc.StatusCode, str | None, str]] = {
    "no prompt": (pb.GenerateRequest(max_new_tokens=4), INVALID, "prompt", "missing"),
    "empty text": (pb.GenerateRequest(text="", max_new_tokens=4), INVALID, "text", "empty"),
    "empty ids": (generation([], 4), INVALID, "token_ids.ids", "empty"),
    "prompt too long": (generation([1] * POSITIONS, 1), INVALID, "token_ids.ids", f"{POSITIONS} positions"),
    "1 MB prompt": (pb.GenerateRequest(text="a " * 600_000, max_new_tokens=4), INVALID, "text", "bytes; at most"),
    "max_new_tokens 0": (generation([1], 0), INVALID, "max_new_tokens", "at least 1"),
    "max_new_tokens too large": (generation([1], POSITIONS), INVALID, "max_new_tokens", "at most 511"),
    "larger than every engine": (generation([1], 300), FAILED, None, str(SLOTS)),
    "temperature negative": (sampling(temperature=-0.1), INVALID, "sampling.temperature", "-0.1"),
    "temperature NaN": (sampling(temperature=math.nan), INVALID, "sampling.temperature", "nan"),
    "temperature infinite": (sampling(temperature=math.inf), INVALID, "sampling.temperature", "inf"),
    "top_p 0": (sampling(top_p=0.0), INVALID, "sampling.top_p", "above 0"),
    "top_p above 1": (sampling(top_p=1.5), INVALID, "sampling.top_p", "at most 1"),
    "top_p NaN": (sampling(top_p=math.nan), INVALID, "sampling.top_p", "nan"),
    "top_k 0": (sampling(top_k=0), INVALID, "sampling.top_k", "at least 1"),
    "unknown token id": (generation([1, 99_999], 4), INVALID, "token_ids.ids[1]", "99999"),
    "unknown stop token": (generation([1], 4, stop_token_ids=[99_999]), INVALID, "stop_token_ids[0]", "99999"),
    "stop list too long": (generation([1], 4, stop=["x"] * 99), INVALID, "stop", "at most"),
    "stop too long": (generation([1], 4, stop=["x" * 5000]), INVALID, "stop[0]", "at most"),
    "stop empty": (generation([1], 4, stop=["a", ""]), INVALID, "stop[1]", "empty"),
    "min_p": (generation([1], 4, sampling=pb.Sampling(min_p=2)), INVALID, "sampling.min_p", "between 0 and 1"),
    "top_logprobs": (generation([1], 4, top_logprobs=21), INVALID, "top_logprobs", "at most 20"),
    "request id odd": (generation([1], 4, request_id="a b"), INVALID, "request_id", "letters"),
    "attempt too large": (generation([1], 4, attempt=1 << 60), INVALID, "attempt", "2^53"),
}


@pytest.mark.parametrize("case", GRPC_CASES)
async def test_grpc(stack: Running, case: str) -> None:
    request, status, field, sentence = GRPC_CASES[case]
    error = await refused(stack, lambda: stack.stub.Generate(request).read())
    assert error.code() is status
    assert sentence in (error.details() or "")
    assert field_of(error) == field
    if field is not None:
        assert (error.details() or "").startswith(f"{field}: ")


def wire_cases() -> dict[str, tuple[bytes, str, str]]:
    """Bytes that are not a GenerateRequest -> field, a part of the sentence."""
    broken = pb.GenerateRequest(text="ab", max_new_tokens=4).SerializeToString().replace(b"ab", b"\xff\xfe")
    new = b"\xc0\x3e\x01"  # field 1000, as a newer client may send it
    sampled, said = (
        pb.Sampling.FromString(new),
        pb.Chat(messages=[pb.ChatMessage(role="user"), pb.ChatMessage.FromString(new)]),
    )
    return {
        "a field of a newer client": (
            generation([1], 4).SerializeToString() + new,
            "1000",
            "no field 1000 of GenerateRequest",
        ),
        "a sampling parameter of a newer client": (
            generation([1], 4, sampling=sampled).SerializeToString(),
            "sampling.1000",
            "this release knows no field 1000 of Sampling",
        ),
        "a member of a message of a newer client": (
            pb.GenerateRequest(chat=said, max_new_tokens=4).SerializeToString(),
            "chat.messages[1].1000",
            "no field 1000 of ChatMessage",
        ),
        "invalid UTF-8": (broken, "message", "UTF-8"),
        "corrupt protobuf": (b"\xff\xff\xff\xff", "message", "not a valid request of /orca.v1.Orca/Generate"),
        "cut protobuf": (
            generation([1, 2, 3], 4).SerializeToString()[:-1],
            "message",
            "not a valid request of /orca.v1.Orca/Generate",
        ),
    }


@pytest.mark.parametrize("case", wire_cases())
async def test_bytes_on_the_wire(stack: Running, case: str) -> None:
    raw, field, sentence = wire_cases()[case]
    async with grpc.aio.insecure_channel(stack.grpc) as channel:
        error = await refused(stack, lambda: channel.unary_stream("/orca.v1.Orca/Generate")(raw).read())
    assert error.code() is INVALID
    assert field_of(error) == field
    assert sentence in (error.details() or "")


async def test_message_over_the_transport_limit(stack: Running) -> None:
    request = pb.GenerateRequest(text="a" * (32 << 20), max_new_tokens=4)
    error = await refused(stack, lambda: stack.stub.Generate(request).read())
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED  # C-core's own answer, without details
    assert "larger than max (33554" in (error.details() or "")


async def test_duplicate_id_with_another_body(stack: Running) -> None:
    first = generation([1, 2], 3, request_id="twice")
    assert len(await tokens(stack, first)) == 3
    assert len(await tokens(stack, first)) == 3, "the same body is Resume from 0"
    error = await refused(stack, lambda: stack.stub.Generate(generation([1, 2], 4, request_id="twice")).read())
    assert error.code() is grpc.StatusCode.ALREADY_EXISTS
    assert "twice" in (error.details() or "")


async def test_unknown_resume(stack: Running) -> None:
    error = await refused(stack, lambda: stack.stub.Resume(pb.ResumeRequest(request_id="nobody")).read())
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert "nobody" in (error.details() or "")


async def test_deadline_already_past(stack: Running) -> None:
    error = await refused(stack, lambda: stack.stub.Generate(generation([1], 4), timeout=-1).read())
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_deadline_in_the_middle_is_no_short_answer(stack: Running) -> None:
    async def read() -> None:
        async for response in stack.stub.Generate(generation([1], 200), timeout=0.4):
            assert not response.HasField("finished")

    error = await refused(stack, read)
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await all_slots_free(stack)


async def test_client_gone_frees_its_slots(stack: Running) -> None:
    """With detach_grace 0 a request ends with its call, and its slots are free by the next iteration."""
    request = generation([1], 200, request_id="leaver")
    call = stack.stub.Generate(request)
    for _ in range(4):
        await call.read()
    call.cancel()
    await all_slots_free(stack)
    *_, last = scheduled(stack.journal())
    assert last.iteration < 200, "the request was not generated to its end"


# body -> HTTP status, param, a part of the sentence
HTTP_CASES: dict[str, tuple[Any, int, str | None, str]] = {
    "empty prompt": ({"prompt": ""}, 400, "prompt", "empty"),
    "no prompt": ({}, 400, "prompt", ""),
    "prompt too long": ({"prompt": [1] * POSITIONS}, 400, "prompt", "positions"),
    "1 MB prompt": ({"prompt": "a " * 600_000}, 400, "prompt", "bytes; at most"),
    "max_tokens 0": ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens", "at least 1"),
    "max_tokens negative": ({"prompt": "a", "max_tokens": -1}, 400, "max_tokens", ""),
    "max_tokens too large": ({"prompt": [1], "max_tokens": POSITIONS}, 400, "max_tokens", "at most 511"),
    "larger than every engine": ({"prompt": [1], "max_tokens": 300}, 400, None, str(SLOTS)),
    "temperature negative": ({"prompt": "a", "temperature": -0.1}, 400, "temperature", "-0.1"),
    "temperature text": ({"prompt": "a", "temperature": "hot"}, 400, "temperature", ""),
    "top_p 0": ({"prompt": "a", "top_p": 0}, 400, "top_p", "above 0"),
    "top_p above 1": ({"prompt": "a", "top_p": 1.5}, 400, "top_p", "at most 1"),
    "unknown token id": ({"prompt": [1, 99_999]}, 400, "prompt[1]", "99999"),
    "stop list too long": ({"prompt": "a", "stop": ["x"] * 99}, 400, "stop", "at most"),
    "n 9999": ({"prompt": "a", "n": 9999}, 400, "n", "too many"),
    "logprobs 99": ({"prompt": "a", "logprobs": 99}, 400, "logprobs", "at most 20"),
    "repetition_penalty 0": ({"prompt": "a", "repetition_penalty": 0}, 400, "repetition_penalty", "above 0"),
    "a bias of no token": ({"prompt": "a", "logit_bias": {"99999": 1}}, 400, "logit_bias[99999]", "no token"),
    "an unknown field": ({"prompt": "a", "frequency_penaltyy": 1}, 400, "frequency_penaltyy", "not known"),
    "another model": ({"prompt": "a", "model": "gpt-99"}, 404, "model", "gpt-99"),
    "NaN": (b'{"prompt": "a", "temperature": NaN}', 400, None, ""),
    "no JSON": (b"{", 400, None, ""),
    "invalid UTF-8": (b'{"prompt": "\xff\xfe"}', 400, None, ""),
    "a list": ([], 400, None, ""),
}


@pytest.mark.parametrize("case", HTTP_CASES)
async def test_http(stack: Running, case: str) -> None:
    body, status, param, sentence = HTTP_CASES[case]
    if isinstance(body, dict):
        body = {"model": "model"} | body
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    before = stack.processes()
    answered, error = await asyncio.to_thread(post, f"http://{stack.http}/v1/completions", raw)
    assert answered == status
    assert sentence in error["error"]["message"]
    assert param is None or error["error"]["param"] == param
    await works(stack, before)


async def test_http_body_over_the_limit(stack: Running) -> None:
    before = stack.processes()
    raw = json.dumps({"model": "model", "prompt": "a" * (32 << 20)}).encode()
    status, error = await asyncio.to_thread(post, f"http://{stack.http}/v1/completions", raw)
    assert status == 413
    assert "bytes" in error["error"]["message"]
    await works(stack, before)


def post(url: str, body: bytes) -> tuple[int, dict[str, Any]]:
    """Status and JSON body of a POST."""
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


async def refused(stack: Running, call: Callable[[], Awaitable[object]]) -> grpc.aio.AioRpcError:
    """The error of a call. Asserts that no process has ended and that the next request works."""
    before = stack.processes()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call()
    await works(stack, before)
    return caught.value


async def works(stack: Running, before: list[dict[str, Any]]) -> None:
    assert len(await tokens(stack, generation([3, 4], 3))) == 3
    assert stack.processes() == before


async def tokens(stack: Running, request: pb.GenerateRequest) -> list[int]:
    events = [response async for response in stack.stub.Generate(request)]
    assert events[-1].HasField("finished")
    return [token.token_id for event in events for token in event.tokens]


async def all_slots_free(stack: Running) -> None:
    """Waits until a new request's first batch finds no slot reserved but its own."""
    own = -(-6 // 16) * 16

    async def reserved() -> int:
        await tokens(stack, generation([9], 5))
        *_, last = scheduled(stack.journal())
        return last.reserved

    async with asyncio.timeout(60):
        while await reserved() > own:
            pass


def field_of(error: grpc.aio.AioRpcError) -> str | None:
    """The field in the google.rpc.BadRequest of an error's details."""
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            assert isinstance(value, bytes)
            for detail in status_pb2.Status.FromString(value).details:
                bad = error_details_pb2.BadRequest()
                if detail.Unpack(bad):
                    return bad.field_violations[0].field
    return None
