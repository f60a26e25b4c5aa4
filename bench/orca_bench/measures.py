"""A server's latency and throughput under a load, from the moments at which its answers came."""

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from orca_lab.calibration import LATE
from orca_lab.timeline import percentile

from .cases import Request


@dataclass
class Answer:
    """One request's fate. Moments are seconds since the start of the load."""

    request: Request
    due: float  # when it was to be sent
    sent: float = 0.0
    came: list[float] = field(default_factory=list)  # moments of the messages that brought tokens
    tokens: int = 0  # that the server says it made
    ended: float = 0.0
    error: str = ""  # why it failed; empty: it has all its tokens
    made: list[int] = field(default_factory=list[int])  # ids of the tokens, where the door tells them

    @property
    def latency(self) -> float:
        """Seconds from the moment at which the request was due, so that a late client counts as a slow server."""
        return self.ended - self.due

    @property
    def normalized(self) -> float:
        """The paper's measure: end-to-end latency over generated tokens, in seconds."""
        return self.latency / self.tokens

    @property
    def first_token(self) -> float | None:
        return self.came[0] - self.due if self.came else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between one message with tokens and the next: how long a reader waits for more."""
        return [after - before for before, after in zip(self.came, self.came[1:], strict=False)]


def lag(answers: Sequence[Answer]) -> float:
    """Seconds by which a client sent its requests late, at the 99th percentile."""
    return percentile([answer.sent - answer.due for answer in answers], 0.99) if answers else 0.0


def spread(name: str, seconds: Iterable[float]) -> dict[str, float | None]:
    """Median and 99th percentile in milliseconds; None when there is nothing to measure."""
    values = list(seconds)
    if not values:
        return {f"{name}_ms_p50": None, f"{name}_ms_p99": None}
    return {
        f"{name}_ms_p50": round(statistics.median(values) * 1e3, 3),
        f"{name}_ms_p99": round(percentile(values, 0.99) * 1e3, 3),
    }


def summary(answers: Sequence[Answer]) -> dict[str, Any]:
    """All numbers of a load. Times are those of the requests that succeeded; the others are counted as errors.

    Rates are over the time from the first arrival to the last end.
    """
    good = [answer for answer in answers if not answer.error]
    seconds = max((a.ended for a in answers), default=0.0) - min((a.due for a in answers), default=0.0)
    tokens = sum(answer.tokens for answer in good)
    errors = Counter(answer.error for answer in answers if answer.error)
    late = lag(answers)
    return {
        "seconds": round(seconds, 4),
        "requests": len(answers),
        "errors": len(answers) - len(good),
        "output_tokens": tokens,
        "requests_per_s": round(len(good) / seconds, 3) if seconds else None,
        "output_tokens_per_s": round(tokens / seconds, 1) if seconds else None,
        **spread("normalized_latency", (answer.normalized for answer in good)),
        **spread("first_token", (answer.first_token for answer in good if answer.first_token is not None)),
        **spread("gap", (gap for answer in good for gap in answer.gaps)),
        **spread("sent_late", (answer.sent - answer.due for answer in answers)),
        **({"disturbed": f"arrivals were {late * 1e3:.0f} ms late at p99"} if late > LATE else {}),
        **({"error": errors.most_common(1)[0][0]} if errors else {}),
    }
