"""What goes wrong in a run, and when: drawn from the seed before the run begins.

Each run draws which kinds of faults it has, so some runs have one kind alone. A process dies or stands still between
any two callbacks. After `LAST` nothing new goes wrong, and every partition is healed.
"""

import random
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from orca_pool.leases import DETACH_FLOOR_SECONDS

from .oracle import MODELS
from .processes import Process

if TYPE_CHECKING:
    from .simulation import Simulation
    from .workers import Engine

LAST = 25.0  # seconds
OUTAGE = DETACH_FLOOR_SECONDS + 10.0  # seconds, once in some runs
KINDS = (
    "endpoint dies",
    "scheduler dies",
    "endpoint leaves",
    "scheduler leaves",
    "process stands still",
    "cut off from redis",
    "cut off from workers",
    "redis stands still",
    "redis fails over",
    "rank dies",
    "rank freezes",
    "engine is gone",
    "exchanges break",
    "exchanges are late",
    "slow network",
)

# Of pulls between engines that have roles.
PULLS = ("pulls fail", "pulls are late", "pulls hang")

# Without these every living master keeps its lease.
DISTURB_LEASES = {
    "process stands still",
    "cut off from redis",
    "redis stands still",
    "redis fails over",
    "exchanges break",
    "exchanges are late",
}


class Faults:
    """The faults of one run. `losses`: those after which an engine may count as lost."""

    def __init__(self, simulation: "Simulation", kinds: tuple[str, ...] | None = None) -> None:
        self._simulation, self._world, self._random = simulation, simulation.world, simulation.world.random
        self._server, self._network = simulation.server, simulation.network
        self.losses = self.trainings = 0
        share = self._random.choice((0.0, 0.15, 0.3, 0.6))
        drawn = tuple(kind for kind in KINDS if self._random.random() < share)
        if simulation.with_roles:
            drawn += tuple(kind for kind in PULLS if simulation.role_draw.random() < share)
        self.kinds = drawn if kinds is None else kinds
        self._random_kinds = kinds is None

    def plan(self) -> None:
        """Has everything happen in its time."""
        world, draw = self._world, self._random
        world.note("faults", *self.kinds)
        for kind in self.kinds:
            if kind == "exchanges break":
                self._server.faults.reset = draw.choice((0.002, 0.02))
                continue
            if kind == "exchanges are late":
                self._server.faults.late = draw.choice((0.0005, 0.005))
                continue
            if kind in PULLS:
                transfers = self._network.transfers
                match kind:
                    case "pulls fail":
                        transfers.fails = draw.choice((0.1, 0.5, 1.0))
                    case "pulls are late":
                        transfers.late = draw.choice((0.1, 0.5))
                    case _:
                        transfers.hangs = 0.02
                continue
            if kind == "slow network":
                self._server.faults.delay, self._network.delay = draw.choice((0.01, 0.1)), 0.01
                continue
            at = draw.uniform(0.5, 8.0)
            while at < LAST:
                world.after(at, self._doing(kind))
                at += draw.expovariate(1 / 6.0)
        world.after(LAST, self._last)
        self._plan_outage()
        self._plan_trainings()

    def _plan_outage(self) -> None:
        """In some runs Redis stands still once for longer than a dead endpoint's streams live on, perhaps just after
        all endpoints have died. Drawn apart, so that other runs stay what they are."""
        draw = random.Random(f"outage {self._simulation.seed}")
        if "redis stands still" in self.kinds and draw.random() < 0.25:
            at = draw.uniform(3.0, 20.0)
            if "endpoint dies" in self.kinds:
                self._world.after(at - 2.0, self._lose_endpoints)
            self._world.after(at, partial(self._server.pause, OUTAGE))

    def _lose_endpoints(self) -> None:
        for endpoint in list(self._simulation.endpoints):
            endpoint.process.kill()
            self._world.after(3.0, partial(self._simulation.replace_endpoint, endpoint, dead=True))

    def _plan_trainings(self) -> None:
        """In some runs engines get other weights. Drawn apart, so that other runs stay what they are.

        Not where an engine is gone for ever: what has tokens of its weights waits for it.
        """
        if not self._random_kinds or "engine is gone" in self.kinds:
            return
        draw = random.Random(f"weights {self._simulation.seed}")
        for _ in range(draw.choice((0, 0, 1, 2, 4))):
            engine = draw.choice(list(self._network.engines.values()))
            self._world.after(draw.uniform(2.0, LAST), partial(self._train, engine, draw.uniform(0.1, 1.5)))

    def _train(self, engine: "Engine", restart: float) -> None:
        """An engine's ranks end, and the next ones read other weights."""
        self.losses += 1
        self.trainings += 1
        (engine.weights,) = MODELS.keys() - {engine.weights}
        self._world.note(engine.name, "gets the weights", engine.weights)
        for rank in list(engine.ranks):
            engine.kill(rank, restart)

    def _doing(self, kind: str) -> Callable[[], None]:
        return lambda: self._do(kind)

    def _last(self) -> None:
        server, network = self._server, self._network
        self._world.note("the last fault is over")
        server.faults.reset = server.faults.late = 0.0
        transfers = network.transfers
        transfers.fails = transfers.late = transfers.hangs = 0.0
        if self._simulation.with_roles:  # where the sides have other weights, nothing begins
            first, *others = network.engines.values()
            for engine in [other for other in others if other.weights != first.weights]:
                self._train(engine, 0.5)
        for process, direction in sorted(server.partitions):
            server.heal(process, direction)
        for process in sorted(network.partitions):
            network.heal(process)

    def _do(self, kind: str) -> None:
        simulation, world, draw = self._simulation, self._world, self._random
        endpoint, scheduler = draw.choice(simulation.endpoints), draw.choice(simulation.schedulers)
        some = draw.choice((endpoint, scheduler)).process
        engine = draw.choice(list(self._network.engines.values()))
        rank = draw.choice(engine.ranks)
        self.losses += kind not in ("endpoint dies", "endpoint leaves", "redis stands still")
        match kind:
            case "endpoint dies":
                self._at_any_callback(endpoint.process, endpoint.process.kill)
                world.after(draw.uniform(0.1, 3.0), lambda: simulation.replace_endpoint(endpoint, dead=True))
            case "scheduler dies":
                self._at_any_callback(scheduler.process, scheduler.process.kill)
                world.after(draw.uniform(0.1, 3.0), lambda: simulation.replace_scheduler(scheduler, dead=True))
            case "endpoint leaves":
                endpoint.leave()
                world.after(draw.uniform(0.0, 3.0), lambda: simulation.replace_endpoint(endpoint))
            case "scheduler leaves":
                scheduler.leave()
                world.after(draw.uniform(0.0, 3.0), lambda: simulation.replace_scheduler(scheduler))
            case "process stands still":
                seconds, stands = draw.choice((0.3, 0.9, 1.4, 2.5, 6.0)) * draw.uniform(0.7, 1.3), draw.random() < 0.3
                self._at_any_callback(some, lambda: some.pause(seconds, stands))
            case "cut off from redis":
                directions = draw.choice((("to",), ("from",), ("to", "from")))
                world.note(some.name, "is cut off from redis", directions)
                for direction in directions:
                    self._server.part(some.name, direction)
                    world.after(draw.uniform(0.2, 6.0), lambda d=direction: self._server.heal(some.name, d))
            case "cut off from workers":
                name = scheduler.process.name
                world.note(name, "is cut off from its workers")
                self._network.partitions.setdefault(name, [])
                world.after(draw.uniform(0.2, 6.0), lambda: self._network.heal(name))
            case "redis stands still":
                self._server.pause(draw.choice((0.3, 1.0, 2.5, 5.0)) * draw.uniform(0.7, 1.3))
            case "redis fails over":
                lag, down = draw.choice((0.01, 0.3, 1.0)) * draw.random(), draw.choice((0.05, 0.5, 3.0)) * draw.random()
                self._server.fail_over(lag, down, draw.random() < 0.5)
            case "rank dies":
                engine.kill(rank, draw.uniform(0.1, 1.5))
            case "engine is gone":
                side = [other for other in self._network.engines.values() if other.role == engine.role]
                spare = max(side, key=lambda other: other.room)
                if engine is not spare:  # a larger one stays, so every request still fits
                    for rank in list(engine.ranks):
                        engine.kill(rank, 1e9)
            case "rank freezes":
                world.note("rank freezes", rank.address)
                rank.frozen = rank.alive
                world.after(draw.uniform(0.2, 5.0), rank.thaw)
            case _:
                raise AssertionError(kind)

    def _at_any_callback(self, process: Process, what: Callable[[], object]) -> None:
        if process.alive and process.fuse is None:
            process.fuse = random.Random(self._random.random()).randrange(60), what
