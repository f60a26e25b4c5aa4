"""`python -m orca_endpoint` as a process: its line of JSON, its status port, its end by signals, refusals to start."""

import asyncio
import json
import os
import signal
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc
import httpx2 as httpx
import pytest
from endpoint.harness import World, collect, generation, ids_of, make_model, read
from listening import listening
from properties import first

from orca.v1 import orca_pb2 as pb
from orca.v1.orca_pb2_grpc import OrcaStub
from orca_pool.pool import Pool
from orca_pool.records import Committed, Reason


@asynccontextmanager
async def process(redis_url: str, pool: str, model: Path, **settings: object) -> AsyncIterator[Process]:
    values = {"redis_url": redis_url, "pool": pool, "model": model, **settings}
    environment = {f"ORCA_{name.upper()}": str(value) for name, value in values.items()}
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "orca_endpoint",
        env=os.environ | environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.communicate()


async def ports(child: Process) -> dict[str, str]:
    assert child.stdout is not None
    return json.loads(await asyncio.wait_for(child.stdout.readline(), 60))


async def ready(child: Process) -> dict[str, str]:
    """The addresses of the process, once /readyz says yes."""
    answer = await ports(child)
    async with httpx.AsyncClient() as client, asyncio.timeout(60):
        while (await client.get(f"http://{answer['status']}/readyz")).status_code != 200:
            await asyncio.sleep(0.05)
        assert (await client.get(f"http://{answer['status']}/livez")).status_code == 200
        models = await client.get(f"http://{answer['http']}/v1/models")
        assert models.json()["data"][0]["id"] == "tiny"
    return answer


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_the_end_of_a_process(orca: World, number: signal.Signals) -> None:
    """However the process ends, its request goes on and is resumed elsewhere. After SIGTERM it exits with 0."""
    async with process(orca.redis_url, orca.name, orca.model, drain_seconds=0.2) as child:
        address = (await ready(child))["grpc"]
        async with grpc.aio.insecure_channel(address) as channel:
            call = OrcaStub(channel).Generate(generation(max_new_tokens=3, request_id="orphan"))
            request = await orca.engine.claim()
            await orca.engine.commit(request, 0, [10])
            seen = await read(call, 2)
            child.send_signal(number)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await collect(call)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert await asyncio.wait_for(child.wait(), 60) == (0 if number is signal.SIGTERM else -number)
    assert ids_of(seen) == [10]
    resumed = orca.stub.Resume(pb.ResumeRequest(request_id="orphan", from_index=1))
    assert await orca.engine.commit(request, 1, [11, 12], Reason.LENGTH) == Committed.OK
    assert ids_of(await collect(resumed)) == [11, 12]


async def test_a_completion_whose_endpoint_is_killed(orca: World) -> None:
    """`kill -9` in the middle of a stream of the OpenAI door: another endpoint gives the rest."""
    body = {"prompt": [5, 6], "max_tokens": 3, "stream": True, "detach_grace": 30}
    async with process(orca.redis_url, orca.name, orca.model) as child, httpx.AsyncClient() as http:
        address = (await ready(child))["http"]
        seen: list[str] = []
        async with http.stream("POST", f"http://{address}/v1/completions", json=body) as answer:
            request = await orca.engine.claim()
            await orca.engine.commit(request, 0, [10])
            with suppress(httpx.TransportError):  # it breaks
                async for line in answer.aiter_lines():
                    seen.append(line)
                    if line.startswith("data: "):
                        child.kill()
        assert "data: [DONE]" not in seen
        assert seen[0] == "id: 1"
        name = json.loads(seen[1].removeprefix("data: "))["id"]
        assert await orca.engine.commit(request, 1, [11, 12], Reason.LENGTH) == Committed.OK
        rest = await http.get(f"{orca.serving.http}/v1/completions/{name}", headers={"Last-Event-ID": "1"})
    chunks = [json.loads(line[6:]) for line in rest.text.splitlines() if line.startswith("data: {")]
    spell = orca.serving.app.endpoint.spell
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == spell(11) + spell(12)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


async def test_not_ready_until_an_engine_has_formed(redis_url: str, model: Path) -> None:
    async with process(redis_url, "engineless", model) as child, httpx.AsyncClient() as client:
        addresses = await ports(child)
        answer = await client.get(f"http://{addresses['status']}/readyz")
        assert answer.status_code == 503
        async with grpc.aio.insecure_channel(addresses["grpc"]) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await collect(OrcaStub(channel).Generate(generation()))
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "no engine has formed yet" in (caught.value.details() or "")
        child.terminate()
        assert await asyncio.wait_for(child.wait(), 60) == 0


async def test_another_model(redis_url: str, model: Path, tmp_path: Path) -> None:
    """An endpoint of another model refuses to start, with a sentence."""
    async with Pool(redis_url, "taken") as pool:
        await pool.identify("0123456789abcdef", 8, 8)
    async with process(redis_url, "taken", model) as child:
        _, errors = await asyncio.wait_for(child.communicate(), 30)
        assert child.returncode == 1
        assert b"0123456789abcdef" in errors
        assert b"Traceback" not in errors


async def test_wrong_settings(redis_url: str, model: Path) -> None:
    """Each wrong setting stops the start with a sentence that names the setting."""

    async def refusal(**settings: str) -> str:
        given = {"model": str(model)} | settings
        path = Path(given.pop("model"))
        async with process(redis_url, "settings", path, **given) as child:
            _, errors = await asyncio.wait_for(child.communicate(), 30)
            assert child.returncode == 1
            return errors.decode()

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"ORCA_STATUS_PORT: cannot listen on 127.0.0.1:{port}" in await refusal(status_port=port)
    wrong = [
        ({"model": "/nowhere"}, "there is no such folder"),
        ({"max_waiting": "many"}, "ORCA_MAX_WAITING"),
        ({"host": "203.0.113.7"}, "203.0.113.7"),
        ({"port": "70000"}, "ORCA_PORT"),
    ]
    for settings, part in first(2, wrong):
        sentence = await refusal(**settings)
        assert part in sentence
        assert "Traceback" not in sentence


async def test_a_signal_while_the_model_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The download of the model stands still: the hub takes the request and never answers. SIGTERM ends the process."""
    asked = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        asked.set()
        await reader.read()  # until the process has ended
        writer.close()

    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    async with listening(silent) as port:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
        async with process("redis://127.0.0.1:9/0", "unread", Path("someone/nothing")) as child:
            await asyncio.wait_for(asked.wait(), 60)
            child.terminate()
            assert await asyncio.wait_for(child.wait(), 30) == 0


async def test_no_redis_yet(model: Path, tmp_path: Path) -> None:
    """The endpoint waits for the pool, and can be ended meanwhile."""
    async with process("redis://127.0.0.1:9/0", "nowhere", model, log_level="INFO") as child:
        assert child.stderr is not None
        async with asyncio.timeout(60):
            while b"the request pool is away" not in await child.stderr.readline():
                pass
        child.terminate()
        assert await asyncio.wait_for(child.wait(), 60) == 0


async def test_a_model_without_a_tokenizer(orca: World, tmp_path: Path) -> None:
    """Prompts of ids are served; text is refused with a sentence."""
    folder = make_model(tmp_path / "ids", tokenizer=False)
    async with process(orca.redis_url, "ids-only", folder) as child:
        addresses = await ports(child)
        async with grpc.aio.insecure_channel(addresses["grpc"]) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await collect(OrcaStub(channel).Generate(pb.GenerateRequest(text="a", max_new_tokens=1)))
            assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert not (await OrcaStub(channel).GetModel(pb.GetModelRequest())).has_tokenizer
