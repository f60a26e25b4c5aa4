"""Adapters beside a model, through both doors: a request's model chooses one, kills end no stream, and what one adapter
has read of a prompt is not another's."""

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx2
import pytest
from e2e.test_prefix import turn
from lora import Lora, make_lora
from reference import Reference
from stacks import running

from orca_client import AlreadyExists, NotFound
from orca_local.stack import DEMO_MODEL

BLOCK, COUNT = 16, 60
TEXT = [(7 * n) % 250 for n in range(70)]


def make(tmp_path: Path) -> tuple[list[Lora], dict[str, Reference]]:
    """Two adapters of the demo model, and the merged models by name."""
    loras = [make_lora(tmp_path / name, DEMO_MODEL, name, seed=n, rank=8) for n, name in enumerate(("a", "b"))]
    references = {"": Reference(DEMO_MODEL)}
    for lora in loras:
        lora.merged(DEMO_MODEL).save_pretrained(merged := tmp_path / f"merged-{lora.adapter.name}")
        references[lora.adapter.name] = Reference(merged)
    return loras, references


def said(loras: list[Lora]) -> str:
    return ",".join(f"{lora.adapter.name}={lora.adapter.folder}" for lora in loras)


@pytest.mark.timeout(280)
async def test_requests_choose_and_kills_change_nothing(tmp_path: Path) -> None:
    loras, references = make(tmp_path)
    want = {name: reference.greedy(TEXT, COUNT) for name, reference in references.items()}
    assert len({tuple(tokens) for tokens in want.values()}) == 3
    numbers: dict[str, Any] = {"pp": 2, "block_size": BLOCK, "max_batch_size": 8, "slots": 2048}
    policy = "balanced,positions=64,prefix=shared"
    async with running(tmp_path / "run", DEMO_MODEL, policy=policy, adapters=said(loras), **numbers) as stack:
        epochs = [engine.epoch for engine in (await stack.client.get_model()).engines]
        for name, tokens in want.items():  # one after the other: what the one before read is there
            assert await turn(stack, TEXT, COUNT, model=name) == (tokens, 0)
            assert await turn(stack, TEXT, COUNT, model=name) == (tokens, (len(TEXT) - 1) // BLOCK * BLOCK)

        after = [engine.epoch for engine in (await stack.client.get_model()).engines]
        assert after == epochs, "a rank found keys of another adapter"

        for role in ("rank", "scheduler", "endpoint", "rank"):
            came = asyncio.Event()
            each = [stack.tokens(TEXT, COUNT, lambda _, came=came: came.set(), model=name) for name in [*want, *want]]
            streams = [asyncio.create_task(one) for one in each]
            await came.wait()
            os.kill(next(one["pid"] for one in stack.processes() if one["role"] == role and one["pid"]), signal.SIGKILL)
            assert await asyncio.gather(*streams) == [*want.values(), *want.values()], role

        await turn(stack, TEXT, 5, model="a", request_id="one")
        assert (await turn(stack, TEXT, 5, model="a", request_id="one"))[0] == want["a"][:5]
        with pytest.raises(AlreadyExists):
            await turn(stack, TEXT, 5, model="b", request_id="one")
        with pytest.raises(NotFound, match=f"'c' is not served here; '{DEMO_MODEL.name}', 'a', 'b' are"):
            await turn(stack, TEXT, 5, model="c")
        await check_http(stack.http, want)


async def check_http(address: str, want: dict[str, list[int]]) -> None:
    async with httpx2.AsyncClient(base_url=f"http://{address}", timeout=60) as client:
        listed = (await client.get("/v1/models")).json()["data"]
        assert [(one["id"], one.get("parent")) for one in listed] == [
            (DEMO_MODEL.name, None),
            *((name, DEMO_MODEL.name) for name in want if name),
        ]
        assert (await client.get("/v1/models/b")).json()["parent"] == DEMO_MODEL.name
        assert (await client.get("/v1/models/c")).status_code == 404
        texts = {}
        for name in want:
            body = {"model": name or DEMO_MODEL.name, "prompt": TEXT, "max_tokens": COUNT, "temperature": 0}
            whole = (await client.post("/v1/completions", json=body)).json()
            assert whole["model"] == body["model"]
            texts[name] = whole["choices"][0]["text"]
            async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
                lines = [json.loads(line[6:]) async for line in stream.aiter_lines() if line.startswith("data: {")]
            assert {line["model"] for line in lines} == {body["model"]}
            assert "".join(line["choices"][0]["text"] for line in lines) == texts[name]
        assert len(set(texts.values())) == 3
        refused = await client.post("/v1/completions", json={"model": "c", "prompt": TEXT, "max_tokens": 1})
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
