"""What comes together shares a script, and nothing else: not its answers, not its errors."""

import asyncio
import hashlib
from collections.abc import Sequence
from typing import Any

import pytest
from pool.lab import Lab, tokens_of
from redis.exceptions import ResponseError

from orca_common.errors import Unavailable
from orca_pool.gathering import Gathering
from orca_pool.records import Attached, Refusal
from orca_pool.wire import pack_tokens


async def test_what_comes_during_an_exchange_goes_together() -> None:
    sent: list[list[int]] = []
    go = asyncio.Event()

    async def send(items: Sequence[int]) -> list[int]:
        sent.append(list(items))
        await go.wait()
        return [10 * item for item in items]

    gathering = Gathering[int, int](send, 3)
    tasks = [asyncio.create_task(gathering.ask(item)) for item in range(6)]
    while not sent:
        await asyncio.sleep(0)
    tasks[4].cancel()  # it waits: it is not sent
    tasks[0].cancel()  # it is under way: its answer is for nobody
    go.set()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert [answer for answer in answers if not isinstance(answer, BaseException)] == [10, 20, 30, 50]
    assert sorted(item for items in sent for item in items) == [0, 1, 2, 3, 5]
    assert max(map(len, sent)) <= 3
    async with asyncio.timeout(10):
        assert [await gathering.ask(item) for item in (7, 8)] == [70, 80], "who has an answer may ask at once"


async def test_an_error_ends_the_waiting_of_all() -> None:
    """Behind a pool that is away nobody waits for one patience after the other. Later ones are sent again."""
    sent: list[int] = []

    async def send(items: Sequence[int]) -> list[int]:
        sent.append(len(items))
        await asyncio.sleep(0)
        if len(sent) == 1:
            raise Unavailable("the request pool is away")
        return list(items)

    gathering = Gathering[int, int](send, 2)
    answers = await asyncio.gather(*(gathering.ask(item) for item in range(9)), return_exceptions=True)
    assert all(isinstance(answer, Unavailable) for answer in answers)
    assert await gathering.ask(5) == 5
    assert len(sent) == 2


async def test_those_who_wait_at_the_end_are_cancelled() -> None:
    gathering = Gathering[int, int](lambda items: asyncio.Event().wait(), 2)  # type: ignore[arg-type, return-value]
    tasks = [asyncio.create_task(gathering.ask(item)) for item in range(5)]
    await asyncio.sleep(0)
    await gathering.close()
    assert all(isinstance(e, asyncio.CancelledError) for e in await asyncio.gather(*tasks, return_exceptions=True))


async def test_a_cancelled_exchange_leaves_nobody_waiting() -> None:
    """Nobody has cancelled those who wait: they hear that the pool is unavailable, and may ask again."""
    sent: list[list[int]] = []

    async def send(items: Sequence[int]) -> list[int]:
        sent.append(list(items))
        await asyncio.sleep(0)
        if len(sent) == 1:
            raise asyncio.CancelledError
        return list(items)

    gathering = Gathering[int, int](send, 2)
    async with asyncio.timeout(10):
        answers = await asyncio.gather(*(gathering.ask(item) for item in range(5)), return_exceptions=True)
        assert [type(answer) for answer in answers] == [Unavailable] * 5
        assert await gathering.ask(5) == 5
    assert sent == [[0, 1], [5]]


async def test_a_closed_one_can_be_asked_again() -> None:
    """Also when it is closed before its exchange has begun. What was cancelled is not sent."""
    sent: list[list[int]] = []

    async def send(items: Sequence[int]) -> list[int]:
        sent.append(list(items))
        return list(items)

    gathering = Gathering[int, int](send, 2)
    task = asyncio.create_task(gathering.ask(1))
    await asyncio.sleep(0)
    await gathering.close()
    async with asyncio.timeout(10):
        assert isinstance((await asyncio.gather(task, return_exceptions=True))[0], asyncio.CancelledError)
        assert await gathering.ask(2) == 2
    assert sent == [[2]]


async def test_what_takes_long_goes_alone(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis does nothing else while a script runs. A digest is made of all tokens; who knows none gets all of them."""
    scripts: list[int] = []
    run = lab.pool._run

    async def counted(script: str, *args: Any, **more: Any) -> Any:
        scripts.append(len(args) // 7)
        return await run(script, *args, **more)

    await lab.endpoint()
    await lab.engine()
    tokens = tokens_of(0, 4)
    for n in range(8):
        await lab.submit(f"r{n}")
        await lab.redis("APPEND", f"{lab.keys.prefix}tokens:r{n}", pack_tokens(tokens))
    monkeypatch.setattr(lab.pool, "_run", counted)
    digest = hashlib.sha1(b"".join(token.token_id.to_bytes(4, "little") for token in tokens)).digest()
    short: dict[str, Any] = {"known": 4, "last": tokens[-1]}
    kinds: list[dict[str, Any]] = [short, short, {**short, "seen": 4, "digest": digest}, {}] * 2
    found = await asyncio.gather(
        *(lab.pool.attach(f"r{n}", endpoint="e", attempt=2, **kind) for n, kind in enumerate(kinds))
    )
    assert not [answer for answer in found if not isinstance(answer, Attached)]
    answers = [answer.tokens for answer in found if isinstance(answer, Attached)]
    assert answers == [[], [], [], tokens] * 2
    assert sorted(scripts) == [1, 1, 1, 1, 4]


async def test_each_call_gets_its_own_answer(lab: Lab) -> None:
    """Known, unknown, unregistered and broken records in one exchange."""
    await lab.endpoint()
    await lab.engine()
    for n in range(3):
        await lab.submit(f"r{n}")
    await lab.redis("APPEND", f"{lab.keys.prefix}tokens:r1", pack_tokens(tokens_of(0, 2)))
    await lab.redis("SET", f"{lab.keys.prefix}request:broken", "no hash")
    asked = [("r0", "e"), ("none", "e"), ("r1", "e"), ("r2", "ghost"), ("broken", "e"), ("r2", "e")]
    one = {"known": 1, "last": tokens_of(5, 1)[0]}  # another than the pool has, which so tells all tokens
    found = await asyncio.gather(
        *(lab.pool.attach(name, endpoint=endpoint, attempt=2, **one) for name, endpoint in asked),
        return_exceptions=True,
    )
    assert found[1] is Refusal.UNKNOWN
    assert found[3] is Refusal.UNREGISTERED
    assert isinstance(found[4], ResponseError)
    tokens = [answer.tokens for answer in found if isinstance(answer, Attached)]
    assert tokens == [[], tokens_of(0, 2), []]
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        await lab.pool.attach("broken", endpoint="e", attempt=3)


async def test_submits_share_a_script(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """New, known, too large, unregistered and broken ones. The queue has them in the order in which they came."""
    scripts: list[str] = []
    run = lab.pool._run

    async def counted(script: str, *args: Any, **more: Any) -> Any:
        scripts.append(script)
        return await run(script, *args, **more)

    await lab.endpoint()
    await lab.engine()
    await lab.submit("known")
    await lab.redis("SET", f"{lab.keys.prefix}request:broken", "no hash")
    monkeypatch.setattr(lab.pool, "_run", counted)
    new, known, other, large, ghost, broken, last = await asyncio.gather(
        lab.submit("new"),
        lab.submit("known", attempt=2),
        lab.submit("known", attempt=2, digest="other"),
        lab.submit("large", 1000),
        lab.submit("ghost", endpoint="ghost"),
        lab.submit("broken"),
        lab.submit("last"),
        return_exceptions=True,
    )
    assert scripts == ["submit"]
    assert isinstance(new, Attached)
    assert isinstance(known, Attached)
    assert isinstance(last, Attached)
    assert (known.position, new.position, last.position) == (1, 2, 3)
    assert (known.record, last.record) == (b"record of known", b"record of last")
    assert (other, large, ghost) == (Refusal.OTHER_BODY, Refusal.NEVER_FITS, Refusal.UNREGISTERED)
    assert isinstance(broken, ResponseError)


async def test_a_full_queue_takes_a_part_of_what_came_together(lab: Lab) -> None:
    await lab.endpoint()
    await lab.engine()
    answers = await asyncio.gather(*(lab.submit(f"r{n}", max_waiting=3) for n in range(5)))
    assert [isinstance(answer, Attached) for answer in answers] == [True] * 3 + [False] * 2


async def test_a_long_record_goes_alone(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    send = lab.pool._submit_all

    async def counted(requests: Sequence[tuple[str | bytes | int, ...]]) -> list[Any]:
        counts.append(len(requests))
        return await send(requests)

    await lab.endpoint()
    await lab.engine()
    monkeypatch.setattr(lab.pool, "_submit_all", counted)
    monkeypatch.setattr(lab.pool._submits, "_send", counted)
    await asyncio.gather(*(lab.submit(f"{n}-" + "long" * (n % 2) * 5000) for n in range(4)))
    assert sorted(counts) == [1, 1, 2]
