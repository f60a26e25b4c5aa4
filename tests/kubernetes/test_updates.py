"""`helm upgrade` and `helm rollback` under load: one engine after the other, and never a failed stream."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from cluster import Failed, until
from pauses import Pauses
from traffic import Under

from release import NEXT, REGISTRY, TAG, TWO_PODS, Release, Releases, run_pod

SERVED = 8080
# Runs in a pod with the worker's image: serves its demo model as an archive.
SERVE = f"""
import functools, http.server, tarfile
with tarfile.open("/tmp/demo_model.tar.gz", "w:gz") as archive:
    archive.add("/opt/orca/demo_model", "demo_model")
handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory="/tmp")
http.server.ThreadingHTTPServer(("", {SERVED}), handler).serve_forever()
"""
BROKEN = f"{REGISTRY}/orca-worker:broken"  # by images.sh: its ranks end as they start


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


async def test_to_another_source_of_the_model(releases: Releases, traffic: Under, pauses: Pauses) -> None:
    """A folder of the image becomes a download of the same weights, as docs/kubernetes.md says. The streams go on."""
    orca, cluster = await releases.get(TWO_PODS), releases.cluster
    await run_pod(cluster, "archive", f"{REGISTRY}/orca-worker:{TAG}", "python", "-c", SERVE)
    try:
        await cluster.kubectl("wait", "--for=condition=Ready", "pod/archive", "--timeout=120s")
        address = (await cluster.get("pod", "archive"))["status"]["podIP"]
        async with traffic(orca) as load:
            async with load.disturbed("helm upgrade to a download of the same model") as seen:
                url = f"http://{address}:{SERVED}/demo_model.tar.gz"
                switch = {"model.path": "null", "model.download.url": url}
                await orca.change(switch, "--reset-then-reuse-values")
                await orca.healed(600)
                await load.flows()
            pauses(seen)
            inside = await cluster.execute(orca.worker(0), "printenv", "ORCA_MODEL")
            assert inside.strip() == "/models/demo_model"
            async with load.disturbed("helm rollback to the model of the image") as seen:
                await orca.rollback()
                await orca.healed(600)
                await load.flows()
            pauses(seen)
    finally:
        await cluster.kubectl("delete", "pod", "archive", "--grace-period=0", "--force")


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
