"""Checks what pods reach: names in DNS, and each arrow of the design (docs/design.md, "The house")."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from urllib.parse import urlsplit

from .finding import Finding, fault, listing, ok, unchecked, warning
from .objects import Object, Release, at, by_component, is_ready, matches, name_of, ordinal
from .snapshot import Attempt, Inside, Snapshot, Unknown

OTLP = "OTEL_EXPORTER_OTLP_ENDPOINT"
SKEW = 1.0  # seconds that two clocks may differ
POOL = ""  # stands for the address in the pod's own setting redis_url
API = ("kubernetes.default.svc", 443)
DNS = "dns"
ANSWERS = {  # of a pod's try -> in words, and what to do
    "silent": ("no answer", "look at the NetworkPolicies, and at the CNI between the two nodes"),
    "refused": ("refused", "nothing listens there: look at that pod's log"),
}


@dataclass(frozen=True)
class Question:
    """An attempt that a pod is asked to make: to connect to a port, or without a port to resolve a name."""

    arrow: str
    target: str  # for the report
    host: str
    port: int | None = None


def questions(release: Release, pods: Sequence[Object]) -> Mapping[str, list[Question]]:
    """Returns the attempts of each running pod of the release, by the pod's name."""
    running = by_component(pod for pod in pods if at(pod, "status", "phase") == "Running")
    workers = [pod for pod in running.get("worker", []) if at(pod, "status", "podIP")]
    supervisor, first = release.number("worker", "ORCA_PORT", 50050), release.number("worker", "ORCA_RANK_PORT", 0)
    ranks = range(first, first + release.number("worker", "ORCA_RANKS", 1)) if first else range(0)

    def to_pod(arrow: str, pod: Object, port: int) -> Question:
        return Question(arrow, f"{name_of(pod)}:{port}", str(at(pod, "status", "podIP")), port)

    services = [name_of(service) for service in release.of_kind("Service") if is_named(service, pods)]
    tried: dict[str, list[Question]] = {}
    for component, sources in running.items():
        for pod in sources:
            found: list[Question] = []
            match component:
                case "endpoint":
                    found += [Question(DNS, name, name) for name in services]
                    found.append(Question("endpoint -> redis", "redis", POOL))
                case "scheduler":
                    found.append(Question("scheduler -> redis", "redis", POOL))
                    found.append(Question("scheduler -> API server", f"{API[0]}:{API[1]}", *API))
                    found += [to_pod("scheduler -> supervisor", other, supervisor) for other in workers]
                    found += [to_pod("scheduler -> rank", other, port) for other in workers for port in ranks]
                case "worker":
                    others = [other for other in workers if engine_of(release, other) == engine_of(release, pod)]
                    others = [other for other in others if name_of(other) != name_of(pod)]
                    found += [to_pod("worker -> worker", other, supervisor) for other in others]
                    found += [to_pod("worker -> worker", other, port) for other in others for port in ranks]
                case _:
                    continue
            found += collector(component, release.settings(component).get(OTLP))
            tried[name_of(pod)] = found
    return tried


def engine_of(release: Release, pod: Object) -> int:
    return ordinal(pod) // release.pods_per_engine


def is_named(service: Object, pods: Sequence[Object]) -> bool:
    """Whether a Service has an address in DNS now. One without an address of its own has those of its Ready pods."""
    if at(service, "spec", "clusterIP") != "None":
        return True
    chosen = [pod for pod in pods if matches(at(service, "spec", "selector"), at(pod, "metadata", "labels"))]
    early = at(service, "spec", "publishNotReadyAddresses")
    return any(at(pod, "status", "podIP") if early else is_ready(pod) for pod in chosen)


def collector(component: str, url: str | None) -> list[Question]:
    """The way to where spans go, when that is set."""
    parts = urlsplit(url or "")
    if not parts.hostname:
        return []
    port = parts.port or 4317
    return [Question(f"{component} -> OTLP", f"{parts.hostname}:{port}", parts.hostname, port)]


def known(snapshot: Snapshot) -> tuple[Inside, ...]:
    assert not isinstance(snapshot.inside, Unknown)
    return snapshot.inside


def attempts(snapshot: Snapshot, dns: bool) -> list[Attempt]:
    return [attempt for seen in known(snapshot) for attempt in seen.attempts if (attempt.arrow == DNS) is dns]


def names(snapshot: Snapshot) -> list[Finding]:
    """The Services' names are known in DNS."""
    tried = attempts(snapshot, dns=True)
    if not tried:
        return [unchecked("dns", "no endpoint pod could be asked")]
    failed: dict[str, list[str]] = {}
    for attempt in tried:
        if attempt.answer != "resolved":
            failed.setdefault(attempt.answer, []).append(attempt.target)
    advice = "look at CoreDNS, at the Services' endpoints, and at egress to port 53 in the NetworkPolicies"
    findings = [fault("dns", f"{listing(sorted(set(targets)))}: {why}", advice) for why, targets in failed.items()]
    slowest = max(attempt.seconds for attempt in tried)
    count = len({attempt.target for attempt in tried})
    return findings or [ok("dns", f"{count} names resolve in the endpoint's pods, in at most {slowest * 1e3:.0f} ms")]


def arrows(snapshot: Snapshot) -> list[Finding]:
    """Each arrow of the design is open: who has to talk to another reaches it. One line an arrow."""
    tried: dict[str, list[Attempt]] = {}
    for attempt in attempts(snapshot, dns=False):
        tried.setdefault(attempt.arrow, []).append(attempt)
    findings = []
    for arrow, found in tried.items():
        bad: dict[str, list[str]] = {}
        for attempt in found:
            if attempt.answer != "open":
                bad.setdefault(attempt.answer, []).append(f"{attempt.source} to {attempt.target}")
        for answer, ways in bad.items():
            words, advice = ANSWERS.get(answer, (answer, "look at DNS and at the routes between the nodes"))
            said = f"{arrow}: {words}, {len(ways)} of {len(found)} tries: {listing(ways, 2)}"
            findings.append(fault("arrows", said, advice))
        if not bad:
            middle = median(attempt.seconds for attempt in found)
            findings.append(ok("arrows", f"{arrow}: {len(found)} open, in {middle * 1e3:.1f} ms"))
    mute: dict[str, list[str]] = {}
    for pod, why in snapshot.unseen.items():
        mute.setdefault(why, []).append(pod)
    findings += [unchecked("arrows", f"from {listing(pods)}: {why}") for why, pods in mute.items()]
    return findings or [unchecked("arrows", "no pod of the release runs")]


def outside(snapshot: Snapshot) -> list[Finding]:
    """Lists what cannot be seen from the release's own pods."""
    del snapshot
    said = "whether pods outside the release are kept out: that takes a pod of its own, and doctor makes none"
    return [unchecked("outside", said)]


def clocks(snapshot: Snapshot) -> list[Finding]:
    """The clocks in the pods agree."""
    seen = known(snapshot)
    if len(seen) < 2:
        return [unchecked("pod-clocks", "fewer than two pods could be asked")]
    first, last = min(seen, key=lambda pod: pod.ahead), max(seen, key=lambda pod: pod.ahead)
    apart, error = last.ahead - first.ahead, first.error + last.error
    if apart - error > SKEW:
        said = f"the clock in {last.pod} is {apart:.1f} s ahead of that in {first.pod}"
        return [warning("pod-clocks", said, "let all nodes keep time by NTP: traces and logs mix up their order")]
    return [ok("pod-clocks", f"{len(seen)} pods agree to {max(apart, error):.1f} s")]
