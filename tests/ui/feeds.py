"""Lines of a scheduler's feed, as a test writes them."""

from typing import Any

ENGINE, START = "engine-0", 1000.0


def state(**more: Any) -> dict[str, Any]:
    """An engine of two stages as its master tells it."""
    rank = {"tensor_rank": 0, "host": "h", "iteration": 0}
    return {
        **{"state": "Running", "why": None, "term": 1, "epoch": 1, "tp": 1, "pp": 2, "pods": ["a:1", "a:2"]},
        "ranks": [rank | {"stage": n, "pod": n, "pid": 10 + n} for n in range(2)],
        **{"reserved": 0, "slots": 64, "block_size": 16, "max_batch_size": 4, "in_flight": 0, "n_workers": 2},
        **{"policy": "paper", "requests": 0},
    } | more


class Feed:
    """A scheduler's feed: numbers its events."""

    def __init__(self, name: str = "scheduler-a", **engine: Any) -> None:
        self.name, self.engine, self._number = name, engine, 0

    def line(self, *events: dict[str, Any], queue: Any = (0, 0.0), **more: Any) -> dict[str, Any]:
        numbered = []
        for event in events:
            self._number += 1
            numbered.append({"number": self._number, "engine": ENGINE, "term": self.engine.get("term", 1)} | event)
        return {
            "scheduler": self.name,
            "queue": list(queue),
            "engines": {ENGINE: state(**self.engine)},
            "events": numbered,
        } | more


def request(claim: int, name: str, submitted: float, **more: Any) -> dict[str, Any]:
    return {"claim": claim, "id": name, "input": 5, "max_new": 8, "made": 0, "submitted": submitted, "losses": 0} | more


def batch(number: int, *members: tuple[int, int, int, int, list[int]], freed: tuple[int, ...] = ()) -> dict[str, Any]:
    """Members: claim, row, start, count, new blocks."""
    return {"number": number, "members": [list(m) for m in members], "freed": list(freed), "stop": "pool"}


def timed(number: int, at: float) -> dict[str, Any]:
    """An iteration whose two stages took 10 ms each."""
    times = [[stage, 0, *(at + 0.01 * (stage + part) for part in (0, 0, 1, 1))] for stage in range(2)]
    return {"at": at + 0.02, "timed": number, "times": times}
