"""The request pool: every operation of DESIGN section 4 on one Redis."""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from orca_common.errors import FailedPrecondition

from .keys import Keys
from .link import Argument, Link
from .records import (
    Attached,
    ClaimAnswer,
    Claimed,
    CommitRow,
    Delivery,
    EngineInfo,
    EngineState,
    Finish,
    ModelIdentity,
    Reason,
    Refusal,
    Renewed,
    Times,
)
from .scripts import Constants, build, sources
from .wire import unpack_packets, unpack_tokens

READ_ENTRIES = 256  # of a stream in one answer
DEFAULTS = Constants()
EXACT = 2**53  # integers below are exact in Lua


class Pool:
    """A connection to the pool of one release. All methods raise Unavailable while Redis is away.

    redis_url: redis://, rediss:// or unix://. pool: the release's name. Every operation may be sent twice.
    lua: the scripts' sources; only tests give others than the package's.
    """

    def __init__(
        self,
        redis_url: str,
        pool: str,
        *,
        constants: Constants = DEFAULTS,
        patience: float = 2.0,
        lua: Mapping[str, str] | None = None,
    ) -> None:
        self._keys = Keys(pool)
        self._link = Link(redis_url, patience)
        self._scripts = build(sources() if lua is None else lua, constants)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._link.close()

    @property
    def generation(self) -> int:
        """Grows when a connection to Redis was lost and made again: an endpoint then attaches its calls again."""
        return self._link.generation

    async def _run(self, script: str, *args: Argument) -> Any:
        return await self._link.run(self._scripts[script], 1, self._keys.pool, *args)

    # -- identity
    async def identify(self, digest: str, max_positions: int, vocab_size: int) -> None:
        """Claims or checks the release's model. Raises FailedPrecondition when the pool is another model's."""
        stands = (await self._run("identify", digest, max_positions, vocab_size)).decode()
        if stands != digest:
            raise FailedPrecondition(
                f"the pool {self._keys.prefix} serves the model with digest {stands}, this service has {digest}"
            )

    async def identity(self) -> ModelIdentity | None:
        fields = ("digest", "max_positions", "vocab_size", "slots")
        digest, positions, vocabulary, slots = await self._link.command("HMGET", self._keys.pool, *fields)
        if digest is None:
            return None
        return ModelIdentity(digest.decode(), int(positions), int(vocabulary), int(slots or 0))

    async def engine_infos(self) -> list[EngineInfo]:
        """The engines that have formed, by name."""
        answer = await self._run("engine_infos")
        return sorted((EngineInfo(g[0].decode(), *map(int, g[1:])) for g in answer), key=lambda info: info.engine)

    # -- endpoints
    async def renew_endpoint(
        self, incarnation: str, *, register: bool = False, replaces: str | None = None
    ) -> int | None:
        """Registers or renews an endpoint incarnation, in place of `replaces`.

        Answers its registration number; None when it is not registered (any more).
        """
        return await self._run("renew_endpoint", incarnation, int(register), replaces or "")

    async def leave_endpoint(self, incarnation: str) -> None:
        """The end of a drained endpoint: its registration and stream go; calls still attached are a dead endpoint's."""
        await self._run("leave_endpoint", incarnation)

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
    ) -> Attached | Refusal:
        """Queues a request and attaches its call. A known id with the same body is only attached.

        need: its slots (input and new tokens). deadline_in, detach_grace: seconds.
        """
        deadline = "" if deadline_in is None else _microseconds(deadline_in)
        grace = _microseconds(detach_grace)
        return _attached(
            await self._run(
                "submit", request_id, record, body_digest, need, deadline, grace, endpoint, _exact(attempt), max_waiting
            )
        )

    async def attach(self, request_id: str, *, endpoint: str, attempt: int) -> Attached | Refusal:
        return _attached(await self._run("attach", request_id, endpoint, _exact(attempt)))

    async def detach(self, request_id: str, *, attempt: int, grace: float) -> None:
        """Nobody listens any more. Without a newer attempt the request ends after `grace` seconds (0: at once)."""
        await self._run("detach", request_id, _exact(attempt), _microseconds(grace))

    async def cancel(self, request_id: str) -> bool | None:
        """True: it was alive; False: it had ended; None: unknown."""
        answer = await self._run("cancel", request_id)
        return None if answer is None else bool(answer)

    async def finish_at(self, request_id: str, index: int, reason: Reason, digest: bytes) -> str:
        """Ends a request with the token at `index`. digest: SHA-1 of the ids 0..index as u32-le.

        Answers 'ok', 'ahead' (the pool has fewer tokens: wait for the healing) or 'other' (another prefix).
        """
        return (await self._run("finish_at", request_id, index, int(reason), digest.hex())).decode()

    async def read(self, endpoint: str, cursor: bytes | None, *, wait: float) -> list[Delivery]:
        """Entries after cursor (None: from the start), waiting at most `wait` seconds for the first one.

        Blocks on a connection of its own; a cancelled read loses nothing.
        """
        entries = await self._read_stream(self._keys.delivery(endpoint), cursor, wait)
        return [
            Delivery(entry, int(number), unpack_packets(packets, engine.decode()))
            for entry, (_, number, _, engine, _, packets) in entries
        ]

    # -- schedulers
    async def renew_scheduler(
        self, scheduler: str, *, detach_floor: float = 30.0
    ) -> tuple[dict[str, EngineState], int]:
        """Renews, sweeps, and answers all engines' leases and the number of living schedulers.

        To be called about three times in `sweep_gap`'s length: later sweeps take the gap for an outage and end nothing.
        detach_floor: seconds that calls of a dead endpoint have at least to be attached elsewhere.
        """
        living, *engines = await self._run("renew_scheduler", scheduler, _microseconds(detach_floor))
        states = {
            engine.decode(): EngineState(owner.decode() or None, int(term), int(counter))
            for engine, owner, term, counter in engines
        }
        return states, living

    async def leave_scheduler(self, scheduler: str) -> None:
        await self._run("leave_scheduler", scheduler)

    async def acquire(self, engine: str, owner: str, seen: EngineState | None) -> int | None:
        """The new term; None when the lease moved."""
        saw = ("", "", "", "") if seen is None else (1, seen.owner or "", seen.term, seen.counter)
        return await self._run("acquire", engine, owner, *saw)

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
        """None: not the master any more. `form` after a formation: the sizes become known (slots: whole blocks)."""
        numbers = ("" if epoch is None else epoch, "" if reserve is None else reserve)
        sizes = ("", "", "") if form is None else (form.slots, form.tensor_parallel, form.pipeline_parallel)
        answer = await self._run("renew", engine, owner, term, *numbers, *sizes)
        if answer is None:
            return None
        epoch_now, reserved, last_claim, *claims = answer
        return Renewed({i.decode(): int(claim) for i, claim in claims}, int(epoch_now), int(reserved), int(last_claim))

    async def holding(self, engine: str, owner: str, term: int) -> ClaimAnswer | None:
        """Everything the engine has claimed, in full (a new master's start)."""
        return _claim_answer(await self._run("holding", engine, owner, term))

    async def number(self, last: int) -> int:
        """A fresh epoch: max(last + 1, TIME in microseconds)."""
        seconds, microseconds = await self._link.command("TIME")
        return max(last + 1, int(seconds) * 1_000_000 + int(microseconds))

    async def release(self, engine: str, owner: str, term: int) -> None:
        """Leaves the engine to others, who may take it at once."""
        await self._run("release", engine, owner, term)

    async def retire(self, engine: str, owner: str, term: int) -> None:
        """Deletes an engine that has no ranks. Changes nothing while it has claims: give them back first."""
        await self._run("retire", engine, owner, term)

    async def claim(
        self,
        engine: str,
        owner: str,
        term: int,
        have: int,
        *,
        count: int,
        slots: int,
        total: int,
        block_size: int = 1,
    ) -> ClaimAnswer | None:
        """At most `count` of the oldest requests that fit in `slots`; None: not the master any more.

        have: the last claim number heard. When the engine's is higher, the answer is what was claimed since.
        total: all slots of this engine; a larger request is left to a larger engine.
        block_size: a request takes whole blocks.
        """
        return _claim_answer(await self._run("claim", engine, owner, term, have, count, slots, total, block_size))

    async def commit(self, engine: str, owner: str, term: int, rows: Sequence[CommitRow]) -> list[int] | None:
        """Per row: Committed.OK, Committed.GONE or the pool's count. None: the term is old, nothing changed."""
        args: list[Argument] = [engine, owner, term]
        for row in rows:
            finish = "" if row.finish is None else int(row.finish)
            args += (row.request_id, row.claim, row.base, finish, row.tokens)
        return await self._run("commit", *args)

    async def give_back(self, engine: str, owner: str, term: int, rows: Mapping[str, tuple[int, bool]]) -> None:
        """rows: request id -> (claim, was it RUNNING at a loss)."""
        args: list[Argument] = []
        for request_id, (claim, lost) in rows.items():
            args += (request_id, claim, int(lost))
        await self._run("give_back", engine, owner, term, *args)

    async def hints(self, engine: str, cursor: bytes | None, *, wait: float) -> tuple[bytes, list[str]]:
        """Hints after cursor: '' (requests wait in the queue) or the id of a request that ended early. Waits like read.

        Answers the cursor to go on from, and each hint once. cursor None: from the oldest hint that is kept.
        """
        entries = await self._read_stream(self._keys.control(engine), cursor, wait)
        last = entries[-1][0] if entries else cursor or b"0"
        return last, list(dict.fromkeys(hint.decode() for _, (_, hint) in entries))

    async def _read_stream(self, key: str, cursor: bytes | None, wait: float) -> list[Any]:
        """Entries (id, [field, value, ...]) after the cursor."""
        block: tuple[Argument, ...] = ("BLOCK", max(1, round(wait * 1000))) if wait > 0 else ()
        command = ("XREAD", "COUNT", READ_ENTRIES, *block, "STREAMS", key, cursor or b"0")
        answer = await self._link.blocking(*command, wait=wait)
        return answer[0][1] if answer else []


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)


def _exact(attempt: int) -> int:
    if not 0 <= attempt < EXACT:
        raise ValueError(f"attempt: an integer from 0 to 2^53 - 1 is needed, it is {attempt}")
    return attempt


def _attached(answer: Any) -> Attached | Refusal:
    if isinstance(answer, int):
        return Refusal(answer)
    record, position, tokens, engines, reason, final, *times = answer
    lines = (line.split(" ", 1) for line in engines.decode().splitlines())
    finish = None
    if int(reason):
        finish = Finish(Reason(int(reason)), int(final), Times(*map(int, times)))
    return Attached(record, position, unpack_tokens(tokens), [(int(i), engine) for i, engine in lines], finish)


def _claim_answer(answer: Any) -> ClaimAnswer | None:
    if answer is None:
        return None
    last_claim, waiting, *held = answer
    requests = [
        Claimed(
            request_id.decode(),
            int(claim),
            int(arrival),
            record,
            unpack_tokens(tokens),
            int(losses),
            None if deadline == b"" else int(deadline) / 1e6,
            int(submitted),
        )
        for request_id, claim, arrival, record, tokens, losses, deadline, submitted in held
    ]
    return ClaimAnswer(requests, int(last_claim), waiting)
