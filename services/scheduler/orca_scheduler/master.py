"""The engine master: drives one engine through one term of its lease (DESIGN sections 3, 5 and 6).

One task at a time owns the core and applies events one after another; others talk to it through its inbox.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from orca.v1 import worker_pb2 as pb
from orca_common.errors import FailedPrecondition, Unavailable
from orca_common.service import LoopPulse, cancel
from orca_common.telemetry import Telemetry
from orca_pool.pool import Pool
from orca_pool.records import Claimed, EngineInfo, Reason
from orca_pool.wire import TOKEN

from .core import (
    Action,
    Arrived,
    BatchReturned,
    Cancelled,
    Commit,
    Core,
    Drain,
    EngineLost,
    EngineReady,
    Event,
    GiveBack,
    ScheduleBatch,
    Tick,
)
from .discovery import Candidate, Place
from .invariants import violations
from .journal import Journal
from .ledger import Deposed, Ledger
from .output import Held
from .rank import Seen
from .ranks import RankLost, Ranks
from .request import Arrival, Phase
from .settings import SchedulerSettings
from .tracing import Tracing

log = logging.getLogger(__name__)
REFORM_SECONDS, LONGEST_SECONDS = 0.2, 5.0  # between attempts to form the engine: first, longest
TICK_SECONDS = 0.05  # resolution of deadlines


# What a note of an iteration's times holds for each rank, in this order.
TIMES = (
    "stage",
    "tensor_rank",
    "received",
    "taken",
    "started",
    "computed",
    "sent",
    "control_bytes",
    "data_bytes",
    "waited",
)


class InFlight(NamedTuple):
    """A batch on the ranks: its claims in the core's order, and where the report has each one's token."""

    claims: tuple[int, ...]
    places: tuple[int, ...]


class EngineMaster:
    """Masters one engine until it is deposed, or has left after `leave`."""

    def __init__(
        self,
        candidate: Candidate,
        owner: str,
        term: int,
        taken_over: bool,
        pool: Pool,
        settings: SchedulerSettings,
        telemetry: Telemetry,
        pulse: LoopPulse,
    ) -> None:
        self.engine, self._candidate, self._term = candidate.engine, candidate, term
        self._taken_over = taken_over  # from an owner who had not released it
        self._pool, self._settings, self._pulse = pool, settings, pulse
        self._core = Core(settings.max_batch_size, settings.pp, settings.block_size, settings.run_ahead)
        self._ledger = Ledger(
            pool, self.engine, owner, term, settings.block_size, self._core.room, self._arrived, self._tell
        )
        self._inbox: asyncio.Queue[tuple[Event, pb.IterationReport | None]] = asyncio.Queue(1024)
        self._leaving = asyncio.Event()
        self.unready: str | None = f"{self.engine} is being formed"  # for the status port
        self._ranks: Ranks | None = None  # None: not formed
        self._seen: dict[Place, Seen] = {}
        self._epoch = 0
        self._breaking_up: str | None = None  # a rank is leaving: this engine comes to rest, and forms again without it
        self._stale_rows: list[int] = []  # that the ranks hold from an earlier master of this epoch
        self._in_flight: dict[int, InFlight] = {}  # by iteration
        self._tracing = Tracing(telemetry.tracer, self.engine) if telemetry.enabled else None
        self._journal: Journal | None = None
        if settings.run_dir is not None:
            self._journal = Journal(Path(settings.run_dir) / f"journal-{self.engine}-{term}.jsonl", self._core)

    def leave(self) -> None:
        """Schedule nothing more; finish what is in flight, commit it, release the engine."""
        self._leaving.set()

    async def run(self) -> None:
        """Returns when the engine was released, or another master has taken it."""
        try:
            await self._ledger.open()
            async with asyncio.TaskGroup() as tasks:
                for part in [*self._ledger.parts(), self._ticking(), self._mastering()]:
                    tasks.create_task(part)
        except* Deposed as deposed:
            log.info("engine left", extra={"engine": self.engine, "why": str(deposed.exceptions[0])})
        finally:
            if self._journal is not None:
                self._journal.close()

    # -- formation and failure

    async def _mastering(self) -> None:
        """Forms the engine and runs it, and forms it again when a rank was lost."""
        wait = REFORM_SECONDS
        while not self._leaving.is_set():
            try:
                await self._life()
                wait = REFORM_SECONDS
            except FailedPrecondition as refusal:
                self.unready, wait = f"{self.engine} cannot form: {refusal}", min(2 * wait, LONGEST_SECONDS)
                log.error("engine cannot form", extra={"engine": self.engine, "why": str(refusal)})
                await self._give_back_rest()
            except Unavailable as away:
                log.warning("pool away", extra={"engine": self.engine, "why": str(away)})
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._leaving.wait(), wait)
        await self._ledger.release()

    async def _life(self) -> None:
        """One formation, from its first greeting to the loss of a rank."""
        self._breaking_up = None
        while not self._inbox.empty():  # what an earlier life was told: least of all may its Drain stop this one
            self._inbox.get_nowait()
            self._inbox.task_done()
        heard = self._returned, self._timed, self._rank_leaves
        async with Ranks(self._candidate, self._term, self._settings, self._pulse, self._seen, *heard) as ranks:
            try:
                await self._until_one_ends(self._living(ranks), ranks.watch())
                return  # to leave, and not formed
            except RankLost as verdict:
                log.error("rank lost", extra={"engine": self.engine, "verdict": str(verdict)})
                self._note(lost=str(verdict))
                await self._ledger.confirm()  # else the ranks are another's, whom they follow
                await ranks.fence(verdict)
            finally:
                formed, self._ranks = self._ranks is not None, None
                self.unready = f"{self.engine} is being formed"
        await self._lost(formed)

    async def _living(self, ranks: Ranks) -> None:
        await self._until_one_ends(self._form(ranks), self._leaving.wait())
        if self._ranks is not None:
            await self._looping()

    async def _until_one_ends(self, *parts: Awaitable[object]) -> None:
        tasks = [asyncio.ensure_future(part) for part in parts]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await cancel(*tasks)

    async def _form(self, ranks: Ranks) -> None:
        """Makes the ranks one engine: in the epoch where they stand, if it is the pool's, else in a new one."""
        hellos = await ranks.greet()
        for hello in hellos:
            await self._pool.identify(hello.model_digest, hello.max_positions, hello.vocab_size)
        ledger, settings, stand = self._ledger, self._settings, ranks.standing()
        if stand is not None and stand.epoch == ledger.epoch:
            self._epoch, n_slots = stand.epoch, stand.slots
            self._stale_rows = list(stand.rows)
        else:
            await self._give_back_rest()
            self._epoch = await ledger.new_epoch(max(hello.epoch for hello in hellos))
            n_slots = await ranks.form(self._epoch)
            self._stale_rows = []
        first = max(ledger.iteration, *(hello.iteration for hello in hellos)) + 1
        await ledger.formed(EngineInfo(self.engine, settings.tp, settings.pp, n_slots, self._epoch), first)
        ranks.run()
        self._ranks, self._taken_over, self.unready = ranks, False, None
        self._note(formed=self._epoch, slots=n_slots, tp=settings.tp, pp=settings.pp)
        log.info("engine formed", extra={"engine": self.engine, "epoch": self._epoch, "slots": n_slots})
        await self._apply(EngineReady(self._now, n_slots, first))
        kept = [held for held in ledger.outputs.held.values() if held.finish is None]
        if kept:
            if self._tracing is not None:
                for held in kept:
                    self._tracing.taken_over(held)
            await self._apply(self._arrival(kept))

    async def _lost(self, formed: bool) -> None:
        """The engine is gone: what it had made is committed, its requests go back to the queue."""
        self._ledger.lost()
        self._in_flight.clear()
        if self._tracing is not None:
            self._tracing.lost()
        if formed:
            await self._apply(EngineLost(self._now))
        await self._give_back_rest()  # what had not reached the core

    async def _give_back_rest(self) -> None:
        """Returns what no core knows. After a takeover nobody can tell what was RUNNING: then all of it was."""
        await self._give_back(dict.fromkeys(self._ledger.outputs.held, self._taken_over))

    async def _give_back(self, running: Mapping[int, bool]) -> None:
        """Returns requests to the queue, by claim: whether each was RUNNING at a loss."""
        await self._ledger.give_back(running)
        self._left(running, "given back")

    # -- the loop

    async def _looping(self) -> None:
        """One event, its actions, and so on. Ends by RankLost or Deposed."""
        while not (self._leaving.is_set() and not self._core.in_flight):
            if self._breaking_up is not None and not self._core.in_flight:
                raise RankLost(self._breaking_up)
            event, report = await self._inbox.get()
            try:
                await self._apply(event, report)
            finally:
                self._inbox.task_done()
        await self._ledger.release()

    async def _apply(self, event: Event, report: pb.IterationReport | None = None) -> None:
        """Steps the core and does what it says."""
        if report is not None:
            await self._ledger.keep_up(report.number)
            if self._tracing is not None:
                self._tracing.returned(report)
        if isinstance(event, Cancelled):
            self._cancelled(event.claims)
        if isinstance(event, Arrived):  # without those that were given back since
            held = self._ledger.outputs.held
            event = Arrived(event.now, tuple([arrival for arrival in event.requests if arrival.claim in held]))
        actions = self._core.step(event)
        if self._journal is not None and (actions or not isinstance(event, Tick)):
            self._journal.step(event, actions)
        # The next batch first: while a commit is put together, stage 0 would wait.
        for action in sorted(actions, key=lambda action: not isinstance(action, ScheduleBatch)):
            await self._perform(action, report)
        if report is not None:
            del self._in_flight[report.number]
        self._ledger.claimable()
        if not self._core.in_flight:
            self._rest()

    async def _perform(self, action: Action, report: pb.IterationReport | None) -> None:
        match action:
            case ScheduleBatch():
                assert self._ranks is not None, "a batch was scheduled without an engine"
                self._in_flight[action.iteration] = in_flight(action)
                self._ledger.used(action.iteration)
                await self._ranks.send(self._control_message(action))
            case Commit():
                self._commit(action, report)
            case GiveBack():
                await self._give_back(dict(action.requests))

    def _control_message(self, action: ScheduleBatch) -> pb.Iteration:
        """The iteration for the ranks: new requests in full, once; increments by row, position and, unless the ranks
        have it, token."""
        message = pb.Iteration(term=self._term, epoch=self._epoch, number=action.iteration)
        message.free_rows.extend(self._stale_rows)
        self._stale_rows = []
        message.free_rows.extend(action.free_rows)
        for member in action.members:
            if member.phase is Phase.INCREMENT:
                message.increment_rows.append(member.row)
                message.increment_positions.append(member.length - 1)
                if member.token is not None:
                    message.increment_tokens.append(member.token)
                continue
            held = self._ledger.outputs.held[member.claim]
            record, generated = held.record, held.token_ids()
            message.initiations.add(
                row=member.row,
                claim=member.claim,
                token_ids=[*record.prompt_ids, *generated],
                generated=len(generated),
                blocks=member.blocks,
                temperature=record.temperature,
                top_k=record.top_k,
                top_p=record.top_p,
                seed=record.seed,
                logprobs=record.logprobs,
            )
        if self._tracing is not None:
            message.trace.update(self._tracing.scheduled(action, self._core.slots.n_slots))
        return message

    def _commit(self, action: Commit, report: pb.IterationReport | None) -> None:
        """Tokens and ends for the next commit to the pool."""
        logprobs: dict[int, float] = {}
        if action.iteration is not None:
            batch = self._in_flight[action.iteration]
            if report is not None and report.logprobs:
                logprobs = {c: report.logprobs[place] for c, place in zip(batch.claims, batch.places, strict=True)}
        for claim, _, token, finish in action.outcomes:
            logprob = logprobs.get(claim, math.nan)
            packed = b"" if token is None else TOKEN.pack(token, logprob, action.iteration)
            self._ledger.outputs.append(claim, packed, None if finish is None else Reason(int(finish)))
            if finish is not None:
                self._left([claim], finish.name)
        self._ledger.committable()

    def _cancelled(self, claims: tuple[int, ...]) -> None:
        for claim in claims:
            self._ledger.outputs.drop(claim)
        self._left(claims, "ended elsewhere")

    def _left(self, claims: Iterable[int], reason: str) -> None:
        if self._tracing is not None:
            self._tracing.ended(claims, reason)

    def _rest(self) -> None:
        """Nothing is in flight: time to look at oneself."""
        for sentence in violations(self._core):
            log.critical("invariant violated", extra={"engine": self.engine, "violation": sentence})
        if self._journal is not None:
            self._journal.flush()

    def _note(self, **fields: Any) -> None:
        """A note that is in the file at once, with the moment on both clocks: the core's, and the wall's in ns."""
        if self._journal is not None:
            self._journal.note(**fields, now=self._now, wall=time.time_ns())
            self._journal.flush()

    def _timed(self, iteration: int, times: list[pb.StageTimes]) -> None:
        """All ranks have told their times of an iteration."""
        if self._journal is not None:
            self._journal.note(iteration=iteration, times=[[getattr(t, name) for name in TIMES] for t in times])

    # -- the inbox

    async def _returned(self, report: pb.IterationReport) -> None:
        """The tokens of an iteration, from the ranks."""
        token_ids, batch = report.token_ids, self._in_flight[report.number]
        event = BatchReturned(self._now, report.number, tuple([token_ids[place] for place in batch.places]))
        await self._inbox.put((event, report))

    async def _rank_leaves(self, sentence: str) -> None:
        """A rank is asked to end: nothing more is scheduled, and nothing is lost when all batches have returned."""
        self._breaking_up = self._breaking_up or sentence
        await self._inbox.put((Drain(self._now), None))

    async def _arrived(self, requests: list[Claimed]) -> None:
        """Claimed requests, on their way to the core; returns when they are there."""
        if self._journal is not None:
            self._journal.note(claims={claimed.claim: claimed.request_id for claimed in requests})
        arrived = [self._ledger.outputs.held[claimed.claim] for claimed in requests]
        if self._tracing is not None:
            for held in arrived:
                self._tracing.claimed(held)
        await self._inbox.put((self._arrival(arrived), None))
        await self._inbox.join()

    async def _tell(self, event: Event) -> None:
        """News from the ledger. Claims that end while the engine is not formed are in no core."""
        if self._ranks is None and isinstance(event, Cancelled):
            self._cancelled(event.claims)
        else:
            await self._inbox.put((event, None))

    def _arrival(self, requests: list[Held]) -> Arrived:
        """Claimed requests as the core knows them."""
        arrivals = []
        for held in requests:
            claimed, record = held.claimed, held.record
            stops = tuple(record.stop_token_ids)
            arrivals.append(
                Arrival(
                    claim=claimed.claim,
                    arrival=claimed.arrival,
                    input_tokens=len(record.prompt_ids),
                    max_new_tokens=record.max_new_tokens,
                    generated=len(held.tokens) // TOKEN.size,
                    eos_token_ids=tuple(i for i in record.end_token_ids if i not in stops),
                    stop_token_ids=stops,
                    deadline=held.deadline,
                )
            )
        return Arrived(self._now, tuple(arrivals))

    async def _ticking(self) -> None:
        """Deadlines, and the wish to leave, as events."""
        told = False
        while True:
            await asyncio.sleep(TICK_SECONDS)
            now, held = self._now, self._ledger.outputs.held.values()
            if self._leaving.is_set() and not told:
                told = True
                await self._inbox.put((Drain(now), None))
            late = any(h.deadline is not None and h.deadline <= now for h in held)
            if self._ranks and late and self._inbox.empty():  # a loop that waits for the pool needs no second one
                await self._inbox.put((Tick(now), None))

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def in_flight(action: ScheduleBatch) -> InFlight:
    """The ranks run initiations before increments; among each kind they keep the batch's order."""
    first = [n for n, member in enumerate(action.members) if member.phase is Phase.INITIATION]
    then = [n for n, member in enumerate(action.members) if member.phase is Phase.INCREMENT]
    places = [0] * len(action.members)
    for place, n in enumerate(first + then):
        places[n] = place
    return InFlight(tuple([member.claim for member in action.members]), tuple(places))
