"""API keys at both doors: a wrong key comes to nothing, a right one brings its tenant's name into the call."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import httpx2 as httpx
import openai
import pytest
from endpoint.harness import World, detail_of, generation, world
from google.rpc import error_details_pb2

from orca.v1 import orca_pb2 as pb
from orca_client import AsyncOrcaClient, Unauthenticated
from orca_common.api_keys import line_of, new_key
from orca_endpoint.calls.call import Call

KEY = new_key()


@pytest.fixture
async def locked(redis_url: str, model: Path) -> AsyncIterator[World]:
    async with world(redis_url, model, api_keys=line_of("research", KEY)) as started:
        yield started


async def test_grpc_calls_without_a_valid_key_are_refused(locked: World) -> None:
    stub, channel = locked.stub, locked.serving.channel
    reflect = channel.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
    calls = {
        "Generate": lambda **more: stub.Generate(generation(), **more).read(),
        "GenerateText": lambda **more: stub.GenerateText(generation(), **more),
        "Resume": lambda **more: stub.Resume(pb.ResumeRequest(request_id="a"), **more).read(),
        "Cancel": lambda **more: stub.Cancel(pb.CancelRequest(request_id="a"), **more),
        "GetModel": lambda **more: stub.GetModel(pb.GetModelRequest(), **more),
        # It writes nothing: a client of grpc.aio that writes into a call which was just refused may report INTERNAL.
        "reflection": lambda **more: reflect(**more).read(),
    }
    for name, call in calls.items():
        for metadata in ((), (("authorization", f"Bearer {new_key()}"),), (("authorization", KEY),)):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(metadata=metadata)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED, name
            bearer = metadata and metadata[0][1].startswith("Bearer ")
            reason = detail_of(refused.value, error_details_pb2.ErrorInfo()).reason
            assert reason == ("WRONG_KEY" if bearer else "NO_KEY")
        twice = (("authorization", f"Bearer {KEY}"), ("authorization", f"Bearer {new_key()}"))
        with pytest.raises(grpc.aio.AioRpcError, match="comes twice in the metadata") as refused:
            await call(metadata=twice)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT, name
    health = channel.unary_unary("/grpc.health.v1.Health/Check")
    assert await health(b"") == b"\x08\x01", "probes have no key"


async def test_http_requests_without_a_valid_key_are_refused(locked: World) -> None:
    async with httpx.AsyncClient(base_url=locked.serving.http) as http:
        for headers in ({}, {"authorization": f"Bearer {new_key()}"}, {"authorization": KEY}):
            for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions"), ("GET", "/nothing")):
                answer = await http.request(method, path, headers=headers)
                assert answer.status_code == 401
                assert answer.headers["www-authenticate"] == "Bearer"
                assert answer.json()["error"]["type"] == "invalid_request_error"
                assert answer.json()["error"]["code"] == "invalid_api_key"
    async with openai.AsyncOpenAI(base_url=f"{locked.serving.http}/v1", api_key="wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()


async def test_a_valid_key_brings_its_tenant_into_the_call(locked: World, monkeypatch: pytest.MonkeyPatch) -> None:
    tenants: list[str] = []
    add = locked.serving.app.delivery.add

    def noting(call: Call) -> None:
        tenants.append(call.tenant)
        add(call)

    monkeypatch.setattr(locked.serving.app.delivery, "add", noting)
    async with locked.background(lambda record: [7] * 8):
        async with AsyncOrcaClient(locked.serving.addresses["grpc"], api_key=KEY) as client:
            assert len((await client.get_model()).engines) == 1
            async with client.generate([5, 6], max_new_tokens=8) as stream:
                assert await stream.text()
        base = f"{locked.serving.http}/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key=KEY, max_retries=0) as client:
            assert [model.id async for model in client.models.list()] == ["tiny"]
            await client.completions.create(model="tiny", prompt=[5, 6], max_tokens=8)
    assert tenants == ["research", "research"]


async def test_a_completion_that_is_taken_up_keeps_its_id(locked: World) -> None:
    """The tenant's name is a matter of the pool alone."""
    headers = {"authorization": f"Bearer {KEY}"}
    async with (
        locked.background(lambda record: [7] * 2),
        httpx.AsyncClient(base_url=locked.serving.http, headers=headers) as http,
    ):
        made = (await http.post("/v1/completions", json={"prompt": [5, 6], "max_tokens": 2})).json()["id"]
        again = await http.get(f"/v1/completions/{made}")
    ids = {json.loads(line[6:])["id"] for line in again.text.splitlines() if line.startswith("data: {")}
    assert ids == {made}


async def test_the_client_library_says_that_its_key_is_wrong(locked: World) -> None:
    async with AsyncOrcaClient(locked.serving.addresses["grpc"], api_key="wrong") as client:
        with pytest.raises(Unauthenticated, match="not valid here") as refused:
            await client.get_model()
    assert refused.value.reason == "WRONG_KEY"


async def test_operators_alone_load_and_unload_adapters(redis_url: str, model: Path) -> None:
    operator, keys = new_key(), [line_of("research", KEY)]
    keys.append(line_of("operations", operator))
    async with (
        world(redis_url, model, api_keys=",".join(keys), operators="others, operations") as orca,
        httpx.AsyncClient(base_url=orca.serving.http) as http,
    ):

        async def call(what: str, key: str = operator, **body: object) -> httpx.Response:
            headers = {"authorization": f"Bearer {key}"}
            return await http.post(f"/v1/{what}_lora_adapter", json=body, headers=headers)

        async def names() -> list[str]:
            answer = await http.get("/v1/models", headers={"authorization": f"Bearer {operator}"})
            return [one["id"] for one in answer.json()["data"]]

        legal = {"lora_name": "legal", "lora_path": "/legal"}
        for what in ("load", "unload"):
            refused = await call(what, KEY, **legal)
            assert (refused.status_code, "(the setting operators)" in refused.text) == (403, True)
        own = orca.serving.app.endpoint.name
        wrong = [
            {},
            {"lora_name": "legal"},
            {**legal, "rank": 3},
            {**legal, "lora_name": own},
            {**legal, "lora_path": 5},
            {**legal, "lora_path": "/a\0b"},
            {**legal, "lora_path": "/x" * 4096},
            {**legal, "lora_name": "a=b"},
        ]
        assert [(await call("load", **body)).status_code for body in wrong] == [400] * len(wrong)
        assert not (await orca.pool.adapters()).entries

        loading = asyncio.create_task(call("load", **legal))
        while not (await orca.pool.adapters()).entries:
            await asyncio.sleep(0.01)
        assert await names() == [own], "no engine has it yet"
        again = await call("load", **legal, load_inplace=False)
        assert (again.status_code, "loaded already" in again.text) == (400, True)
        await orca.engine.load_adapters()
        assert (await loading).status_code == 200
        assert await names() == [own, "legal"]
        replaced = asyncio.create_task(call("load", **legal, load_inplace=True))
        while len((await orca.pool.adapters()).entries) < 2:
            await asyncio.sleep(0.01)
        [pending] = [key for key, one in (await orca.pool.adapters()).entries.items() if one.state == "pending"]
        await orca.pool.drop_adapter(pending)
        answer = await replaced
        assert (answer.status_code, "meanwhile" in answer.text) == (503, True)
        assert [(await call("unload", lora_name="legal")).status_code for _ in range(2)] == [200, 404]
        assert await names() == [own]
