"""The adapter of a request is the one that its name had when it came, or none is found: never the model alone."""

import asyncio
import threading
from pathlib import Path

import httpx2 as httpx
import pytest
from endpoint.harness import World, serving, world

from orca.v1.pool_pb2 import PoolRequest
from orca_endpoint.calls.endpoint import TOKENIZING


async def adapters_served(orca: World) -> list[str]:
    async with httpx.AsyncClient(base_url=orca.serving.http) as http:
        return [one["id"] for one in (await http.get("/v1/models")).json()["data"]][1:]


async def test_what_another_endpoint_has_taken_out_is_not_answered_by_the_model(redis_url: str, model: Path) -> None:
    """As in an update of the endpoints whose settings have an adapter less."""
    async with world(redis_url, model, adapters="legal=/x,other=/x") as orca:
        await orca.engine.load_adapters()
        while await adapters_served(orca) != ["legal", "other"]:
            await asyncio.sleep(0.05)
        async with serving(redis_url, orca.name, model, adapters="other=/x"):
            while await adapters_served(orca) != ["other"]:
                await asyncio.sleep(0.05)
            async with httpx.AsyncClient(base_url=orca.serving.http) as http:
                body = {"model": "legal", "prompt": [5], "max_tokens": 1}
                assert (await http.post("/v1/completions", json=body)).status_code == 404


async def test_an_adapter_that_is_unloaded_while_its_request_is_read(
    redis_url: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request is still one of the adapter's."""
    monkeypatch.setattr("orca_endpoint.requests.validation.TEXT_IN_LOOP", 0)
    async with world(redis_url, model, operators="*") as orca:
        adapter = await orca.pool.load_adapter("legal", "/x")
        await orca.engine.load_adapters()
        while await adapters_served(orca) != ["legal"]:
            await asyncio.sleep(0.05)
        endpoint, gate = orca.serving.app.endpoint, threading.Event()
        busy = [asyncio.create_task(endpoint.tokenizing.run(gate.wait, str(n))) for n in range(TOKENIZING)]
        async with httpx.AsyncClient(base_url=orca.serving.http) as http:
            body = {"model": "legal", "prompt": "the cat sat", "max_tokens": 1}
            asked = asyncio.create_task(http.post("/v1/completions", json=body))
            try:
                while not endpoint._validating:
                    assert not asked.done(), (await asked).text
                    await asyncio.sleep(0.01)
                assert await orca.pool.unload_adapter("legal")
                while await adapters_served(orca):
                    await asyncio.sleep(0.05)
            finally:
                gate.set()
            await asyncio.gather(*busy)
            claimed = PoolRequest.FromString((await orca.engine.claim()).record)
            assert claimed.sampling.adapter == adapter
            asked.cancel()


async def test_an_endpoint_that_starts_knows_the_adapters_at_once(
    redis_url: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of its settings are in the pool, and it has those that operators have loaded, though it names none."""
    monkeypatch.setattr("orca_endpoint.calls.adapters.LOOK", 3600.0)
    async with world(redis_url, model, adapters="own=/x") as orca:
        assert [entry.name for entry in (await orca.pool.adapters()).entries.values()] == ["own"]
    async with world(redis_url, model, operators="*") as orca:
        await orca.pool.load_adapter("legal", "/x")
        await orca.engine.load_adapters()
        async with serving(redis_url, orca.name, model) as other:
            assert list(other.app.endpoint.adapters.ids) == ["legal"]
