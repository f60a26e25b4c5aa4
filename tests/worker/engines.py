"""A master of a few lines for engines of several ranks, with real controllers, gRPC and gloo.

`in_process` runs the ranks in the test's own process, each with its own GPU thread. `processes` starts a process each,
by a fork server as in a pod.
"""

import asyncio
import math
import random
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import torch
from warm_forks import begin_warm
from worker.driver import Sampled, drafted, no_guess

from orca.v1 import worker_pb2 as pb
from orca.v1 import worker_pb2_grpc
from orca_common.adapters import Adapter
from orca_common.checkpoint import Checkpoint, read_checkpoint
from orca_common.lanes.server import LaneServer
from orca_common.listening import reserve_port
from orca_common.protocol import PROTOCOL
from orca_common.telemetry import Telemetry
from orca_common.tls import Plaintext
from orca_scheduler.core.core import Member
from orca_scheduler.ranks.members import increment, initiation, put_members
from orca_worker.data_plane.rendezvous import Rendezvous
from orca_worker.iteration.model import Compute, Model
from orca_worker.models.families import family_of, modules_of
from orca_worker.partition import Place, Types
from orca_worker.pod.supervisor import RankProcess
from orca_worker.processes.forks import ForkServer
from orca_worker.rank.controller import Controller
from orca_worker.settings import Kernels, RankSettings
from orca_worker.stage.stage import Stage

BLOCK_SIZE = 4
LOOPBACK = "127.0.0.1"
Loader = Callable[[Checkpoint, Types, Compute], Callable[[Place], tuple[Model, int]]]


class Broken(Exception):
    """An epoch is over. Its arguments are the rank that said so first, and its sentence."""


@dataclass
class Batch:
    """A batch in flight."""

    requests: list[Sampled]
    tokens: asyncio.Future[pb.IterationReport]  # of the rank that samples


class Master:
    """Drives the engine whose ranks listen at `addresses`, stage-major."""

    def __init__(self, addresses: Sequence[str], tp: int, pp: int, slots: int, seed: int = 0) -> None:
        self.addresses, self.tp, self.pp, self.slots = list(addresses), tp, pp, slots
        self.term, self.epoch, self.number = 1, 0, 0
        self.chance = random.Random(seed)
        self.guess: Callable[[Sampled], Sequence[int]] = no_guess  # drafts for a request's next tokens
        self.silent = False  # iterations carry no tokens, as of a scheduler that runs ahead
        self.times: dict[tuple[int, int], pb.StageTimes] = {}  # (rank, iteration)
        self.messages = 0  # that carried only times
        self.heartbeats = asyncio.Queue[pb.Heartbeat]()  # that came back
        self.waiting: dict[int, asyncio.Future[pb.IterationReport]] = {}  # by iteration: the sampler's
        self.broken: list[tuple[int, str]] = []  # (rank, sentence): a lane ended, an iteration failed
        self.channels: list[grpc.aio.Channel] = []
        self.lanes: list[Any] = []
        self.readers: list[asyncio.Task[None]] = []

    @property
    def sampler(self) -> int:
        return (self.pp - 1) * self.tp

    async def form(self, **fields: Any) -> list[pb.FormResponse]:
        """A new epoch of all ranks, with nothing running."""
        await self.close()
        self.epoch += 1
        self.channels = [grpc.aio.insecure_channel(address) for address in self.addresses]
        stubs = [worker_pb2_grpc.ControllerStub(channel) for channel in self.channels]
        hello = pb.HelloRequest(protocol=PROTOCOL, engine="e-0", term=self.term)
        await asyncio.gather(*(stub.Hello(hello, wait_for_ready=True) for stub in stubs))
        hosted = await stubs[-1].HostStore(pb.HostStoreRequest(term=self.term, epoch=self.epoch))
        requests = self.form_requests(hosted.address, **fields)
        formed = await asyncio.gather(*(stub.Form(request) for stub, request in zip(stubs, requests, strict=True)))
        assert min(one.slots for one in formed) >= self.slots
        allocate = pb.AllocateRequest(term=self.term, epoch=self.epoch, slots=self.slots)
        await asyncio.gather(*(stub.Allocate(allocate) for stub in stubs))
        self.blocks = list(range(self.slots // BLOCK_SIZE))
        self.rows = list(range(50))
        self.chance.shuffle(self.blocks)
        self.chance.shuffle(self.rows)
        self.held: dict[int, tuple[int, list[int]]] = {}  # id of a running request: its row and blocks
        self.ended: list[int] = []
        self.broken = []
        self.lanes = [stub.Run() for stub in stubs]
        self.readers = [asyncio.create_task(self.read(i, lane)) for i, lane in enumerate(self.lanes)]
        return formed

    def form_requests(self, store: str, **fields: Any) -> list[pb.FormRequest]:
        """The request to each rank."""
        shared: dict[str, Any] = {
            "tensor_parallel": self.tp,
            "pipeline_parallel": self.pp,
            "block_size": BLOCK_SIZE,
        } | fields
        places = [divmod(i, self.tp) for i in range(len(self.addresses))]
        formations = [pb.Formation(**shared, stage=stage, tensor_rank=rank) for stage, rank in places]
        return [
            pb.FormRequest(
                term=self.term, epoch=self.epoch, formation=formation, store=store, controllers=self.addresses
            )
            for formation in formations
        ]

    async def read(self, rank: int, lane: Any) -> None:
        """Reads the reports of a rank."""
        try:
            async for report in lane:
                result = report.iteration
                for times in (*report.times.stages, *([result.times] if result.token_ids else [])):
                    assert (times.stage, times.tensor_rank) == divmod(rank, self.tp)
                    self.times[rank, times.iteration] = times
                self.messages += report.HasField("times")
                if report.HasField("heartbeat"):
                    self.heartbeats.put_nowait(report.heartbeat)
                if not report.HasField("iteration"):
                    continue
                if result.error:
                    self.lose(rank, f"{'lost' if result.peer_lost else 'failed'}: {result.error}")
                else:
                    assert rank == self.sampler
                    self.waiting.pop(result.number).set_result(result)
            self.lose(rank, "the lane has ended")
        except grpc.aio.AioRpcError as error:
            self.lose(rank, error.details() or "")

    def lose(self, rank: int, sentence: str) -> None:
        """Nothing of this epoch will come back: fails all batches in flight."""
        self.broken.append((rank, sentence))
        waiting, self.waiting = self.waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(Broken(rank, sentence))
                future.exception()  # nobody may be waiting for this batch

    async def close(self) -> None:
        for reader in self.readers:
            reader.cancel()
        await asyncio.gather(*self.readers, return_exceptions=True)
        for channel in self.channels:
            await channel.close()
        self.readers, self.channels = [], []

    async def issue(self, new: Sequence[Sampled], increments: Sequence[Sampled], ahead: bool = False) -> Batch:
        """Sends one iteration, without waiting for its tokens. `ahead`: its increments carry none. Raises Broken."""
        self.number += 1
        iteration = pb.Iteration(term=self.term, epoch=self.epoch, number=self.number, free_rows=self.ended)
        self.ended = []
        members, drafts = list[Member](), list[int]()
        for request in new:
            row = self.rows.pop()
            needed = -(-(len(request.prompt) + request.new_tokens) // BLOCK_SIZE)
            blocks = [self.blocks.pop() for _ in range(needed)]
            self.held[id(request)] = row, blocks
            iteration.admissions.add(
                row=row,
                claim=self.number,
                token_ids=request.prompt + request.made,
                generated=len(request.made),
                sampling=request.params,
            )
            members.append(initiation(row, len(request.prompt) + len(request.made), blocks))
        for request in increments:
            start = len(request.prompt) + len(request.made) - 1 + ahead
            member = increment(self.held[id(request)][0], start, None if ahead or self.silent else request.made[-1])
            guessed = self.guess(request)[: request.new_tokens - len(request.made) - 1 - ahead]
            members.append(drafted(member, len(guessed)))
            drafts += guessed
        put_members(iteration, members, drafts)
        batch = Batch([*new, *increments], asyncio.get_running_loop().create_future())
        self.waiting[self.number] = batch.tokens
        try:
            await self.lanes[0].write(pb.ControlMessage(iteration=iteration))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await asyncio.wait(self.readers[:1])  # the lane has ended: its reader knows why
            raise Broken(*self.broken[0]) from None
        return batch

    async def collect(self, batch: Batch) -> None:
        """Waits for a batch's tokens."""
        report = await batch.tokens
        made = report.made or [1] * len(batch.requests)
        owners = [one for one, count in zip(batch.requests, made, strict=True) for _ in range(count)]
        for request, token, logprob in zip(owners, report.token_ids, report.logprobs, strict=True):
            request.made.append(token)
            assert math.isnan(logprob) != bool(request.sampling.get("logprobs"))
            request.logprobs.append(logprob)
        for one in report.tops:
            owners[one.index].tops.append(one.scores)
        for one in report.prompts:
            batch.requests[one.index].scored_prompt += one.scores

    def free(self, request: Sampled) -> None:
        row, blocks = self.held.pop(id(request))
        self.rows.insert(0, row)
        self.blocks += blocks
        self.chance.shuffle(self.blocks)
        self.ended.append(row)

    async def run(self, requests: Sequence[Sampled], max_batch: int = 4) -> None:
        """Runs requests to their ends in random batches, with up to `pp` in flight. Raises Broken."""
        waiting, running = list(requests), list[Sampled]()
        flight: list[Batch] = []
        while waiting or running or flight:
            busy = {id(request) for batch in flight for request in batch.requests}
            free = [request for request in running if id(request) not in busy]
            if len(flight) < self.pp and (free or waiting):
                old = self.chance.sample(free, k=self.chance.randint(0, min(len(free), max_batch - 1)))
                new = waiting[: self.chance.randint(not old, min(2, max_batch - len(old)))]
                waiting = waiting[len(new) :]
                if not old and not new:
                    old = free[:max_batch]
                running += new
                flight.append(await self.issue(new, old))
                continue
            await self.collect(flight[0])
            for request in flight.pop(0).requests:
                if len(request.made) == request.new_tokens:
                    running.remove(request)
                    self.free(request)


@dataclass
class InProcess:
    """A rank of the test's own process."""

    stage: Stage
    controller: Controller
    server: LaneServer
    address: str
    failures: list[str] = field(default_factory=list)


async def serve(
    folder: Path,
    slots: int | None = None,
    quantize: str | None = None,
    adapters: Sequence[Adapter] = (),
    kv_dtype: str | None = None,
    load: Loader | None = None,
) -> InProcess:
    checkpoint = read_checkpoint(folder, quantize, tuple(adapters))
    device = torch.device("cpu") if family_of(checkpoint).needs_torch else None
    types, compute = Types.of("float32", kv_dtype), Compute(1)
    of_place = None if load is None else load(checkpoint, types, compute)
    stage = Stage(checkpoint, types, device, slots, compute, of_place)
    failures: list[str] = []
    rendezvous = Rendezvous("127.0.0.1", device, returns_encoded=checkpoint.has_encoder)
    controller = Controller(checkpoint, stage, Telemetry("test"), rendezvous, Plaintext(), failures.append)
    server = controller.server()
    address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    return InProcess(stage, controller, server, address, failures)


@asynccontextmanager
async def in_process(
    folder: Path,
    tp: int,
    pp: int,
    slots: int = 400,
    seed: int = 0,
    quantize: str | None = None,
    adapters: Sequence[Adapter] = (),
    kv_dtype: str | None = None,
    load: Loader | None = None,
    **fields: Any,
) -> AsyncIterator[tuple[Master, list[InProcess]]]:
    """An engine of tp x pp ranks that has formed. load: makes their models, instead of the model's family."""
    ranks = [await serve(folder, slots, quantize, adapters, kv_dtype, load) for _ in range(tp * pp)]
    master = Master([rank.address for rank in ranks], tp, pp, slots // BLOCK_SIZE * BLOCK_SIZE, seed)
    try:
        await master.form(**fields)
        yield master, ranks
    finally:
        await master.close()
        for rank in ranks:
            assert await rank.controller.leave(5)
            await rank.server.stop(grace=0)
            assert not rank.failures


class Process:
    """A rank as a process of its own, made by a fork server as a supervisor's ranks are."""

    def __init__(self, forks: ForkServer, folder: Path, slots: int, kernels: Kernels = "auto") -> None:
        self._forks, self._port = forks, reserve_port("port", LOOPBACK)
        self._settings = RankSettings(
            model=str(folder),
            dtype="float32",
            device="cpu",
            threads=1,
            slots=slots,
            kernels=kernels,
            port=self._port.getsockname()[1],
        )
        self.address = f"{LOOPBACK}:{self._settings.port}"

    async def start(self) -> "Process":
        """Returns when it listens."""
        self._process = RankProcess(await self._forks.fork(), self._settings)
        while self._process.status is None:
            assert self.running
            await asyncio.sleep(0.01)
        return self

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return not self._process.ended.done()

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    async def end(self, number: signal.Signals = signal.SIGKILL) -> int:
        """Ends the process. Returns its exit status."""
        self.send(number)
        status = await self._process.ended
        self._port.close()
        return status


@asynccontextmanager
async def fork_server(folder: Path) -> AsyncIterator[ForkServer]:
    """A fork server whose ranks are this process's children. It imports what a checkpoint's ranks need, once."""
    server = ForkServer(begin_warm(), modules_of(read_checkpoint(folder)), "INFO")
    try:
        yield server
    finally:
        server.kill()
        await server.ended


@asynccontextmanager
async def processes(
    forks: ForkServer, folders: Sequence[Path], slots: int = 600, kernels: Kernels = "auto"
) -> AsyncIterator[list[Process]]:
    """Starts a rank for each folder."""
    ranks = [Process(forks, folder, slots, kernels) for folder in folders]
    try:
        await asyncio.gather(*(rank.start() for rank in ranks))
        yield ranks
    finally:
        await asyncio.gather(*(rank.end() for rank in ranks))
