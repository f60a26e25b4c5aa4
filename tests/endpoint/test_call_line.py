"""One line for each call that was refused or has ended, at both doors; and the spans of the same calls."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import httpx2 as httpx
import pytest
from endpoint.harness import World, collect, generation, until, world
from endpoint.lines import lines_of
from endpoint.test_chat import make_chat_model
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from orca.v1 import orca_pb2 as pb
from orca_pool.records import Reason

pytestmark = pytest.mark.usefixtures("one_helper")

FIELDS = {
    "time", "level", "service", "logger", "event", "method", "door", "peer", "status", "reason", "request", "trace",
    "prompt_tokens", "output_tokens", "queue", "first_token", "total",
}  # fmt: skip

FIELD = {"INVALID_FIELD": "max_new_tokens", "UNREADABLE_MESSAGE": "message"}  # reason of a refusal -> the line's field


@pytest.fixture
def spans(orca: World) -> InMemorySpanExporter:
    return recorded(orca)


def recorded(orca: World) -> InMemorySpanExporter:
    """The spans of an endpoint from now on."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    telemetry = orca.serving.app.endpoint.telemetry
    telemetry.enabled, telemetry.tracer = True, provider.get_tracer("test")
    return exporter


async def one_line(caplog: pytest.LogCaptureFixture) -> dict[str, Any]:
    await until(lambda: bool(lines_of(caplog)))
    (line,) = lines_of(caplog)
    caplog.clear()
    return line


def some(line: dict[str, Any], *names: str) -> tuple[Any, ...]:
    return tuple(line[name] for name in names)


async def test_grpc(orca: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "orca_endpoint.calls.line")
    async with orca.background(lambda record: [5, 6, 7]):
        await collect(orca.stub.Generate(generation(request_id="r", max_new_tokens=3)))
    line = await one_line(caplog)
    assert line.keys() == FIELDS
    assert some(line, "event", "method", "door", "status", "reason", "request") == (
        "call ended", "Generate", "grpc", "OK", "LENGTH", "r"
    )  # fmt: skip
    assert line["peer"].startswith("127.0.0.1:")
    assert some(line, "prompt_tokens", "output_tokens") == (3, 3)
    assert 0 <= line["queue"] <= line["total"]
    assert 0 < line["first_token"] <= line["total"]

    refusals = {
        "INVALID_FIELD": lambda: orca.stub.Generate(generation(max_new_tokens=0)).read(),
        "UNKNOWN_REQUEST": lambda: orca.stub.Cancel(pb.CancelRequest(request_id="nobody")),
        "UNREADABLE_MESSAGE": lambda: orca.serving.channel.unary_unary("/orca.v1.Orca/Cancel")(b"\xff\xff"),
    }
    for reason, call in refusals.items():
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call()
        line = await one_line(caplog)
        assert line.get("field") == FIELD.get(reason)
        assert None not in line.values()
        assert "prompt_tokens" not in line, "there was no request"
        assert some(line, "event", "status", "reason") == ("call refused", caught.value.code().name, reason)
    await orca.stub.GetModel(pb.GetModelRequest())
    assert some(await one_line(caplog), "event", "method", "status") == ("call ended", "GetModel", "OK")


async def test_http(orca: World, http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture) -> None:
    """Also of a body that is none, an unknown path, and a client that leaves."""
    caplog.set_level("INFO", "orca_endpoint.calls.line")
    body = {"model": "tiny", "prompt": [[1, 2], [3]], "max_tokens": 2}
    async with orca.background(lambda record: [5, 6]):
        await http.post("/v1/completions", json=body)
    line = await one_line(caplog)
    assert line.keys() == FIELDS | {"http_status"}
    assert some(line, "method", "door", "status", "http_status") == ("POST /v1/completions", "http", "OK", 200)
    assert some(line, "prompt_tokens", "output_tokens") == (3, 4)
    for path, sent, reason in (
        ("/v1/completions", b"{", "INVALID_FIELD"),
        ("/v1/completions", b'{"model": "other", "prompt": "a"}', "UNKNOWN_MODEL"),
        ("/v1/completions", b'{"max_new_tokens": 8}', "INVALID_FIELD"),
        ("/v1/completions", b'{"A secret": 8}', "INVALID_FIELD"),
        ("/v1/nothing", b"", "UNKNOWN_REQUEST"),
    ):
        answer = await http.post(path, content=sent)
        line = await one_line(caplog)
        assert "secret" not in str(line)
        assert some(line, "event", "reason", "http_status") == ("call refused", reason, answer.status_code)
    late = await http.post("/v1/completions", json=body, headers={"x-request-timeout": "0.2"})
    line = await one_line(caplog)
    assert some(line, "status", "http_status") == ("DEADLINE_EXCEEDED", late.status_code)
    sending = asyncio.create_task(http.post("/v1/completions", json=body))
    await until(lambda: orca.serving.app.delivery.count == 2)
    sending.cancel()
    line = await one_line(caplog)
    assert some(line, "event", "status", "reason") == ("call ended", "CANCELLED", "CLIENT_GONE")


async def test_the_spans(orca: World, http: httpx.AsyncClient, spans: InMemorySpanExporter) -> None:
    async with orca.background(lambda record: [5, 6, 7]):
        await collect(orca.stub.Generate(generation(request_id="r", max_new_tokens=3)))
        submit, request = await two(spans)
        assert (submit.name, request.name) == ("orca.submit", "orca.request")
        assert submit.parent is not None
        assert request.context is not None
        assert submit.parent.span_id == request.context.span_id
        assert submit.start_time == request.start_time, "the time before the queue has a span"
        assert request.attributes is not None
        assert {**request.attributes, "client.address": "127.0.0.1", "client.port": ""} == {
            "orca.request_id": "r",
            "orca.tokens": 3,
            "orca.reason": "LENGTH",
            "rpc.system.name": "grpc",
            "rpc.method": "orca.v1.Orca/Generate",
            "rpc.response.status_code": "OK",
            "client.address": "127.0.0.1",
            "client.port": "",
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "orca",
            "gen_ai.request.model": "tiny",
            "gen_ai.response.model": "tiny",
            "gen_ai.response.id": "r",
            "gen_ai.request.max_tokens": 3,
            "gen_ai.request.temperature": 0.0,
            "gen_ai.request.top_k": 0.0,
            "gen_ai.request.top_p": 1.0,
            "gen_ai.response.finish_reasons": ("length",),
            "gen_ai.usage.input_tokens": 3,
            "gen_ai.usage.output_tokens": 3,
        }
        await http.post("/v1/completions", json={"model": "tiny", "prompt": [1], "max_tokens": 3})
        _, request = await two(spans)
        assert request.attributes is not None
        named = {name: value for name, value in request.attributes.items() if name.startswith(("http", "url"))}
        assert named == {
            "http.request.method": "POST",
            "http.route": "/v1/completions",
            "http.response.status_code": 200,
            "url.path": "/v1/completions",
            "url.scheme": "http",
        }


async def test_the_client_and_the_request_are_in_one_trace(redis_url: str, tmp_path: Path) -> None:
    """Over both doors, with OpenTelemetry's names of what is asked for and of its end."""
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    carrier = {"traceparent": f"00-{trace}-{parent}-01"}
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="a")])
    async with (
        world(redis_url, make_chat_model(tmp_path / "tiny")) as orca,
        httpx.AsyncClient(base_url=orca.serving.http, headers=carrier) as http,
        orca.background(lambda record: [5, 0]),
    ):
        body = {"messages": [{"role": "user", "content": "a"}]}
        spans, grpc_request = recorded(orca), pb.GenerateRequest(chat=chat, max_new_tokens=8)
        for send, operation, reason in (
            (lambda: http.post("/v1/chat/completions", json=body), "chat", "stop"),
            (lambda: collect(orca.stub.Generate(grpc_request, metadata=tuple(carrier.items()))), "chat", "stop"),
            (lambda: http.post("/v1/completions", json={"prompt": [1], "max_tokens": 1}), "text_completion", "length"),
        ):
            await send()
            _, request = await two(spans)
            assert request.context is not None
            assert request.parent is not None
            assert f"{request.context.trace_id:032x}" == trace
            assert f"{request.parent.span_id:016x}" == parent
            assert request.attributes is not None
            assert request.attributes["gen_ai.operation.name"] == operation
            assert request.attributes["gen_ai.response.finish_reasons"] == (reason,)


async def test_errors_are_errors_in_spans(orca: World, spans: InMemorySpanExporter) -> None:
    """Of a refused call, and of one that ends in the middle. A client that leaves is no error."""
    with pytest.raises(grpc.aio.AioRpcError):
        await collect(orca.stub.Generate(generation(max_new_tokens=0)))
    for span in await two(spans):
        assert span.status.status_code is StatusCode.ERROR
        assert "max_new_tokens" in (span.status.description or "")
    call = orca.stub.Generate(generation(request_id="r"))
    await call.read()
    request = await orca.engine.claim()
    await orca.engine.commit(request, 0, [], Reason.NOT_FINITE)
    with pytest.raises(grpc.aio.AioRpcError):
        await collect(call)
    submit, span = await two(spans)
    assert (submit.status.status_code, span.status.status_code) == (StatusCode.UNSET, StatusCode.ERROR)
    assert span.attributes is not None
    assert span.attributes["error.type"] == "LOGITS_NOT_FINITE"
    assert span.attributes["rpc.response.status_code"] == "INTERNAL"
    call = orca.stub.Generate(generation(request_id="left"))
    await call.read()
    call.cancel()
    _, span = await two(spans)
    assert span.status.status_code is StatusCode.UNSET
    assert span.attributes is not None
    assert span.attributes["orca.reason"] == "CLIENT_GONE"


async def two(spans: InMemorySpanExporter) -> tuple[ReadableSpan, ...]:
    """The next two spans that end."""
    await until(lambda: len(spans.get_finished_spans()) == 2)
    found = spans.get_finished_spans()
    spans.clear()
    return found
