"""Schedulers share the engines: a simulated set of them joins, leaves, dies and stands still, and comes to rest."""

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from orca_pool.leases import LEASE_SECONDS, RENEW_SECONDS
from orca_scheduler.share import holds_too_much, may_take

REST = 20.0  # seconds after the last change in which everything must have come to rest
STEP = 0.05


@dataclass(eq=False)
class Member:
    """A scheduler as far as it takes and releases engines."""

    name: str
    next_look: float
    engines: set[str] = field(default_factory=set)
    releasing: tuple[str, float] | None = None  # the engine, and when it has drained
    too_much: float | None = None
    sights: dict[str, tuple[object, float]] = field(default_factory=dict)
    alive: bool = True
    leaving: bool = False


class Cluster:
    """The pool's books of owners and living schedulers, and the schedulers. Each looks at its own pace."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.now, self.made = rng, 0.0, 0
        self.engines = [f"engine-{n}" for n in range(rng.randrange(1, 9))]
        self.leases: dict[str, tuple[str | None, float]] = dict.fromkeys(self.engines, (None, 0.0))  # owner, renewal
        self.registered: dict[str, float] = {}
        self.members: list[Member] = []
        self.releases: list[float] = []
        self.join()

    # -- what may happen

    def join(self) -> None:
        self.made += 1
        self.members.append(Member(f"s-{self.rng.random()}", self.now + self.rng.random() * RENEW_SECONDS))

    def die(self) -> None:
        self._one().alive = False

    def leave(self) -> None:
        """It deregisters at once, and releases its engines when they have drained."""
        member = self._one()
        member.leaving = True
        self.registered.pop(member.name, None)

    def stand_still(self) -> None:
        member = self._one()
        member.next_look = self.now + self.rng.random() * 4

    def scale(self) -> None:
        self.engines.append(f"engine-{len(self.engines)}")
        self.leases[self.engines[-1]] = None, 0.0

    def _one(self) -> Member:
        return self.rng.choice([member for member in self.members if member.alive])

    # -- time

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += STEP
            for member in self.members:
                if member.alive:
                    self._turn(member)
            for name, renewed in list(self.registered.items()):
                if self.now - renewed > LEASE_SECONDS:
                    del self.registered[name]
            owners = [owner for owner, _ in self.leases.values() if owner]
            for member in self.members:
                assert len(member.engines) >= owners.count(member.name), "an engine without a master"

    def _turn(self, member: Member) -> None:
        frozen = member.next_look > self.now + RENEW_SECONDS
        for engine in list(member.engines):
            if self.leases[engine][0] != member.name:
                member.engines.discard(engine)  # deposed
            elif not frozen:
                self.leases[engine] = member.name, self.now
        if member.releasing is not None and self.now >= member.releasing[1]:
            self._release(member, member.releasing[0])
            member.releasing = None
        if member.leaving:
            for engine in list(member.engines):
                self._release(member, engine)
            member.alive = False
        elif self.now >= member.next_look:
            member.next_look = self.now + RENEW_SECONDS * (1 + self.rng.random() / 4)
            self._look(member)

    def _release(self, member: Member, engine: str) -> None:
        if engine in member.engines:
            member.engines.discard(engine)
            self.leases[engine] = None, self.now

    def _look(self, member: Member) -> None:
        """As `Scheduler._look`."""
        self.registered[member.name] = self.now
        living, engines = len(self.registered), len(self.engines)
        others = [engine for engine in self.engines if engine not in member.engines]
        free = [engine for engine in others if self._free(member, engine)]
        held = Counter(str(self.leases[engine][0]) for engine in others if engine not in free)
        held[member.name] = len(member.engines)
        for engine in free:
            if may_take(member.name, held, engines, living) and self.rng.random() < 0.9:  # or another one was faster
                self.leases[engine] = member.name, self.now
                member.engines.add(engine)
                held[member.name] += 1
        if free or not holds_too_much(member.name, held, engines, living):
            member.too_much = None
            return
        member.too_much = self.now if member.too_much is None else member.too_much
        if member.releasing is None and self.now - member.too_much > LEASE_SECONDS:
            member.releasing = max(member.engines), self.now + self.rng.random()
            self.releases.append(self.now)

    def _free(self, member: Member, engine: str) -> bool:
        lease = self.leases[engine]
        if lease[0] is None:
            return True
        if engine not in member.sights or member.sights[engine][0] != lease:
            member.sights[engine] = lease, self.now
            return False
        return self.now - member.sights[engine][1] > LEASE_SECONDS

    def counts(self) -> list[int]:
        """Engines of each living scheduler."""
        owners = Counter(owner for owner, _ in self.leases.values())
        return [owners[member.name] for member in self.members if member.alive]


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_the_engines_are_shared_whatever_happened(first: int) -> None:
    """After the last change each scheduler comes to hold its part, and nothing moves any more."""
    for seed in range(first, first + 50):
        cluster = Cluster(random.Random(seed))
        rng = cluster.rng
        for _ in range(rng.randrange(1, 12)):
            cluster.run(rng.choice((0.1, 1.0, 5.0)))
            change = rng.choice(
                (cluster.join, cluster.join, cluster.die, cluster.leave, cluster.stand_still, cluster.scale)
            )
            change()
            if not any(member.alive and not member.leaving for member in cluster.members):
                cluster.join()
        cluster.run(REST)
        counts, engines = cluster.counts(), len(cluster.engines)
        assert sum(counts) == engines, f"seed {seed}: an engine is nobody's"
        assert max(counts) - min(counts) <= 1, f"seed {seed}: {counts}"
        before = dict(cluster.leases), len(cluster.releases)
        cluster.run(REST)
        owners = {engine: owner for engine, (owner, _) in cluster.leases.items()}
        assert owners == {engine: owner for engine, (owner, _) in before[0].items()}, f"seed {seed}"
        assert len(cluster.releases) == before[1], f"seed {seed}: engines are passed around"


@pytest.mark.parametrize("engines", [1, 2, 5, 8])
def test_no_engine_moves_twice_when_a_scheduler_joins(engines: int) -> None:
    for seed in range(20):
        cluster = Cluster(random.Random(seed))
        cluster.engines = [f"engine-{n}" for n in range(engines)]
        cluster.leases = dict.fromkeys(cluster.engines, (None, 0.0))
        cluster.run(REST)
        for others in range(1, 4):
            counts = [*cluster.counts(), 0]
            cluster.join()
            released = len(cluster.releases)
            cluster.run(REST)
            least = engines // (others + 1)
            assert len(cluster.releases) - released == least, f"{counts} -> {cluster.counts()}"


def test_parts() -> None:
    """Of 5 engines, two schedulers have 2 or 3."""
    assert may_take("a", {}, 5, 2)
    assert may_take("a", {"a": 2}, 5, 2)
    assert not may_take("a", {"a": 3}, 5, 2)
    assert not may_take("a", {"a": 2, "b": 3}, 5, 2), "the one more is another's"
    assert not holds_too_much("a", {"a": 3, "b": 2}, 5, 2)
    assert holds_too_much("a", {"a": 4, "b": 1}, 5, 2)
    # 4 engines for three: a and b both have two, and one of them may.
    assert [holds_too_much(name, {"a": 2, "b": 2}, 4, 3) for name in "ab"] == [False, True]
    # Fewer engines than schedulers: nobody gives the only one away.
    assert not holds_too_much("a", {"a": 1}, 1, 3)
    assert not may_take("b", {"a": 1}, 1, 3)
    assert not holds_too_much("a", {}, 0, 1)
