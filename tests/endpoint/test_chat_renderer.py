"""Chats are rendered in processes of their own: bounded in time and memory, and in turns of callers."""

import asyncio
import json
import signal
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import psutil
import pytest
from endpoint.harness import make_model, until

from orca.v1.orca_pb2 import Chat, ChatMessage
from orca_common.errors import FailedPrecondition, InvalidArgument, ResourceExhausted, Unavailable
from orca_endpoint.requests.chats import Chats
from orca_endpoint.requests.helpers import Helper
from orca_endpoint.requests.validation import Fields
from orca_endpoint.text.chat_template import read_chat_template

FIELDS = Fields({})
MOST = 1 << 16  # bytes of a chat
# Compares two lists of 10^12 numbers, which are few in memory, in one call of C.
SLOW = "".join(
    f"{{% set {name} = [{of}] * 1000 %}}"
    for name, of in (("a", "0"), ("b", "a"), ("c", "b"), ("d", "c"), ("m", "0"), ("n", "m"), ("o", "n"), ("p", "o"))
)
WAYS = {
    "slow": f"{SLOW}{{{{ d == p }}}}",
    "huge": "{{ 'a'.center(8000000000) }}",
    "long": "{{ 'a' * 99999 }}",
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
}
TEMPLATE = "".join(f"{{% if messages[0].content == '{name}' %}}{way}{{% endif %}}" for name, way in WAYS.items())
TEMPLATE += "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"


@pytest.fixture
async def chats(tmp_path: Path) -> AsyncIterator[Chats]:
    folder = make_model(tmp_path)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    chats = Chats(folder, read_chat_template(folder), MOST, 16)
    yield chats
    await chats.close()


async def ask(chats: Chats, text: str, caller: str = "") -> str:
    """The text of a chat with one message."""
    return (await chats.text(said(text), FIELDS, caller))[0]


def said(text: str, count: int = 1) -> Chat:
    return Chat(messages=[ChatMessage(role="user", content=text)] * count)


async def test_a_chat_is_rendered(chats: Chats) -> None:
    assert await chats.text(said("hello", 2), FIELDS) == ("[user] hello\n[user] hello\n", "")


async def test_what_a_template_takes_is_bounded(chats: Chats) -> None:
    """In this process one call of C held the lock for seconds, or took 8 GB."""
    for way, problem in (
        ("slow", "too much time or memory"),
        ("huge", r"\(MemoryError"),
        ("loops", "took more than 1 s"),
        ("long", f"makes more than {MOST} characters"),
    ):
        with pytest.raises(InvalidArgument, match=rf"^chat\.messages: .*{problem}"):
            await chats.text(said(way), FIELDS)
        assert await ask(chats, "hello"), "the next one is rendered"


async def test_a_chat_that_takes_long_keeps_no_other_caller_waiting(chats: Chats) -> None:
    """Nor does the start of another process after it."""
    assert await ask(chats, "hello", "y")
    slow = [asyncio.create_task(chats.text(said("slow"), FIELDS, "x")) for _ in range(3)]
    await until(lambda: chats.helpers.turns.count == 2)
    for _ in range(50):
        assert await ask(chats, "hello", "y")
    assert chats.helpers.turns.count, "and some of the slow ones wait still"
    assert all(isinstance(one, InvalidArgument) for one in await asyncio.gather(*slow, return_exceptions=True))


async def test_renderers_start_one_after_the_other(chats: Chats) -> None:
    """On busy cores the first chat waited for both."""
    second, first = chats.helpers.all
    begun: list[Helper] = []
    ready = asyncio.Event()

    def noted(helper: Helper) -> Callable[[], Awaitable[Process]]:
        start = helper.start

        async def starts() -> Process:
            begun.append(helper)
            await ready.wait()
            return await start()

        return starts

    for helper in chats.helpers.all:
        helper.start = noted(helper)  # type: ignore[method-assign]
    chats.warm()
    await until(lambda: begun == [first])
    ready.set()
    await until(lambda: begun == [first, second])


async def test_a_large_chat_is_refused_before_it_is_rendered(chats: Chats) -> None:
    with pytest.raises(InvalidArgument, match=rf"^chat\.messages: the chat has \d+ bytes; at most {MOST} are allowed$"):
        await chats.text(said("a", MOST // 8), FIELDS)


async def test_a_bounded_number_of_each_caller_waits(chats: Chats) -> None:
    chats.helpers.turns.waiting = 2
    asked = [asyncio.create_task(chats.text(said("a"), FIELDS, "x")) for _ in range(3)]
    await until(lambda: chats.helpers.turns.count == 2)
    with pytest.raises(ResourceExhausted, match="2 chats of this caller wait here already"):
        await chats.text(said("a"), FIELDS, "x")
    assert await ask(chats, "a", "y")
    assert len(await asyncio.gather(*asked)) == 3


async def test_a_killed_renderer_is_no_fault_of_the_next_chat(chats: Chats) -> None:
    killed = [await one.start() for one in chats.helpers.all]
    for process in killed:
        process.kill()
    assert await ask(chats, "a", "x")
    assert await ask(chats, "a", "y")
    assert [await process.wait() for process in killed] == [-signal.SIGKILL] * 2


async def test_a_caller_that_leaves(chats: Chats) -> None:
    """Its chat is rendered all the same, and the answer is not taken for that of the next chat."""
    for n in range(20):
        leaving = asyncio.create_task(chats.text(said(f"left {n}"), FIELDS))
        for _ in range(n):
            await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        assert await chats.text(said(f"stays {n}"), FIELDS) == (f"[user] stays {n}\n", "")


async def test_no_process_is_left(chats: Chats) -> None:
    """And a chat that is being rendered at the end gets an error."""
    assert await ask(chats, "a")
    ours = [psutil.Process((await one.start()).pid) for one in chats.helpers.all]
    slow = asyncio.create_task(chats.text(said("slow"), FIELDS))
    await until(lambda: len(chats.helpers._free) == 1)
    await chats.close()
    with pytest.raises(Unavailable):
        await slow
    assert not any(one.is_running() for one in ours)
    with pytest.raises(Unavailable, match="leaving"):
        await chats.text(said("a"), FIELDS)


async def test_a_model_without_a_template(tmp_path: Path) -> None:
    chats = Chats(make_model(tmp_path), None, MOST, 16)
    with pytest.raises(FailedPrecondition, match="no chat template"):
        await chats.text(said("a"), FIELDS)
    await chats.close()


async def test_no_process_outlives_the_endpoint(tmp_path: Path) -> None:
    """Wherever its start is as the endpoint closes: it is not begun, is being made, or does not answer yet."""
    folder = make_model(tmp_path)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    for turns in range(8):  # of the event loop; the process is made in the first, and known after some
        others = set(psutil.Process().children())
        chats = Chats(folder, read_chat_template(folder), MOST, 16)
        waiting = asyncio.create_task(ask(chats, "hello"))
        for _ in range(turns):
            await asyncio.sleep(0)
        await chats.close()
        with pytest.raises(Unavailable, match="this endpoint is leaving"):
            await waiting
        assert others >= set(psutil.Process().children())
