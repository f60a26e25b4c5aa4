"""The adapters of an engine: the ranks get the pool's table, and the pool the adapters that all of them have."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial

from orca.v1 import worker_pb2 as pb
from orca_common.errors import echo
from orca_pool.pool import Pool
from orca_pool.records import PoolAdapter
from orca_pool.retry import reached

log = logging.getLogger(__name__)

LONGEST = 500  # characters of why a rank does not have an adapter


class EngineAdapters:
    """Follows the pool's table for one term of an engine's master. A rank's word counts for the last table alone.

    `send` tells a table to all ranks. `has` are those that all ranks have: the engine claims requests of these alone,
    and the master gives back others.
    """

    def __init__(
        self, pool: Pool, engine: str, owner: str, term: int, ranks: int, send: Callable[[pb.AdapterTable], None]
    ) -> None:
        self._pool, self._engine, self._owner, self._term = pool, engine, owner, term
        self._ranks, self._send = ranks, send
        self.has: frozenset[str] = frozenset()  # ids
        self._table: Mapping[str, PoolAdapter] = {}
        self._version = self._wanted = 0  # of the table: that the master has, and that there is
        self._number = 0  # of the last table that the ranks got
        self._runs = False
        self._answers: dict[int, pb.AdaptersHeld] = {}  # to it, by rank
        self._news = asyncio.Event()

    def running(self) -> None:
        """The engine has formed: its ranks may be new, and the pool counts on none of their adapters."""
        self._runs, self.has = True, frozenset()
        self._tell()

    def lost(self) -> None:
        """Notes that the engine does not run any more."""
        self._runs, self.has = False, frozenset()

    def changed(self, version: int) -> None:
        """Notes the version of the pool's table."""
        if version != self._version:
            self._wanted = version
            self._news.set()

    def answered(self, rank: int, held: pb.AdaptersHeld) -> None:
        """Takes a rank's answer to a table."""
        if held.number == self._number and self._runs:
            self._answers[rank] = held
            self._news.set()

    async def follow(self) -> None:
        """Reads the table when it has changed, and reports the answers of all ranks to the pool. Ends with its task."""
        while True:
            await self._news.wait()
            self._news.clear()
            if self._wanted != self._version:
                found = await reached(lambda: self._pool.adapters(self._version))
                if found.version != self._version:
                    self._version = self._wanted = found.version
                    self._table = found.entries
                    self._tell()
            if self._runs and len(self._answers) == self._ranks:
                has = self._said()
                self._answers.clear()
                self.has = frozenset(adapter for adapter, found, _ in has if found)  # claims may come from here on
                await reached(partial(self._pool.tell_adapters, self._engine, self._owner, self._term, has))

    def _tell(self) -> None:
        """Sends the ranks the table, unless there was never an adapter."""
        self._answers.clear()
        if not self._runs or not (self._table or self._number):
            return
        self._number += 1
        table = pb.AdapterTable(number=self._number)
        for one in self._table.values():
            table.entries.add(id=one.id, name=one.name, folder=one.folder)
        self._send(table)

    def _said(self) -> list[tuple[str, str, str]]:
        """Of each adapter: id, the fingerprint that all ranks have, or why the engine does not have it."""
        of_ranks = [{one.id: one for one in held.adapters} for held in self._answers.values()]
        said = list[tuple[str, str, str]]()
        for adapter in self._table:
            each = [of_rank.get(adapter, pb.AdapterHeld()) for of_rank in of_ranks]
            prints, errors = {one.fingerprint for one in each}, [one.error for one in each if one.error]
            if len(prints) == 1 and not errors and "" not in prints:
                said.append((adapter, echo(prints.pop(), LONGEST), ""))
                continue
            why = errors[0] if errors else "the ranks of an engine read other files of it"
            said.append((adapter, "", echo(why, LONGEST)))
            log.warning("adapter not loaded", extra={"engine": self._engine, "adapter": adapter, "why": said[-1][2]})
        return said
