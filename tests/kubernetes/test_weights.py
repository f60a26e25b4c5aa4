"""An update to other weights of the same configuration under load: no stream has tokens of two models."""

import itertools
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path

import pytest
from cluster import Failed, until
from grpc.aio import AioRpcError
from pauses import Pauses
from reference import Known, Reference
from retrained import retrain

from orca_chaos.streams import Streams
from orca_client import AsyncOrcaClient, Finished, FinishReason, Token
from orca_client.errors import Aborted
from orca_local.stack import DEMO_MODEL
from orca_pool.keys import Keys
from release import REGISTRY, TWO_PODS, Release, Releases

ROUNDS = int(os.environ.get("ROUNDS", "1"))  # to the other model, and back
# Made of the other images by tests/kubernetes/images.sh: they have a fine-tune of the demo model as well.
OTHER = {f"{service}.image": f"{REGISTRY}/orca-{service}:other" for service in ("endpoint", "worker")}
PATHS = "/opt/orca/demo_model", "/opt/orca/other_model"
STREAMS = 16


class OfTwoModels(Streams):
    """Requests whose tokens are those of one of two models, whole; or the first ones of one of them."""

    def __init__(self, clients: Sequence[AsyncOrcaClient], known: Iterable[tuple[Known, Known]]) -> None:
        super().__init__(STREAMS)
        self.ends: Counter[str] = Counter()
        self._clients, self._asked = clients, itertools.cycle(known)

    async def _request(self, n: int) -> None:
        (prompt, old), (_, new) = next(self._asked)
        got: list[int] = []
        client = self._clients[n % len(self._clients)]
        try:
            async for event in client.generate(prompt, max_new_tokens=len(old), ignore_eos=True):
                if isinstance(event, Token):
                    self._came(n, event.engine)
                    got.append(event.token_id)
                    assert got in (old[: len(got)], new[: len(got)]), f"after the prompt {prompt}"
                elif isinstance(event, Finished):
                    assert (event.reason, len(got)) == (FinishReason.LENGTH, len(old))
        except Aborted as error:
            if error.reason != "MODEL_CHANGED":
                raise
            assert got, "what has no tokens begins with other weights"
            self.ends["MODEL_CHANGED"] += 1
            return
        self.ends["old" if got == old else "new"] += 1


@pytest.fixture(scope="session")
def models(known: list[Known], tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Known, Known]]:
    """Requests, with the tokens of both models."""
    other = Reference(retrain(DEMO_MODEL, Path(tmp_path_factory.mktemp("models")) / "other"))
    both = [(one, Known(one.prompt, other.greedy(one.prompt, len(one.tokens)))) for one in known]
    assert all(old.tokens[:3] != new.tokens[:3] for old, new in both), "the first tokens tell the model"
    return both


@pytest.mark.parametrize("engines", [2, 1])
async def test_an_update_to_other_weights(
    releases: Releases, models: list[tuple[Known, Known]], pauses: Pauses, engines: int
) -> None:
    """Each engine finishes what it began: no client receives an error."""
    orca = await releases.get(TWO_PODS | OTHER | {"engine.count": engines})
    ends = await updated(orca, models, pauses, "and back", there_and_back=1)
    assert not ends["MODEL_CHANGED"]
    assert ends["old"]
    assert ends["new"]


async def rank_killed(orca: Release) -> None:
    """A rank of the engine that is updated last, or of the only one. A pod that leaves takes its ranks along."""
    pod = (await orca.pods("worker"))[-1]
    try:
        for pid in (await orca.rank_pids(pod))[:1]:
            await orca.kill_inside(pod, pid)
    except (Failed, AioRpcError):
        if any(same.uid == pod.uid and not same.leaving for same in await orca.pods("worker")):
            raise


async def test_without_time_to_finish(releases: Releases, models: list[tuple[Known, Known]], pauses: Pauses) -> None:
    """One engine that may not finish, and whose rank is killed besides: what has tokens ends MODEL_CHANGED."""
    orca = await releases.get(TWO_PODS | OTHER | {"engine.count": 1, "scheduler.settings.finish_seconds": 0})
    ends = await updated(orca, models, pauses, "a rank killed", rank_killed)
    assert ends["MODEL_CHANGED"]


async def killed_twice(orca: Release) -> None:
    """A rank is killed while it serves the old model, and the first pod of the new revision as soon as there is one."""
    old = {pod.uid for pod in await orca.pods("worker")}
    await rank_killed(orca)
    new = ""

    async def same() -> str | None:
        nonlocal new
        new = next((pod.name for pod in await orca.pods("worker") if pod.uid not in old), "")
        return None if new else "no worker pod has been replaced yet"

    await until(same, 600)
    await orca.cluster.kubectl("delete", "pod", new, "--grace-period=0", "--force")


@pytest.mark.parametrize("engines", [2, 1])
async def test_kills_during_updates(
    releases: Releases, models: list[tuple[Known, Known]], pauses: Pauses, engines: int
) -> None:
    """Whatever dies meanwhile: no stream has tokens of both models, and the only error is MODEL_CHANGED."""
    orca = await releases.get(TWO_PODS | OTHER | {"engine.count": engines})
    ends = await updated(orca, models, pauses, "a rank and a new pod killed", killed_twice)
    assert ends["old"]
    assert ends["new"]


async def test_a_pod_that_is_lost_while_the_only_engine_finishes(
    releases: Releases, models: list[tuple[Known, Known]], pauses: Pauses
) -> None:
    """It comes back with the new model. Requests with tokens of the old model wait, and a rollback lets them go on."""
    orca = await releases.get(TWO_PODS | OTHER | {"engine.count": 1})
    key = f"{Keys(f'{orca.cluster.namespace}.{orca.name}').prefix}engine:engine-0"

    async def finishes() -> str | None:
        return None if (await orca.redis("hget", key, "finishing")).strip() == "1" else "it does not finish yet"

    title = "a pod deleted, grace 0, while the only engine finishes before other weights, and helm rollback"
    async with (
        orca.client(0) as by_service,
        orca.client(1) as by_pod,
        OfTwoModels([by_service, by_pod], models) as load,
    ):
        async with load.disturbed(title) as seen:
            await orca.upgrade({"model.path": PATHS[1]}, wait=False)
            await until(finishes)
            await orca.cluster.kubectl("delete", "pod", orca.worker(0), "--grace-period=0", "--force")
            await orca.healed(600)
            await orca.rollback()
            await orca.healed(600)
        pauses(seen)
    print(f"{title}: {dict(load.ends)}")
    assert not load.ends["MODEL_CHANGED"]
    assert load.ends["old"]
    said = await orca.events(f"{orca.name}-worker")
    assert any("before it had finished with the model" in message for message in said), said


async def updated(
    orca: Release,
    models: list[tuple[Known, Known]],
    pauses: Pauses,
    name: str,
    harm: Callable[[Release], Awaitable[None]] | None = None,
    there_and_back: int = ROUNDS,
) -> Counter[str]:
    """Updates to the other model and back under load, with harm to each update. Returns how the streams ended."""
    ends: Counter[str] = Counter()
    for path in there_and_back * tuple(reversed(PATHS)):
        async with orca.client(0) as by_service, orca.client(1) as by_pod:
            async with OfTwoModels([by_service, by_pod], models) as load:
                title = f"helm upgrade to {Path(path).name}, {orca.values['engine.count']} engines, {name}"
                async with load.disturbed(title) as seen:
                    await orca.upgrade({"model.path": path}, wait=harm is None)
                    if harm is not None:
                        await harm(orca)
                    await orca.healed(600)
                pauses(seen)
            print(f"{title}: {dict(load.ends)}")
            ends += load.ends
    return ends
