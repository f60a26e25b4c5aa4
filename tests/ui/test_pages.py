"""The service over HTTP: a scripted scheduler, a real uvicorn, keys, headers, chats that cannot be passed on."""

import asyncio
import json
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest
from listening import listening
from ui.feeds import ENGINE, START, Feed, arrived, asked

from orca_common.api_keys import line_of
from orca_common.service import Answer, Query, StatusPort
from orca_scheduler.master.journal import ENCODER
from orca_ui.app import UiApp
from orca_ui.pages import STATIC
from orca_ui.settings import UiSettings

KEY = "orca-test-key"
NOWHERE = "http://127.0.0.1:9"  # no server listens there


@asynccontextmanager
async def page(
    read: Callable[[], bytes], explain: Callable[[Query], Answer] = lambda _: Answer(404, {}), **settings: Any
) -> AsyncIterator[httpx2.AsyncClient]:
    """The service, which follows one scripted scheduler."""
    streams = {"/live": lambda: read, "/live/quiet": lambda: read}
    pages = {"/explain": explain}
    scheduler = StatusPort("127.0.0.1", 0, lambda: None, lambda: True, pages=pages, streams=streams)
    given = {"scheduler_status": f"127.0.0.1:{scheduler.port}", "endpoint_url": NOWHERE} | settings
    app = UiApp(UiSettings.load(**given))
    address = (await app.start())["http"]
    running = asyncio.create_task(app.run())
    try:
        async with httpx2.AsyncClient(base_url=f"http://{address}", trust_env=False) as client:
            yield client
    finally:
        await app.drain()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await app.close()
        await asyncio.to_thread(scheduler.close)


def scripted() -> Callable[[], bytes]:
    feed = Feed()
    first = [feed.line((START, asked({1: "mine"}, START)), (START, arrived(1)), held={})]

    def read() -> bytes:
        return json.dumps(first.pop() if first else feed.line()).encode() + b"\n"

    return read


async def first_with(answer: httpx2.Response, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The first message that meets a condition."""
    async with asyncio.timeout(30):
        async for line in answer.aiter_lines():
            if line.startswith("data: ") and condition(message := json.loads(line[6:])):
                return message
    raise AssertionError("the stream ended")


async def test_a_feed_may_hold_every_character_that_json_does_not_escape() -> None:
    why = "cannot form: a\u2028b\x85c"
    line = ENCODER.encode(Feed(why=why).line(held={})) + b"\n"
    lines = [line]
    async with page(lambda: lines.pop() if lines else line) as client, client.stream("GET", "/live") as answer:
        message = await first_with(answer, lambda m: bool(m.get("engines")))
        assert message["engines"][ENGINE]["why"] == why


async def test_a_browser_gets_the_picture_and_its_files() -> None:
    async with page(scripted()) as client:
        async with client.stream("GET", "/live") as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            message = await first_with(answer, lambda m: bool(m.get("requests")))
            assert message["requests"][0]["id"] == "mine"
            assert ENGINE in message["engines"]
        for path in ("/", *(f"/{file.name}" for file in STATIC.iterdir())):
            answer = await client.get(path)
            assert answer.status_code == 200, path
            assert "default-src 'none'" in answer.headers["content-security-policy"]
            assert answer.headers["x-content-type-options"] == "nosniff"
        assert (await client.get("/settings.py")).status_code == 404
        assert (await client.get("/requests/1/text")).status_code == 404, "no prompt is in the feed"


async def test_a_story_is_the_scheduler_s_explanation() -> None:
    asked_for = list[str]()

    def explain(query: Query) -> Answer:
        asked_for.append(query["request"])
        return Answer(200, {"request": query["request"], "unseen": 0.0})

    async with page(scripted(), explain) as client, client.stream("GET", "/live") as answer:
        message = await first_with(answer, lambda m: bool(m.get("requests")))
        story = await client.get(f"/requests/{message['requests'][0]['n']}")
        assert (story.status_code, story.json()) == (200, {"request": "mine", "unseen": 0.0})
        assert (await client.get("/requests/99")).status_code == 404
    assert asked_for == ["mine"]


async def test_a_story_that_no_scheduler_knows() -> None:
    async with page(scripted()) as client, client.stream("GET", "/live") as answer:
        await first_with(answer, lambda m: bool(m.get("requests")))
        assert (await client.get("/requests/1")).status_code == 404


async def test_with_keys_only_the_files_are_open(tmp_path: Path) -> None:
    keys = line_of("research", KEY)
    async with page(scripted(), api_keys=keys) as client:
        assert (await client.get("/")).status_code == 200
        assert (await client.get("/about")).json() == {"keys": True}
        for path in ("/live", "/v1/models", "/requests/1", "/requests/1/text"):
            for wrong in ({}, {"authorization": "Bearer no"}):
                answer = await client.get(path, headers=wrong)
                assert answer.status_code == 401, path
        async with client.stream("GET", "/live", headers={"authorization": f"Bearer {KEY}"}) as answer:
            assert answer.status_code == 200
            await first_with(answer, lambda m: bool(m["engines"]))


async def test_chats_that_cannot_be_passed_on() -> None:
    async with page(scripted()) as client:
        answer = await client.post("/v1/completions", json={"prompt": "a"})
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "server_error")
        form = await client.post("/v1/completions", content=b'{"prompt": "a"}', headers={"content-type": "text/plain"})
        assert form.status_code == 415, "a page of another site could send it"
        large = await client.post("/v1/completions", json={"prompt": "a" * (1 << 20)})
        assert large.status_code == 413


async def test_another_host_is_refused() -> None:
    """A page whose name looks up to 127.0.0.1 would read what is here."""
    other = {"host": "evil.example"}
    async with page(scripted()) as client:
        for path in ("/", "/live", "/about", "/v1/models"):
            answer = await client.get(path, headers=other)
            assert (answer.status_code, "'evil.example'" in answer.text) == (421, True), path
        assert (await client.get("/", headers={"host": "localhost:1"})).status_code == 200


@pytest.mark.parametrize("settings", [{"host_names": "page.example"}, {"api_keys": line_of("research", KEY)}])
async def test_hosts_that_are_given_and_keys(settings: dict[str, Any]) -> None:
    async with page(scripted(), **settings) as client:
        answer = await client.get("/about", headers={"host": "page.example", "authorization": f"Bearer {KEY}"})
    assert answer.status_code == 200


async def test_a_busy_endpoint_says_when_to_try_again() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(
            b"HTTP/1.1 429 .\r\nretry-after: 7\r\nset-cookie: a=b\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
        )
        writer.close()

    async with listening(answer) as port, page(scripted(), endpoint_url=f"http://127.0.0.1:{port}") as client:
        told = await client.post("/v1/completions", json={"prompt": "a"})
    assert (told.status_code, told.headers["retry-after"], "set-cookie" in told.headers) == (429, "7", False)


async def test_browsers_that_leave_before_the_answer_leave_nothing_behind() -> None:
    """64 of them left every later chat at 429. The endpoint sees each leave."""
    came, speak, answers = asyncio.Semaphore(0), asyncio.Event(), list[asyncio.Task[None]]()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers.append(asyncio.current_task())  # type: ignore[arg-type]
        with closing(writer), suppress(asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            if speak.is_set():
                head = b"HTTP/1.1 200 .\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
                writer.write(head + b"data: 1\n\n")
            else:
                came.release()
                await reader.read()  # until it leaves

    async with listening(answer) as port, page(scripted(), endpoint_url=f"http://127.0.0.1:{port}") as client:
        body = {"messages": [{"role": "user", "content": "a"}], "stream": True}
        for _ in range(2):
            asked = [asyncio.create_task(client.post("/v1/chat/completions", json=body)) for _ in range(40)]
            async with asyncio.timeout(20):
                await came.acquire()
            await asyncio.wait(asked, timeout=0.3)  # at the endpoint, most of them
            for one in asked:
                one.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        speak.set()
        async with asyncio.timeout(20):
            while (told := await client.post("/v1/chat/completions", json=body)).status_code == 429:
                await asyncio.sleep(0.05)
        assert (told.status_code, told.text) == (200, "data: 1\n\n")
        async with asyncio.timeout(20):
            await asyncio.gather(*answers)


async def test_more_viewers_than_allowed_are_refused() -> None:
    async with page(scripted(), max_viewers=1) as client, client.stream("GET", "/live") as answer:
        await first_with(answer, lambda m: True)
        refused = await client.get("/live")
        assert (refused.status_code, "max_viewers" in refused.text) == (503, True)


@pytest.mark.parametrize("file", sorted(STATIC.iterdir()), ids=lambda file: file.name)
def test_nothing_is_inline_and_nothing_comes_from_elsewhere(file: Path) -> None:
    text = file.read_text().replace("http://www.w3.org/2000/svg", "")
    assert "http://" not in text
    assert "https://" not in text
    assert "<style" not in text
    assert "style=" not in text
    assert "onclick=" not in text


NODE = shutil.which("node")


@pytest.mark.skipif(NODE is None, reason="Node.js is not installed")
@pytest.mark.parametrize("width", [100, 350, 1300])
def test_the_slot_map_is_small_however_many_slots_there_are(width: int) -> None:
    """At 2,000,000 slots it was 590 pixels tall on a wide screen, and 1,550 on a phone."""
    counts = [0, 1, 5, 64, 1000, 125_000, 10_000_000]
    script = f"import {{ grid }} from '{STATIC / 'grid.js'}';"
    script += f"console.log(JSON.stringify({counts}.map((blocks) => grid(blocks, {width}))))"
    run = [str(NODE), "--input-type=module", "--eval", script]
    for blocks, drawn in zip(counts, json.loads(subprocess.check_output(run, text=True)), strict=True):
        side, columns, squares, each, height = map(drawn.get, ("side", "columns", "squares", "each", "height"))
        assert 4 <= side <= 18
        assert columns * side <= width
        assert squares <= columns * (height // side), "each has its place"
        assert height <= 132
        assert max(1, blocks) <= squares * each < blocks + each + 1
        assert each == 1 or side == 4
