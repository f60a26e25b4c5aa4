"""The request pool: every operation of DESIGN section 4 on one Redis. (INTERFACE: bodies to be written.)"""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from .records import (
    Attached,
    ClaimAnswer,
    Committed,
    CommitRow,
    Delivery,
    EngineInfo,
    EngineState,
    ModelIdentity,
    Reason,
    Refusal,
    Renewed,
)


class Pool:
    """A connection to the pool of one release. All methods raise Unavailable while Redis is away."""

    def __init__(self, redis_url: str, pool: str) -> None: ...
    async def __aenter__(self) -> Self: ...
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    async def ping(self) -> None: ...

    @property
    def generation(self) -> int:
        """Grows each time that a connection to Redis was lost and made again: an endpoint then attaches its calls again."""

    # -- identity
    async def identify(self, digest: str, max_positions: int, vocab_size: int) -> None:
        """Claims or checks the release's model. Raises FailedPrecondition when the pool is another model's."""

    async def identity(self) -> ModelIdentity | None: ...
    async def engine_infos(self) -> list[EngineInfo]: ...

    # -- endpoints
    async def renew_endpoint(
        self, incarnation: str, *, register: bool = False, replaces: str | None = None
    ) -> int | None:
        """Registers or renews an endpoint incarnation; its registration number, None when it is not registered (any more)."""

    async def leave_endpoint(self, incarnation: str) -> None:
        """The end of a drained endpoint: its registration and its stream are removed; calls still attached are swept like a dead endpoint's."""

    async def submit(
        self,
        request_id: str,
        record: bytes,
        body_digest: str,
        need: int,
        *,
        deadline_in: float | None,
        detach_grace: float,
        endpoint: str,
        attempt: int,
        max_waiting: int,
    ) -> Attached | Refusal: ...
    async def attach(self, request_id: str, *, endpoint: str, attempt: int) -> Attached | Refusal: ...
    async def detach(self, request_id: str, *, attempt: int, grace: float) -> None: ...
    async def cancel(self, request_id: str) -> bool | None:
        """True: it was alive; False: it had ended; None: unknown."""

    async def finish_at(self, request_id: str, index: int, reason: Reason, digest: bytes) -> str:
        """'ok', 'ahead' (the pool has fewer tokens: wait for the healing), 'other' (another prefix). digest: SHA-1 of the ids 0..index as u32-le."""

    async def read(self, endpoint: str, cursor: bytes | None, *, wait: float) -> list[Delivery]:
        """Entries after cursor (None: from the start), waiting at most `wait` seconds for the first one. Uses a connection of its own (blocking)."""

    # -- schedulers
    async def renew_scheduler(
        self, scheduler: str, *, detach_floor: float = 30.0
    ) -> tuple[dict[str, EngineState], int]:
        """Renews, sweeps, and answers all engines' leases and the number of living schedulers."""

    async def leave_scheduler(self, scheduler: str) -> None: ...
    async def acquire(self, engine: str, owner: str, seen: EngineState | None) -> int | None:
        """The new term; None when the lease moved."""

    async def renew(
        self,
        engine: str,
        owner: str,
        term: int,
        *,
        epoch: int | None = None,
        reserve: int | None = None,
        form: EngineInfo | None = None,
    ) -> Renewed | None:
        """None: not the master any more. `form` (with slots) after a formation: the sizes become known."""

    async def holding(self, engine: str, owner: str, term: int) -> ClaimAnswer | None:
        """Everything the engine has claimed, in full (a new master's start)."""

    async def number(self, last: int) -> int:
        """A fresh epoch: max(last + 1, TIME in microseconds)."""

    async def release(self, engine: str, owner: str, term: int) -> None: ...
    async def retire(self, engine: str, owner: str, term: int) -> None: ...
    async def claim(
        self, engine: str, owner: str, term: int, have: int, *, count: int, slots: int, total: int
    ) -> ClaimAnswer | None: ...
    async def commit(self, engine: str, owner: str, term: int, rows: Sequence[CommitRow]) -> list[int] | None:
        """Per row: Committed.OK, Committed.GONE or the pool's count. None: the term is old, nothing changed."""

    async def give_back(self, engine: str, owner: str, term: int, rows: Mapping[str, tuple[int, bool]]) -> None:
        """rows: request id -> (claim, was it RUNNING at a loss)."""

    async def hints(self, engine: str, cursor: bytes | None, *, wait: float) -> tuple[bytes, list[str]]:
        """Waits for hints on `control:ENGINE`: '' (requests wait in the queue) or the id of a request that ended early. Own connection."""
