"""Traffic: streams of the client library at all times, each compared with the tokens that it must have."""

import itertools
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from reference import Known

from orca_chaos.streams import Streams
from orca_client import AsyncOrcaClient, Finished, FinishReason, Token
from release import Release


class Traffic(Streams):
    """Requests with known tokens.

    async with Traffic(clients, known) as traffic:
        async with traffic.disturbed("a rank is killed") as seen:
            ...  # kill it, and wait until all is well again
    """

    def __init__(self, clients: Sequence[AsyncOrcaClient], known: Sequence[Known], streams: int = 20) -> None:
        """clients: the streams are spread over them. known: requests and their tokens, taken in turn."""
        super().__init__(streams)
        self.finished = 0  # requests that ended with all their tokens
        self._clients = clients
        self._asked = itertools.cycle(known)

    async def _request(self, n: int) -> None:
        client, known = self._clients[n % len(self._clients)], next(self._asked)
        got: list[int] = []
        async for event in client.generate(known.prompt, max_new_tokens=len(known.tokens), ignore_eos=True):
            match event:
                case Token():
                    self._came(n, event.engine)
                    wanted = len(got), known.tokens[len(got)]
                    assert (event.index, event.token_id) == wanted, f"after the prompt {known.prompt}"
                    got.append(event.token_id)
                case Finished():
                    assert (event.reason, got) == (FinishReason.LENGTH, known.tokens)
                case _:
                    pass
        self.finished += 1


class Under(Protocol):
    """`async with traffic(release) as load`: a number of streams on a release while the block runs."""

    def __call__(self, release: Release, streams: int = 20) -> AbstractAsyncContextManager[Traffic]: ...
