"""One seeded run: real endpoints and schedulers, modelled Redis, workers and clients, and faults.

Checked after every operation and at the end: each index comes exactly once to each client and is the right token; a
request ends, with a reason that the deeds of its client and the faults allow, within `BOUND` after the last fault;
nothing that is claimed, waits or listens is left.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from orca_common.telemetry import Telemetry
from orca_pool.scripts import Constants
from orca_scheduler import pods, rank

from .clients import Client, Habit, Stream
from .oracle import VOCABULARY, Oracle
from .processes import World
from .server import Server
from .services import EndpointProcess, SchedulerProcess
from .workers import Engine, Network

BOUND = 150.0  # seconds after the last fault


class Simulation:
    """The run of one seed."""

    def __init__(self, seed: int, lines: int = 400) -> None:
        self.seed = seed
        self.world = World(seed, lines)
        self.random = self.world.random
        self.oracle = Oracle()
        self.server = Server(self.world, self.oracle, Constants())
        self.network = Network(self.world)
        self.telemetry = Telemetry("simulator")
        self.endpoints: list[EndpointProcess] = []
        self.schedulers: list[SchedulerProcess] = []
        self.clients: list[Client] = []
        self._lives = 0

    def run(self) -> None:
        """Raises Violation."""
        with _seams(self.network, self.world):
            try:
                self._begin()
                self.world.run(1000.0, lambda: all(client.end is not None for client in self.clients))
                for client in self.clients:
                    self.world.need(client.end is not None, f"{client.name} never ended")
                self._end()
            finally:
                self.world.close()

    def _begin(self) -> None:
        self.settings = {"pp": 1, "block_size": 4, "max_batch_size": 4, "run_ahead": 0}
        engine = Engine(self.world, "engine-0", 80, (0.01, 0.03))
        self.network.add(engine)
        self.start_scheduler()
        self.start_endpoint()
        process = self.world.process("clients")
        for n in range(8):
            prompt = tuple(self.random.randrange(1, VOCABULARY) for _ in range(self.random.randint(1, 8)))
            habit = Habit(self.random.uniform(0, 5), prompt, self.random.randint(1, 24), self.random.random() < 0.5, 1.0)
            name = f"request-{n}"
            right = self.oracle.add(name, prompt, habit.count, habit.ends)
            client = Client(
                self.world, process, name, habit, right, self.call, self.cancel, lambda: self.server.rollbacks
            )
            self.clients.append(client)
            process.start(client.run)

    def start_scheduler(self) -> None:
        self._lives += 1
        addresses = [pod for engine in self.network.engines.values() for pod in engine.pods]
        self.schedulers.append(
            SchedulerProcess(
                self.world, self.server, f"scheduler-{self._lives}", addresses, self.settings, self.telemetry
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

    def _end(self) -> None:
        """Everyone leaves; nothing may be left in the pool."""
        world, model = self.world, self.server.model
        world.run(world.now + BOUND, lambda: not model.live())
        for request in model.live():
            world.fail(f"{request.request_id} never ended in the pool: {request.state}")
        for service in [*self.endpoints, *self.schedulers]:
            service.leave()
        world.run(world.now + 30.0, lambda: len(world.processes) == 1)
        world.need(len(world.processes) == 1, f"{[process.name for process in world.processes]} never left")
        world.need(not model.endpoints, f"endpoints are left: {list(model.endpoints)}")
        world.need(not model.schedulers, f"schedulers are left: {model.schedulers}")
        for name, engine in model.engines.items():
            world.need(engine.owner is None, f"{name} is still owned by {engine.owner}")
        if world.violation is not None:
            raise world.violation


@contextmanager
def _seams(network: Network, world: World) -> Iterator[None]:
    """The scheduler dials the modelled workers; what it logs as critical is a violation."""
    before = rank.dial, rank.listens, pods.dial
    rank.dial, rank.listens, pods.dial = network.dial, network.listens, network.dial  # pyright: ignore

    class Critical(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            world.fail(f"{record.getMessage()}: {record.__dict__.get('violation')}")

    handler, root = Critical(logging.CRITICAL), logging.getLogger()
    root.addHandler(handler)
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(disabled)
        root.removeHandler(handler)
        rank.dial, rank.listens, pods.dial = before
