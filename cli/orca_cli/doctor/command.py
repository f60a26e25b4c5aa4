"""Carries out the command `orca doctor`."""

import shutil
import sys
from pathlib import Path

import typer

from .cluster import Cluster
from .examine import examine
from .finding import Finding, Level, as_json, report
from .gather import gather
from .rendered import read_rendered
from .snapshot import Snapshot

WIDTH = 80  # columns at least, and where there is no terminal


async def check_cluster(
    release: str | None, namespace: str | None, context: str | None, redis_url: str | None
) -> list[Finding]:
    """The findings about a release in a cluster."""
    async with Cluster.connected(namespace, context) as cluster:
        return examine(await gather(cluster, release or "orca", redis_url))


def check_rendered(path: Path, release: str | None) -> list[Finding]:
    """The findings about a rendered chart."""
    return examine(Snapshot(read_rendered(path, release)), rendered=True)


def show(findings: list[Finding], json: bool) -> None:
    """Prints the findings. Raises typer.Exit with status 1 when there is a fault."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDTH
    print(as_json(findings) if json else report(findings, max(width, WIDTH)))
    if any(finding.level is Level.FAULT for finding in findings):
        raise typer.Exit(1)
