"""Classes and shares at both doors: where a request comes into the queue, and what a key may ask for."""

from pathlib import Path

import grpc
import httpx2 as httpx
import openai
import pytest
from endpoint.harness import World, field_of, generation, read, world

from orca.v1 import orca_pb2 as pb
from orca_client import AsyncOrcaClient
from orca_common.api_keys import line_of, new_key

KEY, OTHER = new_key(), new_key()
KEYS = f"{line_of('research', KEY)} priority=high weight=3\n{line_of('shop', OTHER)}"


async def position(orca: World, priority: int, key: str | None = None) -> int:
    """Of a new request that waits, from 0. It lives on without its call."""
    metadata = () if key is None else (("authorization", f"Bearer {key}"),)
    request = generation(priority=priority)
    request.detach_grace.FromSeconds(600)
    [first] = await read(orca.stub.Generate(request, metadata=metadata), 1)
    return first.accepted.queue_position


async def test_classes_go_first(redis_url: str, model: Path) -> None:
    async with world(redis_url, model) as orca:
        asked = [pb.PRIORITY_NORMAL, pb.PRIORITY_LOW, pb.PRIORITY_UNSPECIFIED, pb.PRIORITY_HIGH, pb.PRIORITY_URGENT]
        assert [await position(orca, one) for one in asked] == [0, 1, 1, 0, 0]
        async with openai.AsyncOpenAI(base_url=f"{orca.serving.http}/v1", api_key="any") as client:
            ask = client.completions.with_raw_response.create
            for more, before in (({"priority": "urgent"}, "1"), ({"priority": "high"}, "3"), ({}, "6")):
                body = {**more, "detach_grace": 600}
                stream = await ask(model="tiny", prompt=[5], max_tokens=4, stream=True, extra_body=body)
                assert stream.headers["x-queue-position"] == before
        async with (
            AsyncOrcaClient(orca.serving.addresses["grpc"]) as client,
            client.generate([5], max_new_tokens=4, priority="low") as stream,
        ):
            assert (await anext(aiter(stream))).queue_position == 8  # type: ignore[union-attr]


async def test_a_key_bounds_the_class(redis_url: str, model: Path) -> None:
    async with world(redis_url, model, api_keys=KEYS) as orca:
        assert await position(orca, pb.PRIORITY_HIGH, KEY) == 0
        for key, priority, highest in ((KEY, pb.PRIORITY_URGENT, "high"), (OTHER, pb.PRIORITY_HIGH, "normal")):
            with pytest.raises(grpc.aio.AioRpcError, match=f"may ask for {highest} at most") as refused:
                await position(orca, priority, key)
            assert field_of(refused.value) == "priority"
        with pytest.raises(grpc.aio.AioRpcError, match="is 9, which is no class"):
            await position(orca, 9, KEY)
        headers = {"authorization": f"Bearer {OTHER}"}
        async with httpx.AsyncClient(base_url=orca.serving.http, headers=headers) as http:
            answer = await http.post("/v1/completions", json={"prompt": [5], "max_tokens": 4, "priority": "high"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "priority")


async def test_shares_by_the_weights_of_keys(redis_url: str, model: Path) -> None:
    """Three of the one tenant go before the second of the other."""
    async with world(redis_url, model, api_keys=KEYS, order="fair") as orca:
        assert [await position(orca, 0, OTHER) for _ in range(4)] == [0, 1, 2, 3]
        places = [await position(orca, 0, KEY) for _ in range(4)]
        assert places == sorted(places)
        assert places[0] <= 1
        assert places[3] <= 5
        with pytest.raises(grpc.aio.AioRpcError, match="must be normal here: tenants have fair shares"):
            await position(orca, pb.PRIORITY_HIGH, KEY)


async def test_hosts_have_shares_where_there_are_no_keys(redis_url: str, model: Path) -> None:
    async with world(redis_url, model, order="fair") as orca:
        assert [await position(orca, 0) for _ in range(3)] == [0, 1, 2]
