"""The engine master: drives one engine through one term of its lease (docs/design.md, "Engine formation and failure").

It decides nothing. The lifecycle and the core do; the master brings them what the ledger and the ranks find out, in the
order in which it came, and carries out their actions. One task owns all of that; others post to its inbox.
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from orca.v1 import worker_pb2 as pb
from orca_common.block_keys import root_by
from orca_common.errors import FailedPrecondition, Unavailable
from orca_common.metrics import Metrics
from orca_common.priorities import ABOVE_ALL
from orca_common.protocol import HANDED, SHARED
from orca_common.reservation import Reservation
from orca_common.sampling import scores_prompt
from orca_common.service import LoopPulse
from orca_common.telemetry import Telemetry
from orca_common.tls import Transport
from orca_pool.keys import tenant_of
from orca_pool.pool import Pool
from orca_pool.records import FINISHING_LOAD, NO_LOAD, EngineInfo, EngineLoad, Reason
from orca_pool.retry import reached
from orca_pool.wire import TOKEN

from .. import timers
from ..core import core
from ..core.core import (
    Adopted,
    Arrived,
    BatchReturned,
    BeginHere,
    Cancelled,
    Commit,
    Core,
    Drain,
    EngineLost,
    EngineReady,
    GiveBack,
    HandOver,
    LetGo,
    Member,
    Pull,
    Pulled,
    ScheduleBatch,
)
from ..core.drafting import MOST, POSITIONS
from ..core.invariants import violations
from ..core.policy import Policy
from ..core.request import Arrival
from ..core.roles import Role, Roles
from ..discovery.candidates import Candidate, Discovery
from ..lifecycle.events import (
    Admit,
    Allocate,
    CandidateChanged,
    Claimed,
    Confirm,
    Confirmed,
    Dial,
    EpochGiven,
    Expect,
    Fence,
    Finished,
    Form,
    Gone,
    HangUp,
    HostStore,
    Identified,
    Identify,
    LeaseLost,
    Leave,
    LifeAction,
    LifeEvent,
    Model,
    NewEpoch,
    Opened,
    Record,
    Recorded,
    Refused,
    Release,
    Replaced,
    ReplacePods,
    Rested,
    Retire,
    Run,
    Say,
    Stop,
    Wake,
)
from ..lifecycle.lifecycle import Draining, Lifecycle, Running
from ..lifecycle.progress import Durations
from ..ranks.members import put_members
from ..ranks.ranks import Ranks
from ..settings import SchedulerSettings
from .adapters import EngineAdapters
from .forecast import Forecast
from .journal import Journal, Named, path_of
from .ledger import CaughtUp, Deposed, EndedElsewhere, HandedOn, Ledger, News, Unneeded
from .metrics import EngineMetrics
from .output import Held
from .pace import Pace
from .recent import EngineRecent
from .reports import first_tokens, made_of, problem_of
from .tracing import GIVEN_BACK, HANDED_OVER, Tracing

log = logging.getLogger(__name__)


# What a note of an iteration's times holds for each rank, in this order.
TIME_FIELDS = (
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
times_of = attrgetter(*TIME_FIELDS)

NO_TOKENS: Mapping[int, int] = {}


class Sent(NamedTuple):
    """An iteration in flight."""

    members: tuple[Member, ...]  # in the ranks' order
    drafts: Sequence[int]  # theirs, one after the other


class Returned(NamedTuple):
    """News for the inbox: the tokens of an iteration."""

    now: float
    report: pb.IterationReport


Message = LifeEvent | News | core.Tick | core.Measured | core.Pulled | core.LetGo | Returned


class Inbox:
    """News in the order in which it came, for one task.

    An asyncio.Queue takes twice as long: it asks for the running loop, a system call in Python 3.11.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._news = loop, deque[Message]()
        self._waiter: asyncio.Future[None] | None = None

    @property
    def empty(self) -> bool:
        return not self._news

    def put(self, news: Message) -> None:
        self._news.append(news)
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def get(self) -> Message:
        """Waits for news."""
        while not self._news:
            self._waiter = self._loop.create_future()
            await self._waiter
        return self._news.popleft()


class EngineMaster:
    """Masters one engine until the term ends: after `leave`, or when another scheduler has the lease.

    `candidate` None: the engine is not discovered any more; its claims go back to the queue and its keys are deleted.
    `silent_term`: of an owner before who had not released the engine.
    """

    def __init__(
        self,
        engine: str,
        candidate: Candidate | None,
        owner: str,
        term: int,
        silent_term: int | None,
        pool: Pool,
        discovery: Discovery,
        settings: SchedulerSettings,
        telemetry: Telemetry,
        pulse: LoopPulse,
        transport: Transport,
        metrics: Metrics,
        recent: EngineRecent,
    ) -> None:
        self._roles = Roles.parse(settings.roles)
        role = self._roles.of(engine)
        self.engine, self.term, self.shape = engine, term, settings.shape_of(role)
        self._taken_over = candidate is not None and silent_term is not None
        self._pool, self._discovery, self._pulse = pool, discovery, pulse
        self._transport = transport
        self.lifecycle = Lifecycle(
            engine, self.shape, *_of_candidate(candidate), finish_seconds=settings.finish_seconds
        )
        self.core: Core = settings.core(role)
        self._policy_for = settings.policy_for
        self._policy = self.core.policy  # of the next formation
        self._forecast = self._forecast_of_policy()
        self._pace = Pace()
        self._metrics = EngineMetrics(metrics, engine, settings.pp, decodes=role is Role.DECODE)
        self._adapters = EngineAdapters(pool, engine, owner, term, settings.shape.ranks, self._tell_adapters)
        self._ledger = Ledger(
            pool,
            engine,
            owner,
            term,
            self.core.room,
            self.load,
            self._post,
            self._committed,
            self._yielding,
            self._adapters.changed,
        )
        self._loop = asyncio.get_running_loop()
        self._inbox = Inbox(self._loop)
        self._ranks: Ranks | None = None  # of the last life that was dialed
        self._durations = Durations()
        self._met: dict[int, int] = {}  # pid of the process that has answered a greeting, by rank
        self._epoch = 0  # that the ranks run in
        self._stale_rows: tuple[int, ...] = ()  # that the ranks hold from an earlier master of this epoch
        self._returned: deque[Returned] = deque()  # until the pool keeps up
        self._vain: pb.IterationReport | None = None  # of an iteration that made nothing, until its pause is over
        self._vain_since: float | None = None  # when the first one in a row came
        self._pull_at = 0.0  # until when the last pause of pulls is, as it was logged
        self._in_flight: dict[int, Sent] = {}  # by iteration
        self._tasks: set[asyncio.Task[None]] = set()
        self._questions: list[asyncio.Task[None]] = []  # to the pool, of this life
        self._wake: asyncio.TimerHandle | None = None
        self._deadline: asyncio.TimerHandle | None = None  # the next one of a request
        self._tick: asyncio.TimerHandle | None = None  # that the core waits for
        self._stopped: str | None = None  # why the term is over
        self._vocabulary = 0  # tokens of the model, as the ranks have told
        self.not_finite = 0  # rows of logits that held NaN or infinity
        self._failed: asyncio.Future[None] = self._loop.create_future()  # ends by the error of a task
        self._tracing = None
        if telemetry.ids is not None:
            self._tracing = Tracing(telemetry.tracer, telemetry.ids, engine, term, silent_term)
        self._show_prompts = settings.show_prompts
        path = None if settings.run_dir is None else path_of(Path(settings.run_dir), engine, term)
        self._journal = Journal(path, self.core, self.lifecycle, term, self._names, recent)

    @property
    def unready(self) -> str | None:
        """Why the engine serves nothing; None when it runs."""
        return self.lifecycle.unready

    @property
    def refusal(self) -> str | None:
        """Why its ranks refused to form the last time; None when they did not. May be asked in any thread."""
        return self.lifecycle.refusal

    @property
    def unreached_since(self) -> float | None:
        """Since when no supervisor of the engine could be reached, on the loop's clock; None: they could."""
        return self.lifecycle.unreached_since

    @property
    def slots(self) -> tuple[int, int]:
        """The engine's slots that are reserved, and all of them. May be asked in any thread."""
        memory = self.core.memory
        return memory.reserved, memory.n_slots

    def requests(self) -> list[dict[str, Any]]:
        """Returns the requests that the engine has, for people. May be asked in any thread."""
        held = self._ledger.outputs.held.copy()
        return [
            {
                "request": held[request.claim].claimed.request_id,
                "engine": self.engine,
                "submitted": held[request.claim].claimed.submitted / 1e6,
                "tokens": request.generated,
                "max_new_tokens": request.arrived.max_new_tokens,
                "iterations": request.iterations,
                "state": "waits" if request.row is None else "runs" if request.running else "between iterations",
            }
            for request in self.core.requests
            if request.claim in held
        ]

    def held(self) -> list[Held]:
        """The requests that it has claimed. May be asked in any thread."""
        return list(self._ledger.outputs.held.values())

    def load(self) -> EngineLoad:
        """The engine's load, for the pool's predictions."""
        if self.unready is not None:
            return NO_LOAD
        core, pace = self.core, self._pace.seconds
        if self.lifecycle.finishing:
            return FINISHING_LOAD
        left = min((r.arrived.max_new_tokens - r.generated for r in core.requests), default=0)
        yields = max((priority for priority, _ in self._yielding()), default=0)
        return EngineLoad(core.limits.places, core.room().slots, pace, left * pace, yields=yields)

    def _yielding(self) -> list[tuple[int, int]]:
        """(priority, order) for `Pool.claim`. By fair shares a request gives way to each one that comes before it."""
        return [(priority or ABOVE_ALL, order) for priority, order in self.core.yielding()]

    def leave(self) -> None:
        """Schedule nothing more; finish what is in flight, commit it, release the engine."""
        self._post(Leave(self._now))

    def candidate_changed(self, candidate: Candidate | None) -> None:
        """Discovery has news of the engine. None: it is to be retired."""
        self._post(CandidateChanged(self._now, *_of_candidate(candidate)))

    async def run(self) -> None:
        """Returns when the engine was released or retired, or another master has taken it."""
        failed = self._failed
        try:
            self._spawn(self._ledger.run(self._taken_over))
            self._spawn(self._adapters.follow())
            looping = self._spawn(self._serve_inbox())
            await asyncio.wait([looping, failed], return_when=asyncio.FIRST_COMPLETED)
            (failed if failed.done() else looping).result()
            log.info("engine left", extra={"engine": self.engine, "why": self._stopped})
        finally:
            for timer in filter(None, (self._wake, self._deadline, self._tick)):
                timer.cancel()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            if self._ranks is not None:
                await self._ranks.close()  # a HangUp of the last step was cancelled before it began
            if self._tracing is not None:
                self._tracing.left()
            self._journal.close()

    def _spawn(self, part: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Starts a task of this term. An error that ends it ends the master."""
        task = asyncio.ensure_future(part)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._failed.done():
            self._failed.set_exception(error)

    def _post(self, news: Message) -> None:
        self._end_pause()
        self._inbox.put(news)

    def _came(self, report: pb.IterationReport) -> None:
        """Posts the report of an iteration. Where all its rows wait for the work on their forms, the next iteration
        would be the same, and take the cores from that work: it comes after a pause of half of the time that they have
        waited, or with other news."""
        sent = self._in_flight.get(report.number)
        if not report.waiting or (sent is not None and len(report.waiting) < len(sent.members)):
            self._vain_since = None
            self._post(Returned(self._now, report))
            return
        self._end_pause()  # of the one before, if it was sent ahead
        self._vain_since = self._now if self._vain_since is None else self._vain_since
        self._vain = report
        self._loop.call_later(min((self._now - self._vain_since) / 2, timers.VAIN), self._end_pause, report)

    def _end_pause(self, of: pb.IterationReport | None = None) -> None:
        """Posts the report that waits; of: only if it is this one."""
        report = self._vain
        if report is not None and (of is None or of is report):
            self._vain = None
            self._inbox.put(Returned(self._now, report))

    # -- the loop

    async def _serve_inbox(self) -> None:
        while self._stopped is None:
            match await self._inbox.get():
                case Returned() as returned:
                    self._returned.append(returned)
                    self._take_returned()
                case CaughtUp():
                    self._take_returned(held_up=True)
                case EndedElsewhere() as ended:
                    self._end_elsewhere(ended.claims)
                case core.Tick() | core.Measured() | core.LetGo() as event:
                    self._step_core(event)
                case core.Pulled() as event:
                    if event.done:
                        self._spawn(self._ledger.pulled(event.claim))
                    self._step_core(event)
                case HandedOn() as handed:
                    if self._tracing is not None:
                        self._tracing.ended(handed.claims, HANDED_OVER, handed.moment)
                case Unneeded() as unneeded:
                    self._step_core(LetGo(self._now, unneeded.claims))
                case Claimed() as claimed:
                    self._note_claims(claimed.now, claimed.claims)
                    self._look_at_deadlines()
                    if self._tracing is not None:
                        for request in self._ledger.outputs.of(claimed.claims):
                            self._tracing.claimed(request)
                    self._step_life(claimed)
                    self._ledger.admitted()
                case Opened() as opened:
                    self._note_claims(opened.now, opened.claims)
                    self._look_at_deadlines()
                    if self._tracing is not None:
                        for request in self._ledger.outputs.of(opened.claims):
                            self._tracing.taken_over(request)
                    self._step_life(opened)
                case event:
                    self._step_life(event)
            life = self.lifecycle
            if (
                life.finish_by is not None
                and isinstance(life.state, Running)
                and self._ledger.nothing_left
                and not self.core.requests
            ):
                self._step_life(Finished(self._now, life.life))
            if isinstance(life.state, Draining) and not self.core.in_flight:
                self._step_life(Rested(self._now, life.life))

    def _take_returned(self, held_up: bool = False) -> None:
        """Gives the core what has returned, as far as the pool keeps up. held_up: it did not, until now."""
        while self._returned and self._ledger.keeps_up(self._returned[0].report.number):
            now, report = self._returned.popleft()
            if report.number != next(iter(self._in_flight), None):
                continue  # the engine was lost meanwhile, or will be: a report before this one was wrong
            outputs = self._ledger.outputs
            members, drafts = self._in_flight[report.number]
            problem = problem_of(report, members, drafts, outputs.held, self._vocabulary)
            if problem is not None:
                self._dialed.wrong(f"iteration {report.number}, which {problem}")
                continue
            if self._tracing is not None:
                self._tracing.returned(report)
            running = len(self.core.requests)
            for part in report.prompts:
                outputs.scored(members[part.index].claim, part.scores)
            firsts = first_tokens(report, members)
            if report.not_finite:
                self._note_not_finite(report, firsts)
            made = made_of(report, firsts.values())
            # A batch as large has no place for drafts, and the next one is mostly as large: then no text is read.
            drafting = self.core.policy.drafts == "ngram" and len(members) < POSITIONS
            offered = outputs.offers(firsts, made.made, MOST) if drafting else ()
            keyed = self.core.policy.prefix != "off" and not self.core.run_ahead  # ranks without tokens make no keys
            keys = outputs.keys(firsts, made.made) if keyed else ()
            event = BatchReturned(now, report.number, *made, offered, keys)
            late = self._now - now if held_up else 0.0
            began = time.perf_counter()
            actions = self.core.step(event)
            try:
                self._send_batches(actions)
                stepped = time.perf_counter() - began
                self._settle(actions, report, firsts)
            finally:
                self._record_step(event, actions, late)
            self._stepped()
            self._pace.returned(now, len(report.token_ids) - len(report.waiting), running, not self.core.in_flight)
            if held_up:
                self._pace.held(self._now)
            self._metrics.returned(report.number, self._now - now, stepped, now)
            del self._in_flight[report.number]

    def _note_not_finite(self, report: pb.IterationReport, firsts: Mapping[int, int]) -> None:
        """Counts and logs the requests whose logits were not finite. Who is stuck, its rank logs."""
        for claim in (claim for claim, first in firsts.items() if first in report.not_finite):
            self.not_finite += 1
            held = self._ledger.outputs.held.get(claim)
            log.error(
                "logits are not finite: the request ends without this token",
                extra={
                    "engine": self.engine,
                    "iteration": report.number,
                    "request": held.claimed.request_id if held is not None else None,
                },
            )

    def _step_core(self, event: core.Event) -> None:
        """Steps the core and does what it says."""
        actions = self.core.step(event)
        try:
            self._send_batches(actions)
            self._settle(actions)
        finally:
            self._record_step(event, actions)
        self._stepped()

    def _send_batches(self, actions: Iterable[core.Action]) -> None:
        """First of all, since the ranks wait for them."""
        for action in actions:
            if isinstance(action, ScheduleBatch):
                self._schedule(action)
            elif isinstance(action, Pull):
                self._pull(action)

    def _settle(
        self,
        actions: Iterable[core.Action],
        report: pb.IterationReport | None = None,
        firsts: Mapping[int, int] = NO_TOKENS,
    ) -> None:
        """Carries out the commits and ends of an event. report: that of the iteration that has returned."""
        for action in actions:
            match action:
                case Commit():
                    self._commit(action, report, firsts)
                case GiveBack():
                    self._give_back(action)
                case HandOver():
                    self._hand_over(action)
                case BeginHere():
                    self._begin_here(action)
                case ScheduleBatch() | Pull():
                    pass

    def _record_step(self, event: core.Event, actions: Sequence[core.Action], late: float = 0.0) -> None:
        """After the actions: the ranks wait for a batch, and where an action fails, this is the step to look for."""
        if actions or not isinstance(event, core.Tick):
            self._journal.core_step(event, actions, late)

    def _stepped(self) -> None:
        self._ledger.claimable()
        if self._tick is not None:
            self._tick.cancel()
        self._tick, due = None, self.core.tick_at
        if due is not None:
            self._tick = self._loop.call_at(due, lambda: self._post(core.Tick(max(due, self._now))))
        if not self.core.in_flight:
            self._check_invariants()

    def _step_life(self, event: LifeEvent) -> None:
        """Steps the lifecycle and does what it says."""
        actions = self.lifecycle.step(event)
        self._journal.life_step(event, actions)
        for action in actions:
            self._perform(action)
        if self._wake is not None:
            self._wake.cancel()
        due = self.lifecycle.wake_at
        self._wake = None if due is None else self._loop.call_at(due, lambda: self._post(Wake(max(due, self._now))))

    def _perform(self, action: LifeAction) -> None:
        match action:
            case Dial(life, pods):
                self._ranks = Ranks(
                    self.engine,
                    self.term,
                    life,
                    pods,
                    self.shape,
                    self._pulse,
                    self._transport,
                    self._spawn,
                    self._post,
                    self._came,
                    self._times_came,
                    self._pull_ended,
                    self._adapters.answered,
                    self._durations,
                    self._met,
                )
            case Identify(life, models):
                self._vocabulary = min(model.vocab_size for model in models)
                self._ask(partial(self._identify, life, models))
            case NewEpoch(life, above):
                self._ask(partial(self._new_epoch, life, above))
            case HostStore(_, epoch):
                self._dialed.host_store(epoch)
            case Form(_, epoch, store):
                self._dialed.form(epoch, store, self.lifecycle.formation)
            case Allocate(_, epoch, slots):
                self._dialed.allocate(epoch, slots)
            case Record():
                self._ask(partial(self._record, action))
            case Run(_, epoch, stale_rows):
                self._epoch, self._stale_rows = epoch, stale_rows
                self._durations.keep(self.lifecycle.weights)
                self._dialed.run(epoch)
                self._adapters.running()
            case EngineReady() | EngineLost() | Drain():
                self._tell_core(action)
            case Admit(claims):
                self._admit(claims)
            case GiveBack():
                self._give_back(action)
            case Confirm(life):
                self._spawn(self._confirm(life))
            case Fence(_, rank, pid, verdict):
                self._dialed.fence(rank, pid, verdict)
            case HangUp():
                for question in self._questions:
                    question.cancel()
                self._questions.clear()
                self._dialed.hang_up()
            case ReplacePods(life):
                self._spawn(self._replace_pods(life))
            case Expect(seconds):
                self._discovery.unfinished(self.engine, seconds)
                self._spawn(self._ledger.expect(seconds))
            case Release() | Retire():
                self._spawn(self._release(retire=isinstance(action, Retire)))
            case Say("rank lost", verdict):
                log.error("rank lost", extra={"engine": self.engine, "verdict": verdict})
                self._note(lost=verdict)
            case Say("engine cannot form", why):
                log.error("engine cannot form", extra={"engine": self.engine, "why": why})
            case Say("pods cannot be replaced", why):
                log.warning("pods cannot be replaced", extra={"engine": self.engine, "why": why})
            case Say(what, why):
                log.info(what, extra={"engine": self.engine, "why": why})
            case Stop(why):
                self._stopped = why

    def _tell_adapters(self, table: pb.AdapterTable) -> None:
        self._dialed.tell_adapters(table)

    @property
    def _dialed(self) -> Ranks:
        assert self._ranks is not None, "the lifecycle dials before it asks ranks for anything"
        return self._ranks

    # -- questions of the lifecycle to the pool

    def _ask(self, question: Callable[[], Awaitable[None]]) -> None:
        """A question whose answer counts in this life alone: it may be cancelled before it begins."""
        self._questions.append(self._spawn(self._until_deposed(question)))

    async def _until_deposed(self, question: Callable[[], Awaitable[None]]) -> None:
        try:
            await question()
        except Deposed as deposed:
            self._post(LeaseLost(self._now, str(deposed)))

    async def _identify(self, life: int, models: tuple[Model, ...]) -> None:
        try:
            if self._roles.of(self.engine) is None:
                raise FailedPrecondition(
                    f"roles: {self.engine} has none, {self._roles} are {self._roles.engines} engines"
                )
            can = frozenset[str].intersection(*(frozenset(model.can) for model in models))
            self._policy = self._policy_for(can)
            check_needs(self._policy, can, self.core.role)
            for model in models:
                await reached(lambda of=model: self._pool.identify(of.digest, of.max_positions, of.vocab_size))
        except FailedPrecondition as refusal:
            self._post(Refused(self._now, life, None, str(refusal)))
        else:
            self._post(Identified(self._now, life))

    async def _new_epoch(self, life: int, above: int) -> None:
        self._post(EpochGiven(self._now, life, await self._ledger.new_epoch(above)))

    async def _record(self, action: Record) -> None:
        shape = self.shape
        policy, rule = self._policy, Reservation(shape.block_size, self._policy.reserves_output)
        sizes = shape.tp, shape.pp, action.slots, action.epoch
        info = EngineInfo(self.engine, *sizes, action.weights, policy.name, rule, policy.prefix, self.core.role)
        self._post(Recorded(self._now, action.life, await self._ledger.formed(info, action.above)))

    async def _confirm(self, life: int) -> None:
        async def confirm() -> None:
            await self._ledger.confirm()
            self._post(Confirmed(self._now, life))

        await self._until_deposed(confirm)

    async def _replace_pods(self, life: int) -> None:
        async def replace() -> None:
            await self._ledger.confirm()
            trouble = ""
            try:
                await self._discovery.replace(self.engine)
            except Unavailable as away:
                trouble = str(away)
            self._post(Replaced(self._now, life, trouble))

        await self._until_deposed(replace)

    async def _release(self, *, retire: bool) -> None:
        await self._ledger.release(retire)
        self._post(LeaseLost(self._now, "retired" if retire else "released"))

    # -- the core's engine and requests

    def _forecast_of_policy(self) -> Forecast | None:
        limits, seconds = self.core.limits, self.core.policy.seconds
        return Forecast(seconds, limits.positions) if seconds is not None and limits.positions else None

    def _tell_core(self, event: EngineReady | EngineLost | Drain) -> None:
        match event:
            case EngineReady(_, n_slots, _):
                if self._policy.name != self.core.policy.name:
                    self._step_core(Adopted(self._now, self._policy.name))
                    self._forecast = self._forecast_of_policy()
                shape = self.shape
                self._note(formed=self._epoch, slots=n_slots, tp=shape.tp, pp=shape.pp)
                log.info(
                    "engine formed",
                    extra={
                        "engine": self.engine,
                        "epoch": self._epoch,
                        "slots": n_slots,
                        "run_ahead": self.core.run_ahead,
                        "policy": self.core.policy.name,
                    },
                )
            case EngineLost():
                self._adapters.lost()
                self._metrics.lost(self.lifecycle.lost_by)
                self._pace.lost()
                if self._forecast is not None:
                    self._forecast.lost()
                self._in_flight.clear()
                if self._tracing is not None:
                    self._tracing.lost()
            case Drain():
                pass
        self._step_core(event)

    def _admit(self, claims: tuple[int, ...]) -> None:
        """Hands claimed requests to the core, but those that have ended meanwhile.

        Those that were claimed for other weights, or have an adapter that the ranks do not have now, go back: there was
        a formation, or another master, in between.
        """
        held = self._ledger.outputs.of(claims)
        if other := [request.claimed.claim for request in held if not self._suits(request)]:
            self._give_back(GiveBack(tuple((claim, False) for claim in other)))
            held = [request for request in held if request.claimed.claim not in other]
        if self._show_prompts and held:
            texts = {one.claimed.claim: one.text() for one in held}
            self._journal.remember(texts=texts)
        if held:
            size = self.shape.block_size
            arrived = tuple(arrival(one, self._root(one), size, self.core.role) for one in held)
            self._step_core(Arrived(self._now, arrived))

    def _suits(self, request: Held) -> bool:
        """Whether the ranks have what makes a claimed request's tokens."""
        weights, _, adapter = request.claimed.weights.partition("/")
        return weights == self.lifecycle.weights and (not adapter or adapter in self._adapters.has)

    def _give_back(self, action: GiveBack) -> None:
        """Every request that goes back to the queue goes this way."""
        self._spawn(self._return(dict(action.requests)))

    async def _return(self, requests: dict[int, bool]) -> None:
        moment = await self._ledger.give_back(requests)
        if self._tracing is not None:
            self._tracing.ended(requests, GIVEN_BACK, moment)

    def _end_elsewhere(self, claims: tuple[int, ...]) -> None:
        """Claims that were cancelled, or are another engine's."""
        for claim in claims:
            self._ledger.outputs.drop(claim)
        if self._tracing is not None:
            self._tracing.ended(claims, "ended elsewhere")
        if self.lifecycle.formed:
            self._step_core(Cancelled(self._now, claims))
        else:
            self._step_life(Gone(self._now, claims))

    # -- iterations

    def _schedule(self, action: ScheduleBatch) -> None:
        self._in_flight[action.iteration] = Sent(action.members, self._ledger.outputs.drafts(action.members))
        self._ledger.used(action.iteration)
        now = self._now
        self._pace.scheduled(now)
        if self._forecast is not None:
            self._forecast.scheduled(action.iteration, action.positions)
        message = self._control_message(action)
        self._metrics.scheduled(action, now)
        self._dialed.send(message)

    def _control_message(self, action: ScheduleBatch) -> pb.Iteration:
        """The iteration for the ranks: new requests in full, once; all members by row, positions and, unless the ranks
        have it, token."""
        message = pb.Iteration(term=self.term, epoch=self._epoch, number=action.iteration)
        message.free_rows.extend(self._stale_rows)
        self._stale_rows = ()
        message.free_rows.extend(action.free_rows)
        for member in action.members[: action.admitted]:
            held = self._ledger.outputs.admitted(member.claim, member.start)
            message.admissions.append(self._admission(held, member.row, member.start))
        put_members(message, *self._in_flight[action.iteration])
        if self._tracing is not None:
            message.trace.update(
                self._tracing.scheduled(action, self.core.memory.n_slots, self._epoch, self.core.policy.name)
            )
        return message

    def _admission(self, held: Held, row: int, computed: int) -> pb.Admission:
        """A request in full. With a role its ranks make keys of its tokens, whatever may begin with its blocks."""
        record, generated = held.record, held.token_ids()
        root = self._root(held)
        if self.core.role and not root:
            root = root_by("tenant", tenant_of(held.claimed.request_id), record.sampling.adapter)
        return pb.Admission(
            row=row,
            claim=held.claimed.claim,
            token_ids=[*record.prompt_ids, *generated],
            generated=len(generated),
            sampling=record.sampling if record.HasField("sampling") else None,
            computed=computed,
            root=bytes.fromhex(root),
        )

    # -- requests that change engines

    def _pull(self, action: Pull) -> None:
        """Has the ranks fill a row with what another engine has computed."""
        self._ledger.used(action.iteration)
        message = pb.Iteration(term=self.term, epoch=self._epoch, number=action.iteration)
        message.free_rows.extend([*self._stale_rows, *action.free_rows])
        self._stale_rows = ()
        held = self._ledger.outputs.admitted(action.claim, action.positions)
        message.pull.admission.CopyFrom(self._admission(held, action.row, action.positions))
        message.pull.blocks.extend(action.blocks)
        message.pull.handed.ParseFromString(held.claimed.handed)
        self._dialed.send(message)

    def _pull_ended(self, claim: int, size: int, error: str) -> None:
        """All ranks have a request's keys and values, or one of them says why not."""
        self._metrics.pulled(size, not error)
        held = self._ledger.outputs.held.get(claim)
        if error and held is not None:
            about = {"engine": self.engine, "request": held.claimed.request_id, "why": error}
            log.warning("keys and values were not pulled: the request begins again", extra=about)
        self._post(Pulled(self._now, claim, not error))

    def _begin_here(self, action: BeginHere) -> None:
        """Says that the engine which had begun these requests may let go of them."""
        for claim in action.claims:
            self._spawn(self._ledger.pulled(claim))
        if not action.tried:
            self._metrics.not_pulled(len(action.claims))
        elif self.core.pull_at > self._pull_at:
            self._pull_at = self.core.pull_at
            about = {"engine": self.engine, "failed": self.core.failed_pulls, "seconds": core.PAUSE}
            log.warning("pulls fail one after the other: requests begin again without one for a while", extra=about)

    def _hand_over(self, action: HandOver) -> None:
        """Tells the pool, with the next commit, where these requests' keys and values are."""
        here = partial(pb.Handed, engine=self.engine, epoch=self._epoch, sources=self._dialed.sources())
        for claim, row, positions in action.requests:
            handed = here(claim=claim, row=row, positions=positions)
            self._ledger.hand_over(claim, handed.SerializeToString())
        claims = tuple(one.claim for one in action.requests)
        self._metrics.handed_over(len(claims))
        self._loop.call_later(timers.KEEP, self._let_go, claims)

    def _let_go(self, claims: tuple[int, ...]) -> None:
        """The time is over for which rows are kept that were handed over, if any of them still is."""
        kept = {request.claim for request in self.core.kept}
        if not kept.isdisjoint(claims):
            self._post(LetGo(self._now, claims))

    def _root(self, held: Held) -> str:
        """The root of a request's keys: requests of one root may begin with each other's keys and values. '': it shares
        none."""
        tenant = tenant_of(held.claimed.request_id)
        return root_by(self.core.policy.prefix, tenant, held.record.sampling.adapter)

    def _commit(self, action: Commit, report: pb.IterationReport | None, firsts: Mapping[int, int]) -> None:
        """Tokens and ends for the next commit to the pool. firsts: where a request's tokens begin in the report."""
        logprobs: Sequence[float] = ()
        tops: dict[int, bytes] = {}
        if report is not None and action.iteration is not None:
            logprobs, tops = list(report.logprobs), {one.index: one.scores for one in report.tops}
        append, pack, iteration, at = self._ledger.outputs.append, TOKEN.pack, action.iteration or 0, dict(firsts)
        for claim, _, token, finish in action.outcomes:
            packed, top = b"", b""
            if token is not None:
                n = at.get(claim, 0)
                at[claim] = n + 1
                packed, top = pack(token, logprobs[n] if logprobs else math.nan, iteration), tops.get(n, b"")
            append(claim, packed, None if finish is None else Reason[finish.name], top)
            if finish is not None and self._tracing is not None:
                self._tracing.ends(claim, finish.name)
        self._ledger.committable()

    def _committed(self, seconds: float, tokens: int, ended: list[int], moment: int) -> None:
        """The pool has answered a commit."""
        self._metrics.committed(seconds, tokens)
        if self._tracing is not None:
            self._tracing.committed(ended, moment)

    # -- for those who look on

    def _names(self) -> dict[int, Named]:
        """The requests that the engine holds, by claim number."""
        return {claim: named_in(held) for claim, held in self._ledger.outputs.held.items()}

    def _note_claims(self, now: float, claims: tuple[int, ...]) -> None:
        """The queue has given this engine requests, or had given them to the term before."""
        held = self._ledger.outputs.of(claims)
        named = {one.claimed.claim: named_in(one) for one in held}
        exchanges = {claim: name.exchange for claim, name in named.items() if name.exchange}
        awaited = {
            one.claimed.claim: (one.claimed.prefix_at, one.claimed.overtaken) for one in held if one.claimed.prefix_at
        }
        self._journal.note(
            now=now,
            claims={claim: name.request for claim, name in named.items()},
            submitted={claim: name.submitted for claim, name in named.items()},
            **({"exchanges": exchanges} if exchanges else {}),
            **({"prefix_at": awaited} if awaited else {}),
        )

    def _check_invariants(self) -> None:
        """Nothing is in flight: there is time for this."""
        found = list(violations(self.core))
        self._metrics.violated(len(found))
        for sentence in found:
            log.critical("invariant violated", extra={"engine": self.engine, "violation": sentence})
        self._journal.flush()

    def _note(self, **fields: Any) -> None:
        """A note that is in the file at once, with the moment on both clocks: the core's, and the wall's in ns."""
        self._journal.note(**fields, now=self._now, wall=time.time_ns())
        self._journal.flush()

    def _times_came(self, iteration: int, times: list[pb.StageTimes]) -> None:
        """All ranks have told their times of an iteration."""
        self._metrics.timed(iteration, times)
        if self._forecast is not None and self._forecast.timed(iteration, times):
            self._post(core.Measured(self._now, self._forecast.positions))
        self._journal.note(iteration=iteration, times=[times_of(one) for one in times])

    def _look_at_deadlines(self) -> None:
        """Posts a tick when a request is late, and looks again at the next deadline."""
        now, held = self._now, self._ledger.outputs.held.values()
        due = min((one.deadline for one in held if one.deadline is not None), default=None)
        if self._deadline is not None:
            self._deadline.cancel()
        again = None if due is None else max(due, now + timers.TICK)
        self._deadline = None if again is None else self._loop.call_at(again, self._look_at_deadlines)
        if due is not None and due <= now and self.lifecycle.formed and self._inbox.empty:
            self._post(core.Tick(now))

    @property
    def _now(self) -> float:
        return self._loop.time()


def _of_candidate(candidate: Candidate | None) -> tuple[tuple[str, ...] | None, str, bool, bool, bool]:
    """A candidate as the lifecycle knows it: pods, why some are absent, whether they are to be replaced, whether by
    those of another model, and whether the engine is to be taken away soon."""
    if candidate is None:
        return None, "", False, False, False
    return candidate.pods, candidate.absent, candidate.replace, candidate.other_model, candidate.ending


def check_needs(policy: Policy, can: Collection[str], role: Role = Role.MIXED) -> None:
    """Raises FailedPrecondition where a model's ranks cannot do what the policy, or the engine's role, asks of them."""
    if role and (lacking := sorted({HANDED, SHARED}.difference(can))):
        needs = f"{role} needs {' and '.join(lacking)}"
        raise FailedPrecondition(f"roles: {needs}, which ranks of this model, or of their release, cannot do")
    if lacking := sorted(policy.needs.difference(can)):
        needs = " and ".join(lacking)
        raise FailedPrecondition(f"policy: {policy.name} needs {needs}, which ranks of this model cannot do")


def named_in(held: Held) -> Named:
    """A claimed request as journals name it."""
    return Named(held.claimed.request_id, held.claimed.submitted, held.record.exchange)


def arrival(held: Held, root: str, block_size: int, role: Role = Role.MIXED) -> Arrival:
    """A claimed request as the core knows it. root: '' where it begins with its first position in any case."""
    claimed, record = held.claimed, held.record
    stops = tuple(record.stop_token_ids)
    shares = root and not scores_prompt(record.sampling)
    return Arrival(
        claim=claimed.claim,
        arrival=claimed.order,
        priority=claimed.priority,
        input_tokens=len(record.prompt_ids),
        max_new_tokens=record.max_new_tokens,
        generated=len(held.tokens) // TOKEN.size,
        eos_token_ids=tuple(i for i in record.end_token_ids if i not in stops),
        stop_token_ids=stops,
        deadline=held.deadline,
        prefix=held.keys(root, block_size) if shares else (),
        forced_end=record.sampling.HasField("forced_end"),
        elsewhere=elsewhere(held) if role is Role.DECODE else 0,
    )


def elsewhere(held: Held) -> int:
    """Positions of a request whose keys and values another engine has: all but the last one, or 0."""
    computed = len(held.record.prompt_ids) + len(held.tokens) // TOKEN.size - 1
    try:
        handed = pb.Handed.FromString(held.claimed.handed)
    except DecodeError:
        return 0
    return computed if handed.positions == computed else 0
