"""`helm upgrade` and `helm rollback` under load: one engine after the other, and never a failed stream."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from cluster import Failed, until
from pauses import Pauses
from traffic import Under

from release import REGISTRY, TAG, Release

# Made of the other images by tests/kubernetes/images.sh.
NEXT = os.environ.get("IMAGE_NEXT", "next")  # tag of the same images with another protocol number
BROKEN = f"{REGISTRY}/orca-worker:broken"  # its ranks end as they start


@asynccontextmanager
async def at_most_one_down(orca: Release) -> AsyncIterator[None]:
    """Asserts that while the block runs one engine of two is ready at all times, once both are."""
    least = 2

    async def look() -> None:
        nonlocal least
        while True:
            with suppress(Failed):  # the API server was away for a moment
                least = min(least, len(await orca.ready_engines()))
            await asyncio.sleep(0.3)

    looking = asyncio.create_task(look())
    try:
        yield
    finally:
        looking.cancel()
    assert least >= 1, "both engines were down at a time"


async def test_to_another_protocol_number_and_back(two_engines: Release, traffic: Under, pauses: Pauses) -> None:
    orca = two_engines
    async with traffic(orca) as load:
        async with load.disturbed("helm upgrade to another protocol number") as seen, at_most_one_down(orca):
            await orca.upgrade({"image.tag": NEXT})
            await orca.healed(600)
        pauses(seen)
        assert {pod.image for pod in await orca.pods("worker")} == {f"{REGISTRY}/orca-worker:{NEXT}"}
        async with load.disturbed("helm rollback") as seen, at_most_one_down(orca):
            await orca.rollback()
            await orca.healed(600)
        pauses(seen)
        assert {pod.image for pod in await orca.pods("worker")} == {f"{REGISTRY}/orca-worker:{TAG}"}


async def test_to_another_tp_and_pp_and_back(orca: Release, traffic: Under, pauses: Pauses) -> None:
    """The tokens are the same: the shape is no part of the model."""
    async with traffic(orca) as load:
        for tp, pp in ((1, 4), (2, 2)):
            async with load.disturbed(f"helm upgrade to tp {tp} x pp {pp}") as seen:
                await orca.upgrade({"engine.tp": tp, "engine.pp": pp})
                await orca.healed(600)
                await load.flows()
            pauses(seen)
            pods = await orca.pods("worker")
            assert len(pods) == 4 // tp


async def test_to_an_image_that_cannot_form(two_engines: Release, traffic: Under, pauses: Pauses) -> None:
    """The rollout stops at the first engine, says so, and the other engine serves on. A rollback heals."""
    orca = two_engines
    workers = f"{orca.name}-worker"
    async with traffic(orca) as load:
        async with load.disturbed("helm upgrade to an image that cannot form") as seen:
            try:
                await orca.upgrade({"worker.image": BROKEN}, wait=False)

                async def going_on() -> str | None:
                    said = await orca.events(workers)
                    if not any("is not up" in message for message in said):
                        return f"events: {said}"
                    new = [pod.name for pod in await orca.pods("worker") if pod.image == BROKEN]
                    return None if len(new) == orca.pods_per_engine else f"{new} have the new image"

                await until(going_on, 600)
                assert len(await orca.ready_engines()) == 1
                await load.flows()
            finally:
                await orca.rollback()
            await orca.healed(600)
        pauses(seen)
