"""Clients: each sends one request and follows its stream over whatever endpoint answers, as a client library does.

A client knows the right tokens of its request. It checks each event, and that the end is one that its own deeds and
the faults of the run allow.
"""

import asyncio
import hashlib
import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from orca_common.errors import ErrorReason, OrcaError
from orca_endpoint.calls.events import Accepted, Event, Finished, Token
from orca_pool.records import Reason

from .processes import Process, World


@dataclass(frozen=True)
class Ask:
    """What a call asks of an endpoint."""

    request_id: str
    attempt: int
    prompt: tuple[int, ...]  # empty: a Resume
    max_new_tokens: int = 0
    ends: bool = False  # the token END ends it
    grace: float = 0.0
    from_index: int = 0
    digest: bytes = b""
    deadline: float | None = None  # seconds from now
    slow: float = 0.0  # seconds between the pieces that the client reads
    stop: str = ""  # a stop string; empty: none


@dataclass(frozen=True)
class Habit:
    """What a client does beside reading."""

    start: float
    prompt: tuple[int, ...]
    count: int
    ends: bool
    grace: float
    deadline: float | None = None
    slow: float = 0.0
    leaves: tuple[int, ...] = ()  # it breaks its stream off after so many tokens
    away: float = 0.5  # and comes back after so many seconds
    gone_at: int | None = None  # it breaks off after so many tokens and never comes back
    cancels_at: int | None = None
    doubles: bool = False  # sometimes it calls again while its call still runs, as a proxy may
    stop: str = ""  # a string that ends its stream; empty: none


@dataclass(eq=False)
class Stream:
    """One call's events on their way to the client."""

    world: World
    process: Process  # of the clients
    ask: Ask
    events: "asyncio.Queue[list[Event] | OrcaError | None]" = field(default_factory=asyncio.Queue)
    leave: Callable[[], None] = lambda: None  # set by the endpoint: the client is gone
    _last: float = 0.0

    def put(self, what: "list[Event] | OrcaError | None") -> None:
        at = max(self.world.now + self.world.random.random() * 0.001, self._last + 1e-9)
        self._last = at
        self.world.after(at - self.world.now, lambda: self.events.put_nowait(what))

    def hang_up(self) -> None:
        """The client leaves; the endpoint hears of it."""
        self.world.after(self.world.random.random() * 0.001, lambda: self.leave())  # noqa: PLW0108 it is set later


class Client:
    """One request from its beginning to its end."""

    def __init__(
        self,
        world: World,
        process: Process,
        name: str,
        habit: Habit,
        rights: Sequence[Sequence[int]],
        call: Callable[[Stream], None],
        cancel: Callable[[str], None],
        rollbacks: Callable[[], int],
        losses: Callable[[], int],
        trainings: Callable[[], int],
        outages: Callable[[], float],
    ) -> None:
        """rights: the tokens that each model makes of the request. outages: seconds of them so far."""
        self.name, self.habit = name, habit
        self._rights = list(rights)  # of the models that may have made what was shown
        self._world, self._process, self._call, self._cancel, self._rollbacks = world, process, call, cancel, rollbacks
        self._losses, self._trainings, self._outages = losses, trainings, outages
        self._random = random.Random(f"{name} {world.random.random()}")
        self.shown: list[int] = []
        self.iterations: list[int] = []
        self.end: str | None = None
        self._accepted = self._cancelled = False
        self._left_since: float | None = None  # when it broke its stream off; None: another call has answered since
        self._absence = 0.0  # the longest time without a call, outages not counted: no call could be there
        self._attempt = 0
        self._left_at: set[int] = set()
        self._began = 0.0
        self._aborts = 0

    async def run(self) -> None:
        await asyncio.sleep(self.habit.start)
        self._began = self._process.time()
        while self.end is None:
            self._attempt += self._random.randint(1, 3)
            stream = Stream(self._world, self._process, self._next_ask())
            self._world.note(self.name, "calls", stream.ask.attempt, stream.ask.from_index)
            self._call(stream)
            await self._read(stream)
            if self.end is None:
                await asyncio.sleep(self._random.uniform(0.05, 0.5))
        self._world.note(self.name, "ended", self.end, len(self.shown))

    def _next_ask(self) -> Ask:
        habit, deadline = self.habit, None
        if habit.deadline is not None:
            deadline = max(habit.deadline - (self._process.time() - self._began), 0.01)
        if not self._accepted:
            return Ask(
                self.name,
                self._attempt,
                habit.prompt,
                habit.count,
                habit.ends,
                habit.grace,
                deadline=deadline,
                slow=habit.slow,
                stop=habit.stop,
            )
        seen = struct.pack(f"<{len(self.shown)}I", *self.shown)
        digest = hashlib.sha1(seen).digest() if self._random.random() < 0.7 else b""
        return Ask(
            self.name,
            self._attempt,
            (),
            from_index=len(self.shown),
            digest=digest,
            deadline=deadline,
            slow=habit.slow,
        )

    async def _read(self, stream: Stream) -> None:
        while True:
            deadline = stream.ask.deadline
            try:
                async with asyncio.timeout(deadline and deadline + 2.0):
                    piece = await stream.events.get()
            except TimeoutError:
                stream.hang_up()
                self.end = "DEADLINE_EXCEEDED"
                return
            if piece is None:
                if self.end is None:
                    self._world.fail(f"{self.name}: the stream ended without an end")
                    self.end = "?"
                return
            if isinstance(piece, OrcaError):
                self._failed(piece)
                return
            if self._left_since is not None:
                self._absence = max(self._absence, self._pool_time() - self._left_since)
                self._left_since = None
            for event in piece:
                self._take(event)
            if self.end is not None:
                return
            count, habit = len(self.shown), self.habit
            if habit.cancels_at is not None and count >= habit.cancels_at and not self._cancelled:
                self._cancelled = True
                self._cancel(self.name)
            if habit.gone_at is not None and count >= habit.gone_at and self._accepted:
                stream.hang_up()
                self.end = "gone"
                return
            due = [at for at in habit.leaves if at <= count and at not in self._left_at]
            if due and self._accepted:
                self._left_at.update(due)
                if not habit.doubles:
                    self._left_since = self._pool_time()
                    stream.hang_up()
                    await asyncio.sleep(habit.away)
                return

    def _pool_time(self) -> float:
        """The time without outages."""
        return self._process.time() - self._outages()

    def _take(self, event: Event) -> None:
        need, name, habit = self._world.need, self.name, self.habit
        match event:
            case Accepted():
                self._accepted = True
            case Token(at=at, token_id=token_id, iteration=iteration):
                need(at == len(self.shown), f"{name} got index {at} and had {len(self.shown)} tokens")
                before = [right[at : at + 1] for right in self._rights]
                self._rights = [right for right in self._rights if right[at : at + 1] == [token_id]]
                need(bool(self._rights), f"{name} got token {token_id} at {at}, right is one of {before}")
                self.shown.append(token_id)
                self.iterations.append(iteration)
            case Finished(reason=reason, output_tokens=count):
                need(count == len(self.shown), f"{name} finished with {count} tokens and was shown {len(self.shown)}")
                need(self.end is None, f"{name} ended twice")
                self.end = reason.name
                if reason in (Reason.LENGTH, Reason.EOS) or (reason is Reason.STOP and habit.stop):
                    whole = [len(right) for right in self._rights]
                    need(count in whole, f"{name} ended {reason.name} with {count} of {whole}")
                else:
                    need(reason is Reason.CANCELLED and self._cancelled, f"{name} ended {reason.name}")
            case _:
                self._world.fail(f"{name} got {event}")

    def _failed(self, error: OrcaError) -> None:
        """An error ended the stream: the client tries again, or it is an end that may be."""
        world, name, habit = self._world, self.name, self.habit
        code, reason, rolled_back = error.code, error.reason, self._rollbacks() > 0
        overdue = habit.deadline is not None and self._process.time() - self._began > habit.deadline - 0.3
        world.note(name, "error", code, reason.name, str(error))
        match code:
            case "UNAVAILABLE" | "RESOURCE_EXHAUSTED":
                return
            case "DEADLINE_EXCEEDED":
                world.need(overdue, f"{name} ended DEADLINE_EXCEEDED too early")
            case "FAILED_PRECONDITION" if reason is ErrorReason.TOO_LARGE:
                return  # the largest engine has not formed yet
            case "CANCELLED" if reason is ErrorReason.CLIENT_LEFT:
                world.need(
                    rolled_back or overdue or self._absence > habit.grace, f"{name} ended because its client had left"
                )
            case "INTERNAL" if reason is ErrorReason.ENGINES_LOST:
                world.need(self._losses() >= 3, f"{name} ended because engines were lost {self._losses()} times")
            case "NOT_FOUND":
                world.need(rolled_back, f"{name} is not known")
            case "DATA_LOSS":
                world.need(rolled_back, f"{name} ended with a data loss: {error}")
            case "ABORTED" if reason is ErrorReason.MODEL_CHANGED:
                world.need(self._trainings() > 0, f"{name} ended because its model was gone")
            case "ABORTED":
                self._aborts += 1
                world.need(rolled_back, f"{name}: its newest call was taken over")
            case _:
                world.fail(f"{name} ended {code}: {error}", error)
        self.end = code
