"""What a link does to messages."""

import asyncio
from pathlib import Path

import pytest

from orca_chaos.faults import AT_ONCE, OF_LINKS, Fault, Kind, Victim
from orca_chaos.links import Broken, Direction, Link
from orca_chaos.local_target import LocalTarget
from orca_chaos.network import Network
from orca_local.settings import ServeSettings
from orca_local.stack import Stack

TO, FROM = Direction
UNHARMED = {TO: "once", FROM: "once"}
BEGUN = {
    Kind.DELAY: {TO: "waits", FROM: "waits"},
    Kind.HOLD_TO: {TO: "waits", FROM: "once"},
    Kind.HOLD_FROM: {TO: "once", FROM: "waits"},
    Kind.CUT: {TO: "broken", FROM: "broken"},
    Kind.LOSE: {TO: "broken", FROM: "once"},
    Kind.DOUBLE: {TO: "twice", FROM: "twice"},
}


async def passed(link: Link, direction: Direction) -> str:
    """Describes what happens to the next message."""
    carrying = asyncio.create_task(link.carry(direction))
    for _ in range(3):
        await asyncio.sleep(0)
    if not carrying.done():
        carrying.cancel()
        return "waits"
    return "broken" if isinstance(carrying.exception(), Broken) else ("once", "twice")[carrying.result() - 1]


@pytest.mark.parametrize("kind", OF_LINKS)
async def test_a_fault_hits_the_links_of_its_victim_until_it_ends(kind: Kind, tmp_path: Path) -> None:
    network, settings = Network(), ServeSettings.load(port=0, http_port=0)
    try:
        target = LocalTarget(Stack(settings, tmp_path, print), settings, tmp_path, network)
        hit, other = (network.link(f"scheduler-{n}", "redis") for n in range(2))
        fault = Fault(0.0, kind, Victim("scheduler > redis", hit.name, OF_LINKS), amount=60.0)
        assert await target.begin(fault)
        assert {direction: await passed(hit, direction) for direction in Direction} == BEGUN[kind]
        assert {direction: await passed(other, direction) for direction in Direction} == UNHARMED
        if kind not in AT_ONCE:
            await target.end(fault)
            assert {direction: await passed(hit, direction) for direction in Direction} == UNHARMED
    finally:
        await network.close()


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
