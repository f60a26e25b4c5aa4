"""A world around the lifecycle, for its tests: a pool, pods with ranks, and masters that carry actions out.

`LifeWorld` has one method for each thing that may happen (`OPS`), faults included; `pick` chooses among what it may
happen to. A `Term` is a master without tasks: it does with the lifecycle's and the core's actions what
`orca_scheduler.master.master` does, but each call that it starts waits in `calls` until the world lets it happen, so
answers come late, in any order, or after the life that asked. Every step is held against books that are written here
alone (`Term.check`, `Term.audit`); the invariants are listed in `test_lifecycle_properties`.
"""

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from orca_scheduler import timers
from orca_scheduler.core import core
from orca_scheduler.core.core import Arrived, BatchReturned, Cancelled, Commit, Core, EngineLost, EngineReady, GiveBack
from orca_scheduler.core.core import Drain as CoreDrain
from orca_scheduler.core.request import Arrival
from orca_scheduler.lifecycle.events import (
    Admit,
    AllAnswered,
    Allocate,
    CandidateChanged,
    Claimed,
    Confirm,
    Confirmed,
    Dial,
    Entry,
    EpochGiven,
    Expect,
    Fence,
    Fenced,
    Finished,
    Form,
    Formation,
    Gone,
    HangUp,
    Hello,
    HostStore,
    Identified,
    Identify,
    LeaseLost,
    Leave,
    LifeAction,
    LifeEvent,
    Listens,
    Model,
    NewEpoch,
    Opened,
    Orphaned,
    PodAway,
    PodSeen,
    PoolAway,
    PoolBack,
    RankAllocated,
    RankFormed,
    RankLeaving,
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
    Standing,
    Stop,
    StoreHosted,
    Suspected,
    Wake,
)
from orca_scheduler.lifecycle.lifecycle import (
    Closing,
    Draining,
    Ended,
    Greeting,
    Incomplete,
    Lifecycle,
    Opening,
    Recording,
    Replacing,
    Running,
)
from orca_scheduler.lifecycle.places import Shape
from orca_scheduler.lifecycle.suspicions import Kind, Suspicion
from orca_scheduler.master.journal import decode, encode, lifecycle_state, restored_lifecycle

MODEL = Model("m", 128, 1000)
NEW = Standing(0, 0, 0, (), Formation(0, 0, 0, 0, 0, False))  # of a process that was never formed
STEPS = 3000  # in which everything must have come to its end, once the faults are over


@dataclass(eq=False)
class Request:
    """A request as the pool counts it."""

    arrival: int
    max_new_tokens: int
    generated: int = 0
    ended: bool = False


@dataclass(eq=False)
class Process:
    """A rank's process. Frozen: it takes connections and answers nothing."""

    pid: int
    address: str
    alive: bool = True
    frozen: bool = False
    leaving: bool = False
    standing: Standing = NEW


@dataclass(eq=False)
class Pod:
    """A supervisor and its ranks' processes. Its table names a dead process until it notices the death."""

    address: str
    processes: list[Process]
    noticed: list[int]  # pids in its table; 0: not running
    away: bool = False


@dataclass(eq=False)
class Books:
    """What the pool keeps."""

    term: int = 0
    released: bool = True
    epoch: int = 0
    reserved: int = 0  # iteration numbers up to it may have been used
    away: bool = False
    queue: list[Request] = field(default_factory=list)
    claimed: dict[int, Request] = field(default_factory=dict)  # claims of this engine
    agrees: bool = True  # to the ranks' model
    numbers: int = 100  # claims and epochs

    def number(self) -> int:
        self.numbers += 1
        return self.numbers

    def back(self, claim: int) -> None:
        request = self.claimed.pop(claim)
        self.queue.append(request)
        self.queue.sort(key=lambda one: one.arrival)


@dataclass(eq=False)
class Call:
    """Something that a term has started and that has not happened yet. `life`: it ends with this life."""

    what: str
    life: int | None
    of_pool: bool
    do: Callable[[], bool]  # False: not yet


@dataclass(eq=False)
class Lane:
    """The connection to a rank in a life."""

    process: Process
    greeted: bool = False
    closed: bool = False  # its end, or its silence, was told


@dataclass(frozen=True)
class Returned:
    life: int
    iteration: int


@dataclass(frozen=True)
class EndedElsewhere:
    claims: tuple[int, ...]


Message = LifeEvent | Returned | EndedElsewhere


class Term:
    """A master in one term of its lease, without tasks of its own."""

    def __init__(self, world: "LifeWorld", number: int, taken_over: bool) -> None:
        self.world, self.number, self.taken_over = world, number, taken_over
        shape = world.shape
        self.lifecycle = Lifecycle(
            "engine-0", shape, world.candidate, world.absent, world.replace, world.other_model, world.ending
        )
        self.begin = lifecycle_state(replace(self.lifecycle))
        self.core = Core(2, shape.pp, shape.block_size, shape.run_ahead)
        self.record: list[tuple[LifeEvent, list[LifeAction]]] = []
        self.inbox: deque[Message] = deque()
        self.calls: list[Call] = []
        self.stopped = self.opened = False
        # the life that is open
        self.open: int | None = None
        self.ended: set[int] = set()  # lives that were hung up
        self.dialed: tuple[str, ...] = ()
        self.tables: dict[int, tuple[Entry, ...]] = {}  # pod -> what its supervisor told this life
        self.told: dict[int, set[int]] = {}  # rank -> pids that tables of this life have named
        self.lanes: dict[int, Lane] = {}
        self.given: set[int] = set()  # epochs that the pool gave this life
        self.confirmed: set[int] = set()  # lives in which the pool confirmed the lease
        self.sent: deque[int] = deque()  # iterations that the ranks have
        self.ready = False  # the core was told so
        # claims
        self.total = 0  # slots of the formed engine: 0: nothing is claimed
        self.held: dict[int, Request] = {}
        self.unheard: list[int] = []  # claimed, and the pool's answer was lost
        self.from_takeover: set[int] = set()
        self.giving_back: dict[int, bool] = {}
        self.made: Counter[int] = Counter()  # tokens that no commit has carried
        self.finishing: set[int] = set()
        self.in_flight: dict[int, tuple[int, ...]] = {}
        self.call("open", None, self._open)

    # -- what the world makes of it

    def post(self, message: Message) -> None:
        if not self.stopped:
            self.inbox.append(message)

    def call(self, what: str, life: int | None, do: Callable[[], bool], *, of_pool: bool = True) -> None:
        self.calls.append(Call(what, life, of_pool, do))

    def happens(self, call: Call) -> bool:
        """Lets a call happen. False: it cannot now."""
        if call.of_pool:
            if self.world.books.away:
                return False
            if self.world.books.term != self.number:
                self.calls.remove(call)
                self.post(LeaseLost(self.now, "another scheduler took the engine"))
                return True
        if not call.do():
            return False
        self.calls.remove(call)
        return True

    def deliver(self) -> None:
        """The next message, as the master's loop takes it."""
        match self.inbox.popleft():
            case Returned(life, iteration):
                if life == self.lifecycle.life and iteration in self.in_flight:
                    del_claims = self.in_flight[iteration]
                    self.step_core(BatchReturned(self.now, iteration, ((7,),) * len(del_claims)))
                    self.in_flight.pop(iteration, None)
            case EndedElsewhere(claims):
                for claim in claims:
                    self._drop(claim)
                if self.lifecycle.formed:
                    self.step_core(Cancelled(self.now, claims))
                else:
                    self.tell(Gone(self.now, claims))
            case event:
                self.tell(event)
        self.settle()

    def settle(self) -> None:
        if (
            self.lifecycle.finish_by is not None
            and isinstance(self.lifecycle.state, Running)
            and not self.core.requests
        ):
            self.tell(Finished(self.now, self.lifecycle.life))
        if isinstance(self.lifecycle.state, Draining) and not self.core.in_flight:
            self.tell(Rested(self.now, self.lifecycle.life))
        self.audit()

    def tell(self, event: LifeEvent) -> list[LifeAction]:
        """Steps the lifecycle, checks what it says, and does it."""
        life = self.lifecycle
        before = type(life.state).__name__
        self.world.met[before, type(event).__name__] += 1
        stale = isinstance(life.state, Ended) or getattr(event, "life", life.life) != life.life
        state = repr(life) if stale else ""
        due = life.wake_at
        actions = life.step(event)
        self.record.append((event, actions))
        if stale:
            assert not actions, "an event of an ended life was acted upon"
            assert repr(life) == state, "an event of an ended life changed something"
        if isinstance(event, Wake):
            if due is None or event.now < due:
                assert actions == [], "a wake that was not due was acted upon"
                assert life.wake_at == due
            else:
                assert life.wake_at is None or life.wake_at > event.now, "a Wake at wake_at made no progress"
            if isinstance(life.state, Greeting) and event.now >= life.state.since + timers.KEEP_CLAIMS:
                assert not life.unadmitted, "a greeting keeps claims for too long"
        for action in actions:
            assert not self.stopped, f"{action} after Stop"
            self.check(action)
            self.perform(action)
        self.audit()
        return actions

    # -- the lifecycle's actions: are they right?

    def check(self, action: LifeAction) -> None:
        """What must hold of an action at the moment when it is taken."""
        life, world, mine = self.lifecycle, self.world, self.number == self.world.books.term
        of = getattr(action, "life", None)
        if isinstance(action, ReplacePods):
            assert self.open is None, "pods are replaced while a life is open"
            assert of == life.life
        elif of is not None:
            assert of not in self.ended, f"{action} of a life that was hung up"
            assert of == (life.life if isinstance(action, Dial) else self.open), f"{action} of another life"
        match action:
            case Dial(number, pods):
                assert self.open is None, "dialed while a life is open"
                assert number == max(self.ended, default=0) + 1
                assert len(pods) == world.shape.pods
                assert all(pods), "a pod without an address is dialed"
                assert not life.replace or life.finish_by is not None, "pods are dialed that are to be replaced"
                assert not any(call.what == "fence" for call in self.calls), "a process is greeted while it is killed"
            case Identify(_, models):
                assert set(models) == {MODEL}
                assert len(self.greeted()) == world.shape.ranks
            case NewEpoch(_, above):
                assert not life.unadmitted, "requests wait for a new epoch"
                assert all(lane.process.standing.epoch <= above for lane in self.lanes.values())
            case HostStore(_, epoch):
                assert epoch in self.given
            case Form(_, epoch, store):
                assert epoch in self.given, "an epoch is formed that the pool has not given to this life"
                assert epoch not in world.formed, "an epoch is formed twice"
                assert bool(store) == (world.shape.ranks > 1)
                world.formed.add(epoch)
            case Allocate(_, epoch, slots):
                assert epoch in self.given
                assert slots == world.shape.whole_blocks(world.shape.slots or world.room) > 0
            case Record(_, epoch, slots, above, _):
                self._check_record(epoch, slots, above, mine)
            case Run(_, epoch, stale_rows):
                for lane in self.greeted().values():
                    if lane.process.alive and lane.process.standing.epoch == epoch:
                        assert set(stale_rows) == set(lane.process.standing.rows), "rows that nobody frees"
            case Admit(claims):
                assert claims
                assert isinstance(life.state, Running | Draining)
            case GiveBack(requests):
                assert requests
                for claim, running in requests:
                    assert running == (claim in self.from_takeover), "nobody knows what was RUNNING before a takeover"
            case Say("rank lost", verdict):
                assert verdict
                assert not verdict.endswith(": "), "a verdict that names nobody"
            case Fence(number, rank, pid, verdict):
                assert number in self.confirmed, "fenced without asking whether the lease is still ours"
                assert pid not in world.fenced, "a dead process is fenced again"
                lane = self.lanes.get(rank)
                processes = self.told.get(rank, set()) | ({lane.process.pid} if lane is not None else set())
                assert pid in processes, "a process that neither listened nor stood in a table in this life"
                assert f"pid {pid}" in verdict
            case ReplacePods():
                assert life.replace, "pods are replaced that shall stay"
                assert not life.unadmitted, "requests wait for new pods"
                assert not self.core.requests
            case Expect(seconds):
                assert 0 < seconds < life.finish_seconds + 1
            case Release():
                assert self.world.leaving or self.world.candidate is not None or mine is False
            case Retire():
                assert not life.unadmitted
                assert not self.core.requests
            case _:
                pass

    def _check_record(self, epoch: int, slots: int, above: int, mine: bool) -> None:
        if mine:
            assert epoch == self.world.books.epoch, "an epoch is recorded that is not the newest in the books"
        if epoch in self.given:
            assert slots == self.world.shape.whole_blocks(self.world.shape.slots or self.world.room)
        for rank, lane in self.greeted().items():
            standing = lane.process.standing
            assert above >= standing.iteration or standing.epoch != epoch
            if lane.process.alive and epoch in self.world.formed and not self.world.usurped:
                assert standing.epoch == epoch, "an engine is recorded whose ranks stand elsewhere"
                assert standing.formation == self.lifecycle.formation(rank)

    def greeted(self) -> dict[int, Lane]:
        return {rank: lane for rank, lane in self.lanes.items() if lane.greeted}

    def audit(self) -> None:
        """After every step: each claim has one owner, and the state is in order."""
        life, books = self.lifecycle, self.world.books
        if self.stopped:
            assert isinstance(life.state, Ended)
            return
        assert not (life.formed and life.unadmitted), "claims are kept from a core that runs"
        keeps = isinstance(life.state, Opening | Greeting | Recording | Closing)
        assert keeps or not life.unadmitted, f"claims are kept in {type(life.state).__name__}"
        assert life.formed == self.ready
        if not life.formed:
            assert not self.core.requests
        if isinstance(life.state, Running):
            assert life.unready is None
            assert not life.leaving, "an engine runs on although its scheduler leaves"
            assert life.pods is not None, "an engine runs on that nobody wants"
            assert not life.replace or life.finish_by is not None, "an engine runs on whose pods are to be replaced"
        if isinstance(life.state, Incomplete):
            assert life.pods is not None
            assert not all(life.pods), "nothing is missing"
            assert not life.replace
        if isinstance(life.state, Replacing):
            assert life.replace, "new pods are waited for that nobody makes"
            assert not life.leaving
        if not self.opened or books.term != self.number:
            return  # its claims are nobody's yet, or another's
        core_has = {request.claim for request in self.core.requests if not request.ended}
        on_the_way = {claim for message in self.inbox if isinstance(message, Claimed) for claim in message.claims}
        on_the_way |= {claim for message in self.inbox if isinstance(message, Orphaned) for claim in message.claims}
        on_the_way |= {claim for message in self.inbox if isinstance(message, Opened) for claim in message.claims}
        homes = (set(life.unadmitted), core_has, set(self.giving_back), self.finishing, on_the_way, set(self.unheard))
        for claim in books.claimed:
            owners = sum(claim in home for home in homes)
            assert owners == 1, f"claim {claim} has {owners} owners in {type(life.state).__name__}"

    def replay(self) -> None:
        """The recorded events give the same actions, through the journal's form, from the start and from the middle."""
        again = restored_lifecycle(self.begin)
        for n, (event, actions) in enumerate(self.record):
            if n == len(self.record) // 2:
                again = restored_lifecycle(lifecycle_state(again))
            assert again.step(decode(encode(event))) == actions

    # -- the lifecycle's actions: carried out

    def perform(self, action: LifeAction) -> None:
        match action:
            case Dial(life, pods):
                self.open, self.dialed = life, pods
                self.tables.clear()
                self.told.clear()
                self.lanes.clear()
                self.given.clear()
            case Identify(life):
                self.call("identify", life, lambda: self._identify(life))
            case NewEpoch(life, above):
                self.call("new epoch", life, lambda: self._new_epoch(life, above))
            case HostStore(life, epoch):
                self._ask(0, life, "host", lambda _: StoreHosted(self.now, life, epoch, f"store:{epoch}"))
            case Form(life, epoch, _):
                for rank in range(self.world.shape.ranks):
                    self._ask(rank, life, "form", lambda process, rank=rank: self._formed(life, epoch, rank, process))
            case Allocate(life, epoch, slots):
                for rank in range(self.world.shape.ranks):
                    self._ask(
                        rank,
                        life,
                        "allocate",
                        lambda process, rank=rank: self._allocated(life, epoch, slots, rank, process),
                    )
            case Record(life, epoch, slots, above, _):
                self.call("record", life, lambda: self._record(life, epoch, slots, above))
            case Run():
                pass
            case EngineReady() | EngineLost() | CoreDrain():
                self._tell_core(action)
            case Admit(claims):
                arrivals = tuple(self._arrival(claim) for claim in claims if claim in self.held)
                if arrivals:
                    self.step_core(Arrived(self.now, arrivals))
            case GiveBack():
                self._give_back(action)
            case Confirm(life):
                self.call("confirm", None, lambda: self._confirm(life))
            case Fence(life, rank, pid, _):
                address = self.dialed[self.lifecycle.places[rank].pod]
                self.call("fence", None, lambda: self._fence(life, rank, pid, address), of_pool=False)
            case HangUp(life):
                self.open = None
                self.ended.add(life)
                for call in [call for call in self.calls if call.life == life]:
                    if call.of_pool and self.world.chance(2) and self.happens(call):
                        continue  # it was under way: done, and its answer late
                    if call in self.calls:
                        self.calls.remove(call)
                self.world.lanes_closed(self)
            case ReplacePods(life):
                self.call("replace", None, lambda: self._replace(life))  # the lease is confirmed
            case Release() | Retire():
                retire = isinstance(action, Retire)
                self.call("release", None, lambda: self._release(retire))
            case Say() | Expect():
                pass
            case Stop():
                self.stopped = True
                self.calls = [call for call in self.calls if call.what == "fence"]
                self.inbox.clear()

    def _open(self) -> bool:
        books = self.world.books
        self.held = dict(books.claimed)
        self.from_takeover = set(books.claimed) if self.taken_over else set()
        self.opened = True
        self.post(Opened(self.now, books.epoch, tuple(books.claimed), self.taken_over))
        return True

    def _identify(self, life: int) -> bool:
        if self.world.books.agrees:
            self.post(Identified(self.now, life))
        else:
            self.post(Refused(self.now, life, None, "another model"))
        return True

    def _new_epoch(self, life: int, above: int) -> bool:
        books = self.world.books
        epoch = max(books.number(), books.epoch + 1, above + 1)
        books.epoch, books.numbers = epoch, max(books.numbers, epoch)
        if life == self.lifecycle.life:
            self.given.add(epoch)
        self.post(EpochGiven(self.now, life, epoch))
        return True

    def _ask(self, rank: int, life: int, what: str, answer: Callable[[Process], LifeEvent]) -> None:
        lane = self.lanes[rank]

        def do() -> bool:
            if lane.process.alive and not lane.process.frozen:
                self.post(answer(lane.process))
            elif lane.process.alive:
                self.suspect(life, rank, Kind.SILENT)
            else:
                self.suspect(life, rank, Kind.PEER_LOST)
            return True

        self.call(what, life, do, of_pool=False)

    def _formed(self, life: int, epoch: int, rank: int, process: Process) -> LifeEvent:
        process.standing = process.standing._replace(epoch=0, rows=())
        return RankFormed(self.now, life, epoch, rank, self.world.room + rank)

    def _allocated(self, life: int, epoch: int, slots: int, rank: int, process: Process) -> LifeEvent:
        formation = self.lifecycle.formation(rank)
        process.standing = Standing(epoch, process.standing.iteration, slots, (), formation)
        return RankAllocated(self.now, life, epoch, rank)

    def _record(self, life: int, epoch: int, slots: int, above: int) -> bool:
        books = self.world.books
        first = max(books.reserved, above) + 1
        books.reserved = first + 1000
        self.total = slots
        self.post(Recorded(self.now, life, first))
        return True

    def _confirm(self, life: int) -> bool:
        self.confirmed.add(life)
        self.post(Confirmed(self.now, life))
        return True

    def _fence(self, life: int, rank: int, pid: int, address: str) -> bool:
        pod = self.world.pods[address]
        if not pod.away:
            local = self.lifecycle.places[rank].local_rank
            process = pod.processes[local]
            if process.pid == pid:
                process.alive = False
                pod.noticed[local] = 0
            self.world.fenced.add(pid)
        self.post(Fenced(self.now, life, rank))
        return True

    def _replace(self, life: int) -> bool:
        world = self.world
        if not world.api_away:
            world.pods_deleted()
        self.post(Replaced(self.now, life, "no answer" if world.api_away else ""))
        return True

    def _release(self, retire: bool) -> bool:
        if self.giving_back:
            return False
        books = self.world.books
        self._commit()
        if not retire:
            books.released = True
        elif not books.claimed:
            books.released, books.epoch = True, 0
        self.post(LeaseLost(self.now, "retired" if retire else "released"))
        return True

    # -- the core and claims

    def _tell_core(self, event: EngineReady | EngineLost | CoreDrain) -> None:
        match event:
            case EngineReady():
                assert not self.ready, "the core was told twice that its engine is ready"
                assert isinstance(self.lifecycle.state, Running)
                self.ready = True
            case EngineLost():
                assert self.ready, "the core lost an engine that it did not have"
                self.ready, self.total = False, 0
                self.in_flight.clear()
                self.sent.clear()
            case CoreDrain():
                assert self.ready
                assert isinstance(self.lifecycle.state, Draining)
        self.step_core(event)

    def step_core(self, event: core.Event) -> None:
        for action in self.core.step(event):
            match action:
                case core.ScheduleBatch():
                    assert isinstance(self.lifecycle.state, Running), "a batch without a running engine"
                    assert action.iteration > self.world.last_iteration, "an iteration number is used twice"
                    self.world.last_iteration = action.iteration
                    self.in_flight[action.iteration] = tuple(member.claim for member in action.members)
                    self.sent.append(action.iteration)
                case Commit():
                    for claim, _, token, finish in action.outcomes:
                        if claim in self.held:
                            self.made[claim] += token is not None
                            if finish is not None:
                                self.finishing.add(claim)
                    if not any(call.what == "commit" for call in self.calls):
                        self.call("commit", None, self._commit)
                case GiveBack():
                    self._give_back(action)
        self.audit_core()

    def audit_core(self) -> None:
        for request in self.core.requests:
            assert request.claim not in self.giving_back

    def _commit(self) -> bool:
        books = self.world.books
        for claim, count in self.made.items():
            if claim in books.claimed:
                books.claimed[claim].generated += count
        self.made.clear()
        for claim in sorted(self.finishing):
            request = books.claimed.pop(claim, None)
            if request is not None:
                request.ended = True
            self._drop(claim)
        return True

    def _give_back(self, action: GiveBack) -> None:
        requests = dict(action.requests)
        for claim, running in requests.items():
            assert claim not in self.giving_back, "a claim is given back twice"
            self.giving_back[claim] = running

        def do() -> bool:
            self._commit()
            for claim in requests:
                if claim in self.world.books.claimed:
                    self.world.books.back(claim)
                self._drop(claim)
                del self.giving_back[claim]
            return True

        self.call("give back", None, do)

    def _drop(self, claim: int) -> None:
        self.held.pop(claim, None)
        self.finishing.discard(claim)
        self.made.pop(claim, None)

    def _arrival(self, claim: int) -> Arrival:
        request = self.held[claim]
        return Arrival(claim, request.arrival, 2, request.max_new_tokens, request.generated)

    # -- what ranks and pods tell

    def suspect(self, life: int, rank: int, kind: Kind) -> None:
        self.post(Suspected(self.now, life, Suspicion(rank, kind, kind.value), 0))

    def process(self, rank: int) -> Process:
        place = self.lifecycle.places[rank]
        return self.world.pods[self.dialed[place.pod]].processes[place.local_rank]

    def pod_tells(self, number: int) -> None:
        """A supervisor sends its table."""
        assert self.open is not None
        pod = self.world.pods[self.dialed[number]]
        entries = tuple(Entry(n, f"{pod.address}:{pid}", pid, 0) for n, pid in enumerate(pod.noticed))
        self.tables[number] = entries
        for rank, place in enumerate(self.lifecycle.places):
            if place.pod == number:
                self.told.setdefault(rank, set()).add(pod.noticed[place.local_rank])
        self.post(PodSeen(self.now, self.open, number, entries))

    def greet(self, rank: int) -> bool:
        """One step of a rank's greeting. False: there is none to take."""
        place = self.lifecycle.places[rank]
        if self.open is None or place.pod not in self.tables:
            return False
        lane = self.lanes.get(rank)
        if lane is None:
            pid = self.tables[place.pod][place.local_rank].pid
            process = self.process(rank)
            if not pid or process.pid != pid:
                return False
            self.lanes[rank] = Lane(process)
            self.post(Listens(self.now, self.open, rank, process.address, pid))
            return True
        if lane.greeted or lane.closed:
            return False
        if lane.process.alive and not lane.process.frozen:
            lane.greeted = True
            standing = lane.process.standing
            self.post(Hello(self.now, self.open, rank, "here", lane.process.pid, standing, MODEL, 3, "weights"))
        else:
            lane.closed = True
            self.suspect(self.open, rank, Kind.SILENT)
        return True

    def lane_tells(self, rank: int) -> bool:
        """A rank that has died, freezes or leaves is noticed on its lane. False: there is nothing to notice."""
        lane = self.lanes.get(rank)
        if self.open is None or lane is None or not lane.greeted or lane.closed:
            return False
        if lane.process.alive and not lane.process.frozen:
            return False
        lane.closed = True
        self.suspect(self.open, rank, Kind.SILENT if lane.process.alive else Kind.CUT)
        return True

    def returns(self) -> bool:
        """The ranks have run the oldest iteration that they have."""
        if self.open is None or not self.sent:
            return False
        lanes = [self.lanes[rank] for rank in range(self.world.shape.ranks)]
        if any(lane.closed or not lane.process.alive or lane.process.frozen for lane in lanes):
            return False
        iteration = self.sent.popleft()
        rows = tuple(sorted(self.core.memory.rows()))
        for lane in lanes:
            lane.process.standing = lane.process.standing._replace(iteration=iteration, rows=rows)
        self.post(Returned(self.open, iteration))
        return True

    def claim(self, count: int, lost: bool) -> bool:
        """The pool gives requests; `lost`: its answer does not arrive. False: there is nothing to give."""
        books, room = self.world.books, self.core.room()
        if books.away or books.term != self.number or not (self.total and room.requests and room.slots):
            return False
        self.unheard = [claim for claim in self.unheard if claim in books.claimed]
        if any(isinstance(message, Claimed) for message in self.inbox) or (lost and self.unheard):
            return False
        if self.unheard:
            claims, self.unheard = tuple(self.unheard), []
        else:
            taken, books.queue = books.queue[:count], books.queue[count:]
            claims = tuple(books.number() for _ in taken)
            books.claimed |= dict(zip(claims, taken, strict=True))
        if lost:
            self.unheard = list(claims)
        elif claims:
            self.held |= {claim: books.claimed[claim] for claim in claims}
            self.post(Claimed(self.now, claims))
        return bool(claims)

    @property
    def now(self) -> float:
        return self.world.now


class LifeWorld:
    """One engine over its terms. Everything that may happen is a method that takes `pick`."""

    def __init__(self, shape: Shape, rng: random.Random) -> None:
        self.shape, self.rng, self.room = shape, rng, 16
        self.now = 0.0
        self.books = Books()
        self.pods: dict[str, Pod] = {}
        self._pids = 100
        self.candidate: tuple[str, ...] | None = tuple(f"a{n}" for n in range(shape.pods))
        self.absent, self.replace, self.other_model, self.ending = "", False, False, False  # of the candidate
        self.api_away = False  # nobody can be asked for new pods
        self.remade = False  # the candidate's pods are being made anew, and discovery has not told it
        for address in self.candidate:
            self._pod(address)
        self.met: Counter[tuple[str, str]] = Counter()  # (state, event)
        self.formed: set[int] = set()  # epochs
        self.fenced: set[int] = set()  # pids that a supervisor has seen to
        self.last_iteration = 0
        self.requests: list[Request] = []
        self.leaving = self.usurped = False
        self.sound = True  # no step has failed
        self.pace = 12  # the longest run of steps without anything between them
        self.term = self._next_term()

    def chance(self, of: int) -> bool:
        return self.rng.randrange(of) == 0

    def _pod(self, address: str) -> None:
        if address not in self.pods:
            processes = [self._process(address) for _ in range(self.shape.ranks_per_pod)]
            self.pods[address] = Pod(address, processes, [process.pid for process in processes])

    def _process(self, address: str) -> Process:
        self._pids += 1
        return Process(self._pids, f"{address}:{self._pids}")

    def _next_term(self) -> Term:
        taken_over = not self.books.released
        self.books.term, self.books.released = self.books.number(), False
        self.leaving = self.usurped = False
        return Term(self, self.books.term, taken_over)

    def lanes_closed(self, term: Term) -> None:
        """Ranks may have run what they had, all or some of them; one that was asked to end ends now."""
        some = term.sent and self.chance(2)
        for lane in term.lanes.values():
            if some and self.chance(2):
                standing = lane.process.standing
                lane.process.standing = standing._replace(iteration=max(standing.iteration, term.sent[0]))
            if lane.process.leaving and self.chance(2):
                lane.process.alive = False

    def do(self, name: str, pick: int) -> None:
        """One thing happens."""
        self.sound = False
        getattr(self, name)(pick)
        self.term.audit()
        self.sound = True

    # -- what may happen: the ordinary

    def arrives(self, pick: int) -> None:
        """A client asks."""
        request = Request(len(self.requests) + 1, 1 + pick % 4)
        self.requests.append(request)
        self.books.queue.append(request)

    def goes_on(self, pick: int) -> None:
        """Whatever is under way advances by a few steps."""
        for _ in range(1 + pick % self.pace):
            self._advance(wake=False)

    def reaches(self, pick: int) -> None:
        """Nothing goes wrong until the engine is in a state that is short or rare."""
        target = ("Forming", "Recording", "Running", "Draining")[pick % 4]
        for _ in range(60):
            state = type(self.term.lifecycle.state).__name__
            if state == target or not self._advance():
                return
            if target == "Draining" and state == "Running":
                self.arrives(pick)
                if self.term.core.in_flight and not self.term.inbox:
                    self.leaves(pick // 4) if pick % 3 else self.scheduler_leaves(pick)

    def delivers(self, pick: int) -> None:
        if self.term.inbox:
            self.term.deliver()

    def calls_back(self, pick: int) -> None:
        """A call happens, out of turn."""
        if self.term.calls:
            self.term.happens(self.term.calls[pick % len(self.term.calls)])
            self.term.settle()

    def greets(self, pick: int) -> None:
        self.term.greet(pick % self.shape.ranks)

    def claims(self, pick: int) -> None:
        self.term.claim(1 + pick % 3, lost=pick % 5 == 4)

    def time_passes(self, pick: int) -> None:
        self.now += (0.05, 0.1, 0.5, 2.0, 3.1, 6.0, 121.0)[pick % 7]

    def wakes(self, pick: int) -> None:
        """At the moment that was named, or up to a second later."""
        due = self.term.lifecycle.wake_at
        if due is not None and not self.term.stopped:
            self.now = max(self.now, due) + (pick % 3) / 2
            self.term.tell(Wake(self.now))
            self.term.settle()

    def next_term(self, pick: int) -> None:
        if self.term.stopped and not self.books.away:
            self._new_term()

    def _new_term(self) -> None:
        self.term.replay()
        self.term = self._next_term()

    # -- what may happen: faults

    def wakes_early(self, pick: int) -> None:
        if not self.term.stopped:
            self.term.tell(Wake(self.now))
            self.term.settle()

    def doubles(self, pick: int) -> None:
        """An answer comes a second time, of this life or an earlier one."""
        kinds = (
            Hello | Listens | Identified | EpochGiven | StoreHosted | RankFormed | RankAllocated | Recorded
            | Confirmed | Fenced | RankLeaving | Suspected | Rested | Refused
        )  # fmt: skip
        told = [event for event, _ in self.term.record if isinstance(event, kinds)]
        life = self.term.lifecycle.life
        if pick % 2:
            told = [event for event in told if getattr(event, "life", 0) == life]
        told = [event for event in told if not isinstance(event, Rested) or event.life != life]
        if told and not self.term.stopped:
            self.term.tell(told[-1 - pick % len(told)])
            self.term.settle()

    def dies(self, pick: int) -> None:
        process = self._some_process(pick)
        process.alive = False

    def two_die(self, pick: int) -> None:
        self.dies(pick)
        self.dies(pick // 7 + 1)

    def freezes(self, pick: int) -> None:
        self._some_process(pick).frozen = True

    def leaves(self, pick: int) -> None:
        """A rank is asked to end: it says so on its lane."""
        rank = pick % self.shape.ranks
        lane = self.term.lanes.get(rank)
        if self.term.open is not None and lane is not None and lane.greeted and lane.process.alive:
            lane.process.leaving = True
            self.term.post(RankLeaving(self.now, self.term.open, rank, 0))

    def complains(self, pick: int) -> None:
        """A rank complains about a neighbour, and all ranks that live say so."""
        term, rank = self.term, pick % self.shape.ranks
        lane = term.lanes.get(rank)
        if term.open is None or lane is None or not lane.greeted or lane.closed or not lane.process.alive:
            return
        term.suspect(term.open, rank, Kind.PEER_LOST)
        lanes = [term.lanes[n] for n in range(self.shape.ranks) if n in term.lanes]
        answering = [lane for lane in lanes if lane.greeted and not lane.closed and lane.process.alive]
        if len(answering) == self.shape.ranks and not any(lane.process.frozen for lane in answering):
            term.post(AllAnswered(self.now, term.open))

    def breaks(self, pick: int) -> None:
        """The connection to a rank that lives ends."""
        term, rank = self.term, pick % self.shape.ranks
        lane = term.lanes.get(rank)
        if term.open is not None and lane is not None and lane.greeted and not lane.closed:
            lane.closed = True
            term.suspect(term.open, rank, Kind.CUT)

    def is_noticed(self, pick: int) -> None:
        """A lane tells of the end of its rank."""
        self.term.lane_tells(pick % self.shape.ranks)

    def supervised(self, pick: int) -> None:
        """A supervisor notices deaths, or starts a rank again."""
        self._supervise(list(self.pods.values())[pick % len(self.pods)])

    def table_comes(self, pick: int) -> None:
        number = pick % self.shape.pods
        if self.term.open is not None and not self.pods[self.term.dialed[number]].away:
            self.term.pod_tells(number)

    def pod_away(self, pick: int) -> None:
        number = pick % self.shape.pods
        if self.term.open is not None:
            pod = self.pods[self.term.dialed[number]]
            pod.away = not pod.away
            if pod.away:
                self.term.post(PodAway(self.now, self.term.open, number, "no route"))
            else:
                self.term.pod_tells(number)

    def suspicion(self, pick: int) -> None:
        """Something speaks against a rank, rightly or not."""
        rank, kind = pick % self.shape.ranks, list(Kind)[pick // 5 % len(Kind)]
        if self.term.open is not None and rank in self.term.lanes and kind is not Kind.GONE:
            self.term.suspect(self.term.open, rank, kind)

    def refuses(self, pick: int) -> None:
        rank = None if pick % 3 == 0 else pick % self.shape.ranks
        if self.term.open is not None and (rank is None or rank in self.term.lanes):
            self.term.post(Refused(self.now, self.term.open, rank, "refuses: another version"))

    def model_changes(self, pick: int) -> None:
        self.books.agrees = not self.books.agrees

    def room_changes(self, pick: int) -> None:
        """Ranks have other memory the next time, at times less than a block."""
        self.room = (16, 24, 3)[pick % 3] if not self._forming() else self.room

    def _forming(self) -> bool:
        """Ranks have told, or stand with, the room that they have now."""
        return self.term.open is not None

    def pool_away(self, pick: int) -> None:
        self.books.away = not self.books.away
        self._outage_told()

    def _outage_told(self) -> None:
        """By the term's renewals, which begin when its books are read."""
        if self.term.opened:
            self.term.post(PoolAway(self.now) if self.books.away else PoolBack(self.now))

    def cancels(self, pick: int) -> None:
        """A claim ends elsewhere. The master hears of it."""
        if self.books.claimed and not self.books.away and self.term.opened:
            claim = sorted(self.books.claimed)[pick % len(self.books.claimed)]
            self.books.claimed.pop(claim).ended = True
            self.term.post(EndedElsewhere((claim,)))

    def orphan(self, pick: int) -> None:
        """The pool counts a claim as this engine's of which its master never heard."""
        books = self.books
        ours = self.term.opened and not self.term.stopped and books.term == self.term.number
        if ours and books.queue and not books.away:
            claim = books.number()
            books.claimed[claim] = books.queue.pop(pick % len(books.queue))
            self.term.post(Orphaned(self.now, (claim,)))

    def candidate_changes(self, pick: int) -> None:
        """Other pods, the same ones, or none; at times one has no address, or they are to be replaced."""
        match pick % 6:
            case 0:
                self.candidate = None
            case 1:
                pass
            case kind:
                first = "ab"[kind % 2]
                self.candidate = tuple(f"{first if n == 0 else 'a'}{n}" for n in range(self.shape.pods))
        if self.candidate is not None and pick // 6 % 2 == 0:
            gone = pick % self.shape.pods
            self.candidate = tuple("" if n == gone else address for n, address in enumerate(self.candidate))
        self.replace = self.candidate is not None and pick // 12 % 5 == 0
        self.other_model = self.replace and pick // 60 % 2 == 0
        self.ending = self.candidate is not None and pick // 120 % 4 == 0
        self._candidate_told()

    def _candidate_told(self) -> None:
        for address in filter(None, self.candidate or ()):
            self._pod(address)
        self.absent = "" if all(self.candidate or ()) else "a pod is Pending"
        told = self.absent, self.replace, self.other_model, self.ending
        self.term.post(CandidateChanged(self.now, self.candidate, *told))

    def api_away_or_back(self, pick: int) -> None:
        self.api_away = not self.api_away

    def pods_deleted(self) -> None:
        """Somebody has asked for new pods instead of the candidate's."""
        for address in filter(None, self.candidate or ()):
            for process in self.pods[address].processes:
                process.alive = False
        self.remade = True

    def discovery_tells(self, pick: int) -> None:
        """What became of pods that are made anew: still to be replaced, without an address, or there."""
        if not self.remade or self.candidate is None:
            return
        kind = pick % 3
        self.replace = kind == 0
        self.other_model = self.replace and self.other_model
        self.candidate = tuple("" if kind < 2 else f"{'ab'[pick % 2]}{n}" for n in range(self.shape.pods))
        self.remade = kind < 2
        self._candidate_told()

    def scheduler_leaves(self, pick: int) -> None:
        self.leaving = True
        self.term.post(Leave(self.now))

    def deposed(self, pick: int) -> None:
        """Another master takes the lease, and perhaps the ranks, and ends. This one hears of it at its next call."""
        books = self.books
        if books.away or self.term.stopped:
            return
        books.term, books.released = books.number(), pick % 3 == 0
        self.usurped = True
        if pick % 2:
            books.epoch = books.number()
            for pod in self.pods.values():
                for process in pod.processes:
                    process.standing = process.standing._replace(epoch=0, rows=())
        if pick % 5 == 0:
            for claim in list(books.claimed):
                books.back(claim)
        if pick % 7 == 0:
            self.term.post(LeaseLost(self.now, "another scheduler took the engine"))

    def crashes(self, pick: int) -> None:
        """The scheduler is killed. Its lease runs out."""
        if not self.books.away:
            if self.term.open is not None:
                self.lanes_closed(self.term)
            self._new_term()

    def catches_up(self, pick: int) -> None:
        """The ranks of an epoch come to stand at the same iteration."""
        if self.term.open is not None:
            return
        for pod in self.pods.values():
            for process in pod.processes:
                epoch = process.standing.epoch
                alike = [
                    p.standing.iteration for q in self.pods.values() for p in q.processes if p.standing.epoch == epoch
                ]
                process.standing = process.standing._replace(iteration=max(alike))

    def _some_process(self, pick: int) -> Process:
        processes = [process for pod in self.pods.values() for process in pod.processes]
        return processes[pick % len(processes)]

    def _supervise(self, pod: Pod) -> bool:
        """Notices a death, or starts a rank. False: nothing to do."""
        for local, process in enumerate(pod.processes):
            if process.alive:
                continue
            if pod.noticed[local]:
                pod.noticed[local] = 0
            else:
                pod.processes[local] = self._process(pod.address)
                pod.noticed[local] = pod.processes[local].pid
            return True
        return False

    # -- the end of all faults

    def _advance(self, wake: bool = True) -> bool:
        """One step of what happens when nothing goes wrong. False: there is none."""
        term = self.term
        if term.stopped:
            if self.books.away:
                return False
            self._new_term()
        elif self.books.term != term.number and not self.books.away and not term.inbox:
            term.post(LeaseLost(self.now, "another scheduler took the engine"))  # a renewal
        elif term.inbox:
            term.deliver()
        elif self.remade and self.candidate is not None:
            self.discovery_tells(self.rng.randrange(6))
        elif any(term.happens(call) for call in list(term.calls)):
            term.settle()
        elif not self._ranks_move() and not term.returns() and not term.claim(2, lost=False):
            if not wake or term.lifecycle.wake_at is None:
                return False
            self.wakes(0)
        return True

    def _ranks_move(self) -> bool:
        """Pods and ranks do the next thing that they have to do. False: there is none."""
        term, ranks = self.term, range(self.shape.ranks)
        return (
            any(self._supervise(pod) for pod in self.pods.values())
            or (term.open is not None and self._watched())
            or any(term.greet(rank) for rank in ranks)
            or any(term.lane_tells(rank) for rank in ranks)
        )

    def _watched(self) -> bool:
        """A pod of this life has a table that its master does not know."""
        term = self.term
        for number, address in enumerate(term.dialed):
            table = tuple(entry.pid for entry in term.tables.get(number, ()))
            if not self.pods[address].away and table != tuple(self.pods[address].noticed):
                term.pod_tells(number)
                return True
        return False

    def quiesce(self) -> None:
        """The faults end: the engine runs, and every request ends."""
        self.sound = False
        self.books.away, self.books.agrees = False, True
        self._outage_told()
        self.room = 16 if self.room < self.shape.block_size else self.room
        for number, address in enumerate(self.term.dialed if self.term.open is not None else ()):
            if self.pods[address].away:
                self.pods[address].away = False
                self.term.pod_tells(number)
        for pod in self.pods.values():
            pod.away = False
            for process in pod.processes:
                process.alive &= not process.leaving or self.term.open is not None
        self.api_away = False
        if self.candidate is None or not (all(self.candidate) or self.remade):
            self.candidate = tuple(f"a{n}" for n in range(self.shape.pods))
            self._candidate_told()
        for _ in range(STEPS):
            done = isinstance(self.term.lifecycle.state, Running) and not self.leaving and not self.remade
            done = done and not self.term.inbox and not self.term.calls
            if done and all(request.ended for request in self.requests) and not self.term.core.in_flight:
                break
            moved = self._advance()
            self.term.audit()
            assert moved, f"nothing moves in {self.term.lifecycle}"
        else:
            raise AssertionError(f"no end in {STEPS} steps: {self.term.lifecycle}")
        assert not self.books.claimed
        assert not self.books.queue
        self.term.replay()


ORDINARY = (
    "reaches",
    "arrives",
    "goes_on",
    "delivers",
    "calls_back",
    "greets",
    "claims",
    "time_passes",
    "wakes",
    "next_term",
)
FAULTS = (
    "wakes_early", "doubles", "dies", "two_die", "freezes", "leaves", "complains", "breaks", "is_noticed", "supervised",
    "table_comes",
    "pod_away", "suspicion", "refuses", "model_changes", "room_changes", "pool_away", "cancels", "orphan",
    "candidate_changes", "api_away_or_back", "discovery_tells", "scheduler_leaves", "deposed", "crashes", "catches_up",
)  # fmt: skip
OPS = (*ORDINARY, *FAULTS)
SHAPES = (
    Shape(tp=1, pp=1, ranks_per_pod=1, block_size=4),
    Shape(tp=1, pp=2, ranks_per_pod=1, block_size=4, run_ahead=1),
    Shape(tp=2, pp=1, ranks_per_pod=2, block_size=4, slots=8),
    Shape(tp=2, pp=2, ranks_per_pod=1, block_size=4),
    Shape(tp=2, pp=2, ranks_per_pod=2, block_size=4, run_ahead=1),
)


def storm(rng: random.Random, steps: int, shapes: Sequence[Shape] = SHAPES) -> LifeWorld:
    """Random things happen. In some storms faults are rare, and some faults never come: or none goes far."""
    world = LifeWorld(rng.choice(shapes), random.Random(rng.random()))
    calm, world.pace = rng.choice((1, 2, 6, 15)), rng.choice((1, 2, 4, 12))
    faults = rng.sample(FAULTS, rng.randint(1, len(FAULTS)))
    for _ in range(steps):
        ordinary = rng.randrange(calm + 1)
        name = rng.choice((*ORDINARY, "goes_on", "reaches", "reaches")) if ordinary else rng.choice(faults)
        world.do(name, rng.randrange(1000))
    return world
