"""mTLS and API keys from Secrets, Redis, its replicas, Sentinels and exporters included, under load."""

import asyncio
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from pauses import Pauses
from reference import Known
from traffic import Traffic

from orca_client.tls import tls_credentials
from orca_common.api_keys import line_of, new_key
from orca_common.tls import AUTHORITY, CERTIFICATE, KEY
from orca_local.authority import Authority
from release import REGISTRY, TWO_PODS, Releases

EXPORTER = 9121
HOLDERS = ("endpoint", "scheduler", "worker", "client", "redis")
SECURED = TWO_PODS | {
    **{f"tls.secrets.{holder}": f"{holder}-tls" for holder in HOLDERS},
    "apiKeys.secret": "api-keys",
    "test.apiKeySecret": "api-key",
    "redis.password.secret.name": "pool",
    "redis.password.secret.key": "password",
    "redis.image": f"{REGISTRY}/valkey:8",
    "redis.program": "valkey",
    "redis.exporter.enabled": True,
    "redis.exporter.image": f"{REGISTRY}/redis-exporter:1",
}


@pytest.fixture
async def client_files(releases: Releases, tmp_path: Path) -> AsyncIterator[tuple[Path, str]]:
    """Makes the Secrets: certificates of one authority, API keys, a password. Gives the client's files, and its key."""
    cluster, authority, key = releases.cluster, Authority(tmp_path / "ca"), new_key()
    space = cluster.namespace
    servers = [name for n in range(3) for name in (f"orca-redis-{n}", f"orca-sentinel-{n}.orca-sentinel")]
    hosts = {
        "endpoint": [f"orca-endpoint.{space}.svc.cluster.local", f"orca-endpoint-headless.{space}.svc.cluster.local",
                     "orca-endpoint", f"orca-endpoint.{space}", "localhost"],
        "redis": ["orca-redis", *servers],
    }  # fmt: skip
    names = [f"{holder}-tls" for holder in HOLDERS]
    for holder, name in zip(HOLDERS, names, strict=True):
        made = authority.issue(holder, hosts.get(holder, ["localhost"]))
        files = [f"--from-file={file}={made / file}" for file in (CERTIFICATE, KEY, AUTHORITY)]
        await cluster.kubectl("create", "secret", "generic", name, *files)
    texts = {"api-keys": ("keys", line_of("ours", key)), "api-key": ("key", key), "pool": ("password", new_key())}
    for name, (field, text) in texts.items():
        await cluster.kubectl("create", "secret", "generic", name, f"--from-literal={field}={text}")
    yield authority.issue("client"), key
    await releases.remove()
    await cluster.kubectl("delete", "secret", *names, *texts)


def metrics(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()


@pytest.mark.parametrize("mode", ["single", "sentinel"])
async def test_every_connection_is_mtls(
    releases: Releases, client_files: tuple[Path, str], known: list[Known], pauses: Pauses, mode: str
) -> None:
    folder, key = client_files
    orca = await releases.get(SECURED | {"redis.mode": mode})
    assert "Succeeded" in await orca.cluster.helm("test", orca.name, "--timeout", "200s")
    for pod in await orca.pods("redis"):
        assert "\nredis_up 1\n" in await asyncio.to_thread(metrics, f"http://{pod.address}:{EXPORTER}/metrics")
    signed = {"credentials": tls_credentials(folder), "api_key": key}
    async with (
        orca.client(0, **signed) as by_service,
        orca.client(1, **signed) as by_pod,
        Traffic([by_service, by_pod], known) as load,
    ):
        async with load.disturbed(f"Redis killed, mTLS, redis.mode {mode}") as seen:
            await orca.cluster.kubectl("delete", "pod", f"{orca.name}-redis-0", "--grace-period=0", "--force")
            await orca.healed(600)
            await load.flows()
        pauses(seen)
    assert load.finished >= 20
