"""Tells of ranks that have ended, which their supervisor starts again, by its table of them."""

import time
from collections.abc import Callable, Sequence

from orca.v1 import worker_pb2 as pb

from .keeping import QUIET, UNSTEADY


class RankEnds:
    """Reports the ends of the ranks of all pods: the first deaths in a row, then that a rank does not stay up."""

    def __init__(self, tp: int, pp: int, say: Callable[[str], None]) -> None:
        self._tp, self._pp, self._say = tp, pp, say
        self._deaths: dict[str, tuple[int, float]] = {}  # by the rank's name: how many in a row, when the last one

    def compare(self, ordinal: int, before: Sequence[pb.RankEntry], after: Sequence[pb.RankEntry]) -> None:
        """Two tables of a pod, one after the other."""
        pids = {entry.local_rank: entry.pid for entry in after}
        engine, stage = divmod(ordinal, self._pp)
        for entry in before:
            if entry.pid and pids.get(entry.local_rank) != entry.pid:
                name = f"engine-{engine} rank {stage * self._tp + entry.local_rank}"
                self._tell(name, entry.pid, f"supervisor-{ordinal}")

    def _tell(self, name: str, pid: int, supervisor: str) -> None:
        count, last = self._deaths.get(name, (0, 0.0))
        now = time.monotonic()
        count = count + 1 if now - last < 2 * QUIET else 1  # a new process takes some seconds until it can die again
        self._deaths[name] = count, now
        if count < UNSTEADY:
            self._say(f"{name} (pid {pid}) ended, {supervisor} starts it again")
        elif count == UNSTEADY:
            self._say(f"{name} (pid {pid}) ended, again; {supervisor} starts it until it stays up")
