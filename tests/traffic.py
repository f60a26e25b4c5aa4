"""Traffic: some streams at all times, each compared with the tokens that it must have, while a test does harm."""

import asyncio
import contextlib
import itertools
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

from reference import Known
from release import Release

from orca_client import AsyncOrcaClient, Finished, FinishReason, Token


@dataclass
class Disturbance:
    """What the clients saw from the moment before a fault until every stream went on after it."""

    name: str
    pause: float = 0.0  # seconds: the longest time that a stream waited for its next token, a request's first too
    seconds: float = 0.0  # from the fault until all is healed and every stream goes on
    tokens: Counter[str] = field(default_factory=Counter)  # by the engine that made them


class Traffic:
    """Keeps `streams` requests running. The first error, or wrong token, ends the block that it is used in.

    async with Traffic(clients, known) as traffic:
        async with traffic.disturbed("a rank is killed") as seen:
            ...  # kill it, and wait until all is well again
    """

    def __init__(self, clients: Sequence[AsyncOrcaClient], known: Sequence[Known], streams: int = 20) -> None:
        """clients: the streams are spread over them. known: requests and their tokens, taken in turn."""
        self.finished = 0  # requests that ended with all their tokens
        self._clients, self._streams = clients, streams
        self._asked = itertools.cycle(known)
        self._ending = False
        self._last = [0.0] * streams  # when each stream got its last token, or began to wait for its first
        self._disturbance: Disturbance | None = None

    async def __aenter__(self) -> "Traffic":
        """Returns when every stream has a token."""
        self._tasks = asyncio.TaskGroup()
        await self._tasks.__aenter__()
        begun = time.monotonic()
        self._last = [begun] * self._streams
        for n in range(self._streams):
            self._tasks.create_task(self._keep(n), name=f"stream {n}")
        try:
            await self.flows()
        except BaseException:  # a stream has failed: the group ends the others, and raises what was wrong
            await self.__aexit__(*sys.exc_info())
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        """Waits until the requests that run have ended."""
        self._ending = True
        await self._tasks.__aexit__(*error)  # type: ignore[arg-type]

    async def flows(self) -> None:
        """Waits until every stream has got a token from now on."""
        now = time.monotonic()
        while any(last <= now for last in self._last):
            await asyncio.sleep(0.02)

    @contextlib.asynccontextmanager
    async def disturbed(self, name: str) -> AsyncIterator[Disturbance]:
        """Records what the streams see while the block runs, and until every stream goes on after it."""
        seen = self._disturbance = Disturbance(name)
        begun = time.monotonic()
        yield seen
        await self.flows()
        seen.seconds = time.monotonic() - begun
        self._disturbance = None

    async def _keep(self, n: int) -> None:
        client = self._clients[n % len(self._clients)]
        while not self._ending:
            await self._request(n, client, next(self._asked))

    async def _request(self, n: int, client: AsyncOrcaClient, known: Known) -> None:
        got: list[int] = []
        async for event in client.generate(known.prompt, max_new_tokens=len(known.tokens), ignore_eos=True):
            match event:
                case Token():
                    self._came(n, event)
                    wanted = len(got), known.tokens[len(got)]
                    assert (event.index, event.token_id) == wanted, f"after the prompt {known.prompt}"
                    got.append(event.token_id)
                case Finished():
                    assert (event.reason, got) == (FinishReason.LENGTH, known.tokens)
                case _:
                    pass
        self.finished += 1

    def _came(self, n: int, token: Token) -> None:
        now = time.monotonic()
        if self._disturbance is not None:
            self._disturbance.pause = max(self._disturbance.pause, now - self._last[n])
            self._disturbance.tokens[token.engine] += 1
        self._last[n] = now


class Under(Protocol):
    """`async with traffic(release) as load`: traffic on a release while the block runs."""

    def __call__(self, release: Release) -> AbstractAsyncContextManager[Traffic]: ...
