"""An answer that is kept: one question for all who ask at the same time, and none while the answer is good."""

import asyncio

import pytest

from orca_common.errors import Unavailable
from orca_endpoint.calls.recent import Recent


class Asked:
    """Answers 1, 2, 3 and so on; an error where it is told so."""

    def __init__(self) -> None:
        self.count, self.away = 0, False

    async def __call__(self) -> int:
        self.count += 1
        await asyncio.sleep(0)
        if self.away:
            raise Unavailable("away")
        return self.count


async def test_those_who_ask_together_are_told_one_answer() -> None:
    asked = Asked()
    recent = Recent(asked, 60)
    assert await asyncio.gather(*(recent.get() for _ in range(5))) == [1] * 5
    assert await recent.get() == 1


async def test_an_old_answer_is_not_told() -> None:
    recent = Recent(Asked(), 0)
    assert [await recent.get() for _ in range(3)] == [1, 2, 3]


async def test_an_error_is_not_kept() -> None:
    asked = Asked()
    recent, asked.away = Recent(asked, 60), True
    with pytest.raises(Unavailable):
        await recent.get()
    asked.away = False
    assert await recent.get() == 2


async def test_who_leaves_takes_nothing_from_the_others() -> None:
    recent = Recent(Asked(), 60)
    leaving, staying = (asyncio.create_task(recent.get()) for _ in range(2))
    await asyncio.sleep(0)
    leaving.cancel()
    assert await staying == 1
