"""One seeded run: real endpoints and schedulers, modelled Redis, workers and clients, and faults.

Checked after every operation and at the end: each index comes exactly once to each client and is the right token; a
request ends, with a reason that the deeds of its client and the faults allow, within `BOUND` after the last fault;
nothing that is claimed, waits or listens is left.
"""

import asyncio
import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager

from orca_common.telemetry import Telemetry
from orca_pool.leases import RENEW_SECONDS
from orca_pool.scripts import Constants
from orca_scheduler.core.roles import Roles
from orca_scheduler.master.master import EngineMaster
from orca_scheduler.ranks import rank
from orca_scheduler.timers import KEEP

from .clients import Client, Habit, Stream
from .faults import DISTURB_LEASES, LAST, Faults
from .oracle import POISON, VOCABULARY, Oracle, spell, until
from .processes import Process, World
from .server import Server
from .services import EndpointProcess, SchedulerProcess
from .workers import Engine, Network

USUAL = {*vars(logging.makeLogRecord({})), "message", "taskName"}  # of a log record: what it tells is the rest
BOUND = 150.0  # seconds after the last fault
ROLES = 0.25  # of all runs have engines with roles
IDLE = 5.0  # seconds at most for which a row is kept that no engine needs, in runs that lose no hint


class Simulation:
    """The run of one seed."""

    def __init__(
        self, seed: int, lines: int = 400, kinds: tuple[str, ...] | None = None, roles: bool | None = None
    ) -> None:
        """lines: of the trace that are kept. kinds: of faults; drawn from the seed if not given. roles: whether engines
        have them; drawn from the seed, too."""
        self.seed = seed
        # Apart, so that the runs without roles stay what they are.
        self.role_draw = random.Random(f"roles {seed}")
        drawn = self.role_draw.random() < ROLES
        self.with_roles = drawn if roles is None else roles
        self.world = World(seed, lines)
        self.random = self.world.random
        self.oracle = Oracle()
        # Streams so short that endpoints and masters fall behind, in some runs.
        short = Constants(delivery_length=self.random.choice((4, 16)), control_length=self.random.choice((2, 8)))
        self.server = Server(self.world, self.oracle, self.random.choice((Constants(), short)))
        self.network = Network(self.world)
        self.telemetry = Telemetry("simulator")
        self.endpoints: list[EndpointProcess] = []
        self.schedulers: list[SchedulerProcess] = []
        self.clients: list[Client] = []
        self._lives = 0
        self.faults = Faults(self, kinds)
        self.server.calm = not set(self.faults.kinds) & DISTURB_LEASES
        self._idle: dict[tuple[str, int], float] = {}  # engine and claim of rows that no engine needs -> since when

    def run(self) -> None:
        """Raises Violation."""
        with _seams(self.network, self.world):
            try:
                self._begin()
                self.world.run(LAST + BOUND, lambda: all(client.end is not None for client in self.clients))
                for client in self.clients:
                    self.world.need(client.end is not None, f"{client.name} never ended")
                self._end()
            finally:
                self.world.close()

    def _begin(self) -> None:
        world, draw = self.world, self.random
        stages, block_size = draw.choice((1, 1, 2)), draw.choice((1, 4))
        run_ahead, batch = draw.choice((0, 0, 1)), draw.choice((1, 2, 4, 8))
        self.settings = {
            "pp": stages,
            "block_size": block_size,
            "max_batch_size": batch,
            "run_ahead": run_ahead,
        }
        rooms = [draw.choice((40, 80, 200)) for _ in range(draw.choice((1, 1, 2, 3)))]
        paces = [draw.choice((0.005, 0.03, 0.15)) for _ in rooms]
        roles = Roles()
        if self.with_roles:
            rooms, paces = (rooms * 2)[: max(2, len(rooms))], (paces * 2)[: max(2, len(paces))]
            prefill = self.role_draw.randint(1, len(rooms) - 1)
            roles = Roles(prefill, len(rooms) - prefill)
            self.settings |= {"roles": str(roles), "run_ahead": 0}
            self.network.transfers.hung = self._poisoned
        for n, (room, pace) in enumerate(zip(rooms, paces, strict=True)):
            name, transfers, role = f"engine-{n}", self.network.transfers, roles.of(f"engine-{n}") or ""
            engine = Engine(
                world,
                name,
                transfers,
                room,
                (pace, 2 * pace),
                stages,
                self._poisoned,
                role,
                lambda: self.server.rollbacks,
            )
            self.network.add(engine)
        split = roles.prefill
        largest = min(max(side) for side in (rooms[:split], rooms[split:]) if side)
        for _ in range(draw.choice((1, 2, 3))):
            self.start_scheduler()
        for _ in range(draw.choice((1, 2))):
            self.start_endpoint()
        process = world.process("clients")
        for n in range(draw.choice((6, 15, 25))):
            self._add_client(process, f"request-{n}", largest - 8)
        self.faults.plan()
        whole = self.server.model.constants.control_length == Constants().control_length  # no hint is dropped
        if self.with_roles and self.server.calm and whole:
            world.after(1.0, self._look_for_idle_rows)

    def _add_client(self, process: Process, name: str, most: int) -> None:
        draw = self.random
        prompt = tuple(draw.randrange(1, VOCABULARY) for _ in range(draw.randint(1, 12)))
        count = draw.randint(1, min(draw.choice((8, 40, 150)), most - len(prompt)))
        if draw.random() < 0.02:
            prompt = (POISON, *prompt[1:])
        ends, grace = draw.random() < 0.4, draw.choice((0.0, 0.5, 2.0, 60.0))
        deadline = draw.choice((None, None, None, None, 3.0, 15.0))
        slow, leaves, away = draw.choice((0.0, 0.0, 0.0, 0.05, 0.5)), tuple[int, ...](), draw.choice((0.0, 0.3, 3.0))
        gone_at = cancels_at = None
        match draw.choice(("reads", "reads", "reads", "leaves", "leaves", "doubles", "goes", "cancels")):
            case "leaves" | "doubles":
                leaves = tuple(draw.randint(0, count) for _ in range(draw.randint(1, 3)))
            case "goes":
                gone_at = draw.randint(0, count)
            case "cancels":
                cancels_at = draw.randint(0, count)
        rights, stop = self.oracle.add(name, prompt, count, ends), ""
        if draw.random() < 0.2:
            at = draw.randrange(len(rights[0]))
            stop = "".join(map(spell, rights[0][at : at + draw.randint(1, 2)]))
            rights = [until(right, stop) for right in rights]
        habit = Habit(
            draw.uniform(0, 22),
            prompt,
            count,
            ends,
            grace,
            deadline,
            slow,
            leaves,
            away,
            gone_at,
            cancels_at,
            doubles=draw.random() < 0.3,
            stop=stop,
        )
        client = Client(
            self.world,
            process,
            name,
            habit,
            rights,
            self.call,
            self.cancel,
            lambda: self.server.rollbacks,
            lambda: self.faults.losses,
            lambda: self.faults.trainings,
            lambda: self.server.outages,
        )
        self.clients.append(client)
        process.start(client.run)

    def _poisoned(self) -> None:
        self.faults.losses += 1

    def replace_endpoint(self, endpoint: EndpointProcess, dead: bool = False) -> None:
        """Starts another one. dead: the old one is dead by now; otherwise it may still be leaving."""
        if endpoint in self.endpoints:
            self.endpoints.remove(endpoint)
            self.start_endpoint()
        if dead:
            endpoint.process.kill()

    def replace_scheduler(self, scheduler: SchedulerProcess, dead: bool = False) -> None:
        """As `replace_endpoint`."""
        if scheduler in self.schedulers:
            self.schedulers.remove(scheduler)
            self.start_scheduler()
        if dead:
            scheduler.process.kill()

    def start_scheduler(self) -> None:
        self._lives += 1
        self.schedulers.append(
            SchedulerProcess(
                self.world, self.server, f"scheduler-{self._lives}", self.network, self.settings, self.telemetry
            )
        )

    def start_endpoint(self) -> None:
        self._lives += 1
        self.endpoints.append(EndpointProcess(self.world, self.server, f"endpoint-{self._lives}"))

    def call(self, stream: Stream) -> None:
        """A client calls some endpoint."""
        endpoint = self.random.choice(self.endpoints)
        self.world.after(self.random.random() * 0.001, lambda: endpoint.call(stream))

    def cancel(self, request_id: str) -> None:
        self.random.choice(self.endpoints).cancel(request_id)

    def _masters(self) -> list[EngineMaster]:
        return [one for each in self.schedulers if each.scheduler is not None for one in each.scheduler._mastered()]

    def _reserved(self) -> dict[str, int]:
        """Engines that have slots for requests, and how many, by the books of their masters."""
        return {master.engine: master.slots[0] for master in self._masters() if master.slots[0]}

    def _look_for_idle_rows(self) -> None:
        """An engine that has handed a request over lets go of it when another one has its keys and values, or computes
        them, and when it has ended."""
        masters, now = self._masters(), self.world.now
        runs = {(master.engine, one.claim) for master in masters for one in master.core.requests if not one.elsewhere}
        needed = {
            (one.handed_at[0], one.handed_claim)
            for one in self.server.model.live()
            if one.handed_at is not None and (one.engine, one.claim) not in runs
        }
        kept = {(master.engine, request.claim) for master in masters for request in master.core.kept}
        self._idle = {row: self._idle.get(row, now) for row in kept - needed}
        for (engine, claim), since in self._idle.items():
            self.world.need(now - since < IDLE, f"{engine} keeps the row of claim {claim}, which no engine needs")
        self.world.after(1.0, self._look_for_idle_rows)

    def _end(self) -> None:
        """Everyone leaves; nothing may be left in the pool."""
        world, server = self.world, self.server
        world.run(world.now + BOUND, lambda: world.now > LAST + 5.0 and not server.model.live())
        for request in server.model.live():
            world.fail(f"{request.request_id} never ended in the pool: {request.state}")
        world.run(world.now + KEEP + 5.0, lambda: not self._reserved())
        world.need(not self._reserved(), f"slots are reserved: {self._reserved()}")
        for endpoint in self.endpoints:
            endpoint.leave()
        world.run(world.now + 5.0)
        for scheduler in self.schedulers:
            scheduler.leave()
        world.run(world.now + 30.0, lambda: len(world.processes) == 1)
        for process in world.processes[1:] if world.processes[0].name == "clients" else world.processes:
            world.fail(f"{process.name} never left: it waits at {process.waits()}")
        for _ in range(8):
            world.run(world.now + RENEW_SECONDS)
            server.sweep()
        model = server.model
        world.need(not model.endpoints, f"endpoints are left: {list(model.endpoints)}")
        world.need(not model.schedulers, f"schedulers are left: {list(model.schedulers)}")
        for name, engine in model.engines.items():
            world.need(engine.owner is None, f"{name} is still owned by {engine.owner}")
        if world.violation is not None:
            raise world.violation


@contextmanager
def _seams(network: Network, world: World) -> Iterator[None]:
    """The scheduler looks whether modelled ranks listen; what it logs as critical is a violation."""
    before, rank.listens = rank.listens, network.listens

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            loop = asyncio._get_running_loop()
            extra = {k: v for k, v in vars(record).items() if k not in USUAL}
            world.note(getattr(loop, "name", ""), f'"{record.getMessage()}"', extra)
            if record.levelno == logging.CRITICAL:
                world.fail(f"{record.getMessage()}: {extra}")

    handler, root = Lines(), logging.getLogger()
    level, disabled = root.level, logging.root.manager.disable
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    logging.disable(logging.NOTSET)
    try:
        yield
    finally:
        logging.disable(disabled)
        root.setLevel(level)
        root.removeHandler(handler)
        rank.listens = before
