"""What an operator sees of a real stack: logs in one form, an outage in two lines, logits that are not finite."""

import asyncio
import json
import os
import signal
import urllib.request
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from checkpoints import make_gpt2
from safetensors.torch import load_file, save_file
from stacks import Running, generation, running

from orca.v1 import orca_pb2 as pb

pytestmark = pytest.mark.asyncio(loop_scope="module")

BAD = 20  # the position whose embedding is NaN: a request is well until it comes there
AWAY, BACK = "the request pool is away", "the request pool is back"
FORM = {"time", "level", "service", "logger", "event"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    folder = tmp_path_factory.mktemp("operator")
    model = make_gpt2(folder / "model", heads=1, layers=1, hidden=16, vocab=97, positions=48, seed=2)
    weights = load_file(model / "model.safetensors")
    weights["transformer.wpe.weight"][BAD] = float("nan")
    save_file(weights, model / "model.safetensors")
    async with running(folder / "run", model, slots=512) as started:
        yield started


def lines(stack: Running, service: str) -> list[dict[str, Any]]:
    """All whole lines of a service's logs."""
    texts = [path.read_text() for path in sorted((stack.run_dir / "logs").glob(f"{service}*.log"))]
    return [json.loads(line) for text in texts for line in text[: text.rfind("\n") + 1].splitlines()]


async def collect(call: Any, into: list[pb.GenerateResponse]) -> None:
    async for message in call:
        into.append(message)


def status(stack: Running, role: str) -> dict[str, Any]:
    """What the status port says that `processes.json` names."""
    (address,) = (process["status"] for process in stack.processes() if process["role"] == role)
    with urllib.request.urlopen(f"http://{address}/readyz", timeout=10) as answer:
        return json.load(answer)


async def test_logits_that_are_not_finite_end_their_request(stack: Running) -> None:
    """INTERNAL with the reason, all tokens before and none after; it is counted. A request beside it is well."""
    bad = stack.stub.Generate(generation([1, 2, 3], 30, request_id="bad", ignore_eos=True))
    good = asyncio.create_task(stack.tokens([4, 5, 6], BAD - 4))
    messages: list[pb.GenerateResponse] = []
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(bad, messages)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "NaN or infinite" in (caught.value.details() or "")
    assert sum(len(message.tokens) for message in messages) == BAD - 2  # the last good input is at position BAD - 1
    assert len(await good) == BAD - 4
    assert status(stack, "scheduler")["logits_not_finite"] == 1

    def ended() -> list[tuple[str, str, int]]:
        told = (line for line in lines(stack, "endpoint") if line.get("request") == "bad")
        return [(line["event"], line["reason"], line["output_tokens"]) for line in told]

    await stack.until(lambda: bool(ended()))
    assert ended() == [("call ended", "LOGITS_NOT_FINITE", BAD - 2)]


async def test_a_dead_redis_is_two_lines_in_each_service(stack: Running) -> None:
    (pid,) = (process["pid"] for process in stack.processes() if process["role"] == "redis")
    before = {service: events(stack, service) for service in ("scheduler", "endpoint")}  # of a machine that stood still
    os.kill(pid, signal.SIGSTOP)
    for service, earlier in before.items():
        await stack.until(lambda service=service, earlier=earlier: events(stack, service) == [*earlier, AWAY])
    os.kill(pid, signal.SIGCONT)
    for service, earlier in before.items():
        await stack.until(lambda service=service, earlier=earlier: events(stack, service) == [*earlier, AWAY, BACK])


def events(stack: Running, service: str) -> list[str]:
    return [line["event"] for line in lines(stack, service) if line["event"].startswith("the request pool is")]


async def test_every_line_has_one_form(stack: Running) -> None:
    """Also what uvicorn says of a request that is none, gRPC of a connection that is none, and Redis of anything."""
    names: dict[str, str] = {}  # of these connections: another process's may come to a port that was its own before
    for address in (stack.http, stack.grpc):
        host, port = address.rsplit(":", 1)
        _, writer = await asyncio.open_connection(host, int(port))
        names[address] = "{}:{}".format(*writer.get_extra_info("sockname"))
        writer.write(b"\x00\xffnothing\r\n\r\n")
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    def wrong() -> list[str]:
        invalid = [line for line in lines(stack, "endpoint") if line["event"] == "Invalid HTTP request received."]
        return [line["peer"] for line in invalid if line["peer"] in names.values()]

    await stack.until(lambda: bool(wrong()))
    assert wrong() == [names[stack.http]]
    services = {
        service: {(line["service"], line.keys() >= FORM) for line in lines(stack, service)}
        for service in ("endpoint", "scheduler", "supervisor", "redis")
    }
    assert services == {
        "endpoint": {("orca-endpoint", True)},
        "scheduler": {("orca-scheduler", True)},
        "supervisor": {("orca-worker", True)},
        "redis": {("redis", True)},
    }


async def test_the_status_ports_are_told(stack: Running) -> None:
    """In processes.json, and each answers."""
    with_status = {process["role"] for process in stack.processes() if process.get("status")}
    assert with_status == {"endpoint", "scheduler", "supervisor"}
    for role in with_status:
        assert status(stack, role)["ok"]
    assert status(stack, "scheduler")["policy"].startswith("fill=stall-free,kv=on-demand,positions=128,"), "of auto"
