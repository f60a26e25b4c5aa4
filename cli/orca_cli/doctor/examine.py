"""All checks, in the order of the report."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from . import access, engines, network, pods, redis_server, settings, wiring
from .finding import Finding, fault, unchecked
from .objects import Release
from .snapshot import Snapshot, Unknown


@dataclass(frozen=True)
class Check:
    """A check: `judge` is called when all fields of the snapshot that it `needs` are known."""

    name: str
    judge: Callable[[Snapshot], Sequence[Finding]]
    needs: tuple[str, ...] = ()  # none: the release's objects suffice, so a rendered chart can be checked
    kinds: tuple[str, ...] = ()  # of objects of the release, beside its workloads


CHECKS = (
    Check("engines", engines.whole),
    Check("ranks", engines.ranks),
    Check("shm", engines.shared_memory),
    Check("discovery", engines.discovery),
    Check("updates", engines.updates),
    Check("settings", settings.names),
    Check("same", settings.agree),
    Check("grace", settings.grace),
    Check("probes", settings.probes),
    Check("services", wiring.services, kinds=("Service",)),
    Check("policies", wiring.policies, kinds=("NetworkPolicy",)),
    Check("volume", redis_server.volume),
    Check("tags", settings.tags),
    Check("granted", access.granted, kinds=("Role", "RoleBinding")),
    Check("allowed", access.allowed, ("allowed",)),
    Check("budgets", engines.budgets, kinds=("PodDisruptionBudget",)),
    Check("pods", pods.ready, ("pods",)),
    Check("weights", engines.weights, ("inside",)),
    Check("limits", pods.limits, ("pods",)),
    Check("apart", redis_server.apart, ("pods",)),
    Check("dns", network.names, ("inside",)),
    Check("arrows", network.arrows, ("inside",)),
    Check("outside", network.outside, ("inside",)),
    Check("pod-clocks", network.clocks, ("inside",)),
    Check("redis", redis_server.version, ("redis",)),
    Check("replicas", redis_server.replicas, ("redis",)),
    Check("durable", redis_server.durable, ("redis",)),
    Check("memory", redis_server.memory, ("redis",)),
    Check("redis-clock", redis_server.clock, ("redis",)),
)


def examine(snapshot: Snapshot, rendered: bool = False) -> list[Finding]:
    """Runs all checks. Of a rendered chart, those that need no cluster.

    A check that lacks something yields a line that says what, and so the report always names every check.
    """
    release = snapshot.release
    if not release.workloads():
        return [no_release(release, rendered)]
    findings: list[Finding] = []
    for check in CHECKS:
        if rendered and check.needs:
            continue
        missing = [getattr(snapshot, need) for need in check.needs]
        reasons = [value.why for value in missing if isinstance(value, Unknown)]
        reasons += [release.unread[kind] for kind in check.kinds if kind in release.unread]
        findings += [unchecked(check.name, reasons[0])] if reasons else check.judge(snapshot)
    return findings


def no_release(release: Release, rendered: bool) -> Finding:
    """The finding of a check that has nothing to look at."""
    unread = [release.unread[kind] for kind in ("Deployment", "StatefulSet") if kind in release.unread]
    if unread:
        return fault("release", unread[0], "use credentials that may read the namespace")
    where = "the file" if rendered else f"namespace {release.namespace}"
    advice = "give --release and --namespace as `helm list -A` shows them"
    return fault("release", f"{where} holds no workload of a release {release.name}", advice)
