"""Simulated time, and processes that run real asyncio code in it.

Each process has an event loop of its own, whose clock has an origin of its own. Nothing sleeps: when no process has
anything to do, the time jumps to the next timer or message. All order comes from the seed, so a run can be repeated.
"""

import asyncio
import hashlib
import heapq
import itertools
import random
import warnings
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any

SPIN = 20_000  # callbacks of one process at one moment


class Violation(Exception):
    """A property does not hold."""


class _Task(asyncio.Task[Any]):
    """A task with a number: asyncio keeps tasks in sets, whose order would else depend on addresses."""

    def __init__(self, coroutine: Any, number: int, **options: Any) -> None:
        self.number = number
        super().__init__(coroutine, **options)

    def __hash__(self) -> int:
        return self.number


class _Future(asyncio.Future[Any]):
    def __init__(self, number: int, **options: Any) -> None:
        self.number = number
        super().__init__(**options)

    def __hash__(self) -> int:
        return self.number


class Process(asyncio.AbstractEventLoop):
    """One process: its event loop. It can be killed or paused between any two callbacks."""

    def __init__(self, world: "World", name: str) -> None:
        self.world, self.name = world, name
        self.alive, self.paused = True, False
        self.on_death: list[Callable[[], object]] = []
        self.fuse: tuple[int, Callable[[], object]] | None = None  # after so many callbacks, this happens
        self._origin = world.random.uniform(1e3, 1e6)
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._tasks: set[_Task] = set()

    # -- asyncio's side
    def time(self) -> float:
        return self._origin + self.world.now

    def call_soon(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        if not self._ready:
            self.world.runnable.append(self)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # pyright: ignore[reportAssignmentType]

    def call_at(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self.world.numbers), handle))
        return handle

    def call_later(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def create_task(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, coro: Any, *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[Any]:
        task = _Task(coro, next(self.world.numbers), loop=self, name=name or "task", context=context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def create_future(self) -> asyncio.Future[Any]:
        return _Future(next(self.world.numbers), loop=self)

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It stays in the heap until its time comes."""

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if self.alive:
            self.world.fail(
                f"{self.name}: {context['message']}: {context.get('exception')!r}", context.get("exception")
            )

    # -- the world's side
    def start(self, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Runs `main` in this process. An error that ends it is a violation."""
        self.call_soon(lambda: self.create_task(main()).add_done_callback(self._main_ended))

    def _main_ended(self, task: asyncio.Task[Any]) -> None:
        if self.alive and not task.cancelled() and (error := task.exception()) is not None:
            self.world.fail(f"{self.name} ended by {error!r}", error)

    @property
    def next_timer(self) -> float:
        """When something is to be done, in the world's time."""
        if self.paused or not self._timers:
            return float("inf")
        return self._timers[0][0] - self._origin

    def run(self) -> int:
        """Runs what is ready, and what becomes ready by that. Returns how many callbacks that were."""
        if self.paused or not self.alive:
            return 0
        now, count, ready, timers = self.time(), 0, self._ready, self._timers
        while timers and timers[0][0] <= now + 1e-9:
            handle = heapq.heappop(timers)[2]
            if not handle.cancelled():
                ready.append(handle)
        asyncio._set_running_loop(self)
        try:
            while ready:
                if self.fuse is not None:
                    left, burn = self.fuse
                    self.fuse = (left - 1, burn) if left else None
                    if not left:
                        burn()
                        if self.paused or not self.alive:
                            break
                handle = ready.popleft()
                if not handle.cancelled():
                    handle._run()
                    count += 1
                    if count > SPIN:
                        self.world.fail(f"{self.name} spins: {self.waits()}")
                        break
        finally:
            asyncio._set_running_loop(None)
        return count

    def kill(self) -> None:
        """Ends the process as SIGKILL does: nothing more of it runs, not even its `finally`."""
        if self.alive:
            self.world.note("kill", self.name)
            self.alive = False
            self.world.processes.remove(self)
            self.world.dead.append(self)
            for told in self.on_death:
                told()

    def pause(self, seconds: float, clock_stands: bool) -> None:
        """Runs nothing for so long. clock_stands: as in a machine that is suspended, its clock does not move either."""
        if not self.alive or self.paused:
            return
        self.world.note("pause", self.name, round(seconds, 3), clock_stands)
        self.paused = True

        def go_on() -> None:
            self.paused = False
            if clock_stands:
                self._origin -= seconds
            self.world.note("goes on", self.name)
            self.world.runnable.append(self)

        self.world.after(seconds, go_on)

    def waits(self) -> list[str]:
        """Where its tasks stand, for a violation."""
        frames = [task.get_stack(limit=1) for task in sorted(self._tasks, key=hash)]
        return [f"{stack[-1].f_code.co_qualname}:{stack[-1].f_lineno}" for stack in frames if stack]

    def bury(self) -> None:
        """Ends the coroutines of a process that is over, so that Python does not complain about them."""
        self.alive = True
        self.call_exception_handler = lambda context: None
        asyncio._set_running_loop(self)
        try:
            for _ in range(50):
                if not self._tasks:
                    break
                for task in sorted(self._tasks, key=hash):
                    task.cancel()
                for _ in range(10_000):
                    if not self._ready:
                        break
                    self._ready.popleft()._run()
            for task in self._tasks:
                task._log_destroy_pending = False  # pyright: ignore[reportAttributeAccessIssue]
                task.get_coro().close()  # pyright: ignore[reportOptionalMemberAccess]
        finally:
            asyncio._set_running_loop(None)
            self.alive = False


class World:
    """The time, the order of all that happens, and the trace of it."""

    def __init__(self, seed: int, lines: int = 400) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.numbers = itertools.count(1)
        self.processes: list[Process] = []
        self.dead: list[Process] = []
        self.runnable: deque[Process] = deque()
        self.steps = 0
        self.trace: deque[str] = deque(maxlen=lines)
        self.violation: Violation | None = None
        self._over = False
        self._digest = hashlib.sha256()
        self._events: list[tuple[float, int, Callable[[], object]]] = []

    def process(self, name: str) -> Process:
        process = Process(self, name)
        self.processes.append(process)
        return process

    def after(self, seconds: float, what: Callable[[], object]) -> None:
        """Something outside of all processes happens then."""
        heapq.heappush(self._events, (self.now + seconds, next(self.numbers), what))

    def note(self, *what: object) -> None:
        """A line of the trace."""
        if self._over:
            return
        line = f"{self.now:11.6f} " + " ".join(map(str, what))
        self._digest.update(line.encode())
        self.trace.append(line)

    @property
    def digest(self) -> str:
        """Of the whole trace."""
        return self._digest.hexdigest()[:16]

    def fail(self, sentence: str, error: BaseException | None = None) -> None:
        """Notes the first violation. The run ends with it."""
        if self.violation is None and not self._over:
            self.note("VIOLATION", sentence)
            self.violation = Violation(sentence)
            self.violation.__cause__ = error

    def need(self, condition: object, sentence: str) -> None:
        if not condition:
            self.fail(sentence)

    def run(self, until: float, done: Callable[[], bool] = lambda: False) -> None:
        """Lets time pass until that moment, or until `done`. Raises Violation."""
        while self.violation is None and not done():
            while self.runnable:
                self.steps += self.runnable.popleft().run()
                if self.violation is not None:
                    raise self.violation
            timers = [(process.next_timer, n) for n, process in enumerate(self.processes)]
            moment, which = min(timers, default=(float("inf"), 0))
            if self._events and self._events[0][0] <= moment:
                when, _, what = self._events[0]
                if when > until:
                    break
                heapq.heappop(self._events)
                self.now = max(self.now, when)
                self.steps += 1
                what()
            else:
                if moment > until:
                    break
                self.now = max(self.now, moment)
                self.steps += self.processes[which].run()
        if self.violation is not None:
            raise self.violation
        self.now = max(self.now, until) if not done() else self.now

    def close(self) -> None:
        """Ends what is left of all processes. What they do now counts no more."""
        self._over = True
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of coroutines that never began
            for process in [*self.dead, *self.processes]:
                process.bury()
