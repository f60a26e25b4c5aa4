"""What a link does to messages."""

import asyncio

import pytest

from orca_chaos.links import Broken, Direction, Link


async def test_a_held_direction_waits_and_the_other_passes() -> None:
    link = Link("a", "b")
    link.hold(Direction.TO)
    waiting = asyncio.create_task(link.carry(Direction.TO))
    assert await link.carry(Direction.FROM) == 1
    assert not waiting.done()
    link.release(Direction.TO)
    assert await waiting == 1


async def test_a_severed_link_ends_what_is_held_on_it() -> None:
    link = Link("a", "b")
    link.hold(Direction.FROM)
    waiting = asyncio.create_task(link.carry(Direction.FROM))
    cut = asyncio.create_task(link.breaks())
    await asyncio.sleep(0)
    link.sever()
    await cut
    link.release(Direction.FROM)
    with pytest.raises(Broken):
        await waiting
    link.mend()
    assert await link.carry(Direction.TO) == 1


async def test_messages_are_lost_and_doubled_once_each() -> None:
    link = Link("a", "b")
    link.lose(1)
    link.double(1)
    with pytest.raises(Broken):
        await link.carry(Direction.TO)
    assert await link.carry(Direction.FROM, may_double=False) == 1
    assert [await link.carry(Direction.TO) for _ in range(2)] == [2, 1]
    assert (link.lost, link.doubled) == (1, 1)


async def test_healing_spares_what_has_not_come() -> None:
    link = Link("a", "b")
    link.lose(1)
    link.double(1)
    link.hold(*Direction)
    link.sever()
    link.heal()
    assert [await link.carry(direction) for direction in Direction] == [1, 1]
