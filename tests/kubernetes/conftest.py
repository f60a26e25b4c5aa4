"""The suite on a cluster: `make test-kubernetes`. Each test asks for a release with the values that it needs.

A release stays installed as long as the following tests ask for the same values. What each fault cost is written to
build/kubernetes/pauses.md and pauses.json, and what a failed test left behind to a folder beside them.
"""

import argparse
import asyncio
import itertools
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from cluster import MISSING, Cluster, call
from pauses import Pauses
from reference import Known, Reference
from tokenizers import Tokenizer
from traffic import Traffic, Under

from orca_local.stack import DEMO_MODEL
from release import ROOT, TWO_PODS, Release, Releases

HERE = Path(__file__).parent
# The order of the files: a release that the next file needs too is not installed again. Those with Valkey come last: an
# older Redis cannot read its files on a volume that is given again. The platform comes first: its user could not write
# what a release before has left in the claim.
ORDER = [
    "helm",
    "platform",
    "install",
    "network",
    "faults",
    "restore",
    "chaos",
    "node",
    "scale",
    "autoscale",
    "updates",
    "weights",
    "gate",
    "uninstall",
    "one_rank_pods",
    "values",
    "certificates",
    "sentinel",
    "pauses",
]
PREFIX = "orca-test-"  # of the namespace
CLUSTER = pytest.StashKey[Cluster]()
OUTPUT = ROOT / "build/kubernetes"
PROMPTS, TOKENS, DISTINCT = 6, 200, 12  # of the traffic; the last: different tokens in a continuation, at least


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if item.path.is_relative_to(HERE)]
    items[:] = [item for item in items if item not in ours]
    items += sorted(ours, key=lambda item: ORDER.index(item.path.stem.removeprefix("test_")))
    for item in ours:
        item.add_marker(pytest.mark.kubernetes)
        item.add_marker(pytest.mark.timeout(1200))
        if MISSING is not None:
            item.add_marker(pytest.mark.skip(reason=MISSING))


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A namespace of its own, which takes only pods that the restricted Pod Security Standard allows."""
    cluster = request.session.stash[CLUSTER] = Cluster(f"{PREFIX}{secrets.token_hex(2)}")
    asyncio.run(_create(cluster))
    yield cluster
    asyncio.run(_delete(cluster))


async def _create(cluster: Cluster) -> None:
    """Makes the namespace. Two suites on one cluster would take each other's volumes and cores."""
    names = (await call("kubectl", "get", "namespaces", "--output", "name")).split()
    others = [name.removeprefix("namespace/") for name in names if name.startswith(f"namespace/{PREFIX}")]
    if others:
        pytest.exit(f"a suite runs in {others[0]}; if it was killed: kubectl delete namespace {others[0]}", 2)
    await call("kubectl", "create", "namespace", cluster.namespace)
    restricted = [f"pod-security.kubernetes.io/{mode}=restricted" for mode in ("enforce", "warn", "audit")]
    await call("kubectl", "label", "namespace", cluster.namespace, *restricted)


async def _delete(cluster: Cluster) -> None:
    await call("kubectl", "delete", "namespace", cluster.namespace, "--ignore-not-found", "--timeout=300s")
    await cluster.give_back()


@pytest.fixture(scope="session")
def releases(cluster: Cluster) -> Iterator[Releases]:
    """The last one is uninstalled, too: an object outside of the namespace would stay, and refuse the next suite's."""
    releases = Releases(cluster)
    yield releases
    asyncio.run(releases.remove())


@pytest.fixture
async def orca(releases: Releases) -> Release:
    """The main layout: tp 2 x pp 2 in two pods, one engine, with Jaeger."""
    return await releases.get(TWO_PODS)


@pytest.fixture
async def two_engines(releases: Releases) -> Release:
    """Two engines of the main layout."""
    return await releases.get(TWO_PODS | {"engine.count": 2})


@pytest.fixture(scope="session")
def known() -> list[Known]:
    """Requests of the traffic: pieces of a program's text, and the tokens that follow them."""
    torch.set_num_threads(1)  # the cores are the cluster's
    text = Path(argparse.__file__).read_text()
    ids = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")).encode(text).ids
    prompts = ((ids[at : at + 10 + at % 50], TOKENS + at % 40) for at in range(0, len(ids) - 60, 97))
    varied = (k for k in Reference(DEMO_MODEL).known(prompts) if len(set(k.tokens)) >= DISTINCT)
    return list(itertools.islice(varied, PROMPTS))


@pytest.fixture
def traffic(known: list[Known]) -> Under:
    """`async with traffic(release) as load`: streams while the block runs, half of them over each kind of target."""
    return partial(_traffic, known)


@asynccontextmanager
async def _traffic(known: list[Known], release: Release, streams: int = 20) -> AsyncIterator[Traffic]:
    async with (
        release.client(0) as by_service,
        release.client(1) as by_pod,
        Traffic([by_service, by_pod], known, streams) as traffic,
    ):
        yield traffic


@pytest.fixture(scope="session")
def pauses() -> Pauses:
    return Pauses(OUTPUT)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Keeps what somebody needs who looks for the cause of a failure."""
    report = yield
    cluster = item.session.stash.get(CLUSTER, None)
    if report.failed and cluster is not None and item.path.is_relative_to(HERE):
        folder = OUTPUT / item.name.replace("/", "-")
        asyncio.run(cluster.collect(folder))
        report.sections.append(("the cluster", f"pods, events and logs are in {folder}"))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    table = OUTPUT / "pauses.md"
    if MISSING is None and table.exists():
        terminalreporter.write_line(f"longest pauses, also in {table}:")
        terminalreporter.write(table.read_text())
