"""The engine master with a scripted rank on a real pool: what real ranks do too seldom, or too slowly, for a test."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from servers import RedisServer, redis_server

from orca.v1 import worker_pb2 as pb
from orca.v1 import worker_pb2_grpc
from orca.v1.pool_pb2 import PoolRequest
from orca.v1.sampling_pb2 import SamplingParams
from orca_common.block_keys import keys_of, root_of
from orca_common.errors import Unavailable
from orca_common.metrics import Metrics
from orca_common.protocol import GROWN, OUTPUTS, PARTS, PROTOCOL, SHARED
from orca_common.reservation import Reservation
from orca_common.service import LoopPulse
from orca_common.telemetry import Telemetry
from orca_common.tls import Plaintext
from orca_pool.keys import Keys
from orca_pool.pool import LET_GO, Pool
from orca_pool.records import NO_LOAD, Attached, ClaimAnswer, CommitRow, EngineInfo, EngineState, Finish, Reason
from orca_pool.wire import TOKEN
from orca_scheduler import timers
from orca_scheduler.core import core
from orca_scheduler.core.core import BatchReturned, EngineLost, Room
from orca_scheduler.core.sets import PAPER, fitting
from orca_scheduler.discovery.candidates import Candidate
from orca_scheduler.discovery.static import StaticDiscovery
from orca_scheduler.lifecycle.events import Claimed, Opened, PoolAway, PoolBack
from orca_scheduler.master.journal import CoreStep, parse, read, request_names
from orca_scheduler.master.ledger import MAX_BEHIND, RESERVE, CaughtUp, Deposed, Ledger, News
from orca_scheduler.master.master import EngineMaster, Returned
from orca_scheduler.master.recent import Recent
from orca_scheduler.settings import SchedulerSettings

SLOTS = 1 << 20
UNCOUNTED = lambda *_: None  # noqa: E731 - takes what a ledger has committed
PATIENCE = 2.0  # of the pool: longer than a busy machine lets it wait, and no longer, since some tests wait it out


class Rank(worker_pb2_grpc.ControllerServicer, worker_pb2_grpc.SupervisorServicer):
    """A rank and its supervisor. Its iterations end when the test calls `report`; a fenced one comes back."""

    def __init__(self) -> None:
        self.server = grpc.aio.server()
        worker_pb2_grpc.add_ControllerServicer_to_server(self, self.server)
        worker_pb2_grpc.add_SupervisorServicer_to_server(self, self.server)
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.pid, self.epoch, self.iteration = 1, 0, 0
        self.forming = asyncio.Event()  # is being asked to form
        self.may_form = asyncio.Event()
        self.may_form.set()
        self.may_greet = asyncio.Event()
        self.may_greet.set()
        self.fencing = asyncio.Event()  # is being asked to end
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.frozen = False  # reads nothing and says nothing
        self.verdicts: list[str] = []
        self.forms: list[pb.FormRequest] = []
        self.slots, self.formation = SLOTS, pb.Formation()  # of the epoch
        self.rows: list[int] = []  # that it holds
        self.room = SLOTS  # in its memory
        self.can: list[str] = []
        self.iterations: asyncio.Queue[pb.Iteration] = asyncio.Queue()
        self._reports: asyncio.Queue[pb.Report | None] = asyncio.Queue()

    def report(self, iteration: pb.Iteration, *tokens: int, **fields: Sequence[float]) -> None:
        """The iteration's batch returns. fields: others of IterationReport."""
        count = len(iteration.rows)
        assert len(tokens) in (0, count)
        result = pb.IterationReport(
            epoch=iteration.epoch, number=iteration.number, token_ids=tokens or [7] * count, **cast(Any, fields)
        )
        self._reports.put_nowait(pb.Report(iteration=result))

    def pulled(self, iteration: pb.Iteration, error: str = "") -> None:
        """The iteration has its turn, and its pull has ended."""
        self.report(iteration)
        self._reports.put_nowait(pb.Report(pulled=pb.Pulled(number=iteration.number, error=error)))

    def leave(self) -> None:
        """Says that it was asked to end."""
        self._reports.put_nowait(pb.Report(leaving=pb.Leaving()))

    def refuse(self) -> None:
        """Ends the lane as for a higher term."""
        self._reports.put_nowait(None)

    async def Watch(self, request: pb.WatchRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[pb.RankTable]:  # noqa: N802
        yield pb.RankTable(ranks=[pb.RankEntry(address=self.address, pid=self.pid)])
        await asyncio.Event().wait()

    async def Fence(self, request: pb.FenceRequest, context: grpc.aio.ServicerContext) -> pb.FenceResponse:  # noqa: N802
        self.fencing.set()
        await self.may_end.wait()
        self.verdicts.append(request.verdict)
        self.pid, self.epoch, self.iteration, self.frozen = self.pid + 1, 0, 0, False
        return pb.FenceResponse(killed=True)

    async def Hello(self, request: pb.HelloRequest, context: grpc.aio.ServicerContext) -> pb.HelloResponse:  # noqa: N802
        await self.may_greet.wait()
        return pb.HelloResponse(
            protocol=PROTOCOL,
            incarnation=str(self.pid),
            host="here",
            pid=self.pid,
            epoch=self.epoch,
            iteration=self.iteration,
            slots=self.slots,
            rows=[pb.HeldRow(row=row) for row in self.rows],
            formation=self.formation,
            model_digest="digest",
            max_positions=SLOTS,
            vocab_size=256,
            can=self.can,
        )

    async def Form(self, request: pb.FormRequest, context: grpc.aio.ServicerContext) -> pb.FormResponse:  # noqa: N802
        self.forms.append(request)
        self.forming.set()
        await self.may_form.wait()
        self.formation = request.formation
        return pb.FormResponse(slots=self.room)

    async def Allocate(self, request: pb.AllocateRequest, context: grpc.aio.ServicerContext) -> pb.AllocateResponse:  # noqa: N802
        self.epoch, self.slots = request.epoch, request.slots
        return pb.AllocateResponse()

    async def Run(self, request_iterator: AsyncIterator[pb.ControlMessage], context: grpc.aio.ServicerContext) -> None:  # noqa: N802
        self._reports = asyncio.Queue()
        if self.frozen:
            await asyncio.Event().wait()
        reading = asyncio.create_task(self._read(request_iterator))
        try:
            while (report := await self._reports.get()) is not None:
                await context.write(report)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "term 9 has taken over")
        finally:
            reading.cancel()

    async def _read(self, messages: AsyncIterator[pb.ControlMessage]) -> None:
        async for message in messages:
            if message.HasField("heartbeat"):
                self._reports.put_nowait(pb.Report(heartbeat=message.heartbeat))
            else:
                self.iteration = message.iteration.number
                self.iterations.put_nowait(message.iteration)


class Bench:
    """A master at work on the rank, in this process."""

    def __init__(self, redis: RedisServer, pool: Pool, rank: Rank, engine: str) -> None:
        self.redis, self.pool, self.rank, self.pulse, self.engine = redis, pool, rank, LoopPulse(), engine
        self.recent = Recent(1 << 20).of(engine)
        self.metrics = Metrics("scheduler")

    async def start(self, settings: dict[str, Any], held: EngineState | None = None) -> None:
        """Begins a master's term."""
        term = await self.pool.acquire(self.engine, "me", held)
        assert term is not None
        numbers: dict[str, Any] = {"max_batch_size": 4} | settings
        values = SchedulerSettings(workers=self.rank.address, **numbers)
        candidate, discovery = Candidate(self.engine, (self.rank.address,)), StaticDiscovery([self.rank.address], 1)
        self.master = EngineMaster(
            *(self.engine, candidate, "me", term, None),
            *(self.pool, discovery, values, Telemetry("test"), self.pulse, Plaintext(), self.metrics),
            self.recent,
        )
        self.running = asyncio.create_task(self.master.run())

    async def succeed(self, **settings: int) -> None:
        """The master leaves, and another one with these settings follows and forms."""
        self.master.leave()
        await asyncio.wait_for(self.running, 30)
        await self.start(settings, await self.state())
        await self.formed()

    async def submit(self, name: str, prompt: list[int], count: int) -> None:
        await self.formed()
        await self.put(name, prompt, count)

    async def put(
        self, name: str, prompt: list[int], count: int, record: bytes | None = None, deadline_in: float | None = None
    ) -> None:
        """Submits, whether the engine is formed or not."""
        await self.pool.renew_endpoint("test", register=True)
        record = record or PoolRequest(request_id=name, prompt_ids=prompt, max_new_tokens=count).SerializeToString()
        size = len(prompt) + count
        answer = await self.pool.submit(
            *(name, record, "digest", size, size),
            deadline_in=deadline_in,
            detach_grace=60,
            endpoint="test",
            attempt=1,
            max_waiting=9,
        )
        assert isinstance(answer, Attached), answer

    async def position(self, name: str) -> int:
        """In the queue, from 1; 0 while it is claimed."""
        answer = await self.pool.attach(name, endpoint="test", attempt=1)
        assert isinstance(answer, Attached)
        return answer.position

    async def finish(self, name: str) -> Finish | None:
        answer = await self.pool.attach(name, endpoint="test", attempt=1)
        assert isinstance(answer, Attached)
        return answer.finish

    async def finished(self, name: str) -> list[int]:
        """Waits until it has finished; its tokens."""
        async with asyncio.timeout(60):
            while await self.finish(name) is None:
                await asyncio.sleep(0.01)
        answer = await self.pool.attach(name, endpoint="test", attempt=1)
        assert isinstance(answer, Attached)
        return [token.token_id for token in answer.tokens]

    async def iteration(self, seconds: float = 60) -> pb.Iteration:
        return await asyncio.wait_for(self.rank.iterations.get(), seconds)

    async def state(self) -> EngineState:
        engines, *_ = await self.pool.renew_scheduler("observer")
        return engines[self.engine]

    async def formed(self) -> None:
        """Waits until the engine is formed."""
        async with asyncio.timeout(60):
            while self.master.unready:
                await asyncio.sleep(0.01)


@asynccontextmanager
async def bench(rank: Rank, engine: str = "engine-0", **settings: Any) -> AsyncIterator[Bench]:
    with redis_server() as redis:
        async with Pool(redis.url, "bench", patience=PATIENCE) as pool:
            this = Bench(redis, pool, rank, engine)
            await this.start(settings)
            try:
                await rank.server.start()
                yield this
            finally:
                redis.thaw()
                this.running.cancel()
                await asyncio.wait([this.running])
                await rank.server.stop(0)


@pytest.fixture
def sure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing surer follows a refused control lane here, so that the master need not wait 3 s for it."""
    monkeypatch.setattr(timers, "DOUBT", 0.1)


@pytest.mark.usefixtures("sure")
async def test_a_deposed_master_fences_nobody() -> None:
    rank = Rank()
    async with bench(rank) as this:
        await this.formed()
        assert await this.pool.acquire("engine-0", "another", await this.state()) is not None
        rank.refuse()  # as its new master's Hello does
        await asyncio.wait_for(this.running, 30)
        assert rank.verdicts == []


async def test_a_term_that_ends_closes_its_connections() -> None:
    rank = Rank()
    async with bench(rank) as this:
        await this.formed()
        ranks = this.master._ranks
        assert ranks is not None
        channels = [pod._channel for pod in ranks._pods]
        assert await this.pool.acquire("engine-0", "another", await this.state()) is not None
        await asyncio.wait_for(this.running, 30)
        assert [channel.get_state() for channel in channels] == [grpc.ChannelConnectivity.SHUTDOWN]
        assert [rank._connection and rank._connection.closed for rank in ranks._ranks] == [True]


@pytest.mark.usefixtures("sure")
async def test_a_rank_that_is_lost_is_fenced_and_forms_again() -> None:
    rank = Rank()
    async with bench(rank) as this:
        await this.submit("r", [1, 2], 2)
        first = await this.iteration()
        rank.report(first)
        second = await this.iteration()
        rank.refuse()
        again = await this.iteration()
        assert "stage 0 rank 0 of engine-0" in rank.verdicts[0]
        assert "(host here, pid 1, " in rank.verdicts[0]
        assert again.epoch > second.epoch
        assert again.number > second.number, "a new process knows of no earlier one"
        (begins,) = again.admissions
        assert (list(begins.token_ids), begins.generated) == ([1, 2, 7], 1)


async def test_requests_of_an_earlier_master_go_back_while_a_rank_starts() -> None:
    """A rank may take two minutes to say Hello. Another engine may run them meanwhile."""
    rank = Rank()
    async with bench(rank) as this:
        await this.formed()
        rank.may_greet.clear()
        this.master.leave()
        await asyncio.wait_for(this.running, 30)
        term = await this.pool.acquire("engine-0", "other", await this.state())
        assert term is not None
        await this.put("r", [1, 2], 1)
        claimed = await this.pool.claim("engine-0", "other", term, 0, count=1, slots=SLOTS, total=SLOTS)
        assert claimed is not None
        assert len(claimed.requests) == 1
        await this.pool.release("engine-0", "other", term)
        await this.start({}, await this.state())
        async with asyncio.timeout(timers.START / 10):
            while await this.position("r") == 0:
                await asyncio.sleep(0.02)
        assert this.master.unready, "its rank has not said Hello"


async def test_a_request_that_ends_before_its_engine_forms_is_forgotten() -> None:
    """Nothing is given back for it, and nothing is kept."""
    rank = Rank()
    async with bench(rank) as this:
        await this.formed()
        await this.submit("r", [1, 2], 2)
        await this.iteration()
        rank.may_greet.clear()
        this.master.leave()
        rank.report(pb.Iteration(epoch=rank.epoch, number=rank.iteration, rows=[0]))
        await this.running
        await this.start({}, await this.state())
        async with asyncio.timeout(timers.KEEP_CLAIMS):
            while not this.master.lifecycle.unadmitted:
                await asyncio.sleep(0)
            await this.pool.cancel("r")
            while this.master.lifecycle.unadmitted:
                await asyncio.sleep(0.01)
        assert not this.master._ledger.outputs.held


async def test_tokens_of_an_engine_that_was_lost_are_not_taken() -> None:
    """They were on their way when the verdict came. The request is another engine's by now."""
    rank = Rank()
    async with bench(rank) as this:
        await this.submit("r", [1, 2], 2)
        iteration = await this.iteration()
        master = this.master
        master.lifecycle.lost_by = "gone"
        master._tell_core(EngineLost(master._now))
        report = pb.IterationReport(epoch=iteration.epoch, number=iteration.number, token_ids=[7])
        master._returned.append(Returned(master._now, report))
        master._take_returned()
        assert not master._returned
        assert not this.running.done()
        assert not master.core.requests


async def test_a_request_whose_mask_is_late_runs_its_last_position_again() -> None:
    """The token in its place is not taken."""
    rank = Rank()
    async with bench(rank) as this:
        await this.submit("r", [1, 2], 2)
        rank.report(await this.iteration(), 2, waiting=[0])
        for _ in range(2):
            again = await this.iteration()
            assert (list(again.starts), list(again.counts), list(again.outputs)) == ([1], [1], [1])
            rank.report(again, 2, waiting=[0])
        rank.report(await this.iteration(), 8)
        rank.report(await this.iteration(), 9)
        assert await this.finished("r") == [8, 9]


async def test_the_core_waits_for_a_pool_that_is_far_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a long outage would cost memory without a bound, and as many tokens if this process died."""
    monkeypatch.setattr("orca_scheduler.master.ledger.MAX_BEHIND", 2)
    rank = Rank()
    async with bench(rank) as this:
        await this.submit("r", [1, 2], 9)
        iteration, made = await this.iteration(), 0
        this.redis.freeze()
        while True:
            rank.report(iteration)
            made += 1
            next_one = asyncio.create_task(this.iteration())
            async with asyncio.timeout(60):
                while not (next_one.done() or this.master._returned):
                    await asyncio.sleep(0.01)
            if this.master._returned:
                break
            iteration = await next_one
            assert made < 9, "nothing held the core up"
        assert made == 4  # the third comes while two are behind, the fourth is held back
        held: list[float] = []
        monkeypatch.setattr(this.master._pace, "held", held.append)
        thawed = this.master._now
        this.redis.thaw()
        iteration = await next_one
        assert len(held) == 1
        assert held[0] > thawed, "the outage counts for the pace"
        while made < 8:
            rank.report(iteration)
            iteration, made = await this.iteration(), made + 1
        rank.report(iteration)
        assert await this.finished("r") == [7] * 9


async def test_the_claimer_hears_of_room_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with the next answer of the pool, which may be away."""
    rank = Rank()
    async with bench(rank, max_batch_size=1) as this:
        await this.submit("r", [1], 1)
        iteration = await this.iteration()
        rooms: list[int] = []
        core = this.master.core
        monkeypatch.setattr(this.master._ledger, "claimable", lambda: rooms.append(core.room().requests))
        rank.report(iteration)
        async with asyncio.timeout(60):
            while not rooms:
                await asyncio.sleep(0.01)
        assert rooms[0] == 1


async def test_an_idle_engine_claims_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each renewal tells what waits. A read of the hints that ends without one is no reason to ask once more."""
    monkeypatch.setattr("orca_scheduler.master.ledger.HINT_WAIT", 0.01)
    claims, reads = list[str](), list[int]()
    rank = Rank()
    async with bench(rank) as this:
        await this.submit("r", [1], 1)
        rank.report(await this.iteration())
        assert await this.finished("r") == [7]
        claim, hints = this.pool.claim, this.pool.hints

        async def claimed(engine: str, *args: Any, **named: Any) -> ClaimAnswer | None:
            claims.append(engine)
            return await claim(engine, *args, **named)

        async def read(engine: str, cursor: bytes | None, *, wait: float) -> tuple[bytes, list[str]]:
            found = await hints(engine, cursor, wait=wait)
            reads.append(len(found[1]))
            return found

        monkeypatch.setattr(this.pool, "hints", read)
        async with asyncio.timeout(60):
            while 0 not in reads:  # what was hinted before has been read
                await asyncio.sleep(0.01)
        monkeypatch.setattr(this.pool, "claim", claimed)
        before = len(reads)
        async with asyncio.timeout(60):
            while len(reads) < before + 20:
                await asyncio.sleep(0.01)
        assert sum(reads[before:]) == 0
        assert claims == []
        await this.submit("s", [1], 1)
        rank.report(await this.iteration())
        assert await this.finished("s") == [7]
        assert claims


@pytest.mark.usefixtures("sure")
async def test_a_deadline_is_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes whatever the ranks do, and again until the request has ended."""
    seen: list[core.Event] = []
    async with bench(Rank()) as this:
        await this.formed()
        step = this.master.core.step

        def watched(event: core.Event) -> Sequence[core.Action]:
            seen.append(event)
            return step(event)

        monkeypatch.setattr(this.master.core, "step", watched)
        await this.put("late", [7, 3], 4, deadline_in=2.0)  # the claim comes before it
        await this.iteration()
        (held,) = this.master.held()
        async with asyncio.timeout(60):
            while len(ticks := [event for event in seen if isinstance(event, core.Tick)]) < 2:
                await asyncio.sleep(0.01)
        assert held.deadline is not None
        assert held.deadline <= ticks[0].now < ticks[1].now


async def test_requests_go_back_before_a_lost_rank_is_fenced() -> None:
    """The node of a lost rank may be gone, and its supervisor be asked in vain for seconds."""
    rank = Rank()
    rank.may_end.clear()
    async with bench(rank) as this:
        await this.submit("r", [1, 2], 2)
        await this.iteration()
        rank.refuse()
        await asyncio.wait_for(rank.fencing.wait(), 30)
        async with asyncio.timeout(60):
            while await this.position("r") == 0:
                await asyncio.sleep(0.02)
        assert rank.verdicts == [], "the fence is not answered"
        rank.may_end.set()
        await this.formed()


async def test_rows_that_wait_for_their_forms_do_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else runs: the iterations in vain are fewer and fewer, until another request comes, which waits for none
    of them."""
    rank, pauses = Rank(), list[float]()
    async with bench(rank) as this:
        loop = asyncio.get_running_loop()
        later = loop.call_later

        def noted(delay: float, callback: Callable[..., object], *args: Any, **kwargs: Any) -> asyncio.TimerHandle:
            if callback == this.master._end_pause:
                pauses.append(delay)
            return later(delay, callback, *args, **kwargs)

        monkeypatch.setattr(loop, "call_later", noted)
        await this.submit("r", [1, 2], 1)
        iterations = 0
        while max(pauses, default=0.0) < timers.VAIN:
            rank.report(await this.iteration(), waiting=[0])
            iterations += 1
            assert iterations < 25, "half of the time so far"
        assert max(pauses) == timers.VAIN
        await this.put("other", [1, 2], 1)
        while len((iteration := await this.iteration()).rows) == 1:
            rank.report(iteration, waiting=[0])
        rank.report(iteration)
        assert await this.finished("r") == await this.finished("other") == [7]


async def test_a_stuck_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timers, "STUCK", 1.0)
    rank = Rank()
    async with bench(rank) as this:
        await this.submit("r", [1, 2], 2)
        await this.iteration()  # heartbeats are answered, this iteration never is
        again = await this.iteration()
        assert len(rank.verdicts) == 1
        assert "answers and has made no progress for" in rank.verdicts[0]
        rank.report(again)
        rank.report(await this.iteration())
        await this.finished("r")


async def test_a_frozen_rank_with_a_full_window() -> None:
    rank = Rank()
    rank.frozen = True
    async with bench(rank) as this:
        await this.submit("r", [1 << 28] * 700_000, 2)  # more than gRPC takes in advance: the write waits
        assert len((await this.iteration()).admissions) == 1
        assert "has been silent for" in rank.verdicts[0]


async def test_it_leaves_while_the_engine_forms() -> None:
    rank = Rank()
    rank.may_form.clear()
    async with bench(rank) as this:
        await asyncio.wait_for(rank.forming.wait(), 30)
        this.master.leave()
        await asyncio.wait_for(this.running, 30)
        assert (await this.state()).owner is None


async def test_a_rank_that_left_an_engine_which_never_formed_stops_no_other() -> None:
    """It says so while the engine forms: that is given up at once. The next formation fails for another reason, and the
    one after it schedules none the less."""
    rank = Rank()
    rank.may_form.clear()
    rank.room = 16
    async with bench(rank, slots=SLOTS) as this:
        await asyncio.wait_for(rank.forming.wait(), 30)
        rank.leave()
        async with asyncio.timeout(60):
            while len(rank.forms) < 2:
                await asyncio.sleep(0.01)
        assert rank.verdicts == [], "nobody is killed for it"
        assert rank.forms[1].epoch > rank.forms[0].epoch
        rank.may_form.set()
        async with asyncio.timeout(60):
            while "do not fit" not in str(this.master.unready):
                await asyncio.sleep(0.01)
        rank.room = SLOTS
        await this.submit("r", [1, 2], 1)
        rank.report(await this.iteration(), 5)
        assert await this.finished("r") == [5]


async def test_a_standing_epoch_is_kept() -> None:
    """Its ranks were formed as the new master would form them, whatever that is about the master alone."""
    rank = Rank()
    async with bench(rank, block_size=32, slots=4096) as this:
        await this.formed()
        epoch = rank.epoch
        for settings in ({"block_size": 32, "slots": 4096}, {"block_size": 32}, {"block_size": 32, "run_ahead": 1}):
            await this.succeed(**settings)
            assert (rank.epoch, len(rank.forms), this.master.core.memory.n_slots) == (epoch, 1, 4096)


async def test_rows_of_an_earlier_master_are_freed_in_a_kept_epoch() -> None:
    """Once: with the first iteration."""
    rank = Rank()
    async with bench(rank) as this:
        await this.formed()
        epoch, rank.rows = rank.epoch, [3, 5]
        await this.succeed()
        assert rank.epoch == epoch
        await this.submit("r", [1, 2], 2)
        first = await this.iteration()
        assert list(first.free_rows) == [3, 5]
        rank.report(first)
        assert list((await this.iteration()).free_rows) == []


@pytest.mark.parametrize(
    ("settings", "slots"),
    [({"block_size": 64, "slots": 4096}, 4096), ({"block_size": 32, "slots": 2048}, 2048)],
    ids=["block_size", "slots"],
)
async def test_an_epoch_of_other_settings_is_not_kept(settings: dict[str, int], slots: int) -> None:
    rank = Rank()
    async with bench(rank, block_size=32, slots=4096) as this:
        await this.formed()
        epoch = rank.epoch
        await this.succeed(**settings)
        assert rank.epoch > epoch
        assert [form.epoch for form in rank.forms] == [epoch, rank.epoch]
        assert (rank.formation.block_size, rank.slots) == (settings["block_size"], slots)
        assert this.master.core.memory.n_slots == slots


async def test_a_kept_epoch_runs_by_the_new_master_s_policy() -> None:
    """With all that hangs on it: the request that goes on, and what the pool says of the engine."""
    rank = Rank()
    rank.can = [PARTS, GROWN, SHARED, OUTPUTS]
    async with bench(rank, policy="paper") as this:
        await this.submit("r", [1, 2], 3)
        epoch, first = rank.epoch, await this.iteration()
        assert first.admissions[0].root == b""
        this.master.leave()
        rank.report(first, 5)
        await asyncio.wait_for(this.running, 30)
        rank.rows = [0]
        await this.start({"policy": "auto"}, await this.state())
        again = await this.iteration()
        assert (again.epoch, len(rank.forms), list(again.free_rows)) == (epoch, 1, [0])
        (begins,) = again.admissions
        assert (list(begins.token_ids), begins.generated, begins.root.hex()) == ([1, 2, 5], 1, root_of("tenant "))
        [info] = await this.pool.engine_infos()
        assert info.policy == this.master.core.policy.name == fitting(rank.can, 4, 0).name
        identity = await this.pool.identity()
        assert identity is not None
        assert (identity.prefix, identity.reservation) == ("tenant", Reservation(16, output=False))
        rank.report(again, 6)
        rank.report(await this.iteration(), 7)
        assert await this.finished("r") == [5, 6, 7]


async def test_auto_is_what_the_model_can_do_and_changes_with_it() -> None:
    rank = Rank()
    async with bench(rank, policy="auto", max_batch_size=5) as this:
        await this.formed()
        assert this.master.core.policy == PAPER
        rank.can = [PARTS, GROWN, SHARED, OUTPUTS]
        await this.succeed(block_size=8)  # forms anew
        [info] = await this.pool.engine_infos()
        assert info.policy == this.master.core.policy.name == fitting(rank.can, 4, 0).name
        await this.submit("a", list(range(5, 205)), 2)
        iteration = await this.iteration()
        assert (list(iteration.counts), list(iteration.outputs)) == ([128], [0])  # a part of the prompt


async def test_an_engine_with_a_role_forms_whatever_the_cut_of_the_others() -> None:
    """Both roles get another cut: one of the engines must be the first."""
    rank = Rank()
    rank.can = ["handed", "keyed"]
    rank.may_greet.clear()
    async with bench(rank, roles="prefill=1,decode=1") as this:
        term = await this.pool.acquire("engine-1", "another", None)
        assert term is not None
        await this.pool.renew("engine-1", "another", term, form=EngineInfo("engine-1", 2, 1, 64, 1, role="decode"))
        rank.may_greet.set()
        await this.formed()
        assert rank.formation.hands_over


async def test_who_had_begun_a_request_hears_that_it_begins_here(caplog: pytest.LogCaptureFixture) -> None:
    """After a pull that has failed, and after one that was not tried. Pulls that were under way together are one
    pause, and one warning."""
    rank = Rank()
    rank.can = ["handed", "keyed"]
    async with bench(rank, "engine-1", roles="prefill=1,decode=1", max_batch_size=5) as this:
        await this.formed()
        term = await this.pool.acquire("engine-0", "other", None)
        assert term is not None
        form = EngineInfo("engine-0", 1, 1, 64, 1, role="prefill")
        await this.pool.renew("engine-0", "other", term, form=form)
        heard, handed, let_go, cursor = 0, list[str](), list[str](), None

        async def hand_over(*names: str) -> None:
            nonlocal heard
            for name in names:
                await this.put(name, [1, 2], 2)
            answer = await this.pool.claim("engine-0", "other", term, heard, count=4, slots=64, total=64)
            assert answer is not None
            assert [held.request_id for held in answer.requests] == list(names)
            heard = answer.last_claim
            for held in answer.requests:
                handed.append(f"{LET_GO}{held.claim}")
                where = pb.Handed(engine="engine-0", epoch=1, claim=held.claim, positions=2).SerializeToString()
                row = CommitRow(held.request_id, held.claim, 0, TOKEN.pack(7, 0.0, 1), None, handed=where)
                await this.pool.commit("engine-0", "other", term, [row])

        async def all_let_go() -> None:
            nonlocal cursor
            async with asyncio.timeout(60):
                while len(let_go) < len(handed):
                    cursor, hints = await this.pool.hints("engine-0", cursor, wait=1.0)
                    let_go.extend(hint for hint in hints if hint.startswith(LET_GO))
            assert sorted(let_go) == sorted(handed)

        await hand_over("a", "b", "c", "d")
        for pull in [await this.iteration() for _ in "abcd"]:
            assert pull.HasField("pull")
            rank.pulled(pull, "the other one is gone")
        await all_let_go()  # the master has seen all four fail: what comes now is not pulled
        await hand_over("e")
        await all_let_go()
        begun = 0
        while begun < len(handed):
            iteration = await this.iteration()
            begun += len(iteration.admissions)
            rank.report(iteration)
        for name in "abcde":
            assert await this.finished(name) == [7, 7]
        pulls = {key[1]: counter.value for key, counter in this.metrics._counters["orca_pulls_total"].items()}
        assert pulls == {"done": 0, "failed": 4, "skipped": 1}
    assert sum("pulls fail one after the other" in line for line in caplog.messages) == 1


async def test_an_epoch_that_returns_tokens_is_not_kept_for_one_that_does_not() -> None:
    rank = Rank()
    async with bench(rank) as this:
        await this.formed()
        epoch, rank.formation.return_tokens = rank.epoch, True
        await this.succeed(run_ahead=1)  # one rank has its own tokens
        assert [form.epoch for form in rank.forms] == [epoch, rank.epoch]
        assert rank.epoch > epoch
        assert not rank.formation.return_tokens


def increments(iteration: pb.Iteration) -> list[tuple[int, int]]:
    return [
        (row, start)
        for row, start, count in zip(iteration.rows, iteration.starts, iteration.counts, strict=True)
        if start and count == 1
    ]


async def test_increments_carry_tokens() -> None:
    rank = Rank()
    async with bench(rank) as this:
        await this.submit("r", [1, 2], 3)
        sent = [await this.iteration()]
        for token in (11, 12):
            rank.report(sent[-1], token)
            sent.append(await this.iteration())
        rank.report(sent[-1], 13)
        assert [increments(i) for i in sent] == [[], [(0, 2)], [(0, 3)]]
        assert [list(i.tokens) for i in sent] == [[], [11], [12]]
        assert await this.finished("r") == [11, 12, 13]


async def test_increments_without_tokens() -> None:
    """A run-ahead: each iteration is sent before the one before it is reported, and says where its tokens stand."""
    rank = Rank()
    async with bench(rank, run_ahead=1) as this:
        await this.submit("r", [1, 2], 4)
        sent = [await this.iteration(), await this.iteration()]
        for token in (11, 12):
            rank.report(sent[-2], token)
            sent.append(await this.iteration())
        assert [increments(i) for i in sent] == [[], [(0, 2)], [(0, 3)], [(0, 4)]]
        assert [list(i.tokens) for i in sent] == [[], [], [], []]
        rank.report(sent[-2], 13)
        rank.report(sent[-1], 14)
        assert await this.finished("r") == [11, 12, 13, 14]
        assert rank.iterations.empty()
        await this.submit("next", [3], 1)
        assert list((await this.iteration()).free_rows) == [0]


@pytest.mark.parametrize("run_ahead", [0, 1])
async def test_tokens_of_a_mixed_batch_find_their_requests(run_ahead: int) -> None:
    """The ranks answer for the newcomer first, though it came later; nobody's phase is told by a token."""
    rank = Rank()
    async with bench(rank, run_ahead=run_ahead) as this:
        await this.submit("a", [1, 2], 3 + run_ahead)
        first = [await this.iteration() for _ in range(1 + run_ahead)]
        await this.submit("b", [3], 1)
        async with asyncio.timeout(60):
            while len(this.master.core.requests) < 2:
                await asyncio.sleep(0.01)
        rank.report(first[0], 11)
        mixed = await this.iteration()
        assert (len(mixed.admissions), len(mixed.rows)) == (1, 2)
        if run_ahead:
            rank.report(first[1], 12)
            last = await this.iteration()
            rank.report(mixed, 90, 13)
        else:
            rank.report(mixed, 90, 12)
            last = await this.iteration()
        rank.report(last, 13 + run_ahead)
        assert await this.finished("b") == [90]
        assert await this.finished("a") == list(range(11, 14 + run_ahead))


async def test_what_waits_for_room_is_claimed_when_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once: not after a look at the hints. Those cannot be had, and are asked for again after a pause."""
    monkeypatch.setattr("orca_scheduler.master.ledger.HINT_WAIT", 0.05)
    rank = Rank()
    looks, asked = asyncio.Event(), 0

    async def away(*_: Any, **__: Any) -> tuple[bytes, list[str]]:
        nonlocal asked
        asked += 1
        looks.set()
        if asked == 1000:
            await asyncio.Event().wait()  # without a pause nothing else would run
        raise Unavailable("the pool is away")

    async with bench(rank, max_batch_size=1) as this:
        await this.submit("first", [1], 1)
        running = await this.iteration()
        await this.submit("second", [2], 1)
        async with asyncio.timeout(60):  # until the master has heard of it: there is no room
            while not this.master._ledger._needs:
                await asyncio.sleep(0.01)
        monkeypatch.setattr(this.pool, "hints", away)
        await asyncio.wait_for(looks.wait(), 30)
        rank.report(running)
        await this.iteration()
    assert asked < 1000


@pytest.mark.usefixtures("sure")
async def test_a_claim_that_nobody_heard_of_goes_back_while_the_engine_cannot_form() -> None:
    """The answer of its last claim was lost with the ranks. The engine does not claim again, so a renewal must tell."""
    rank = Rank()
    async with bench(rank) as this:
        await this.formed()
        rank.may_form.clear()
        rank.refuse()
        async with asyncio.timeout(60):
            while len(rank.forms) < 2:
                await asyncio.sleep(0.01)
        await this.put("r", [1, 2], 1)
        term = (await this.state()).term
        lost = await this.pool.claim("engine-0", "me", term, 0, count=1, slots=SLOTS, total=SLOTS)
        assert lost is not None
        assert [claimed.request_id for claimed in lost.requests] == ["r"]
        async with asyncio.timeout(60):
            while await this.position("r") == 0:
                await asyncio.sleep(0.01)


async def test_logits_that_are_not_finite_end_their_request() -> None:
    """Without the token that stands at their position; it is counted. The other request goes on."""
    rank = Rank()
    async with bench(rank) as this:
        await this.formed()
        await this.submit("bad", [1], 3)
        first = await this.iteration()
        await this.submit("good", [1, 2], 1)
        rank.report(first, 5, not_finite=[0])
        rank.report(await this.iteration(), 6)
        assert await this.finished("good") == [6]
        assert await this.finished("bad") == []
        assert (ended := await this.finish("bad")) is not None
        assert ended.reason is Reason.NOT_FINITE
        assert this.master.not_finite == 1


async def test_the_latest_events_are_in_memory() -> None:
    """Without a run folder too; and the requests that the engine has can be listed."""
    rank = Rank()
    async with bench(rank) as this:
        await this.submit("r", [1], 3)
        await this.iteration()
        assert set(request_names(map(parse, this.recent.lines(0))).values()) == {"r"}
        [request] = this.master.requests()
        assert (request["request"], request["engine"], request["max_new_tokens"]) == ("r", "engine-0", 3)


async def test_no_journal_has_tokens_of_prompts(tmp_path: Path) -> None:
    """By the default policy: not those behind the last full block, nor in drafts, which the ranks alone get."""
    rank, secret = Rank(), list(range(10**9, 10**9 + 18))
    rank.can = [PARTS, GROWN, SHARED, OUTPUTS]
    prompt, made = [1, 2, 3, *secret], [1, 2, 3, *[9] * 9]
    async with bench(rank, policy="auto", run_dir=str(tmp_path)) as this:
        await this.submit("r", prompt, len(made))
        for token in made[:3]:
            rank.report(await this.iteration(), token)
        iteration = await this.iteration()
        assert (list(iteration.outputs), list(iteration.drafts)) == ([5], secret[:4])
        rank.report(iteration, 9)
        for token in made[4:]:
            rank.report(await this.iteration(), token)
        assert await this.finished("r") == made
    [path] = tmp_path.iterdir()
    assert not {str(token) for token in secret} & set(re.findall(r"\d+", path.read_text()))
    lines = list(read(path))
    events = [line.event for line in lines if isinstance(line, CoreStep)]
    [arrived] = [event for event in events if isinstance(event, core.Arrived)]
    keys = keys_of(root_of("tenant "), [*prompt, *made], 16)
    assert arrived.requests[0].prefix == keys[:2]
    [claim] = [request.claim for request in arrived.requests]
    assert [event.keys for event in events if isinstance(event, BatchReturned) and event.keys] == [((claim, keys[2]),)]


async def test_with_a_run_ahead_blocks_of_answers_have_no_keys(tmp_path: Path) -> None:
    """Ranks know the tokens of others too late, and would refuse a row that begins behind such a block."""
    rank, prompt, made = Rank(), [5] * 20, list(range(30, 65))
    rank.can = [PARTS, GROWN, SHARED, OUTPUTS]
    async with bench(rank, policy="prefix=tenant", run_ahead=1, run_dir=str(tmp_path)) as this:
        await this.submit("r", prompt, len(made))
        for token in made:
            rank.report(await this.iteration(), token)
        assert await this.finished("r") == made
    [path] = tmp_path.iterdir()
    events = [line.event for line in read(path) if isinstance(line, CoreStep)]
    [arrived] = [event for event in events if isinstance(event, core.Arrived)]
    assert arrived.requests[0].prefix == keys_of(root_of("tenant "), prompt, 16)
    assert [event.keys for event in events if isinstance(event, BatchReturned)] == [()] * len(made)


async def test_the_journal_of_an_idle_engine_is_whole(tmp_path: Path) -> None:
    """While its master lives on."""
    rank = Rank()
    async with bench(rank, run_dir=str(tmp_path)) as this:
        await this.submit("r", [1], 1)
        rank.report(await this.iteration(), 5)
        assert await this.finished("r") == [5]
        [path] = tmp_path.iterdir()
        events = [line.event for line in read(path) if isinstance(line, CoreStep)]
        assert [event.made for event in events if isinstance(event, BatchReturned)]


async def test_the_journal_has_the_step_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own fault in what follows it: no report of a rank gets as far."""

    def fail(*_: object) -> None:
        raise ValueError("a fault")

    rank = Rank()
    async with bench(rank, run_dir=str(tmp_path)) as this:
        await this.submit("r", [1], 3)
        iteration = await this.iteration()
        monkeypatch.setattr(this.master, "_commit", fail)
        rank.report(iteration, 5)
        with pytest.raises(ValueError, match="a fault"):
            await asyncio.wait_for(this.running, 30)
    [path] = tmp_path.iterdir()
    steps = [line for line in read(path) if isinstance(line, CoreStep)]
    assert isinstance(steps[-1].event, BatchReturned)


async def test_sampling_goes_to_the_ranks_as_it_is() -> None:
    """Also what this scheduler does not know: an endpoint and the ranks may be of a newer release."""
    rank, newer = Rank(), bytes([0xA0, 0x3F, 7])  # a varint 7 of field 1012
    asked = SamplingParams(temperature=0.5, top_k=3, top_p=0.25, seed=2**64 - 1, min_p=0.125, logprobs=True)
    asked.repetition_penalty, asked.presence_penalty, asked.frequency_penalty = 1.5, 0.5, -0.5
    asked.logit_bias[7] = -100.0
    asked.MergeFromString(newer)
    record = PoolRequest(request_id="r", prompt_ids=[1], max_new_tokens=1, sampling=asked).SerializeToString()
    async with bench(rank) as this:
        await this.formed()
        await this.put("r", [1], 1, record)
        [sent] = (iteration := await this.iteration()).admissions
        rank.report(iteration, 5)
        assert sent.sampling.SerializeToString() == asked.SerializeToString()
        assert newer in sent.sampling.SerializeToString()
        await this.put("plain", [2], 1)
        [sent] = (await this.iteration()).admissions
        assert not sent.HasField("sampling")


async def test_an_unreadable_record_ends_as_poison() -> None:
    """The master goes on."""
    rank = Rank()
    async with bench(rank) as this:
        await this.formed()
        await this.put("bad", [1], 1, record=b"\xff")
        await this.put("good", [1, 2], 1)
        rank.report(await this.iteration(), 5)
        assert await this.finished("good") == [5]
        assert await this.finished("bad") == []
        assert (ended := await this.finish("bad")) is not None
        assert ended.reason is Reason.INTERNAL


async def test_an_unreadable_record_ends_at_a_takeover() -> None:
    """The next master finds it among the claims of its engine."""
    rank = Rank()
    async with bench(rank) as this:
        await this.formed()
        this.master.leave()
        await asyncio.wait_for(this.running, 30)
        term = await this.pool.acquire("engine-0", "other", await this.state())
        assert term is not None
        await this.put("bad", [1], 1, record=b"\xff")
        claimed = await this.pool.claim("engine-0", "other", term, 0, count=9, slots=SLOTS, total=SLOTS)
        assert claimed is not None
        assert [request.request_id for request in claimed.requests] == ["bad"]
        await this.pool.release("engine-0", "other", term)
        await this.start({}, await this.state())
        assert await this.finished("bad") == []
        assert (ended := await this.finish("bad")) is not None
        assert ended.reason is Reason.INTERNAL


async def test_a_claim_that_was_given_back_is_not_run() -> None:
    rank = Rank()
    async with bench(rank) as this:
        await this.formed()
        this.master._inbox.put(Claimed(0.0, (5,)))
        await this.submit("r", [1, 2], 1)
        assert [i.claim for i in (await this.iteration()).admissions] != [5]
        assert not this.running.done()


async def test_what_returned_is_committed_before_the_release() -> None:
    rank = Rank()
    async with bench(rank) as this:
        await this.submit("r", [1, 2], 2)
        running = await this.iteration()
        this.redis.freeze()
        this.master.leave()
        async with asyncio.timeout(60):
            while not this.master.core._draining:
                await asyncio.sleep(0.01)
        rank.report(running)
        this.redis.thaw()
        await asyncio.wait_for(this.running, 30)
        assert (await this.state()).owner is None
        answer = await this.pool.attach("r", endpoint="test", attempt=1)
        assert isinstance(answer, Attached)
        assert [token.token_id for token in answer.tokens] == [7]


async def test_the_release_waits_for_the_pool() -> None:
    rank = Rank()
    async with bench(rank) as this:
        await this.formed()
        this.redis.freeze()
        this.master.leave()
        done, _ = await asyncio.wait([this.running], timeout=3 * PATIENCE)
        assert not done
        this.redis.thaw()
        await asyncio.wait_for(this.running, 30)
        assert (await this.state()).owner is None


@asynccontextmanager
async def open_ledger() -> AsyncIterator[tuple[RedisServer, Pool, Ledger]]:
    """A ledger of engine `e` without a master; its committing task runs."""
    posted: list[News] = []

    with redis_server() as redis:
        async with Pool(redis.url, "bench", patience=PATIENCE) as pool:
            term = await pool.acquire("e", "me", None)
            assert term is not None
            await pool.renew("e", "me", term, form=EngineInfo("e", 1, 1, 64, 0))
            await pool.renew_endpoint("test", register=True)
            record = PoolRequest(request_id="r", prompt_ids=[1], max_new_tokens=9).SerializeToString()
            await pool.submit(
                *("r", record, "d", 10, 10),
                deadline_in=None,
                detach_grace=60,
                endpoint="test",
                attempt=1,
                max_waiting=9,
            )
            await pool.claim("e", "me", term, 0, count=1, slots=64, total=64)
            ledger = Ledger(
                pool, "e", "me", term, lambda: pytest.fail("no claims here"), lambda: NO_LOAD, posted.append, UNCOUNTED
            )
            await ledger._open(taken_over=False)
            (opened,) = posted
            assert isinstance(opened, Opened)
            assert (opened.epoch, opened.claims, opened.taken_over) == (0, tuple(ledger.outputs.held), False)
            committing = asyncio.create_task(ledger._committing())
            yield redis, pool, ledger
            committing.cancel()
            other = [news for news in posted[1:] if not isinstance(news, PoolAway | PoolBack)]
            assert not other, "there was other news"


async def test_the_next_claim_waits_for_the_last_one_and_for_no_empty_inbox() -> None:
    """The master's inbox may never be empty: iterations return all the time. It says when it has admitted a claim."""
    inbox: list[News] = []
    with redis_server() as redis:
        async with Pool(redis.url, "bench", patience=PATIENCE) as pool:
            term = await pool.acquire("e", "me", None)
            assert term is not None
            ledger = Ledger(pool, "e", "me", term, lambda: Room(1, 64), lambda: NO_LOAD, inbox.append, UNCOUNTED)
            await ledger.formed(EngineInfo("e", 1, 1, 64, 0), 0)
            await pool.renew_endpoint("test", register=True)
            for name in ("a", "b"):
                record = PoolRequest(request_id=name, prompt_ids=[1], max_new_tokens=1).SerializeToString()
                await pool.submit(
                    *(name, record, "d", 2, 2),
                    deadline_in=None,
                    detach_grace=60,
                    endpoint="test",
                    attempt=1,
                    max_waiting=9,
                )
            claiming = asyncio.create_task(ledger._claiming())
            for count in (1, 2):
                async with asyncio.timeout(60):
                    while len(inbox) < count:
                        await asyncio.sleep(0.01)
                ledger.claimable()  # requests wait, and there seems to be room
                await pool.cancel("nobody")  # an exchange later
                asked = ledger._claim_sent or len(inbox) > count
                assert not asked, "nothing is claimed before the core knows of the last claim"
                ledger.admitted()
                ledger.claimable()
            claiming.cancel()


async def reserved(pool: Pool) -> int:
    return int(await pool._link.command("HGET", f"{Keys('bench').prefix}engine:e", "reserved"))


async def test_flush_waits_for_a_commit_under_way() -> None:
    async with open_ledger() as (redis, pool, ledger):
        (claim,) = ledger.outputs.held
        redis.freeze()
        ledger.outputs.append(claim, TOKEN.pack(7, 0.0, 1), None)  # as after "have N": no iteration more is behind
        ledger._committer.set()
        while ledger.outputs.dirty:
            await asyncio.sleep(0)
        flushing = asyncio.create_task(ledger._flush())
        done, _ = await asyncio.wait([flushing], timeout=0.2)
        assert not done
        redis.thaw()
        await asyncio.wait_for(flushing, 30)
        answer = await pool.attach("r", endpoint="test", attempt=1)
        assert isinstance(answer, Attached)
        assert len(answer.tokens) == 1


async def test_a_claim_whose_answer_is_under_way_is_no_orphan() -> None:
    """A renewal tells of it first."""
    async with open_ledger() as (_, pool, ledger):
        record = PoolRequest(request_id="s", prompt_ids=[1], max_new_tokens=9).SerializeToString()
        await pool.submit(
            *("s", record, "d", 10, 10), deadline_in=None, detach_grace=60, endpoint="test", attempt=1, max_waiting=9
        )
        claimed = await pool.claim("e", "me", ledger._term, ledger._last_claim, count=1, slots=64, total=64)
        assert claimed is not None
        assert len(claimed.requests) == 1
        ledger._answered.clear()
        renewing = asyncio.create_task(ledger._renewing())
        await asyncio.wait_for(ledger._answered.wait(), 30)
        renewing.cancel()


async def test_a_claim_that_was_heard_during_a_renewal_is_kept() -> None:
    """The renewal's answer is older."""
    async with open_ledger() as (_, _, ledger):
        ((claim, held),) = ledger.outputs.held.items()
        ledger._answered.clear()
        renewing = asyncio.create_task(ledger._renewing())
        await asyncio.sleep(0)  # it is sent
        ledger.outputs.add(replace(held.claimed, claim=claim + 1), 0.0)
        await asyncio.wait_for(ledger._answered.wait(), 30)
        renewing.cancel()
        assert list(ledger.outputs.held) == [claim, claim + 1]


async def test_claims_are_told_again_after_an_outage() -> None:
    """A Redis that came back may hold an older set under the version that the ledger knows."""
    async with open_ledger() as (redis, pool, ledger):
        renewing = asyncio.create_task(ledger._renewing())
        async with asyncio.timeout(60):
            while not ledger._claims_version:
                await asyncio.sleep(0.01)
        known = await pool.renew("e", "me", ledger._term, known=ledger._claims_version)
        assert known is not None
        assert known.claims is None, "a renewal names the version, and hears nothing"
        before = ledger._claims_generation
        redis.restart()
        async with asyncio.timeout(60):
            while ledger._claims_generation == before:
                await asyncio.sleep(0.01)
        renewing.cancel()


async def test_an_engine_waits_for_a_pool_that_is_far_behind() -> None:
    news: list[News] = []
    async with Pool("redis://127.0.0.1:9", "bench") as pool:
        ledger = Ledger(pool, "e", "me", 1, lambda: Room(0, 0), lambda: NO_LOAD, news.append, UNCOUNTED)
        ledger._reserved = RESERVE
        for _ in range(MAX_BEHIND):
            ledger.committable()
        assert ledger.keeps_up(1)
        ledger.committable()
        assert not ledger.keeps_up(1)
        assert news == []
        ledger._pool_answered()
        assert [type(item) for item in news] == [CaughtUp]


async def test_a_new_epoch_is_above_all_that_the_ranks_have_seen() -> None:
    async with open_ledger() as (_, _, ledger):
        assert (
            await ledger.new_epoch(1 << 52) == (1 << 52) + 1
        )  # ranks that an older Redis formed, whose clock was ahead


async def test_a_formed_engine_has_its_numbers_reserved() -> None:
    async with open_ledger() as (_, pool, ledger):
        # The ranks stand above all that the pool knows.
        assert await ledger.formed(EngineInfo("e", 1, 1, 64, 1), 5_000_000) == 5_000_001
        assert await reserved(pool) >= 5_000_001 + RESERVE


async def test_a_forgotten_reserve_is_asked_for_again() -> None:
    async with open_ledger() as (_, pool, ledger):
        await ledger.formed(EngineInfo("e", 1, 1, 64, 1), 1000)
        await pool._link.command("HSET", f"{Keys('bench').prefix}engine:e", "reserved", 10)
        renewing = asyncio.create_task(ledger._renewing())  # the first renewal finds it, the next one reserves
        async with asyncio.timeout(60):
            while await reserved(pool) < 1000 + RESERVE:
                await asyncio.sleep(0.02)
        renewing.cancel()


async def test_confirm_hears_of_a_takeover() -> None:
    async with open_ledger() as (_, pool, ledger):
        await ledger.confirm()
        engines, *_ = await pool.renew_scheduler("observer")
        assert await pool.acquire("e", "another", engines["e"]) is not None
        with pytest.raises(Deposed):
            await ledger.confirm()
