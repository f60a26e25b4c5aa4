"""BatchMaker's selection on a Transformer (paper section 7; Gao et al., EuroSys 2018), as a policy of the live core.

BatchMaker runs cells of an RNN together when they are the same cell. A Transformer's cells differ with the token index,
since the keys and values that they read have other shapes. So a batch holds requests of one phase with equal input
length, or equal token index; `strict` takes a prompt for a row of cells, one a token.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from orca_common.protocol import PARTS
from orca_scheduler.core.memory import Memory
from orca_scheduler.core.request import Request
from orca_scheduler.core.selection import Limits, Plan, Stop
from orca_scheduler.core.sets import FirstCome


@dataclass(frozen=True, slots=True)
class BatchMaker(FirstCome):
    """Runs the oldest request that may run, with all others of its cell."""

    strict: bool = False

    @property
    def name(self) -> str:
        return "batchmaker-strict" if self.strict else "batchmaker"

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({PARTS}) if self.strict else frozenset()

    def cell(self, request: Request) -> tuple[int, int]:
        """The cell that a request runs next: its first position, and how many it has."""
        return request.computed, 1 if self.strict else request.remaining

    def plan(self, ready: Iterable[Request], live: Sequence[Request], limits: Limits, memory: Memory) -> Plan:
        batch: list[tuple[Request, int]] = []
        wanted, free, blocked = None, memory.free, False
        for request in ready:
            if len(batch) == limits.max_bs:
                return Plan(tuple(batch), Stop.BATCH_FULL)
            cell = self.cell(request)
            if wanted not in (None, cell):
                continue
            if request.row is None:
                need = memory.need(request, cell[1])
                if blocked or need > free:
                    blocked = True
                    continue
                free -= need
            wanted = cell
            batch.append((request, cell[1]))
        return Plan(tuple(batch), Stop.SLOTS if blocked else "no other request runs the same cell")

    def violations(self, requests: Sequence[Request], memory: Memory) -> list[str]:
        return memory.violations(requests)
