"""The request pool's Redis: it forgets nothing that it acknowledged, and answers fast."""

import re

from orca_pool.link import NEEDED, too_old

from .finding import Finding, counted, fault, listing, ok, unchecked, warning
from .network import SKEW
from .objects import at, by_component, containers, name_of, pod_template
from .objects import replicas as pods_of
from .snapshot import Redis, Snapshot, Unknown

WAITS = (7, 2)  # the first Redis with WAITAOF
SLOW = 0.01  # seconds: every iteration of an engine waits for one commit
FULL = 0.8  # share of maxmemory


def volume(snapshot: Snapshot) -> list[Finding]:
    """The release's own Redis writes to a volume that outlives its pod, and is set to keep everything."""
    redis = snapshot.release.workload("redis")
    if redis is None:
        return [ok("volume", "the release has no Redis of its own")]
    findings = []
    if not claimed(redis):
        said = f"{name_of(redis)} has no volume claim: what it holds ends with its pod"
        findings.append(fault("volume", said, "install it with a volume claim: redis.storage"))
    maps = [str(text) for entry in snapshot.release.of_kind("ConfigMap") for text in (entry.get("data") or {}).values()]
    words = " ".join([*maps, *(word for c in containers(pod_template(redis)) for word in started(c))])
    for name, wrong in (("appendonly", "no"), ("appendfsync", "no")):
        if re.search(rf"\b{name}\s+\"?{wrong}\b", words):
            findings.append(
                fault("volume", f"{name_of(redis)} is started with {name} {wrong}", f"see `durable`: {name}")
            )
    return findings or [ok("volume", f"{name_of(redis)} has a volume claim")]


def started(container: object) -> list[str]:
    """The words of a container's command line."""
    return [str(word) for key in ("command", "args") for word in at(container, key) or []]


def claimed(redis: object) -> bool:
    if at(redis, "spec", "volumeClaimTemplates"):
        return True
    volumes = at(redis, "spec", "template", "spec", "volumes") or []
    return any("persistentVolumeClaim" in volume for volume in volumes)


def known(snapshot: Snapshot) -> Redis:
    assert isinstance(snapshot.redis, Redis)
    return snapshot.redis


def version(snapshot: Snapshot) -> list[Finding]:
    """Redis is new enough for our scripts, takes writes, and answers fast."""
    redis = known(snapshot)
    said = f"{redis.server} {redis.version} answers {redis.asked_from} in {redis.seconds * 1e3:.1f} ms"
    findings = []
    if too_old(redis.version):
        findings.append(fault("redis", f"{redis.server} {redis.version} is too old", NEEDED))
    if redis.role != "master":
        advice = "let redis_url name the master: a replica takes no writes"
        findings.append(fault("redis", f"it is a {redis.role}", advice))
    if redis.loading:
        findings.append(warning("redis", "it still loads its file", "wait; all services wait too"))
    if redis.seconds > SLOW:
        advice = "bring it nearer, or give it more CPU: each iteration waits for a commit"
        findings.append(warning("redis", said, advice))
    return findings or [ok("redis", said)]


def replicas(snapshot: Snapshot) -> list[Finding]:
    """All replicas follow, and at least as many as clients wait for (redis_replicas)."""
    redis = known(snapshot)
    release = snapshot.release
    waited = release.number("endpoint", "ORCA_REDIS_REPLICAS", 0)
    servers = release.workload("redis")
    there = pods_of(servers) - 1 if servers is not None else waited
    said = f"{redis.replicas} of {counted(there, 'replica')} follow; clients wait for {waited}"
    number = re.match(r"(\d+)\.(\d+)", redis.version)
    if waited and redis.server == "redis" and number and (int(number[1]), int(number[2])) < WAITS:
        why = f"redis {redis.version} cannot say what is on the disk of a replica, and redis_replicas is {waited}"
        return [fault("replicas", why, "take Redis 7.2 or newer, or Valkey")]
    advice = "look at the pods of Redis and their logs"
    if redis.replicas < waited:
        return [fault("replicas", f"{said}: all streams stand", advice)]
    if redis.replicas < there:
        return [warning("replicas", said, advice)]
    return [ok("replicas", said)]


def apart(snapshot: Snapshot) -> list[Finding]:
    """No node has two servers of Redis, or two Sentinels."""
    assert not isinstance(snapshot.pods, Unknown)
    components = by_component(snapshot.pods)
    findings = []
    for component in ("redis", "sentinel"):
        nodes: dict[str, list[str]] = {}
        for pod in components.get(component, []):
            nodes.setdefault(str(at(pod, "spec", "nodeName")), []).append(name_of(pod))
        for node, names in nodes.items():
            if len(names) > 1:
                advice = "the chart only wishes for other nodes: add some, or demand them by redis.pod.affinity"
                findings.append(warning("apart", f"{listing(names)} stand on {node} and die with it", advice))
    return findings or [ok("apart", "no two servers of Redis share a node")]


def durable(snapshot: Snapshot) -> list[Finding]:
    """Redis writes every command to its append-only file before it answers."""
    redis = known(snapshot)
    if redis.loading:  # it says until then that it has no append-only file
        return [unchecked("durable", "it still loads its file, and tells no settings until then", "ask again then")]
    if redis.appendonly == "no":
        said = "appendonly is no: a restart forgets every request and token"
        return [fault("durable", said, "set appendonly yes and appendfsync always")]
    if redis.last_append not in ("ok", ""):
        said = "the last write to the append-only file failed"
        return [fault("durable", said, "look at its disk and its log; it refuses writes meanwhile")]
    match redis.appendfsync:
        case "always":
            return [ok("durable", "appendonly yes, appendfsync always")]
        case "everysec":
            said = "appendfsync is everysec: the last second is lost with its machine, and clients hear DATA_LOSS"
            return [warning("durable", said, "set appendfsync always")]
        case "":
            why = "the server does not tell appendfsync (CONFIG is not allowed)"
            return [unchecked("durable", why, "make sure that it is always")]
        case other:
            said = f"appendfsync is {other}: what was acknowledged is lost with its machine"
            return [fault("durable", said, "set appendfsync always")]


def memory(snapshot: Snapshot) -> list[Finding]:
    """Redis never throws keys away to make room."""
    redis = known(snapshot)
    bound = f"{redis.maxmemory / 2**20:.0f} MiB" if redis.maxmemory else "no bound"
    if redis.policy != "noeviction":
        said = f"maxmemory-policy is {redis.policy}: with little memory it throws requests away"
        return [fault("memory", f"{said} (maxmemory: {bound})", "set maxmemory-policy noeviction")]
    if redis.maxmemory and redis.used > FULL * redis.maxmemory:
        said = f"{redis.used / 2**20:.0f} MiB of {bound} are used"
        return [warning("memory", said, "give it more, or lower max_waiting: when it is full, requests are refused")]
    return [ok("memory", f"noeviction, {redis.used / 2**20:.0f} MiB used, {bound}")]


def clock(snapshot: Snapshot) -> list[Finding]:
    """Redis' clock agrees with that of the pod that asked it: deadlines and epochs come from it."""
    redis = known(snapshot)
    if abs(redis.ahead) > SKEW:
        where = f"{abs(redis.ahead):.1f} s {'ahead of' if redis.ahead > 0 else 'behind'} that of {redis.asked_from}"
        return [warning("redis-clock", f"its clock is {where}", "let all nodes keep time by NTP")]
    return [ok("redis-clock", f"agrees with {redis.asked_from} to {max(abs(redis.ahead), 0.001) * 1e3:.0f} ms")]
