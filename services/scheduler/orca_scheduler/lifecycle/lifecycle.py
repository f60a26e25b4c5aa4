"""The life of an engine in one term of its master: a pure state machine beside the core, `step(event) -> actions`.

No clock, no I/O, no task: a journal of its events replays to the same verdicts. The states, and what ends each:

    Opening     Opened                                                       -> Greeting
    Incomplete  all pods have an address                                     -> Greeting
    Greeting    Identified, and all ranks stand alike in the books' epoch    -> Recording, which keeps the epoch
                Identified otherwise                                         -> Forming
    Forming     EpochGiven, StoreHosted, all RankFormed, all RankAllocated   -> Recording
    Recording   Recorded                                                     -> Running
    Running     RankLeaving, Leave, the candidate is gone or to be replaced  -> Draining
                the same by another model, and Finished or its time is over  -> Draining
    Draining    Rested                                                       -> Lost, to form again; Replacing; Closing
    Lost        Confirmed, and every lost rank Fenced                        -> Waiting, or Closing
    Waiting     its time is over                                             -> Greeting
    Replacing   the candidate is not to be replaced any more                 -> Greeting

    Greeting, Forming, Recording            Refused                          -> Waiting, each time longer
                                            RankLeaving                      -> Lost
                                            the candidate has other pods     -> Greeting, a new life
    wherever a life would begin or wait,
    and in Greeting, Forming, Recording     a pod has no address             -> Incomplete
    the same, and Incomplete                the candidate is to be replaced  -> Replacing
    Opening, Incomplete, Greeting, Forming,
    Recording, Waiting, Replacing           Leave, the candidate is gone     -> Closing
    Greeting to Draining                    a verdict                        -> Lost
    every state                             LeaseLost                        -> Ended

A running engine is judged by its control lanes alone: that a pod has lost its address counts from the next life on.

Each claim has one owner at a time. The lifecycle owns those that the core does not know (`unadmitted`): it admits them
to the core when the engine runs, or gives them back. The core owns what was admitted, until it finishes a request or
gives it back at EngineLost.
"""

from dataclasses import dataclass, field

from .. import timers
from ..core.core import Drain, EngineLost, EngineReady, GiveBack
from .events import (
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
from .places import Place, Shape
from .suspicions import Kind, Suspicion, judge

# -- states


@dataclass(slots=True)
class Opening:
    """The pool's books are being read."""


@dataclass(slots=True)
class Incomplete:
    """Nothing is open: some pod has no address."""


@dataclass(slots=True)
class Greeting:
    """Pods and ranks are being found. A rank that said Hello has an open control lane."""

    since: float
    pods: list[int] = field(default_factory=list[int])  # whose supervisor has sent its table


@dataclass(slots=True)
class Forming:
    """The ranks take their places in a new epoch."""

    epoch: int = 0  # 0: the pool has not given it yet
    store: str = ""  # where the ranks find each other, once it is hosted
    room: dict[int, int] = field(default_factory=dict[int, int])  # rank -> slots that its memory holds
    slots: int = 0  # of the engine, once all have told their room
    allocated: list[int] = field(default_factory=list[int])  # ranks


@dataclass(slots=True)
class Recording:
    """All ranks are members of the epoch; the pool is being told."""

    epoch: int
    slots: int
    stale_rows: tuple[int, ...] = ()  # that the ranks hold from an earlier master of this epoch


@dataclass(slots=True)
class Running:
    """The core schedules."""


@dataclass(slots=True)
class Draining:
    """The core schedules nothing more; what is in flight comes back."""

    why: str


@dataclass(slots=True)
class Lost:
    """The ranks are given up."""

    verdict: str
    fences: list[int]  # ranks to fence as soon as the lease is confirmed
    fencing: list[int] = field(default_factory=list[int])  # ranks whose fence is not answered yet
    confirmed: bool = False


@dataclass(slots=True)
class Waiting:
    """Nothing is open. The next life begins at `until`."""

    until: float


@dataclass(slots=True)
class Replacing:
    """Nothing is open. The pods are of an old revision: they are made anew, as often as it takes."""

    wait: float = timers.REFORM  # before the next attempt
    until: float | None = None  # when the next attempt begins; None: one is under way
    trouble: str = ""  # why the last attempt failed


@dataclass(slots=True)
class Closing:
    """The lease is being released, or the engine retired."""


@dataclass(slots=True)
class Ended:
    """The term is over."""


State = (
    Opening
    | Incomplete
    | Greeting
    | Forming
    | Recording
    | Running
    | Draining
    | Lost
    | Waiting
    | Replacing
    | Closing
    | Ended
)


@dataclass(slots=True)
class Known:
    """The facts about a rank by which a verdict names it. Host and iteration outlive a life."""

    address: str = "an unknown address"
    host: str = "unknown"
    pid: int = 0  # of the process that listened; 0: none has in this life
    started: int = 0  # pid of the process that its supervisor has started, whether it listens or not
    iteration: int = 0
    cut_pid: int = 0  # of the process to which connections broke ..
    cuts: int = 0  # .. and how often


@dataclass(slots=True)
class Greeted:
    """A rank's Hello."""

    standing: Standing
    model: Model
    protocol: int
    weights: str


@dataclass(slots=True)
class Lifecycle:
    """One engine in one term. The fields before `state` are given, or the candidate's; the others are its state."""

    engine: str
    shape: Shape
    pods: tuple[str, ...] | None  # of the candidate, "" without an address; None: the engine is not wanted any more
    absent: str = ""  # why pods of the candidate have no address
    replace: bool = False  # the candidate's pods are to be made anew
    other_model: bool = False  # .. with another model
    ending: bool = False  # the candidate is to be taken away soon
    finish_seconds: float = timers.FINISH  # for which what was begun may end before that
    state: State = field(default_factory=Opening)
    life: int = 0
    dialed: tuple[str, ...] = ()  # the pods of this life
    epoch: int = 0  # the last one in the pool's books; 0: there is none, or a new one was asked for
    known: list[Known] = field(default_factory=list[Known])
    greeted: dict[int, Greeted] = field(default_factory=dict[int, Greeted])  # ranks of this life
    away: dict[int, str] = field(default_factory=dict[int, str])  # pods that cannot be heard in this life, and why
    suspicions: list[Suspicion] = field(default_factory=list[Suspicion])
    verdict_at: float | None = None  # when the suspicions are judged
    # claim -> True: it may have been RUNNING when its last master died
    unadmitted: dict[int, bool] = field(default_factory=dict[int, bool])
    formed: bool = False  # the core was told EngineReady, and not EngineLost since
    lost_by: str = (
        ""  # why a running engine was given up the last time: a kind of suspicion, leaving, replaced, retired
    )
    leaving: bool = False  # the scheduler is leaving
    finish_by: float | None = None  # when pods are replaced by those of another model, whatever still runs
    away_since: float | None = None  # when the pool was found not to answer; None: it does
    backoff: float = timers.REFORM
    refusal: str | None = None  # why the last attempt to form failed
    unreached_since: float | None = (
        None  # when the first of the greetings ended in which no supervisor could be reached
    )

    # -- what others ask

    @property
    def wake_at(self) -> float | None:
        """When Wake is due."""
        match self.state:
            case Waiting(until) | Replacing(until=until):
                return until
            case Greeting() as greeting:
                return _soonest(self.verdict_at, *(moment for moment, _ in self._greeting_bounds(greeting)))
            case Forming() | Recording() | Running() | Draining():
                return _soonest(self.verdict_at, self._finishes_at)
            case _:
                return None

    @property
    def unready(self) -> str | None:
        """Why the engine serves nothing; None when it runs. May be asked in any thread, so each field is read once."""
        match self.state:
            case Running() | Draining():
                return None
            case Incomplete():
                return f"{self.engine} cannot form: {self.absent}"
            case Replacing(trouble=""):
                return f"{self.engine} waits for pods of the new revision"
            case Replacing(trouble=why):
                return f"{self.engine} waits for pods of the new revision, which cannot be asked for now: {why}"
            case _:
                refusal = self.refusal
                why = "is being formed" if refusal is None else f"cannot form: {refusal}"
                return f"{self.engine} {why}"

    @property
    def finishing(self) -> bool:
        """Whether the engine begins nothing more, and ends what it has begun."""
        return self.ending or self.finish_by is not None

    @property
    def weights(self) -> str:
        """The fingerprint of the ranks' weights. They are the same once all ranks were greeted."""
        return self.greeted[0].weights

    @property
    def places(self) -> tuple[Place, ...]:
        return self.shape.places()

    def formation(self, rank: int) -> Formation:
        """The formation of a rank of this engine."""
        shape, place = self.shape, self.places[rank]
        return_tokens = shape.run_ahead > 0 and shape.ranks > 1  # one rank has its own
        at = place.stage, place.tensor_rank
        return Formation(shape.tp, shape.pp, *at, shape.block_size, return_tokens, shape.hands_over)

    # -- the transitions

    def step(self, event: LifeEvent) -> list[LifeAction]:
        """Applies one event and says what is to be done about it, in this order."""
        if isinstance(self.state, Ended):
            return []
        match event:
            case LeaseLost(_, why):
                actions: list[LifeAction] = self._close_life()
                self.state = Ended()
                return [*actions, Stop(why)]
            case Opened():
                return self._opened(event)
            case Claimed(_, claims):
                self.unadmitted |= dict.fromkeys(claims, False)
                return self._admit() if isinstance(self.state, Running | Draining) else self._give_back()
            case Gone(_, claims):
                for claim in claims:
                    self.unadmitted.pop(claim, None)
                return []
            case Orphaned(_, claims):
                return [GiveBack(tuple((claim, False) for claim in claims))]
            case PoolAway(now):
                self.away_since = self._counted(now)
                return []
            case PoolBack(now):
                if self.finish_by is not None:
                    self.finish_by += now - self._counted(now)
                self.away_since = None
                return []
            case Leave():
                self.leaving = True
                return self._wanted_no_more(event.now, "the scheduler is leaving")
            case CandidateChanged():
                return self._candidate_changed(event)
            case Wake(now):
                return self._woken(now)
            case _:
                return self._of_a_life(event) if event.life == self.life else []

    def _of_a_life(self, event: LifeEvent) -> list[LifeAction]:
        """An event of the present life."""
        match self.state:
            case Greeting() | Forming() | Recording() | Running() | Draining():
                return self._live(event)
            case Lost() as lost:
                return self._lost(lost, event)
            case Replacing() as replacing:
                return self._replacing(replacing, event)
            case _:
                return []

    def _opened(self, event: Opened) -> list[LifeAction]:
        if not isinstance(self.state, Opening):
            return []
        self.epoch = event.epoch
        self.unadmitted = dict.fromkeys(event.claims, event.taken_over)
        self._let_finish(event.now)
        return self._next_life(event.now)

    def _live(self, event: LifeEvent) -> list[LifeAction]:
        """An event of a life whose ranks are not given up."""
        match event, self.state:
            case PodSeen(), _:
                return self._pod_seen(event)
            case PodAway(_, _, pod, why), _:
                self.away[pod] = why
                self._look_for_ended(event.now)
            case Listens(_, _, rank, address, pid), Greeting():
                known = self.known[rank]
                known.address, known.pid = address, pid
            case Suspected(), _:
                self._suspected(event)
            case AllAnswered(now), _:
                self._all_answered(now)
            case RankLeaving(now, _, rank, iteration), _:
                self.known[rank].iteration = max(self.known[rank].iteration, iteration)
                sentence = f"{self._name(rank)} is leaving"
                if isinstance(self.state, Running):
                    return self._drain(now, sentence)
                if not isinstance(self.state, Draining):  # nothing is in flight
                    return self._lose(now, sentence, [])
            case Refused(now, _, rank, why), Greeting() | Forming() | Recording():
                return self._refused(now, why if rank is None else f"{self._name(rank)} {why}")
            case Hello(), Greeting():
                return self._hello(event)
            case Identified(), Greeting() if len(self.greeted) == self.shape.ranks:
                return self._identified()
            case EpochGiven(_, _, epoch), Forming(epoch=0) as forming:
                assert all(g.standing.epoch < epoch for g in self.greeted.values()), f"epoch {epoch} is not new"
                self.epoch = forming.epoch = epoch
                return [HostStore(self.life, epoch)] if self.shape.ranks > 1 else [Form(self.life, epoch, "")]
            case StoreHosted(_, _, epoch, address), Forming(store="") as forming if epoch == forming.epoch:
                forming.store = address
                return [Form(self.life, epoch, address)]
            case RankFormed(now, _, epoch, rank, slots), Forming() as forming if epoch == forming.epoch:
                return self._rank_formed(now, forming, rank, slots)
            case RankAllocated(_, _, epoch, rank), Forming() as forming if epoch == forming.epoch and forming.slots:
                return self._rank_allocated(forming, rank)
            case Recorded(now, _, iteration), Recording() as recording:
                return self._recorded(now, recording, iteration)
            case Rested(now), Draining(why):
                return self._rested(now, why)
            case Finished(now), Running() if self.finish_by is not None:
                return self._finished(now, "it has finished what it began with the old model")
            case _:
                pass  # a late or doubled answer
        return []

    # -- greeting

    def _next_life(self, now: float) -> list[LifeAction]:
        """Dials, unless this engine is not wanted any more, or its pods are not all there, or too old."""
        if self.leaving or self.pods is None:
            return self._close(now)
        if self._replaces(now):
            return self._replace(now)
        if not all(self.pods):
            self.state = Incomplete()
            return [Say("engine is incomplete", self.absent), *self._give_back()]
        self.life, self.dialed, self.state = self.life + 1, self.pods, Greeting(now)
        self.known = self.known or [Known() for _ in range(self.shape.ranks)]
        for known, place in zip(self.known, self.places, strict=True):
            known.address, known.pid, known.started = self.dialed[place.pod], 0, 0
        self.greeted.clear()
        self.away.clear()
        self.suspicions.clear()
        self.verdict_at = None
        return [Dial(self.life, self.dialed)]

    def _greeting_bounds(self, greeting: Greeting) -> list[tuple[float, str]]:
        """The bounds of a greeting's parts: the moment, and the sentence about what was not there by then."""
        bounds: list[tuple[float, str]] = []
        if len(self.greeted) < self.shape.ranks:  # else the pool is asked, which may be away for long
            bounds.append((greeting.since + timers.START, "ranks"))
        if len(greeting.pods) < self.shape.pods:
            bounds.append((greeting.since + timers.DIAL, "pods"))
        if self.unadmitted and len(self.greeted) < self.shape.ranks:
            bounds.append((greeting.since + timers.KEEP_CLAIMS, "claims"))
        return bounds

    def _pod_seen(self, event: PodSeen) -> list[LifeAction]:
        self.away.pop(event.pod, None)
        if isinstance(self.state, Greeting):
            if event.pod not in self.state.pods:
                self.state.pods.append(event.pod)
            self.unreached_since = None
            wanted, count = self.shape.ranks_per_pod, len(event.entries)
            if count != wanted:
                address = self.dialed[event.pod]
                return self._refused(event.now, f"gpus_per_pod: the pod at {address} has {count} ranks, not {wanted}")
        self._look_for_ended(event.now, event.pod, event.entries)
        return []

    def _hello(self, event: Hello) -> list[LifeAction]:
        known, standing = self.known[event.rank], event.standing
        known.host, known.pid = event.host, event.pid
        known.iteration = max(known.iteration, standing.iteration)
        self.greeted[event.rank] = Greeted(standing, event.model, event.protocol, event.weights)
        for other, greeted in self.greeted.items():
            if greeted.weights != event.weights:
                prints = f"{event.weights} and {self._name(other)} the weights {greeted.weights}"
                return self._refused(
                    event.now,
                    f"{self._name(event.rank)} has the weights {prints}: all ranks of an engine have the same; "
                    f"where a checkpoint was written over, delete the pods",
                )
            if greeted.protocol != event.protocol:
                numbers = f"{event.protocol} and {self._name(other)} protocol {greeted.protocol}"
                return self._refused(
                    event.now,
                    f"{self._name(event.rank)} speaks protocol {numbers}: all ranks of an engine speak the same",
                )
        actions: list[LifeAction] = []
        if not self._may_stand(event.rank):
            actions += self._give_back()  # there will be a new epoch: another engine may have them meanwhile
        if len(self.greeted) == self.shape.ranks:
            actions.append(Identify(self.life, tuple(dict.fromkeys(g.model for g in self.greeted.values()))))
        return actions

    def _may_stand(self, rank: int) -> bool:
        """Whether a rank stands in the epoch of the books, formed as it would be now."""
        standing, shape = self.greeted[rank].standing, self.shape
        slots = shape.whole_blocks(shape.slots or standing.slots)
        return (
            standing.epoch == self.epoch != 0
            and standing.formation == self.formation(rank)
            and standing.slots == slots != 0
        )

    def _identified(self) -> list[LifeAction]:
        """Makes the ranks one engine: in the epoch where they stand, if they all do and alike, else in a new one."""
        # Formations differ by place, and `_may_stand` looks at them: the rest must be alike.
        standings = {greeted.standing._replace(formation=self.formation(0)) for greeted in self.greeted.values()}
        if len(standings) == 1 and all(map(self._may_stand, self.greeted)):
            (standing,) = standings
            return self._record(Recording(standing.epoch, standing.slots, standing.rows))
        self.state = Forming()
        self.epoch = 0  # from here on the books may have a new one, even if its answer never comes
        above = max(greeted.standing.epoch for greeted in self.greeted.values())
        return [*self._give_back(), NewEpoch(self.life, above)]

    # -- forming

    def _rank_formed(self, now: float, forming: Forming, rank: int, slots: int) -> list[LifeAction]:
        forming.room[rank] = slots
        if forming.slots or len(forming.room) < self.shape.ranks:
            return []
        smallest = min(forming.room, key=lambda rank: (forming.room[rank], rank))
        room = forming.room[smallest]
        wanted = room if self.shape.slots is None else self.shape.slots
        slots = self.shape.whole_blocks(wanted)
        if slots > room:
            return self._refused(now, f"slots: {slots} do not fit, {self._name(smallest)} has room for {room}")
        forming.slots = slots
        if slots == 0:
            why = f"{self._name(smallest)} has room for {wanted}, a block is {self.shape.block_size}"
            return self._refused(now, f"slots: {why}")
        return [Allocate(self.life, forming.epoch, forming.slots)]

    def _rank_allocated(self, forming: Forming, rank: int) -> list[LifeAction]:
        if rank not in forming.allocated:
            forming.allocated.append(rank)
        if len(forming.allocated) < self.shape.ranks:
            return []
        return self._record(Recording(forming.epoch, forming.slots))

    def _record(self, recording: Recording) -> list[LifeAction]:
        self.state = recording
        above = max(greeted.standing.iteration for greeted in self.greeted.values())
        return [Record(self.life, recording.epoch, recording.slots, above, self.weights)]

    def _recorded(self, now: float, recording: Recording, iteration: int) -> list[LifeAction]:
        self.state = Running()
        self.formed, self.refusal, self.backoff = True, None, timers.REFORM
        run = Run(self.life, recording.epoch, recording.stale_rows)
        return [run, EngineReady(now, recording.slots, iteration), *self._admit()]

    def _refused(self, now: float, why: str) -> list[LifeAction]:
        """Ends this attempt. The next one would probably fail too, so each wait is longer."""
        self.refusal = why
        self.backoff = min(2 * self.backoff, timers.LONGEST_REFORM)
        actions = [Say("engine cannot form", why), *self._close_life(), *self._give_back()]
        self.state = Waiting(now + self.backoff)
        return actions

    # -- suspicions and verdicts

    def _suspected(self, event: Suspected) -> None:
        known = self.known[event.suspicion.rank]
        known.iteration = max(known.iteration, event.iteration)
        self._suspect(event.now, event.suspicion)
        self._look_for_ended(event.now)

    def _suspect(self, now: float, suspicion: Suspicion) -> None:
        """The verdict follows a sure suspicion after LINGER, and a doubtful one after CUT or DOUBT more."""
        self.suspicions.append(suspicion)
        doubt = timers.CUT if suspicion.kind is Kind.CUT else timers.DOUBT
        judged = now + timers.LINGER + (0.0 if suspicion.kind.sure else doubt)
        self.verdict_at = judged if self.verdict_at is None else min(self.verdict_at, judged)

    def _all_answered(self, now: float) -> None:
        """No rank is silent, so ranks that only complain about neighbours have no sure suspicion to wait for."""
        if self.verdict_at is not None and all(s.kind is Kind.PEER_LOST for s in self.suspicions):
            self.verdict_at = min(self.verdict_at, now)

    def _look_for_ended(self, now: float, pod: int | None = None, entries: tuple[Entry, ...] = ()) -> None:
        """Suspects ranks whose process is another than listened, or whose lane ended while their supervisor is away."""
        gone = {s.rank for s in self.suspicions if s.kind is Kind.GONE}
        left = {s.rank for s in self.suspicions if s.kind in (Kind.CLOSED, Kind.CUT, Kind.REFUSED)}
        running = {entry.local_rank: entry for entry in entries}
        for rank, place in enumerate(self.places):
            known = self.known[rank]
            entry = running.get(place.local_rank) if place.pod == pod else None
            if entry is not None:
                known.started = entry.pid
                known.iteration = max(known.iteration, entry.iteration)
            if rank in gone or not known.pid:
                continue
            if place.pod == pod:
                if entry is None or entry.pid != known.pid:
                    self._suspect(now, Suspicion(rank, Kind.GONE, "has ended"))
            elif place.pod in self.away and rank in left:
                detail = f"has ended, and so has its supervisor ({self.away[place.pod]})"
                self._suspect(now, Suspicion(rank, Kind.GONE, detail))

    def _woken(self, now: float) -> list[LifeAction]:
        """Does what was due by now."""
        if self.wake_at is None or now < self.wake_at:
            return []
        if isinstance(self.state, Waiting):
            return self._next_life(now)
        if isinstance(self.state, Replacing):
            self.state.until = None
            return [ReplacePods(self.life)]
        if self._finishes_at is not None and now >= self._finishes_at:
            return self._finished(
                now, f"it has had {self.finish_seconds:g} s to finish what it began with the old model"
            )
        if self.verdict_at is not None and now >= self.verdict_at:
            lost = judge(self.suspicions)
            verdict = "; ".join(f"{self._name(suspicion.rank)} {suspicion.detail}" for suspicion in lost)
            fences = [suspicion.rank for suspicion in lost if self._to_be_fenced(suspicion)]
            return self._lose(now, verdict, fences, lost[0].kind.name.lower())
        assert isinstance(self.state, Greeting), "only a greeting has bounds of its own"
        due = [what for moment, what in self._greeting_bounds(self.state) if now >= moment]
        if "pods" in due:
            pod = next(pod for pod in range(self.shape.pods) if pod not in self.state.pods)
            address, why = self.dialed[pod], self.away.get(pod, "no answer")
            if not self.state.pods and self.unreached_since is None:
                self.unreached_since = now
            return self._lose(now, f"the supervisor at {address} of {self.engine} cannot be reached: {why}", [])
        if "ranks" in due:
            late = [rank for rank in range(self.shape.ranks) if rank not in self.greeted]
            for rank in late:
                self.known[rank].pid = self.known[rank].pid or self.known[rank].started  # it hangs: a new one may not
            names = ", ".join(map(self._name, late))
            return self._lose(now, f"no Hello after {timers.START:.0f} s: {names}", late)
        return self._give_back()

    def _to_be_fenced(self, suspicion: Suspicion) -> bool:
        """Counts a connection that broke, and says whether the lost rank's process is killed.

        One whose connection broke is greeted again, CUTS - 1 times.
        """
        if suspicion.kind is not Kind.CUT:
            return suspicion.kind.fences
        known = self.known[suspicion.rank]
        known.cuts = known.cuts + 1 if known.cut_pid == known.pid else 1
        known.cut_pid = known.pid
        return known.cuts >= timers.CUTS

    def _lose(self, now: float, verdict: str, fences: list[int], cause: str = "leaving") -> list[LifeAction]:
        """The ranks are given up: requests go back at once, and lost ranks are fenced when the lease is confirmed."""
        actions: list[LifeAction] = [Say("rank lost", verdict), *self._core_lost(now, cause), *self._give_back()]
        self.refusal, self.backoff = None, timers.REFORM
        self.state = Lost(verdict, [rank for rank in fences if self.known[rank].pid])
        return [*actions, Confirm(self.life)]

    def _lost(self, lost: Lost, event: LifeEvent) -> list[LifeAction]:
        match event:
            case Confirmed() if not lost.confirmed:
                lost.confirmed, lost.fencing = True, list(lost.fences)
                fences = [Fence(self.life, rank, self.known[rank].pid, lost.verdict) for rank in lost.fences]
                return [*fences, HangUp(self.life), *self._when_fenced(event.now, lost)]
            case Fenced(now, _, rank) if rank in lost.fencing:
                lost.fencing.remove(rank)
                return self._when_fenced(now, lost)
            case _:
                return []

    def _when_fenced(self, now: float, lost: Lost) -> list[LifeAction]:
        """The next life must not greet a process that is about to be killed."""
        if lost.fencing:
            return []
        if not self._may_live(now):
            return self._next_life(now)
        self.state = Waiting(now + timers.REFORM)
        return []

    def _name(self, rank: int) -> str:
        place, known = self.places[rank], self.known[rank]
        return (
            f"stage {place.stage} rank {place.tensor_rank} of {self.engine} at {known.address} "
            f"(host {known.host}, pid {known.pid or 'unknown'}, last iteration {known.iteration})"
        )

    # -- draining and leaving

    def _may_live(self, now: float) -> bool:
        """Whether nothing that is known stands against a new life."""
        return self.pods is not None and all(self.pods) and not self.leaving and not self._replaces(now)

    def _candidate_changed(self, event: CandidateChanged) -> list[LifeAction]:
        """A running engine keeps its pods, unless they are to be replaced; other ones count from the next life on."""
        now, changed = event.now, event.pods != self.pods
        finished_before = self.finishing
        self.pods, self.absent, self.replace, self.other_model, self.ending = (
            event.pods,
            event.absent,
            event.replace,
            event.other_model,
            event.ending,
        )
        if self.pods is None:
            return self._wanted_no_more(now, "the engine is no longer discovered")
        return [*self._let_finish(now, changed), *self._follow_candidate(now, changed, finished_before)]

    def _follow_candidate(self, now: float, changed: bool, finished_before: bool) -> list[LifeAction]:
        """Does what the new candidate asks for. changed: its pods are others. finished_before: the engine did so."""
        match self.state:
            case Running() if self._replaces(now):
                return self._drain(now, "its pods are of an old revision")
            case Running() if self.finish_by is not None and not finished_before:
                return [Say("engine finishes", "its pods are of an old revision, and the new one has another model")]
            case Running() if self.finishing and not finished_before:
                return [Say("engine finishes", "it is to be taken away")]
            case Running() if finished_before and not self.finishing and not changed:
                return [Say("engine begins requests again", "it stays")]
            case Greeting() | Forming() | Recording() if changed or self._replaces(now):
                return [*self._close_life(), *self._next_life(now)]
            case Waiting() if not self._may_live(now):
                return self._next_life(now)
            case Incomplete() if self._may_live(now) or self.replace:
                return self._next_life(now)
            case Replacing() if not self.replace:
                return self._next_life(now)
            case _:
                return []  # Opening, Draining and Lost come to it on their own

    def _wanted_no_more(self, now: float, why: str) -> list[LifeAction]:
        match self.state:
            case Running():
                return self._drain(now, why)
            case Incomplete() | Greeting() | Forming() | Recording() | Waiting() | Replacing():
                return [*self._close_life(), *self._close(now)]
            case _:
                return []  # Opening, Draining and Lost reach _close on their own

    def _drain(self, now: float, why: str) -> list[LifeAction]:
        self.state = Draining(why)
        return [Say("engine drains", why), Drain(now)]

    def _rested(self, now: float, why: str) -> list[LifeAction]:
        if self.leaving or self.pods is None or self._replaces(now):
            return [*self._close_life(), *self._next_life(now)]
        return self._lose(now, why, [])

    def _close_life(self) -> list[LifeAction]:
        """Hangs up, if anything is open."""
        if isinstance(self.state, Opening | Incomplete | Waiting | Replacing | Closing) or (
            isinstance(self.state, Lost) and self.state.confirmed
        ):
            return []
        return [HangUp(self.life)]

    def _close(self, now: float) -> list[LifeAction]:
        """Ends the term.

        At a release, requests that the core still holds stay claimed for the next master. A retired engine has no next
        master, so everything is given back.
        """
        self.state = Closing()
        if self.pods is not None:
            return [Release()]
        return [*self._core_lost(now, "retired"), *self._give_back(), Retire()]

    # -- replacing pods

    def _let_finish(self, now: float, changed: bool = False) -> list[LifeAction]:
        """Gives the engine its time to finish, when the new pods will have another model and something was begun.

        changed: its pods are others. Where one is lost, the rest of the time is for requests to wait: an update that
        is taken back brings pods of their model.
        """
        if self.replace and self.other_model:
            if self.finish_by is None and (self.formed or self.unadmitted):
                self.finish_by = self._counted(now) + self.finish_seconds
            return []
        left, self.finish_by = 0.0 if self.finish_by is None else self.finish_by - self._counted(now), None
        return [Expect(left)] if changed and left > 0 else []

    def _replaces(self, now: float) -> bool:
        """Whether the pods are made anew before anything else. An engine that lacks a pod cannot finish."""
        has_time = self.finish_by is not None and self._counted(now) < self.finish_by
        finishes = has_time and self.pods is not None and all(self.pods)
        return self.replace and not finishes

    @property
    def _finishes_at(self) -> float | None:
        """When an engine that runs has had its time to finish; None: it has no such bound now."""
        return self.finish_by if isinstance(self.state, Running) and self.away_since is None else None

    def _counted(self, now: float) -> float:
        """The moment for the time in which the engine is to finish: it stands still while the pool is away."""
        return now if self.away_since is None else self.away_since

    def _finished(self, now: float, why: str) -> list[LifeAction]:
        self.finish_by = self._counted(now)
        return self._drain(now, f"its pods are of an old revision, and {why}")

    def _replace(self, now: float) -> list[LifeAction]:
        """Has the pods made anew. Nothing is open, and every request goes back."""
        self.state = Replacing()
        self.refusal, self.backoff = None, timers.REFORM
        say = Say("pods are replaced", "they are of an old revision")
        return [say, *self._core_lost(now, "replaced"), *self._give_back(), ReplacePods(self.life)]

    def _replacing(self, replacing: Replacing, event: LifeEvent) -> list[LifeAction]:
        """Asks again until the candidate is another one: that alone says that it was done."""
        match event:
            case Replaced(now, _, why) if replacing.until is None:
                first = bool(why) and not replacing.trouble
                replacing.trouble = why
                replacing.until = now + replacing.wait
                replacing.wait = min(2 * replacing.wait, timers.LONGEST_REFORM)
                return [Say("pods cannot be replaced", why)] if first else []
            case _:
                return []

    # -- claims

    def _core_lost(self, now: float, cause: str) -> list[LifeAction]:
        """Takes the engine from the core, which gives back what it holds."""
        formed, self.formed = self.formed, False
        self.lost_by = cause if formed else self.lost_by
        return [EngineLost(now)] if formed else []

    def _admit(self) -> list[LifeAction]:
        claims = tuple(self.unadmitted)
        self.unadmitted.clear()
        return [Admit(claims)] if claims else []

    def _give_back(self) -> list[LifeAction]:
        requests = tuple(self.unadmitted.items())
        self.unadmitted.clear()
        return [GiveBack(requests)] if requests else []


def _soonest(*moments: float | None) -> float | None:
    """The first of the moments that there are."""
    return min((moment for moment in moments if moment is not None), default=None)
