"""One line in the log for each call at a door, when it has ended or was refused.

A door opens a `CallLine` before it looks at a call. What serves the call finds the line in its context, and adds to it:
gRPC's interceptors and Starlette's middlewares know when a call ends, but not what became of it.
"""

import asyncio
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

from orca_common.errors import ErrorReason, InvalidArgument, OrcaError
from orca_common.telemetry import trace_id_of
from orca_pool.records import Reason, Times

NAME = re.compile(r"[a-z][a-z0-9_.\[\]-]{,63}")  # of a field; whoever sends a text as a name finds it in no log
CLIENT_GONE = "CLIENT_GONE"

log = logging.getLogger(__name__)


class Outcome:
    """The end of a call: a gRPC status by name, and a reason: an ErrorReason, a FinishReason or CLIENT_GONE."""

    def __init__(self, error: BaseException | None, finished: Reason | None, overdue: bool) -> None:
        """overdue: the deadline has passed, or nearly. gRPC ends a call at its deadline as if its client had left."""
        if isinstance(error, OrcaError):
            self.status, self.reason = error.code, error.reason.value
        elif isinstance(error, Exception) and not isinstance(error, asyncio.CancelledError):
            self.status, self.reason = "INTERNAL", ErrorReason.BUG.value
        elif finished is not None:
            self.status, self.reason = "OK", finished.name
        elif overdue:
            self.status, self.reason = "DEADLINE_EXCEEDED", ErrorReason.DEADLINE_PASSED.value
        else:
            self.status, self.reason = "CANCELLED", CLIENT_GONE


class Door(Protocol):
    """A door, as the log and the spans of its calls name it. Attributes are those of OpenTelemetry's conventions."""

    @property
    def name(self) -> str: ...
    def arrived(self, method: str) -> dict[str, str]:
        """Makes a span's attributes of the method that was called."""
        ...

    def ended(self, outcome: Outcome) -> dict[str, str | int]:
        """Makes a span's attributes of the status that the client gets."""
        ...


class Served(Protocol):
    """The line's fields about a request that its call served."""

    @property
    def request_id(self) -> str: ...
    @property
    def outcome(self) -> Outcome | None:
        """None: it has not ended."""
        ...

    @property
    def first_token(self) -> float | None:
        """When it came, on the clock of `time.monotonic`."""
        ...

    @property
    def accepted(self) -> bool: ...
    @property
    def carrier(self) -> Mapping[str, str]: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def output_tokens(self) -> int: ...
    @property
    def times(self) -> Times | None: ...


class Ended(NamedTuple):
    """Those fields of a request whose call has ended: a body may have thousands, whose state is released one by one."""

    request_id: str
    outcome: Outcome | None
    first_token: float | None
    accepted: bool
    carrier: Mapping[str, str]
    prompt_tokens: int
    output_tokens: int
    times: Times | None

    @classmethod
    def of(cls, served: Served) -> "Ended":
        return cls(*[getattr(served, name) for name in cls._fields])


class CallLine:
    """The line of one call, as it is put together. `peer`: the client's address."""

    def __init__(self, door: Door, method: str, peer: str, refused: Callable[[str], None]) -> None:
        """refused: counts a refusal by its reason."""
        self.door, self.method, self.peer, self._refused = door, method, peer, refused
        self.began = time.time_ns()  # on the wall's clock
        self.requests: list[Served] = []
        self.error: OrcaError | None = None  # that a door has answered
        self.answered: int | None = None  # HTTP status
        self.left = False  # the client, before it had an answer
        self.arrived = time.monotonic()

    def add(self, served: Served) -> int:
        """Enters a request. Returns its place."""
        self.requests.append(served)
        return len(self.requests) - 1

    def release(self, place: int) -> None:
        """The call of the request at a place has ended: the line keeps its fields alone."""
        if place < len(self.requests):  # the line is not written yet
            self.requests[place] = Ended.of(self.requests[place])

    def end(self, error: BaseException | None) -> None:
        """Writes the line, and releases the call's state. error: what ended the call, unless a door has answered it.

        A request and an error lead back to this line by the contexts of their tasks and by their frames. While the line
        held them too, nothing but a garbage collection freed them, thousands of calls later.
        """
        self._write(self.error or error)
        self.requests, self.error = [], None

    def _write(self, error: BaseException | None) -> None:
        outcome = self._outcome(error)
        requests = self.requests
        accepted = any(request.accepted for request in requests)
        times = next((request.times for request in requests if request.times is not None), None)
        firsts = [request.first_token for request in requests if request.first_token is not None]
        fields: dict[str, Any] = {
            "method": self.method,
            "door": self.door.name,
            "peer": self.peer,
            "status": outcome.status,
            "reason": outcome.reason,
            "request": requests[0].request_id if requests else None,
            "trace": trace_id_of(requests[0].carrier) if requests else None,
            "prompt_tokens": sum(request.prompt_tokens for request in requests) if requests else None,
            "output_tokens": sum(request.output_tokens for request in requests) if requests else None,
            "queue": round((times.claimed - times.submitted) / 1e6, 4) if times and times.claimed else None,
            "first_token": round(min(firsts) - self.arrived, 4) if firsts else None,
            "total": round(time.monotonic() - self.arrived, 4),
        }
        if self.answered is not None:
            fields["http_status"] = self.answered
        if isinstance(error, InvalidArgument) and NAME.fullmatch(error.field):
            fields["field"] = error.field
        fields = {name: value for name, value in fields.items() if value is not None}
        ended = accepted or outcome.status == "OK" or outcome.reason == CLIENT_GONE
        if not ended:
            self._refused(outcome.reason)
        log.info("call ended" if ended else "call refused", extra=fields)

    def _outcome(self, error: BaseException | None) -> Outcome:
        """Returns the outcome of the error, or of the request that ended worst."""
        if isinstance(error, Exception) and not isinstance(error, asyncio.CancelledError):
            return Outcome(error, None, False)
        known = [request.outcome for request in self.requests if request.outcome is not None]
        bad = [outcome for outcome in known if outcome.status != "OK"]
        if bad or known:
            return (bad or known)[0]
        outcome = Outcome(None, None, overdue=False)
        if error is None and not self.left:
            outcome.status, outcome.reason = "OK", "OK"
        return outcome


_current: ContextVar[CallLine | None] = ContextVar("call line", default=None)


def current_line() -> CallLine | None:
    """The line of the call that this code serves; None outside a door."""
    return _current.get()


def note_error(error: OrcaError) -> None:
    """Notes in the call's line the error that a door answers."""
    line = _current.get()
    if line is not None:
        line.error = error


@contextmanager
def opened(line: CallLine) -> Iterator[CallLine]:
    """Makes a line the current one, and writes it at the end of the block."""
    token = _current.set(line)
    try:
        yield line
    except BaseException as error:
        line.end(error)
        raise
    else:
        line.end(None)
    finally:
        _current.reset(token)
