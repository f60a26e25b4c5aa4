"""`reached`: a call of the pool is made again until the pool answers, or until it is not worth it any more."""

import asyncio
from collections.abc import Iterator

import pytest
from servers import RedisServer, redis_server

from orca_common.errors import FailedPrecondition, Unavailable
from orca_pool.pool import Pool
from orca_pool.retry import RETRY_SECONDS, reached


class Away:
    """A call that finds the pool away the first `failures` times."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.calls = 0
        self.failed = asyncio.Event()

    async def __call__(self) -> str:
        self.calls += 1
        if self.calls <= self.failures:
            self.failed.set()
            raise Unavailable(f"away, call {self.calls}")
        return "here"


async def test_it_calls_until_the_pool_answers() -> None:
    call = Away(5)
    assert await reached(call, retry_seconds=0) == "here"
    assert call.calls == 6


async def test_it_waits_between_calls() -> None:
    loop = asyncio.get_running_loop()
    start = loop.time()
    assert await reached(Away(1)) == "here"
    assert loop.time() - start >= RETRY_SECONDS * 0.9  # a loop's clock is coarser than its timers


async def test_it_gives_up_with_the_last_error() -> None:
    call = Away(1000)
    with pytest.raises(Unavailable, match=r"away, call 1; it was tried for 0 s$"):
        await reached(call, give_up=asyncio.get_running_loop().time() - 1)
    assert call.calls == 1


async def test_an_answer_counts_whatever_the_time() -> None:
    assert await reached(Away(0), give_up=0, leaving=lambda: True) == "here"


async def test_it_ends_when_the_caller_leaves() -> None:
    call = Away(1000)
    with pytest.raises(Unavailable, match=r"away, call 3$"):
        await reached(call, retry_seconds=0, leaving=lambda: call.calls == 3)


async def test_other_errors_are_not_tried_again() -> None:
    calls: list[None] = []

    async def refuse() -> None:
        calls.append(None)
        raise FailedPrecondition("another model")

    with pytest.raises(FailedPrecondition):
        await reached(refuse, retry_seconds=0)
    assert len(calls) == 1


async def test_it_can_be_cancelled_while_it_waits() -> None:
    call = Away(1)
    waiting = asyncio.create_task(reached(call, retry_seconds=1000))
    await call.failed.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


@pytest.fixture
def own() -> Iterator[RedisServer]:
    """A server that the test may break."""
    with redis_server() as server:
        yield server


async def test_over_a_restart_of_redis(own: RedisServer) -> None:
    async with Pool(own.url, "retry") as pool:
        own.kill()
        failed = asyncio.Event()

        def seen() -> bool:
            failed.set()
            return False

        waiting = asyncio.create_task(reached(lambda: pool.cancel("nobody"), leaving=seen))
        await failed.wait()
        own.restart()
        assert await waiting is None
