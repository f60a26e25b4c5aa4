"""Candidates from a fixed list of addresses."""

import asyncio
from collections.abc import Sequence

import pytest

from orca_common.errors import FailedPrecondition
from orca_common.service import cancel
from orca_scheduler.discovery.candidates import Candidate
from orca_scheduler.discovery.static import StaticDiscovery


async def test_the_list_is_reported_once_and_stays() -> None:
    reported: list[Sequence[Candidate]] = []
    discovery = StaticDiscovery(["a:1", "b:1", "c:1", "d:1"], 2)
    assert (discovery.unready, discovery.notices) == (None, ())
    running = asyncio.create_task(discovery.run(reported.append))
    for _ in range(3):
        await asyncio.sleep(0)
    assert not running.done()
    assert reported == [[Candidate("engine-0", ("a:1", "b:1")), Candidate("engine-1", ("c:1", "d:1"))]]
    await cancel(running)


@pytest.mark.parametrize("pods", [0, 1, 3])
def test_a_part_of_an_engine_is_refused(pods: int) -> None:
    sentence = f"workers: {pods} pods are no multiple of the 2 pods of an engine"
    with pytest.raises(FailedPrecondition, match=f"^{sentence}$"):
        StaticDiscovery([f"a:{n}" for n in range(pods)], 2)
