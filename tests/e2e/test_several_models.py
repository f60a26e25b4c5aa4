"""Two releases at one address: what names a model reaches its release, through the proxy of examples/proxy."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import grpc
import httpx2
import openai
import pytest
import pytest_asyncio
from envoy import envoy
from reference import Reference
from retrained import retrain
from stacks import Running, folder_in_memory, generation, running
from tokenizers import Tokenizer

from orca.v1.orca_pb2_grpc import OrcaStub
from orca_client import AsyncOrcaClient, InvalidArgument, NotFound, Token, Unavailable
from orca_local.embedded_pool import keep_port
from orca_local.stack import DEMO_MODEL

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.long]  # `make examples`
NAMES = ("a", "b")
PROMPTS = [[3, 17, 200, 45], [911, 12], [64, 65, 66, 67, 68, 69]]
COUNT = 40
LONG = 200  # tokens of a stream that is cut
decode = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")).decode  # of both


@dataclass
class House:
    """Two releases, and the one address of both."""

    address: str
    models: dict[str, Path]
    stacks: dict[str, Running]
    leave: dict[str, AsyncExitStack]  # closes one release

    def reference(self, name: str, prompt: list[int], count: int = COUNT) -> list[int]:
        return known(self.models[name], tuple(prompt), count)

    def openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"http://{self.address}/v1", api_key="none", max_retries=0)

    def http(self) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(base_url=f"http://{self.address}", timeout=60)


@cache
def known(model: Path, prompt: tuple[int, ...], count: int) -> list[int]:
    return Reference(model).greedy(prompt, count)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def house(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[House]:
    tmp_path = tmp_path_factory.mktemp("models")
    models = {"a": DEMO_MODEL, "b": retrain(DEMO_MODEL, tmp_path / "retrained")}
    async with AsyncExitStack() as both:
        stacks, leave = {}, {}
        for name, other in zip(NAMES, reversed(NAMES), strict=True):
            folder = Path(both.enter_context(folder_in_memory()))
            leave[name] = await both.enter_async_context(AsyncExitStack())
            stacks[name] = await leave[name].enter_async_context(release(folder, models[name], name, other))
        ports = {50050: both.enter_context(keep_port()).getsockname()[1]}
        for n, name in enumerate(NAMES):
            ports |= {50051 + n: port(stacks[name].grpc), 8001 + n: port(stacks[name].http)}
        address = await both.enter_async_context(envoy(tmp_path, ports))
        house = House(address, models, stacks, leave)
        await until_there(house, *NAMES)
        yield house


def release(folder: Path, model: Path, name: str, other: str, **settings: Any) -> Any:
    more = {"ORCA_OTHER_MODELS": other}
    return running(folder, model, environment=more, served_model_name=name, block_size=16, **settings)


def port(address: str) -> int:
    return int(address.rpartition(":")[2])


async def until_there(house: House, *names: str) -> None:
    """Waits until the proxy has seen that these releases are there."""
    async with asyncio.timeout(60), AsyncOrcaClient(house.address) as client:
        for name in names:
            assert (await client.get_model(model=name)).name == name


async def tokens_of(client: AsyncOrcaClient, name: str, prompt: list[int], count: int = COUNT) -> list[int]:
    stream = client.generate(prompt, max_new_tokens=count, ignore_eos=True, model=name)
    await stream.text()
    return [token.token_id for token in stream.tokens]


async def test_each_model_answers_with_its_own_tokens(house: House) -> None:
    asked = [(name, prompt) for prompt in PROMPTS for name in NAMES]
    assert house.reference("a", PROMPTS[0]) != house.reference("b", PROMPTS[0])
    async with AsyncOrcaClient(house.address) as client:
        grpc_tokens = await asyncio.gather(*(tokens_of(client, name, prompt) for name, prompt in asked))
        assert grpc_tokens == [house.reference(name, prompt) for name, prompt in asked]
        assert [(await client.get_model(model=name)).name for name in NAMES] == [*NAMES]

    async with house.openai() as door:
        assert [model.id async for model in await door.models.list()] == [*NAMES]
        assert [(await door.models.retrieve(name)).id for name in NAMES] == [*NAMES]

        async def text(name: str, prompt: list[int], stream: bool) -> str:
            fields: dict[str, Any] = {"model": name, "prompt": prompt, "max_tokens": COUNT, "temperature": 0}
            more = {"ignore_eos": True}
            if not stream:
                answer = await door.completions.create(**fields, extra_body=more)
                assert answer.model == name
                return answer.choices[0].text
            chunks = await door.completions.create(**fields, stream=True, extra_body=more)
            return "".join([chunk.choices[0].text async for chunk in chunks])

        for stream in (False, True):
            texts = await asyncio.gather(*(text(name, prompt, stream) for name, prompt in asked))
            assert texts == [decode(house.reference(name, prompt)) for name, prompt in asked]


async def test_a_model_that_is_named_late_in_a_long_body(house: House) -> None:
    """The proxy reads a body of any size that the door takes."""
    async with house.http() as door:
        for name in NAMES:
            body = '{"prompt": [3, 17], "max_tokens": 4, ' + " " * 3_900_000 + f'"model": "{name}"}}'
            answer = await door.post("/v1/completions", content=body, headers={"content-type": "application/json"})
            assert (answer.status_code, answer.json()["model"]) == (200, name)
            answer = await door.post("/tokenize", json={"model": name, "prompt": "import os"})
            assert answer.status_code == 200


async def test_many_calls_at_once(house: House) -> None:
    """The proxy lets through as many as the doors take: nothing is refused that a release would have queued."""
    calls, each = 1200, 200  # a connection of Envoy carries 256, and by itself it lets 1,024 calls through
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with AsyncExitStack() as channels:
        opened = []
        for _ in range(calls // each):
            stub = OrcaStub(
                await channels.enter_async_context(grpc.aio.insecure_channel(house.address, options=options))
            )
            request = generation([3, 17], LONG, ignore_eos=True, model="a")
            opened += [stub.Generate(request, metadata=(("x-gateway-model-name", "a"),)) for _ in range(each)]
        first = await asyncio.gather(*(call.read() for call in opened))
        assert [response.HasField("accepted") for response in first] == [True] * calls
        assert sum(call.done() for call in opened) < calls - 1024, "all of them were open together"
        for call in opened:
            call.cancel()


async def test_streams_go_on_at_their_own_release(house: House) -> None:
    """An endpoint of `b` is killed; a stream is taken up by another client, by gRPC and by HTTP; one is cancelled."""
    prompt, whole = PROMPTS[0], house.reference("b", PROMPTS[0], LONG)
    async with AsyncOrcaClient(house.address) as client, AsyncOrcaClient(house.address) as another:
        tokens: list[int] = []
        async for event in client.generate(prompt, max_new_tokens=LONG, ignore_eos=True, model="b"):
            if isinstance(event, Token):
                assert event.index == len(tokens)
                tokens.append(event.token_id)
                if len(tokens) == 20:
                    kill(house.stacks["b"], "endpoint")
        assert tokens == whole
        await until_there(house, "b")

        stream = client.generate(prompt, max_new_tokens=LONG, ignore_eos=True, model="b", on_leave="detach")
        while len(stream.tokens) < 20:
            await anext(stream)
        seen = [token.token_id for token in stream.tokens]
        resumed = another.resume(stream.request_id, len(seen), seen=seen, model="b", on_leave="detach")
        await anext(resumed)  # accepted
        async with house.http() as door:
            path = f"/v1/completions/{stream.request_id}"
            answer = await door.get(path, params={"from": len(seen), "model": "b"})
            events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
            assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == decode(whole[len(seen) :])
            answer = await door.get(path, params={"from": 0, "model": "a"}, timeout=5)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, None), (
                "another release, which knows no such id"
            )
        assert seen == whole[: len(seen)]

        stream = client.generate(prompt, max_new_tokens=LONG, ignore_eos=True, model="b")
        await anext(stream)
        assert await stream.cancel()
        with pytest.raises(NotFound):
            await another.cancel(stream.request_id, model="a")
        assert not await another.cancel(stream.request_id, model="b")


async def test_calls_that_name_no_model_of_these(house: House) -> None:
    async with AsyncOrcaClient(house.address) as client, house.http() as door:
        with pytest.raises(InvalidArgument, match="model: is missing; served here: 'a', 'b'"):
            await tokens_of(client, "", [1])
        with pytest.raises(NotFound, match="'c' is not served here; 'a', 'b' are"):
            await tokens_of(client, "c", [1])
        missing = (await door.post("/v1/completions", json={"prompt": [1]}), 400, None)
        unknown = (await door.post("/v1/completions", json={"model": "c", "prompt": [1]}), 404, "model_not_found")
        for answer, status, code in (missing, unknown):
            error = answer.json()["error"]
            assert (answer.status_code, error["param"], error["code"]) == (status, "model", code)
    # Another client, which gives the model in the message alone: it comes to the first release, which says what to do.
    async with grpc.aio.insecure_channel(house.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="served by another release; name it in x-gateway-model-name"):
            await anext(aiter(OrcaStub(channel).Generate(generation([1], 4, model="b"))))
        call = OrcaStub(channel).Generate(generation([1], 4, model="b"), metadata=(("x-gateway-model-name", "b"),))
        assert [response async for response in call][-1].HasField("finished")


async def test_a_release_that_is_away(house: House) -> None:
    """The other one serves on. A stream of the release that went goes on when it is back, on its kept pool."""
    b, prompt = house.stacks["b"], PROMPTS[0]
    ports = {"port": port(b.grpc), "http_port": port(b.http)}
    whole = house.reference("b", prompt, LONG)
    async with AsyncOrcaClient(house.address) as client, house.http() as door:
        stream = client.generate(prompt, max_new_tokens=LONG, ignore_eos=True, model="b")
        while len(stream.tokens) < 20:
            await anext(stream)
        kill(b, "scheduler")
        kill(b, "endpoint")  # so that the stream breaks and does not end well in the drain
        await house.leave["b"].aclose()

        with keep_port(ports["port"]), keep_port(ports["http_port"]):
            assert await tokens_of(client, "a", prompt) == house.reference("a", prompt)
            with pytest.raises(Unavailable):
                await client.get_model(model="b", timeout=2)
            body = {"model": "b", "prompt": prompt}
            answer = await door.post("/v1/completions", json=body)
            assert (answer.status_code, answer.json()["error"]["type"]) == (503, "server_error")
            answer = await door.get("/v1/models")
            assert [model["id"] for model in answer.json()["data"]] == [*NAMES]

        async with release(b.run_dir, house.models["b"], "b", "a", **ports):
            await stream.text()
            assert [token.token_id for token in stream.tokens] == whole


def kill(stack: Running, role: str) -> None:
    for row in stack.processes():
        if row["role"] == role:
            os.kill(row["pid"], signal.SIGKILL)
