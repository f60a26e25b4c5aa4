"""Candidates from a fixed list of addresses, as `orca serve` and tests have it."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Never

from orca_common.errors import FailedPrecondition

from .candidates import Candidate


class StaticDiscovery:
    """Ordinal o of the list belongs to engine o // pods_per_engine."""

    def __init__(self, pods: Sequence[str], pods_per_engine: int) -> None:
        """Raises FailedPrecondition when the list holds a part of an engine."""
        if not pods or len(pods) % pods_per_engine:
            raise FailedPrecondition(
                f"workers: {len(pods)} pods are no multiple of the {pods_per_engine} pods of an engine"
            )
        starts = range(0, len(pods), pods_per_engine)
        self._candidates = [
            Candidate(f"engine-{n}", tuple(pods[s : s + pods_per_engine])) for n, s in enumerate(starts)
        ]

    @property
    def unready(self) -> str | None:
        return None

    @property
    def notices(self) -> Sequence[str]:
        return ()

    async def run(self, discovered: Callable[[Sequence[Candidate]], None]) -> Never:
        """Reports the list, once."""
        discovered(self._candidates)
        await asyncio.Event().wait()
        raise AssertionError("nothing sets the event")

    async def replace(self, engine: str) -> None:
        raise AssertionError("a static candidate never asks to be replaced")

    def unfinished(self, engine: str, seconds: float) -> None:
        raise AssertionError("a static candidate never asks to be replaced")

    async def close(self) -> None:
        pass
