"""`orca explain` of a running stack: each way for a request to go, and its time against the pool's and the client's."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_timed
from stacks import Running, running
from terminals import Terminal

from orca_cli.explaining import explanation, from_journals
from orca_client import DeadlineExceeded
from orca_common.errors import NotFound
from orca_scheduler.explain.telling import standing_of
from orca_ui.picture import Picture

TOKENS = 40
LONG = 60_000  # tokens, 300 s, of a request that is still there when it is looked at; it is cancelled then


async def explained(stack: Running, request: str) -> dict[str, Any]:
    """The account of a request, which holds together: its parts are its whole time."""
    told = await asyncio.to_thread(explanation, request, stack.run_dir, [])
    parts = told["parts"]
    assert parts[0]["begin"] == 0
    assert all(abs(a["begin"] + a["seconds"] - b["begin"]) < 1e-6 for a, b in pairwise(parts))
    assert sum(part["seconds"] for part in parts) == pytest.approx(told["seconds"], rel=0.01)
    assert told["unseen"] == 0
    return told


async def stream(stack: Running, request: str, tokens: int, **options: Any) -> float:
    """Generates a request, and returns the client's seconds for it."""
    began = time.monotonic()
    events = stack.client.generate([1, 2, 3], max_new_tokens=tokens, request_id=request, ignore_eos=True, **options)
    async for _ in events:
        pass
    return time.monotonic() - began


def complete(stack: Running, exchange: str) -> str:
    """Completes a prompt over HTTP, with this X-Request-Id. Returns the answer's id."""
    body = {"model": "model", "prompt": [1, 2, 3], "max_tokens": TOKENS, "ignore_eos": True}
    headers = {"Content-Type": "application/json", "X-Request-Id": exchange}
    request = urllib.request.Request(f"http://{stack.http}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["id"]


def orca_explain(request: str, run_dir: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "orca_cli", "explain", request, "--run-dir", str(run_dir)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def pictured(stack: Running) -> dict[str, Any]:
    """The live page's picture, of the lines that the scheduler tells it, once a request waits."""
    [address] = [row["status"] for row in stack.processes() if row["role"] == "scheduler"]
    picture = Picture()
    with urllib.request.urlopen(f"http://{address}/live", timeout=60) as feed:
        for line in feed:
            picture.line(address, json.loads(line), time.time())
            whole = picture.whole(time.time())
            if whole["queue"][0]:
                return whole
    raise AssertionError("the scheduler ended its lines, and no request waited")


def look_at_top(run_dir: Path) -> None:
    """Drives `orca top` in a terminal while `long` runs: it is listed, a key explains it, another goes back."""
    with Terminal([sys.executable, "-m", "orca_cli", "top", "--run-dir", str(run_dir), "--interval", "0.2"]) as top:
        top.until("engine-0")
        top.until("long")
        top.until(r"\d+% busy")
        top.until(r"queue\s1")
        top.send("\r")
        top.until("long runs on engine-0")
        top.until("which never returned")
        top.send("\x1b")
        top.until("the oldest requests")
        top.send("q")
        assert top.ended() == 0


async def until(stack: Running, request: str, kind: str, claims: int = 0) -> dict[str, Any]:
    """The account of a request, once it has been claimed this often and its last part is of this kind."""
    async with asyncio.timeout(60):
        while True:
            with suppress(NotFound):  # not yet
                told = await explained(stack, request)
                if len(told["engines"]) >= claims and told["parts"][-1]["kind"] == kind:
                    return told
            await asyncio.sleep(0.05)


async def test_explanations(tmp_path: Path) -> None:
    """One engine for one request at a time: the others queue behind it."""
    model = make_timed(tmp_path / "model", seconds=0.005, positions=1 << 16)
    async with running(tmp_path / "run", model, max_batch_size=1, slots=1 << 17) as stack:
        # First, while no pace is known by which it would be refused.
        with pytest.raises(DeadlineExceeded):
            await stream(stack, "expired", LONG, timeout=3.0)
        async with asyncio.timeout(60):  # the client's clock may be ahead
            while (told := await explained(stack, "expired"))["state"] in ("claimed", "running"):
                await asyncio.sleep(0.05)
        assert told["state"] in ("expired", "cancelled"), "the pool's deadline came first, or the end of the call"

        seconds = await stream(stack, "finished", TOKENS)
        told = await explained(stack, "finished")
        assert (told["state"], told["tokens"], told["engines"], told["position"]) == (
            "finished",
            TOKENS,
            ["engine-0"],
            1,
        )
        assert told["seconds"] <= seconds * 1.01, "the client has waited for longer than the pool has had it"
        [run] = [part for part in told["parts"] if part["kind"] == "run"]
        assert (run["iterations"], run["last"] - run["first"] + 1) == (TOKENS, TOKENS)
        standing = standing_of(told)
        assert standing is not None
        assert told["seconds"] == pytest.approx((standing.times.finished - standing.times.submitted) / 1e6)

        name = await asyncio.to_thread(complete, stack, "mine")
        told = await explained(stack, "mine")
        assert (told["request"], told["state"], told["tokens"]) == (name, "finished", TOKENS)

        long = asyncio.ensure_future(stream(stack, "long", LONG))
        # Until an iteration has returned: one in flight is a part "run", too, which a killed rank makes a part "lost".
        while not (told := await until(stack, "long", "run"))["tokens"]:
            pass
        assert told["state"] == "running"
        assert told["parts"][-1]["kind"] == "run"

        waits = asyncio.ensure_future(stream(stack, "waits", TOKENS))
        told = await until(stack, "waits", "places")
        assert (told["state"], told["position_now"]) == ("queued", 1)
        picture = await asyncio.to_thread(pictured, stack)
        assert (picture["queue"][0], picture["engines"]["engine-0"]["state"]) == (1, "Running")
        assert [(one["id"], one["state"]) for one in picture["requests"] if one["state"] != "ended"] == [
            ("long", "running")
        ]

        (rank,) = [row for row in stack.processes() if row["role"] == "rank"]
        os.kill(rank["pid"], signal.SIGKILL)
        told = await until(stack, "long", "run", claims=2)
        assert told["state"] == "running"
        story = [part["kind"] for part in told["parts"] if part["kind"] in ("run", "lost", "forming")]
        assert story[:3] == ["run", "lost", "forming"]
        assert "has ended" in next(part["sentence"] for part in told["parts"] if part["kind"] == "forming")

        await asyncio.to_thread(look_at_top, stack.run_dir)

        await stack.client.cancel("long")
        await asyncio.gather(long, waits)
        told = await explained(stack, "long")
        assert told["state"] == "cancelled"
        told = await explained(stack, "waits")
        assert told["state"] == "finished"
        assert {"places", "run"} <= {part["kind"] for part in told["parts"]}

        printed = await asyncio.to_thread(orca_explain, "waits", stack.run_dir)
        assert (printed.returncode, printed.stdout.startswith("waits finished after ")) == (0, True), printed.stderr
        with pytest.raises(NotFound, match="stranger: there is no such request: no journal in "):
            await asyncio.to_thread(explanation, "stranger", stack.run_dir, [])
        live = {request: await explained(stack, request) for request in ("finished", "mine", "waits")}

    # The run has ended: its journals say the same, but for the end's way to the pool.
    for request, told in live.items():
        [alone] = from_journals(request, stack.run_dir, [])
        assert (alone["state"], alone["tokens"]) == (told["state"], told["tokens"])
        assert [part["sentence"] for part in alone["parts"]] == [
            part["sentence"] for part in told["parts"] if part["kind"] != "commit"
        ]
    refused = await asyncio.to_thread(orca_explain, "stranger", stack.run_dir)
    assert (refused.returncode, "no journal in" in refused.stderr) == (1, True)


async def test_a_scheduler_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"127\.0\.0\.1:1: its status port does not answer"):
        await asyncio.to_thread(explanation, "r", None, ["127.0.0.1:1"])
