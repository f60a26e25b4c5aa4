"""The API server: its version and its speed."""

import re

from .finding import Finding, fault, ok, warning
from .snapshot import Server, Snapshot

OLDEST, NEWEST = (1, 31), (1, 36)  # the versions against which the chart is tested
SLOW = 0.5  # seconds


def asked(snapshot: Snapshot) -> Server:
    assert isinstance(snapshot.server, Server)
    return snapshot.server


def version(snapshot: Snapshot) -> list[Finding]:
    """Kubernetes is one of the versions that the chart was tested with."""
    text = asked(snapshot).version
    found = re.match(r"v?(\d+)\.(\d+)", text)
    said = f"Kubernetes {text.removeprefix('v')}"
    known = f"1.{OLDEST[1]} to 1.{NEWEST[1]}"
    if found is None:
        return [warning("version", f"{said} is no version that can be read", f"known good is {known}")]
    number = int(found[1]), int(found[2])
    if number < OLDEST:
        return [fault("version", f"{said} is too old", f"known good is {known}")]
    if number > NEWEST:
        return [warning("version", f"{said} is newer than what was tested", f"known good is {known}")]
    return [ok("version", said)]


def latency(snapshot: Snapshot) -> list[Finding]:
    """The API server answers in time. A live engine needs no API server; its formation and a rollout do."""
    seconds = asked(snapshot).seconds
    said = f"the API server answers in {seconds * 1e3:.0f} ms"
    if seconds > SLOW:
        return [warning("latency", said, "look at the load of the control plane: new pods are found that much later")]
    return [ok("latency", said)]
