"""The ranks of an engine in one life, as its master reaches them: pods, formation, control lanes."""

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any

from orca.v1 import worker_pb2 as pb
from orca_common.errors import echo
from orca_common.service import LoopPulse, cancel
from orca_common.tls import Transport

from .. import timers
from ..lifecycle.events import AllAnswered, Entry, Fenced, Formation, PodAway, PodSeen, Suspected
from ..lifecycle.places import Shape
from ..lifecycle.progress import Durations, Progress, Work
from ..lifecycle.suspicions import Kind
from .pods import Pod
from .rank import LONGEST_ERROR, Listener, Rank, Told

MOST_TIMES = 256  # iterations whose times have not come from all ranks

Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]  # starts a task whose error is the master's


class Ranks:
    """Carries out the lifecycle's decisions about ranks, and passes it their messages.

    `post` takes events of the lifecycle; `returned` reports with tokens; `timed` the times of all ranks of an
    iteration, when the last of them has come; `pulled` how a request's pull ended on all ranks: its claim, the bytes
    that were taken, and why it failed, or ""; `held` the adapters that a rank has, with its index. `durations` and
    `met` (see `Rank`) outlive this life.
    """

    def __init__(
        self,
        engine: str,
        term: int,
        life: int,
        pods: tuple[str, ...],
        shape: Shape,
        pulse: LoopPulse,
        transport: Transport,
        spawn: Spawn,
        post: Callable[[Told | AllAnswered | PodSeen | PodAway | Fenced], None],
        returned: Callable[[pb.IterationReport], None],
        timed: Callable[[int, list[pb.StageTimes]], None],
        pulled: Callable[[int, int, str], None],
        held: Callable[[int, pb.AdaptersHeld], None],
        durations: Durations,
        met: dict[int, int],
    ) -> None:
        self._life, self._shape, self._pulse = life, shape, pulse
        self._spawn, self._post, self._returned, self._timed = spawn, post, returned, timed
        self._pulled = pulled
        self._loop = asyncio.get_running_loop()  # to ask for it is a system call, in Python 3.11
        self._pulls: dict[int, tuple[int, dict[int, pb.Pulled]]] = {}  # by iteration: claim, and what ranks have told
        self._pulling: dict[int, tuple[int, float]] = {}  # by rank: the pull whose turn it is, and since when
        self._places = shape.places()
        self._progress = Progress(durations, shape.pp)
        self._times: dict[int, dict[int, pb.StageTimes]] = {}  # by iteration and rank, until all have told theirs
        self._asked: list[int] = []  # heartbeats, one a rank, that were sent at the last complaint about a neighbour
        told = Listener(
            self._told,
            self._answered,
            self._tokens_came,
            self._times_came,
            self._pull_ended,
            lambda: self._progress.latest,
            held,
        )
        self._pods = [
            Pod(address, transport, partial(self._seen, n), partial(self._away, n)) for n, address in enumerate(pods)
        ]
        self._ranks = [Rank(n, engine, term, life, transport, told, met) for n in range(shape.ranks)]
        self._fences: list[asyncio.Task[None]] = []
        self._tasks = [
            *(spawn(pod.watch()) for pod in self._pods),
            *(spawn(rank.serve(partial(self._entry, rank.index))) for rank in self._ranks),
            spawn(self._listen()),
        ]

    def hang_up(self) -> None:
        """Ends this life of the ranks. Fences that are under way go on."""
        self._spawn(self.close())

    async def close(self) -> None:
        """Closes all channels, once the fences are through. May be called again."""
        await cancel(*self._tasks)
        await asyncio.gather(*(rank.close() for rank in self._ranks))
        await asyncio.gather(*self._fences, return_exceptions=True)  # their errors are the master's already
        await asyncio.gather(*(pod.close() for pod in self._pods))

    def _start(self, part: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(self._spawn(part))

    # -- pods

    def _entry(self, rank: int) -> pb.RankEntry | None:
        place = self._places[rank]
        return self._pods[place.pod].table.get(place.local_rank)

    def _seen(self, pod: int) -> None:
        told = {
            place.local_rank: self._ranks[n].last_iteration for n, place in enumerate(self._places) if place.pod == pod
        }
        entries = tuple(
            Entry(e.local_rank, e.address, e.pid, told.get(e.local_rank, 0)) for e in self._pods[pod].table.values()
        )
        self._post(PodSeen(self._now, self._life, pod, entries))

    def _away(self, pod: int, why: str) -> None:
        self._post(PodAway(self._now, self._life, pod, why))

    def fence(self, rank: int, pid: int, verdict: str) -> None:
        """Has a rank's supervisor kill this process. Posts Fenced when that was done, or tried in vain."""
        self._fences.append(self._spawn(self._fence(rank, pid, verdict)))

    async def _fence(self, rank: int, pid: int, verdict: str) -> None:
        place = self._places[rank]
        await self._pods[place.pod].fence(place.local_rank, pid, verdict)
        self._post(Fenced(self._now, self._life, rank))

    # -- formation: each rank posts its own answer

    def host_store(self, epoch: int) -> None:
        self._start(self._ranks[0].host_store(epoch))

    def form(self, epoch: int, store: str, formation: Callable[[int], Formation]) -> None:
        controllers = [rank.address for rank in self._ranks]
        for rank in self._ranks:
            self._start(rank.form(epoch, formation(rank.index), store, controllers))

    def allocate(self, epoch: int, slots: int) -> None:
        for rank in self._ranks:
            self._start(rank.allocate(epoch, slots))

    # -- control lanes

    def run(self, epoch: int) -> None:
        """The engine runs under this epoch from here on: a rank answers heartbeats at once."""
        for rank in self._ranks:
            rank.run(epoch)

    def send(self, iteration: pb.Iteration) -> None:
        """Puts an iteration on the control lane of stage 0's controller."""
        work = Work.of(iteration.starts[:], iteration.counts[:]) if iteration.rows else None
        self._progress.sent(iteration.number, work, self._now)
        if iteration.HasField("pull"):
            self._pulls[iteration.number] = iteration.pull.admission.claim, {}
        self._ranks[0].send(iteration)

    def tell_adapters(self, table: pb.AdapterTable) -> None:
        """Sends all ranks the table of adapters."""
        for rank in self._ranks:
            rank.tell_adapters(table)

    def wrong(self, report: str) -> None:
        """Distrusts the rank that samples: it has sent an impossible report."""
        self._ranks[self._sampler].wrong(report)

    @property
    def _sampler(self) -> int:
        """The rank that samples: the first of the last stage."""
        return len(self._ranks) - self._shape.tp

    def _tokens_came(self, rank: int, report: pb.IterationReport) -> None:
        if rank != self._sampler:
            self._ranks[rank].wrong("tokens, and another rank makes them")
            return
        if report.number != self._progress.oldest:
            return  # it answers an iteration of an earlier life in this epoch; its requests were given back
        self._progress.returned(self._now)
        self._returned(report)

    def _times_came(self, rank: int, iteration: int, times: pb.StageTimes) -> None:
        if iteration not in self._times and len(self._times) >= MOST_TIMES:
            del self._times[min(self._times)]  # some rank did not tell its own
        place = self._places[rank]
        times.stage, times.tensor_rank = place.stage, place.tensor_rank  # whatever it says
        of_all = self._times.setdefault(iteration, {})
        of_all[rank] = times
        if len(of_all) == len(self._ranks):
            del self._times[iteration]
            self._timed(iteration, list(of_all.values()))

    # -- requests that change engines

    def sources(self) -> list[pb.BlockSource]:
        """The addresses at which other engines get keys and values, for each rank."""
        return [rank.blocks for rank in self._ranks]

    def _pull_ended(self, rank: int, pulled: pb.Pulled) -> None:
        """A rank's part of a pull is over. Until all are, blocks may be written."""
        claim, told = self._pulls.get(pulled.number, (0, None))
        if told is None:
            return  # of an earlier life or master
        told[rank] = pulled
        if len(told) == len(self._ranks):
            del self._pulls[pulled.number]
            errors = [echo(one.error, LONGEST_ERROR) for one in told.values() if one.error]
            self._pulled(claim, sum(one.bytes for one in told.values()), errors[0] if errors else "")

    def _unpulled(self, now: float) -> Iterator[tuple[Rank, float]]:
        """The ranks that owe the end of a pull for too long, and for how many seconds.

        A rank takes pulls up in their order, so the first that it has not ended has its turn: since those before it
        have ended, and the iterations before it.
        """
        oldest = self._progress.oldest
        begun = [(n, told) for n, (_, told) in self._pulls.items() if oldest is None or n < oldest]
        for rank in self._ranks:
            number = next((n for n, told in begun if rank.index not in told), None)
            if number is None:
                self._pulling.pop(rank.index, None)
                continue
            was, since = self._pulling.get(rank.index, (None, now))
            if was != number:
                since = now
            self._pulling[rank.index] = number, since
            standing = now - max(since, self._pulse.late_at)
            if standing > timers.PULL:
                yield rank, standing

    # -- complaints, silence and standstill

    def _told(self, event: Told) -> None:
        """Passes a rank's message on. After a complaint about a neighbour, all ranks are asked for a heartbeat."""
        self._post(event)
        if isinstance(event, Suspected) and event.suspicion.kind is Kind.PEER_LOST:
            self._asked = [rank.ask() for rank in self._ranks]

    def _answered(self) -> None:
        if self._asked and all(rank.answered >= n for rank, n in zip(self._ranks, self._asked, strict=True)):
            self._asked = []
            self._post(AllAnswered(self._now, self._life))

    async def _listen(self) -> None:
        """Suspects silent and stuck ranks, while this process itself is on time."""
        while True:
            due = min((r.last_heard + r.silence for r in self._ranks if r.last_heard is not None), default=math.inf)
            await asyncio.sleep(min(max(due - self._now, timers.LOOK), timers.SELDOM))
            now = self._now
            for rank in self._ranks:
                silent = 0.0 if rank.last_heard is None else now - rank.last_heard
                if silent > rank.silence and self._pulse.on_time(rank.silence):
                    rank.last_heard = None
                    rank.suspect(Kind.SILENT, f"has been silent for {silent:.1f} s")
            owing = list(self._unpulled(now))
            if owing and self._pulse.on_time(timers.SILENCE):
                for rank, standing in owing:
                    rank.suspect(Kind.STUCK, f"answers and has ended no pull for {standing:.1f} s")
                return
            standing = self._progress.stuck(now, since=self._pulse.late_at)
            if standing is not None and self._pulse.on_time(timers.SILENCE):
                for rank in self._stuck():
                    rank.suspect(Kind.STUCK, f"answers and has made no progress for {standing:.1f} s")
                return

    def _stuck(self) -> list[Rank]:
        """The ranks that hold up the oldest iteration: in the first stage where it is not done, those furthest behind.
        Tensor ranks that wait for each other cannot be told apart from here."""
        oldest = self._progress.oldest
        assert oldest is not None
        late = [rank for rank in self._ranks if rank.last_iteration < oldest] or [self._ranks[-self._shape.tp]]
        stage = self._places[late[0].index].stage
        late = [rank for rank in late if self._places[rank.index].stage == stage]
        behind = min(rank.last_iteration for rank in late)
        return [rank for rank in late if rank.last_iteration == behind]

    @property
    def _now(self) -> float:
        return self._loop.time()
