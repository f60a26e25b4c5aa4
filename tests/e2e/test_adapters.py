"""Adapters beside a model, through both doors: a request's model chooses one, kills end no stream, and what one adapter
has read of a prompt is not another's."""

import asyncio
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import httpx2
import pytest
from e2e.test_prefix import turn
from lora import Lora, make_lora
from reference import Reference
from stacks import running

from orca_client import Aborted, Accepted, AlreadyExists, AsyncStream, NotFound, Token
from orca_local.stack import DEMO_MODEL

BLOCK, COUNT = 16, 40
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


@pytest.mark.timeout(280)
async def test_loaded_replaced_and_unloaded_under_load(tmp_path: Path) -> None:
    """Old streams go on with the old version, new ones have the new one, whatever is killed meanwhile."""
    root = tmp_path / "adapters"
    root.mkdir()
    first, second = (make_lora(root / f"{n}", DEMO_MODEL, "a", seed=n, rank=8) for n in range(2))
    want = {"": Reference(DEMO_MODEL).greedy(TEXT, COUNT)}
    for name, lora in (("first", first), ("second", second)):
        lora.merged(DEMO_MODEL).save_pretrained(merged := tmp_path / f"merged-{name}")
        want[name] = Reference(merged).greedy(TEXT, COUNT)
    assert len({tuple(tokens) for tokens in want.values()}) == 3
    numbers: dict[str, Any] = {"tp": 2, "block_size": BLOCK, "max_batch_size": 2, "slots": 2048}
    policy = "balanced,positions=64,prefix=shared"
    settings: dict[str, Any] = {"adapters_folder": str(root), "operators": "*", **numbers}
    async with (
        running(tmp_path / "run", DEMO_MODEL, policy=policy, **settings) as stack,
        httpx2.AsyncClient(base_url=f"http://{stack.http}", timeout=60) as client,
    ):

        async def load(lora: Lora, **more: object) -> tuple[int, str]:
            body = {"lora_name": "a", "lora_path": str(lora.adapter.folder), **more}
            answer = await client.post("/v1/load_lora_adapter", json=body)
            return answer.status_code, answer.text

        async def listed() -> list[str]:
            return [one["id"] for one in (await client.get("/v1/models")).json()["data"]][1:]

        def kill(role: str) -> None:
            pids = [one["pid"] for one in stack.processes() if one["role"] == role and one["pid"]]
            os.kill(pids[0], signal.SIGKILL)

        async def begun(count: int) -> list[asyncio.Task[list[int]]]:
            """Streams of the adapter, of which two run, and the others wait. Returns when all are accepted and a token
            has come: then the version of each is chosen."""
            came = asyncio.Event()

            async def read(stream: AsyncStream) -> list[int]:
                async for event in stream:
                    if isinstance(event, Token):
                        came.set()
                return [token.token_id for token in stream.tokens]

            options: dict[str, Any] = {"max_new_tokens": COUNT, "ignore_eos": True, "model": "a"}
            streams = [stack.client.generate(TEXT, **options) for _ in range(count)]
            for stream in streams:
                assert isinstance(await anext(stream), Accepted)
            tasks = [asyncio.create_task(read(stream)) for stream in streams]
            await came.wait()
            return tasks

        assert await listed() == []
        with pytest.raises(NotFound):
            await turn(stack, TEXT, 5, model="a")
        assert await load(first) == (200, "Success: LoRA adapter 'a' added successfully.")
        assert await listed() == ["a"]
        assert (await load(second))[0] == 400, "it is there, and load_inplace was not said"

        for role in ("rank", "scheduler"):
            old = await begun(6)
            assert (await load(second, load_inplace=True))[0] == 200
            assert not all(task.done() for task in old), "the load was to come while streams run"
            new = await begun(2)
            kill(role)
            assert await asyncio.gather(*old) == [want["first"]] * 6, role
            assert await asyncio.gather(*new) == [want["second"]] * 2, role
            assert await stack.tokens(TEXT, COUNT) == want[""]
            await stack.until(lambda: all(one["pid"] for one in stack.processes()))
            first, second, want["first"], want["second"] = second, first, want["second"], want["first"]

        wrong = root / "wrong"
        shutil.copytree(first.adapter.folder, wrong)
        (wrong / "adapter_model.safetensors").write_bytes(b"12345678")
        status, text = await load(first._replace(adapter=first.adapter._replace(folder=wrong)), load_inplace=True)
        assert status == 400
        assert "adapter a: " in text
        assert await stack.tokens(TEXT, COUNT, model="a") == want["first"], "the one before is served on"

        last = await begun(4)
        answer = await client.post("/v1/unload_lora_adapter", json={"lora_name": "a"})
        assert (answer.status_code, await listed()) == (200, [])
        kill("endpoint")
        with pytest.raises(NotFound):
            await turn(stack, TEXT, 5, model="a")
        assert await asyncio.gather(*last) == [want["first"]] * 4
        assert (await client.post("/v1/unload_lora_adapter", json={"lora_name": "a"})).status_code == 404


@pytest.mark.timeout(180)
async def test_a_file_of_adapters_is_followed(tmp_path: Path) -> None:
    """.. and engines claim requests of those alone that they have: `b` is outside of their folder."""
    root = tmp_path / "adapters"
    root.mkdir()
    lora, outside = make_lora(root / "a", DEMO_MODEL, "a", seed=1), make_lora(tmp_path / "b", DEMO_MODEL, "b", seed=2)
    listed = tmp_path / "list"
    listed.write_text("# none yet\n")
    lora.merged(DEMO_MODEL).save_pretrained(tmp_path / "merged")
    want = Reference(tmp_path / "merged").greedy(TEXT, COUNT)
    settings: dict[str, Any] = {"adapters_folder": str(root), "adapters_file": str(listed)}
    async with (
        running(tmp_path / "run", DEMO_MODEL, block_size=BLOCK, slots=2048, **settings) as stack,
        httpx2.AsyncClient(base_url=f"http://{stack.http}", timeout=60) as client,
    ):

        async def names(wanted: set[str]) -> None:
            async with asyncio.timeout(30):
                while {one["id"] for one in (await client.get("/v1/models")).json()["data"][1:]} != wanted:
                    await asyncio.sleep(0.05)

        refused = await client.post("/v1/load_lora_adapter", json={"lora_name": "c", "lora_path": str(root)})
        assert refused.status_code == 403
        listed.write_text(f"a={lora.adapter.folder}\nb={outside.adapter.folder}\n")
        await names({"a", "b"})
        waits = asyncio.create_task(stack.tokens(TEXT, 5, model="b"))
        assert await stack.tokens(TEXT, COUNT, model="a") == want
        # None answers as the model alone. It waits until the engine has said so, or comes later.
        with pytest.raises((Aborted, NotFound), match=r"or its adapter, any more|or no engine has it; try again"):
            await waits
        shutil.copytree(outside.adapter.folder, root / "b")
        listed.write_text(f"a={lora.adapter.folder}\nb={root / 'b'}\n")
        outside.merged(DEMO_MODEL).save_pretrained(tmp_path / "merged-b")
        of_b = Reference(tmp_path / "merged-b").greedy(TEXT, 5)
        async with asyncio.timeout(60):
            while True:
                try:
                    assert await asyncio.wait_for(stack.tokens(TEXT, 5, model="b"), 5) == of_b
                except (TimeoutError, NotFound, Aborted):  # also of the version that was outside
                    continue
                break
        listed.write_text("")
        await names(set())
