"""The ranks of one engine, as its master reaches them (DESIGN section 6).

Greeting, formation, control lanes, and the verdict on a lost rank.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Never, Self, TypeVar

from orca.v1 import worker_pb2 as pb
from orca_common.errors import FailedPrecondition
from orca_common.service import LoopPulse, cancel

from .channels import DIAL_SECONDS
from .discovery import Candidate, Place, places
from .pods import Pod
from .progress import Progress
from .rank import Leaving, Rank, Seen
from .settings import SchedulerSettings
from .signs import Kind, Sign, Signs

T = TypeVar("T")
log = logging.getLogger(__name__)
SILENCE_SECONDS = 2.0  # without a heartbeat: the verdict (DESIGN section 6)
FORMING_SILENCE_SECONDS = 15.0  # the same while ranks load: Python's lock is not always free then
DOUBT_SECONDS = SILENCE_SECONDS + 1.0  # for a silent rank to be found after its peers complained
LOOK_SECONDS = 0.1  # between looks at the silence of all ranks
START_SECONDS = 120.0  # bound of a rank's start: importing torch on a cold disk takes its time


class RankLost(Exception):
    """Ranks are gone, or judged so. The sentence names stage, rank, host and last iteration of each."""

    def __init__(self, verdict: str, lost: tuple[Rank, ...] = ()) -> None:
        super().__init__(verdict)
        self.lost = lost  # to be killed by their supervisors, if they still live


@dataclass(frozen=True, slots=True)
class Standing:
    """Where all ranks stand alike."""

    epoch: int
    iteration: int
    slots: int
    rows: tuple[int, ...]  # that they hold


class Ranks:
    """One engine's ranks under one master's term. An async context manager: leaving it closes all channels.

    `seen` keeps what is known of the ranks from one life of the engine to the next. `returned` takes a report with
    tokens; `timed` the times of all ranks of an iteration, when the last of them has come; `leaving` a sentence about a
    rank that was asked to end, and will as soon as its lane is closed, or its time is up.
    """

    def __init__(
        self,
        candidate: Candidate,
        term: int,
        settings: SchedulerSettings,
        pulse: LoopPulse,
        seen: dict[Place, Seen],
        returned: Callable[[pb.IterationReport], Awaitable[None]],
        timed: Callable[[int, list[pb.StageTimes]], None],
        leaving: Leaving,
    ) -> None:
        self._candidate, self._term, self._settings, self._pulse = candidate, term, settings, pulse
        self._seen, self._returned, self._timed, self._leaving = seen, returned, timed, leaving
        self._signs = Signs(DOUBT_SECONDS)
        self._news = asyncio.Event()  # of pods
        self._pods: list[Pod] = []
        self._ranks: list[Rank] = []
        self._times: dict[int, list[pb.StageTimes]] = {}  # by iteration, until all ranks have reported it
        self._progress = Progress()
        self._silence = FORMING_SILENCE_SECONDS

    async def __aenter__(self) -> Self:
        settings, engine = self._settings, self._candidate.engine
        self._pods = [Pod(address, self._look) for address in self._candidate.pods]
        self._ranks = [
            Rank(
                place,
                engine,
                self._term,
                self._pods[place.pod],
                self._signs,
                self._seen.get(place, Seen()),
                self._tokens_came,
                self._times_came,
                self._leaving,
            )
            for place in places(settings.tp, settings.pp, settings.ranks_per_pod)
        ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._seen |= {rank.place: Seen(rank.host, rank.last_iteration) for rank in self._ranks}
        await asyncio.gather(*(part.close() for part in [*self._ranks, *self._pods]))

    # -- formation

    async def greet(self) -> list[pb.HelloResponse]:
        """Finds the ranks by their pods' supervisors, says Hello and opens the control lanes.

        Raises RankLost when pods cannot be reached, FailedPrecondition when a rank does not fit in this engine.
        """
        await self._all([self._found(pod) for pod in self._pods])
        try:
            async with asyncio.timeout(START_SECONDS):
                hellos = await self._all([rank.greet() for rank in self._ranks])
        except TimeoutError:
            late = [rank for rank in self._ranks if not rank.hello.incarnation]
            sentence = f"not listening after {START_SECONDS:.0f} s: {', '.join(map(str, late))}"
            raise RankLost(sentence, tuple(late)) from None
        for rank in self._ranks:
            rank.look()
            rank.open()
        return hellos

    async def _found(self, pod: Pod) -> None:
        try:
            async with asyncio.timeout(DIAL_SECONDS):
                while pod.table is None:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            why = pod.away or "no answer"
            raise RankLost(
                f"the supervisor at {pod.address} of {self._candidate.engine} cannot be reached: {why}"
            ) from None
        if len(pod.table) != self._settings.ranks_per_pod:
            raise FailedPrecondition(
                f"gpus_per_pod: the pod at {pod.address} has {len(pod.table)} ranks, not {self._settings.ranks_per_pod}"
            )

    def standing(self) -> Standing | None:
        """Where the ranks stand, if all stand alike as members of one epoch, which was formed as it would be now."""
        if any(rank.hello.formation != self._formation(rank.place) for rank in self._ranks):
            return None
        stands = {
            Standing(h.epoch, h.iteration, h.slots, tuple(sorted(held.row for held in h.rows)))
            for h in (rank.hello for rank in self._ranks)
        }
        stand, slots, block_size = stands.pop(), self._settings.slots, self._settings.block_size
        if stands or not stand.epoch or stand.slots != (slots or stand.slots) // block_size * block_size:
            return None
        return stand

    def _formation(self, place: Place) -> pb.Formation:
        settings = self._settings
        return pb.Formation(
            tensor_parallel=settings.tp,
            pipeline_parallel=settings.pp,
            stage=place.stage,
            tensor_rank=place.tensor_rank,
            block_size=settings.block_size,
            return_tokens=settings.run_ahead > 0 and len(self._ranks) > 1,  # one rank has its own
        )

    async def form(self, epoch: int) -> int:
        """Forms the engine under a new epoch: its `n_slots`, the smallest rank's. Raises FailedPrecondition."""
        ranks, settings = self._ranks, self._settings
        slots, block_size = settings.slots, settings.block_size
        store = await ranks[0].host_store(epoch) if len(ranks) > 1 else ""
        controllers = [rank.address for rank in ranks]
        formed = await self._all([rank.form(epoch, self._formation(rank.place), store, controllers) for rank in ranks])
        room = min(response.slots for response in formed)
        smallest = next(rank for rank, response in zip(ranks, formed, strict=True) if response.slots == room)
        if slots is not None and slots > room:
            raise FailedPrecondition(f"slots: {slots} do not fit, {smallest} has room for {room}")
        n_slots = (slots or room) // block_size * block_size
        if n_slots == 0:
            raise FailedPrecondition(f"slots: {smallest} has room for {slots or room}, a block is {block_size}")
        await self._all([rank.allocate(epoch, n_slots) for rank in ranks])
        return n_slots

    async def _all(self, parts: list[Coroutine[Any, Any, T]]) -> list[T]:
        """All results. The first failure is raised, when all others have ended."""
        tasks = [asyncio.ensure_future(part) for part in parts]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    # -- control lanes

    def run(self) -> None:
        """The engine runs from here on: a rank answers heartbeats at once."""
        self._silence = SILENCE_SECONDS
        for rank in self._ranks:
            rank.heard()

    async def send(self, iteration: pb.Iteration) -> None:
        """Puts an iteration on the control lane of stage 0's controller."""
        self._progress.sent(iteration.number, asyncio.get_running_loop().time())
        await self._ranks[0].send(iteration)

    async def _tokens_came(self, report: pb.IterationReport) -> None:
        self._progress.returned(asyncio.get_running_loop().time())
        await self._returned(report)

    def _times_came(self, iteration: int, times: pb.StageTimes) -> None:
        of_all = self._times.setdefault(iteration, [])
        of_all.append(times)
        if len(of_all) == len(self._ranks):
            del self._times[iteration]
            self._timed(iteration, of_all)

    # -- verdicts

    def _look(self) -> None:
        """There is news of a pod."""
        self._news.set()
        for rank in self._ranks:
            rank.look()

    async def watch(self) -> Never:
        """Judges the ranks. Ends by RankLost alone."""
        listening = asyncio.create_task(self._listening())
        try:
            signs = await self._signs.lost()
        finally:
            await cancel(listening)
        raise self._verdict(signs)

    async def _listening(self) -> None:
        """Finds silent and stuck ranks, while this process itself is on time."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            now = asyncio.get_running_loop().time()
            for rank in self._ranks:
                silent = 0.0 if rank.last_heard is None else now - rank.last_heard
                if silent > self._silence and self._pulse.on_time(self._silence):
                    rank.last_heard = None
                    self._signs.put(rank.place, Kind.SILENT, f"has been silent for {silent:.1f} s")
            standing = self._progress.stuck(now, since=self._pulse.late_at)
            if standing is not None and self._pulse.on_time(SILENCE_SECONDS):
                for rank in self._stuck():
                    detail = f"answers and has made no progress for {standing:.1f} s"
                    self._signs.put(rank.place, Kind.STUCK, detail)
                return

    def _stuck(self) -> list[Rank]:
        """The ranks that hold the oldest iteration up: of the first stage where it is not done, those furthest behind.
        Tensor ranks that wait for each other cannot be told apart from here."""
        oldest = self._progress.oldest
        assert oldest is not None
        late = [rank for rank in self._ranks if rank.last_iteration < oldest] or [self._ranks[-self._settings.tp]]
        late = [rank for rank in late if rank.place.stage == late[0].place.stage]
        behind = min(rank.last_iteration for rank in late)
        return [rank for rank in late if rank.last_iteration == behind]

    def _verdict(self, signs: list[Sign]) -> RankLost:
        by_place: dict[Place, Rank] = {rank.place: rank for rank in self._ranks}
        lost = [(by_place[sign.place], sign) for sign in signs]
        sentence = "; ".join(f"{rank} {sign.detail}" for rank, sign in lost)
        return RankLost(sentence, tuple(rank for rank, sign in lost if sign.kind.fences))

    async def fence(self, lost: RankLost) -> None:
        """Has the lost ranks killed, if they still live. Returns when that was tried."""
        pods = self._pods
        await asyncio.gather(
            *(pods[rank.place.pod].fence(rank.place.local_rank, rank.pid, str(lost)) for rank in lost.lost if rank.pid)
        )
