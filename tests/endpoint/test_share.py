"""No caller takes the whole queue: it has as many requests in it as are free, also those that it has left."""

from pathlib import Path

import grpc
import httpx2 as httpx
import pytest
from endpoint.harness import World, detail_of, generation, until, world
from google.rpc import error_details_pb2

from orca_common.api_keys import line_of, new_key

SETTINGS = {"max_waiting": 4, "trusted_proxies": "127.0.0.1"}
ONE, OTHER = "203.0.113.1", "203.0.113.2"
KEYS = {"research": new_key(), "training": new_key()}

Metadata = tuple[tuple[str, str], ...]


async def leave_one(orca: World, metadata: Metadata) -> None:
    """A call that waits and is left for an hour."""
    request = generation(max_new_tokens=1)
    request.detach_grace.FromSeconds(3600)
    before = orca.serving.app.delivery.count
    call = orca.stub.Generate(request, metadata=metadata)
    await call.read()
    call.cancel()
    await until(lambda: orca.serving.app.delivery.count == before)


async def refusal(orca: World, metadata: Metadata) -> str:
    """The sentence with which a further request is refused."""
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await orca.stub.Generate(generation(max_new_tokens=1), metadata=metadata).read()
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert detail_of(refused.value, error_details_pb2.ErrorInfo()).reason == "QUEUE_FULL"
    assert detail_of(refused.value, error_details_pb2.RetryInfo()).retry_delay.ToSeconds() >= 0
    return refused.value.details() or ""


async def test_a_host_has_its_share_of_the_queue(redis_url: str, model: Path) -> None:
    """Another one finds room, and over HTTP it is the same share."""
    async with world(redis_url, model, **SETTINGS) as orca:
        one, other = (("x-forwarded-for", ONE),), (("x-forwarded-for", OTHER),)
        for _ in range(2):
            await leave_one(orca, one)
        share = "has its share of the queue, at most 2 requests now, as many as are free for all"
        assert f"host {ONE} {share}" in await refusal(orca, one)
        body = {"model": "tiny", "prompt": [5], "max_tokens": 1}
        async with httpx.AsyncClient(base_url=orca.serving.http, headers=dict(one)) as http:
            answer = await http.post("/v1/completions", json=body)
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert f"host {ONE} {share}" in answer.json()["error"]["message"]
        await leave_one(orca, other)
        assert f"host {OTHER} has its share of the queue, at most 1 requests now" in await refusal(orca, other)
        claimed = await orca.engine.claim()
        await orca.engine.answer(claimed, [10])
        await leave_one(orca, one)


async def test_a_tenant_has_its_share_from_any_host(redis_url: str, model: Path) -> None:
    keys = ",".join(line_of(tenant, key) for tenant, key in KEYS.items())
    async with world(redis_url, model, api_keys=keys, **SETTINGS) as orca:

        def of(tenant: str, host: str) -> Metadata:
            return (("authorization", f"Bearer {KEYS[tenant]}"), ("x-forwarded-for", host))

        for host in (ONE, OTHER):
            await leave_one(orca, of("research", host))
        assert "tenant 'research' has its share of the queue" in await refusal(orca, of("research", ONE))
        await leave_one(orca, of("training", ONE))


async def test_the_limit_of_a_tenant_is_a_hosts_where_there_are_no_keys(redis_url: str, model: Path) -> None:
    async with world(redis_url, model, trusted_proxies="127.0.0.1", tenant_requests=1) as orca:
        one, other = (("x-forwarded-for", ONE),), (("x-forwarded-for", OTHER),)
        await leave_one(orca, one)
        with pytest.raises(grpc.aio.AioRpcError, match=f"host {ONE} has all that it may: 1 requests") as refused:
            await orca.stub.Generate(generation(max_new_tokens=1), metadata=one).read()
        assert detail_of(refused.value, error_details_pb2.ErrorInfo()).reason == "TENANT_FULL"
        await leave_one(orca, other)
