"""A copy of Redis's files is put back under running clients, as docs/backup.md says: what came since is forgotten."""

import itertools
from collections import Counter
from collections.abc import Sequence

from cluster import until
from pauses import Pauses
from reference import Known

from orca_chaos.streams import Streams
from orca_client import AsyncOrcaClient, OrcaError, Token
from release import REGISTRY, Release, run_pod

LOST = "TOKENS_LOST"  # the error of a stream whose tokens the copy does not have
COPY = "tar -C /data -c appendonlydir | base64"
RESTORE = "rm -r /data/appendonlydir && base64 -d | tar -C /data -x"


class MayBeLost(Streams):
    """Requests with known tokens. One that the pool has forgotten may end with an error that says so."""

    def __init__(self, clients: Sequence[AsyncOrcaClient], known: Sequence[Known]) -> None:
        super().__init__(20)
        self.ends: Counter[str] = Counter()
        self._clients, self._asked = clients, itertools.cycle(known)

    async def _request(self, n: int) -> None:
        client, known = self._clients[n % len(self._clients)], next(self._asked)
        got: list[int] = []
        try:
            async for event in client.generate(known.prompt, max_new_tokens=len(known.tokens), ignore_eos=True):
                if isinstance(event, Token):
                    self._came(n, event.engine)
                    got.append(event.token_id)
                    assert got == known.tokens[: len(got)], f"after the prompt {known.prompt}"
        except OrcaError as error:
            if error.reason != LOST:
                raise
            self.ends[error.reason] += 1
        else:
            assert got == known.tokens
            self.ends["whole"] += 1

    async def more(self, count: int) -> None:
        """Waits until this many requests more have ended whole."""
        wanted = self.ends["whole"] + count

        async def missing() -> str | None:
            return None if self.ends["whole"] >= wanted else f"{self.ends}; {wanted} whole ones are wanted"

        await until(missing)


async def test_an_old_copy_under_running_clients(orca: Release, known: list[Known], pauses: Pauses) -> None:
    redis, claim = f"{orca.name}-redis", f"data-{orca.name}-redis-0"
    kubectl = orca.cluster.kubectl

    async def gone() -> str | None:
        return (
            f"{redis}-0 is still there" if any(pod.name == f"{redis}-0" for pod in await orca.pods("redis")) else None
        )

    async with orca.client(0) as by_service, orca.client(1) as by_pod, MayBeLost([by_service, by_pod], known) as load:
        await orca.redis("config", "set", "auto-aof-rewrite-percentage", "0")
        assert "aof_rewrite_in_progress:0" in await orca.redis("info", "persistence")
        copy = await orca.cluster.execute(f"{redis}-0", "sh", "-c", COPY)
        await orca.redis("config", "set", "auto-aof-rewrite-percentage", "100")
        await load.more(40)  # so all that the copy has of running requests is old
        async with load.disturbed("an old copy of Redis's files put back") as seen:
            await kubectl("scale", "statefulset", redis, "--replicas=0")
            await until(gone)
            await run_pod(orca.cluster, "restore", f"{REGISTRY}/redis:7.0", "sleep", "infinity", claim=claim)
            await kubectl("wait", "--for=condition=Ready", "pod/restore", "--timeout=120s")
            await kubectl("exec", "--stdin", "restore", "--", "sh", "-c", RESTORE, given=copy)
            await kubectl("delete", "pod", "restore", "--grace-period=0", "--force")
            await kubectl("scale", "statefulset", redis, "--replicas=1")
            await orca.healed()
            await load.more(40)
        pauses(seen)
    assert load.ends[LOST] <= 20, "a request that came after the copy was put back"
