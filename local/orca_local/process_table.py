"""`processes.json` of a run folder: what runs now, by role, pid and address, and what is being started again."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from orca.v1 import worker_pb2 as pb

from .child import Child
from .settings import StackSettings


class ProcessTable:
    """Writes the file after each change. A full disk is reported once, and ends nothing."""

    def __init__(
        self, path: Path, settings: StackSettings, children: Sequence[Child], say: Callable[[str], None]
    ) -> None:
        """children: the list that the stack keeps."""
        self._path, self._settings, self._children, self._say = path, settings, children, say
        self.ranks: dict[int, list[pb.RankEntry]] = {}  # by the ordinal of the pod
        self._trouble = ""

    def write(self) -> None:
        new = self._path.with_suffix(".tmp")
        try:
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                json.dump(self._rows(), file, indent=1)
            new.replace(self._path)
        except OSError as error:
            if self._trouble != str(error):
                self._say(
                    f"{self._path.parent} cannot be written ({error.strerror}): what writes there ends again and again"
                )
            self._trouble = str(error)
        else:
            self._trouble = ""

    def _rows(self) -> list[dict[str, Any]]:
        """A rank's `rank` is its number in its engine: stage-major, then by tensor rank. `pid` is null while a
        process is being started again, `address` before it has listened for the first time."""
        rows: list[dict[str, Any]] = [
            {
                "role": child.role,
                "name": child.name,
                "pid": child.pid,
                "address": child.address if child.addresses else None,
                "status": child.status,
                "restarts": child.restarts,
            }
            for child in self._children
        ]
        tp, pp = self._settings.tp, self._settings.pp
        for ordinal, ranks in sorted(self.ranks.items()):
            engine, stage = divmod(ordinal, pp)
            rows += [
                {
                    "role": "rank",
                    "pid": r.pid,
                    "address": r.address,
                    "supervisor": f"supervisor-{ordinal}",
                    "engine": f"engine-{engine}",
                    "stage": stage,
                    "tensor_rank": r.local_rank,
                    "rank": stage * tp + r.local_rank,
                }
                for r in ranks
                if r.pid
            ]
        return rows
