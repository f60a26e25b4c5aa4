"""The request pool: all its operations, on one Redis. See docs/pool.md and docs/design.md, "The request pool"."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, cast

from redis.exceptions import OutOfMemoryError, ResponseError

from orca_common.errors import FailedPrecondition
from orca_common.reservation import Reservation
from orca_common.settings import PoolSettings

from .gathering import Gathering
from .keys import Keys
from .leases import DETACH_FLOOR_SECONDS
from .link import Argument, Link
from .listeners import Listeners
from .records import (
    BY_ARRIVAL,
    NO_LIMITS,
    NO_LOAD,
    Adapters,
    Attached,
    Busy,
    ClaimAnswer,
    Claimed,
    CommitAnswer,
    CommitRow,
    CommittedToken,
    Delivery,
    EngineInfo,
    EngineLoad,
    EngineState,
    EngineUse,
    Finish,
    Look,
    ModelIdentity,
    PoolAdapter,
    QueueLimits,
    Reason,
    Refusal,
    Renewed,
    Standing,
    Times,
    Turn,
)
from .scripts import SCHEMA, Constants, build, standard
from .wire import pack_tokens, unpack_packets, unpack_tokens

READ_ENTRIES = 256  # entries of a stream that one answer holds at most
SUBMITTED_TOGETHER = 32  # requests, in one script: as many as a batch often has; Redis takes 1 ms for them
LONG_RECORD = 16384  # bytes: a record of more goes alone
ATTACHED_TOGETHER = 32  # calls, in one script, with 1,000 tokens each it takes Redis 1 ms
DEFAULTS = Constants()
TOLD = frozenset(["submit", "submit_known", "attach", "cancel", "finish_at"])  # a client hears of what these did
SCHEMA_ERROR = "SCHEMA "
EXACT = 2**53  # Lua has doubles only: integers below this are exact
TAKEN = "="  # instead of an adapter's id, which ends with a number
LET_GO = "/"  # before a claim number in a hint: no id begins so


class Pool:
    """The request pool of one release: queue, records, committed tokens, delivery streams and leases.

    Endpoints and schedulers share it. Every method that asks Redis raises Unavailable while Redis is away, and may then
    be called again (see `retry.reached`): each operation names what its caller believes, and changes nothing when that
    is no longer true. "Engine, owner, term" name a lease; an operation of an old term changes nothing.
    """

    def __init__(
        self,
        redis_url: str,
        pool: str,
        *,
        password: str | None = None,
        tls_dir: str | None = None,
        constants: Constants = DEFAULTS,
        patience: float = 2.0,
        replicas: int = 0,
        lua: Mapping[str, str] | None = None,
    ) -> None:
        """Connects at the first operation.

        redis_url: as `primary.Primary` takes it. pool: the release's name. password: of Redis, where the URL has none,
        and of its Sentinels. tls_dir: for rediss://, a folder with this service's certificate and the authority (see
        `orca_common.tls`); without it the machine's authorities count, and no certificate is shown. patience: seconds
        that an exchange with Redis may take. replicas: this number of replicas have on disk what clients receive.
        constants: of the settings. lua: only tests give others.
        """
        self._keys = Keys(pool)
        self._replicas = replicas
        self._link = Link(redis_url, patience, password=password, tls_dir=tls_dir)
        self._scripts = standard(constants) if lua is None else build(lua, constants)
        # Of the engines that this process masters.
        self._listeners = defaultdict[str, Listeners](lambda: Listeners(self._keys.tokens))
        self._submits = Gathering(self._submit_all, SUBMITTED_TOGETHER)
        self._attaches = Gathering(self._attach_all, ATTACHED_TOGETHER)

    @classmethod
    def of(cls, settings: PoolSettings) -> Self:
        """The pool that a service's settings name."""
        constants = Constants(
            retention=settings.retention,
            retain_requests=settings.retain_requests,
            retain_bytes=settings.retain_bytes,
        )
        return cls(
            settings.redis_url,
            settings.pool,
            password=settings.redis_password,
            tls_dir=settings.tls_dir,
            constants=constants,
            replicas=settings.redis_replicas,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connections to Redis."""
        await self._submits.close()
        await self._attaches.close()
        await self._link.close()

    @property
    def generation(self) -> int:
        """Grows after each time that Redis was away, and with each change to another server.

        Redis may have forgotten something then, so an endpoint attaches its calls again.
        """
        return self._link.generation

    async def _run(self, script: str, *args: Argument, renewal: bool = False) -> Any:
        replicas = self._replicas if script in TOLD else 0
        try:
            return await self._link.run(
                self._scripts[script], 1, self._keys.pool, *args, renewal=renewal, replicas=replicas
            )
        except ResponseError as error:
            if str(error).startswith(SCHEMA_ERROR):
                raise FailedPrecondition(
                    f"the pool {self._keys.prefix} has keys of schema {str(error).split()[1]}, this service works with "
                    f"{SCHEMA}: end the other release and delete its keys, or give this one a pool of another name"
                ) from None
            raise

    async def _renew(self, script: str, *args: Argument) -> Any:
        """Like `_run`, ahead of all others: a lease depends on it."""
        return await self._run(script, *args, renewal=True)

    # -- identity
    async def identify(self, digest: str, max_positions: int, vocab_size: int) -> None:
        """Agrees with the pool on the model. Raises FailedPrecondition when the release serves another one.

        The first service of a release sets the model. digest: of what all services must share of it (see
        `orca_common.checkpoint`). The weights may differ from engine to engine.
        """
        stands = (await self._run("identify", digest, max_positions, vocab_size)).decode()
        if stands != digest:
            raise FailedPrecondition(
                f"the pool {self._keys.prefix} serves the model with digest {stands}, this service has {digest}"
            )

    async def check_durable(self, allow_volatile: bool) -> str | None:
        """Raises FailedPrecondition where Redis may forget what it acknowledged; allowed, returns the sentence."""
        memory = _info(await self._link.command("INFO", "memory"))
        persistence = _info(await self._link.command("INFO", "persistence"))
        problems: list[str] = []
        policy = memory.get("maxmemory_policy", "")
        if policy.startswith("allkeys"):  # the pool's keys have no expiry: volatile-* finds none of them
            problems.append(f"it evicts any key when memory is short (maxmemory-policy {policy})")
        if persistence.get("aof_enabled") == "0":
            problems.append("it has no append-only file (appendonly no)")
        if not problems:
            return None
        sentence = f"redis_url: this Redis may forget requests that were acknowledged: {', and '.join(problems)}"
        if not allow_volatile:
            raise FailedPrecondition(f"{sentence}; allow_volatile_redis accepts that")
        return sentence

    async def identity(self) -> ModelIdentity | None:
        """The model that the release has agreed on, and the slots of its largest engine. None: no service was there."""
        fields = ("digest", "max_positions", "vocab_size", "slots", "block", "output", "prefix")
        digest, positions, vocabulary, slots, block, output, prefix = await self._link.command(
            "HMGET", self._keys.pool, *fields
        )
        if digest is None:
            return None
        reservation = None if block is None else Reservation(int(block), bool(int(output)))
        sizes = int(positions), int(vocabulary), int(slots or 0)
        return ModelIdentity(digest.decode(), *sizes, reservation, (prefix or b"off").decode())

    async def engine_infos(self) -> list[EngineInfo]:
        """The engines that have formed, by name."""
        answer = await self._run("engine_infos")
        infos = (
            EngineInfo(
                engine.decode(),
                int(tp),
                int(pp),
                int(slots),
                int(epoch),
                weights.decode(),
                policy.decode(),
                role=role.decode(),
            )
            for engine, tp, pp, slots, epoch, weights, policy, role in answer
        )
        return sorted(infos, key=lambda info: info.engine)

    # -- adapters
    async def adapters(self, known: int = 0, about: str = "") -> Adapters:
        """The adapters that are served beside the model; none where `known` is their version. about: the id of one of
        which the answer tells what each engine says."""
        version, table, engines = await self._run("adapters", known, about)
        said = [text.decode() for text in engines]
        return Adapters(
            int(version),
            {key.decode(): _adapter(key, raw) for key, raw in zip(table[::2], table[1::2], strict=True)},
            dict(zip(said[::2], said[1::2], strict=True)),
        )

    async def name_adapters(self, folders: Mapping[str, str]) -> list[str]:
        """The setting names these adapters, name by folder, and no others. Returns the ids of those that are new."""
        named = [part for pair in folders.items() for part in pair]
        return [made.decode() for made in await self._run("change_adapters", "setting", *named)]

    async def load_adapter(self, name: str, folder: str, replace: bool = True) -> str:
        """Has engines load one more adapter, or with `replace` another folder of it.

        Returns its id; "": the name is the setting's; TAKEN: it is loaded already.
        """
        what = "replace" if replace else "load"
        return (await self._run("change_adapters", what, name, folder))[0].decode()

    async def unload_adapter(self, name: str) -> bool:
        """New requests do not name it any more. False: it was not loaded, or the name is the setting's."""
        return not await self._run("change_adapters", "unload", name, "")

    async def drop_adapter(self, adapter: str) -> None:
        """Gives up on an adapter, by its id, that no engine could load."""
        await self._run("change_adapters", "drop", adapter, "")

    async def tell_adapters(self, engine: str, owner: str, term: int, has: Sequence[tuple[str, str, str]]) -> bool:
        """Which adapters all ranks of an engine have: id, fingerprint of its files, or why they do not have it. Returns
        whether the owner is the engine's master."""
        args = [part for one in has for part in one]
        return await self._run("tell_adapters", engine, owner, term, *args) is not None

    async def engine_uses(self) -> dict[str, EngineUse]:
        """The load of each engine that has formed, by its name."""
        answer = await self._run("engine_uses")
        return {
            engine.decode(): EngineUse(int(requests), int(rows), int(free), int(slots))
            for engine, requests, rows, free, slots in answer
        }

    # -- endpoints
    async def renew_endpoint(
        self, incarnation: str, *, register: bool = False, replaces: str | None = None, read: int = 0
    ) -> int | None:
        """Renews an endpoint's registration, and returns its number. None: the incarnation is not registered.

        Call it every `leases.RENEW_SECONDS`. register: registers an incarnation that is not registered yet. replaces:
        an older incarnation to remove. read: number of the last entry that was read from the stream; Redis forgets it
        and those before. Another number than last time: the registration was lost and made again.
        """
        return await self._renew("renew_endpoint", incarnation, int(register), replaces or "", read)

    async def hand_over(self, incarnation: str) -> int:
        """Notes that an endpoint is leaving. Returns how many others live and stay."""
        return await self._run("hand_over", incarnation)

    async def leave_endpoint(self, incarnation: str) -> None:
        """Removes a drained endpoint's registration and stream. Calls still attached count as those of a dead one."""
        await self._run("leave_endpoint", incarnation)

    async def submit(
        self,
        request_id: str,
        record: bytes,
        body_digest: str,
        max_tokens: int,
        upfront: int,
        *,
        deadline_in: float | None,
        detach_grace: float,
        endpoint: str,
        attempt: int,
        max_waiting: int,
        new_tokens: int | None = None,
        tenant: str = "",
        turn: Turn = BY_ARRIVAL,
        keys: bytes = b"",
        adapter: str = "",
        limits: QueueLimits = NO_LIMITS,
    ) -> Attached | Refusal | Busy:
        """Queues a request and attaches its call. A known id with the same body is only attached.

        record: a PoolRequest. max_tokens: input tokens + max_new_tokens, so the slots that it fills at the end.
        upfront: slots that must be free for it to begin. deadline_in: seconds from now (None: no deadline).
        detach_grace: seconds for which the request lives on when its endpoint dies. max_waiting: a queue of this many
        requests is full. new_tokens: max_new_tokens, None: all of max_tokens. tenant: who pays for the request, which
        counts against the limits of a tenant and its share of the queue; a host, where callers have no keys. turn:
        where it comes into the queue. keys: those of its prompt's last full blocks (`wire.pack_keys`), where it may
        begin with others' keys and values. adapter: the id of the one that makes its tokens; "" for none.
        Raises ValueError for an attempt that is not below 2^53.
        """
        deadline = "" if deadline_in is None else _microseconds(deadline_in)
        grace = _microseconds(detach_grace)
        rest: list[Argument] = [body_digest, max_tokens, upfront, deadline, grace, endpoint, _exact(attempt)]
        rest += [max_tokens if new_tokens is None else new_tokens, tenant, turn.lift]
        rest += ["" if turn.weight is None else str(turn.weight), int(turn.priority), keys, adapter, max_waiting]
        rest += ["" if limit is None else limit for limit in limits]
        try:
            answer = _submitted(await self._submit(request_id, record, *rest))
        except OutOfMemoryError:
            answer = _submitted((await self._run("submit_known", request_id, b"", *rest))[0])
        if isinstance(answer, Attached) and not answer.record:  # the request is new
            return replace(answer, record=record, new=True)
        return answer

    async def _submit(self, request_id: str, record: bytes, *rest: Argument) -> Any:
        request = (request_id, record, *rest)
        if len(record) > LONG_RECORD:
            return (await self._submit_all([request]))[0]
        return await self._submits.ask(request)

    async def _submit_all(self, requests: Sequence[tuple[Argument, ...]]) -> list[Any]:
        return await self._run("submit", *(argument for request in requests for argument in request))

    async def attach(
        self,
        request_id: str,
        *,
        endpoint: str,
        attempt: int,
        known: int = 0,
        last: CommittedToken | None = None,
        seen: int = 0,
        digest: bytes = b"",
    ) -> Attached | Refusal:
        """Makes this call the one listener of a known request. The call of a lower attempt is told ABORTED.

        known, last: how many tokens the call has, and the last of them. The answer then holds only those beyond, and no
        record, if the pool has the same; all of them otherwise. seen, digest: how many tokens the client saw, and the
        SHA-1 of their ids (empty: not told). Where the pool has fewer or others, nothing changes.
        Raises ValueError for an attempt that is not below 2^53.
        """
        packed = b"" if last is None else pack_tokens([last])
        args = (request_id, endpoint, _exact(attempt), known, packed, seen, digest.hex())
        # Redis serves nobody else while a script runs, so what takes long in it goes alone: all tokens and the record,
        # or a digest of all tokens.
        if digest or not known:
            return _attached((await self._attach_all([args]))[0])
        return _attached(await self._attaches.ask(args))

    async def _attach_all(self, calls: Sequence[tuple[Argument, ...]]) -> list[Any]:
        return await self._run("attach", *(argument for call in calls for argument in call))

    async def detach(self, request_id: str, *, attempt: int, grace: float | None = None, at_least: float = 0.0) -> None:
        """Ends the listening of this attempt. The request ends max(`grace`, `at_least`) seconds later (0: at once).

        grace None: the one that the request was submitted with. A newer attempt that is attached, or comes within the
        grace, keeps the request alive.
        """
        seconds = "" if grace is None else _microseconds(grace)
        await self._run("detach", request_id, _exact(attempt), seconds, _microseconds(at_least))

    async def cancel(self, request_id: str) -> bool | None:
        """Ends a request at once. True: it was alive; False: it had ended; None: it is unknown."""
        answer = await self._run("cancel", request_id)
        return None if answer is None else bool(answer)

    async def look_up(self, request_id: str) -> Standing | None:
        """Returns how a request stands; None: it is not known. Changes nothing."""
        answer = await self._run("look_up", request_id)
        if answer is None:
            return None
        state, position, slots, order, engine, tokens, losses, reason, *times, now, prefix_at, overtaken = answer
        why = Reason(int(reason)) if int(reason) else None
        numbers = int(position), int(slots), int(order)
        moments = Times(*map(int, times))
        about = engine.decode(), int(tokens), int(losses), why, moments, int(now), prefix_at.decode(), int(overtaken)
        return Standing(state.decode(), *numbers, *about)

    async def show(self, request_id: str) -> Attached | None:
        """Returns all of a request that an attach would, beside its place in the queue; None: it is not known. Changes
        nothing: the call that listens to it goes on."""
        answer = await self._run("show", request_id)
        if answer is None:
            return None
        shown = _attached(answer)
        assert isinstance(shown, Attached)
        return shown

    async def finish_at(self, request_id: str, index: int, reason: Reason, digest: bytes) -> str:
        """Ends a request with the token at `index`, where an endpoint found a stop string. The smallest index stays.

        digest: SHA-1 of the token ids 0..index, each as 4 bytes little-endian. Returns 'ok'; 'ahead' when the pool has
        fewer tokens or does not know the request, because Redis lost some and the engine has yet to make them again;
        'other' when the pool has other tokens.
        """
        return (await self._run("finish_at", request_id, index, int(reason), digest.hex())).decode()

    async def read(self, endpoint: str, cursor: bytes | None, *, wait: float) -> list[Delivery]:
        """The entries of an endpoint's delivery stream after `cursor` (None: from the start).

        Waits at most `wait` seconds for the first one, on a connection of its own. A cancelled read loses nothing.
        """
        entries = await self._read_stream(self._keys.delivery(endpoint), cursor, wait)
        if entries and self._replicas:
            # A write of our own: WAITAOF waits for what this connection wrote, and all before it.
            await self._link.command("SET", self._keys.read, endpoint, replicas=self._replicas)
        return [
            Delivery(entry, int(entry.partition(b"-")[2]), unpack_packets(packets, engine.decode()))
            for entry, (_, engine, _, packets) in entries
        ]

    # -- schedulers
    async def renew_scheduler(self, scheduler: str, *, detach_floor: float = DETACH_FLOOR_SECONDS) -> Look:
        """Renews a scheduler's registration and sweeps. Returns all engines' leases, and the state of the queue.

        Call it every `leases.RENEW_SECONDS`: a sweep that comes more than `leases.GAP_SECONDS` after the one before
        cannot tell the gap from an outage, and ends less. detach_floor: the least seconds that the calls of a dead
        endpoint have to be attached elsewhere.
        """
        answer = await self._renew("renew_scheduler", scheduler, _microseconds(detach_floor))
        *leases, living, waiting, oldest = answer
        engines = {name.decode(): _lease(text) for name, text in zip(leases[::2], leases[1::2], strict=True)}
        return Look(engines, living, waiting, int(oldest) / 1e6)

    async def leave_scheduler(self, scheduler: str) -> None:
        """Removes a scheduler that leaves. It releases its engines before."""
        await self._run("leave_scheduler", scheduler)

    async def acquire(self, engine: str, owner: str, seen: EngineState | None) -> int | None:
        """Takes an engine's lease, and returns the new term. None: the lease is no longer as `seen`.

        owner: the candidate. seen: the lease as the candidate read it; None: no lease was there.
        (A known engine that is free has one, whose owner is None.)
        """
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
        weights: str = "",
        known: str = "",
        load: EngineLoad = NO_LOAD,
    ) -> Renewed | None:
        """Renews an engine's lease. None: the owner is not its master any more.

        Call it every `leases.RENEW_SECONDS`. epoch: a new one. reserve: the last iteration number that the master may
        use. form: given after a formation, when the engine's sizes are known (slots: in whole blocks). weights: the
        fingerprint of its last formation. known: the version of the engine's claims that an earlier renewal answered;
        the same claims are not told again. load: what predictions of the queue are made of, and whether the engine
        begins anything.
        """
        numbers = ("" if epoch is None else epoch, "" if reserve is None else reserve)
        sizes: Sequence[Argument] = [""] * 8
        if form is not None:
            rule = form.reservation
            sizes = (
                form.slots,
                form.tensor_parallel,
                form.pipeline_parallel,
                form.policy,
                rule.block_size,
                int(rule.output),
                form.prefix,
                form.role,
            )
        told = (load.rows, load.free, _microseconds(load.pace), _microseconds(load.room_in))
        answer = await self._renew(
            "renew", engine, owner, term, *numbers, *sizes, weights, known, *told, int(load.finishing), load.yields
        )
        if answer is None:
            return None
        epoch_now, reserved, last_claim, version, needs, adapters, *claims = answer
        changed = None if version.decode() == known else {i.decode(): int(claim) for i, claim in claims}
        numbers = needs, int(epoch_now), int(reserved), int(last_claim), int(adapters)
        return Renewed(changed, version.decode(), *numbers)

    async def holding(self, engine: str, owner: str, term: int) -> ClaimAnswer | None:
        """Everything that the engine has claimed, in full: a new master starts from it. None: not its master."""
        return _claim_answer(await self._run("holding", engine, owner, term))

    async def number(self, last: int) -> int:
        """A fresh epoch: max(last + 1, Redis's TIME in microseconds). No epoch is given twice."""
        seconds, microseconds = await self._link.command("TIME")
        return max(last + 1, int(seconds) * 1_000_000 + int(microseconds))

    async def release(self, engine: str, owner: str, term: int) -> None:
        """Frees the engine's lease, so that another scheduler can take the engine at once."""
        self._listeners.pop(engine, None)
        await self._run("release", engine, owner, term)

    async def expect(self, engine: str, owner: str, term: int, seconds: float) -> None:
        """Has requests with tokens of the engine's weights wait for these, even when it has formed with others."""
        await self._run("expect", engine, owner, term, _microseconds(seconds))

    async def retire(self, engine: str, owner: str, term: int) -> None:
        """Deletes an engine that has no ranks any more. Does nothing while it has claims: give them back first."""
        self._listeners.pop(engine, None)
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
        yielding: Iterable[tuple[int, int]] = (),
    ) -> ClaimAnswer | None:
        """Takes at most `count` of the first requests that fit into `slots`. None: not the master any more.

        have: the last claim number that the master heard of. If the engine's is higher, an answer was lost: this one
        tells what was claimed since, and nothing new is taken. total: all slots of the engine; a larger request is left
        to a larger engine. yielding: class and order of requests that the engine runs, the last one first, each of
        which gives way to a request of a higher class before it, beyond `count`. Where shares are fair, their class is
        ABOVE_ALL of orca_common.priorities.
        """
        last = " ".join(f"{priority} {order}" for priority, order in yielding)
        answer = await self._run("claim", engine, owner, term, have, count, slots, total, last)
        if answer is None:
            return None
        last_claim, needs, before, after, *held = answer
        self._listeners[engine].claimed(before, after)
        return _claim_answer([last_claim, needs, *held])

    async def commit(self, engine: str, owner: str, term: int, rows: Sequence[CommitRow]) -> CommitAnswer | None:
        """Appends tokens and records ends. Answers for each row Committed.OK, Committed.GONE or the pool's count.

        A count tells how many tokens the pool has where that is not the row's base: send again from there. None: not
        the master any more, and nothing was changed.
        """
        listeners = self._listeners[engine]
        args, order = listeners.arguments(rows)
        answer = await self._run("commit", engine, owner, term, *args)
        if answer is None:
            self._listeners.pop(engine, None)
            return None
        return listeners.answered(rows, order, answer)

    async def pulled(self, engine: str, owner: str, term: int, request_id: str, claim: int) -> None:
        """Notes that the engine has the keys and values of a request that it has claimed: who kept them may let go."""
        await self._run("pulled", engine, owner, term, request_id, claim)

    async def give_back(self, engine: str, owner: str, term: int, rows: Mapping[str, tuple[int, bool]]) -> int | None:
        """Returns claimed requests to the queue, each to its old place.

        Returns the moment, as Redis's TIME in microseconds. None: not the master any more, and nothing was changed.

        rows: request id -> (claim number, whether it was RUNNING when the engine lost its ranks). A request that was
        RUNNING counts the loss; see docs/design.md, "The request pool", about poison.
        """
        args: list[Argument] = []
        for request_id, (claim, lost) in rows.items():
            args += (request_id, claim, int(lost))
        moment = await self._run("give_back", engine, owner, term, *args)
        return None if moment is None else int(moment)

    async def hints(self, engine: str, cursor: bytes | None, *, wait: float) -> tuple[bytes, list[str]]:
        """The hints for an engine's master after `cursor` (None: from the oldest that is kept), each once.

        A hint is the id of a request that ended early; or '': requests wait in the queue; or LET_GO and a claim number:
        the keys and values that the engine keeps of it are not needed any more. Also returns the cursor to go on from.
        Waits like `read`.
        """
        entries = await self._read_stream(self._keys.control(engine), cursor, wait)
        last = entries[-1][0] if entries else cursor or b"0"
        return last, list(dict.fromkeys(hint.decode() for _, (_, hint) in entries))

    async def _read_stream(self, key: str, cursor: bytes | None, wait: float) -> list[Any]:
        """The entries of a stream after the cursor, each as (id, [field, value, ...])."""
        block: tuple[Argument, ...] = ("BLOCK", max(1, round(wait * 1000))) if wait > 0 else ()
        command = ("XREAD", "COUNT", READ_ENTRIES, *block, "STREAMS", key, cursor or b"0")
        answer = await self._link.blocking(*command, wait=wait)
        return answer[0][1] if answer else []


def _adapter(adapter: bytes, raw: bytes) -> PoolAdapter:
    entry = json.loads(raw)
    names = entry["name"], entry["folder"], entry["state"], entry["source"]
    return PoolAdapter(adapter.decode(), *names, entry["print"])


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)


def _exact(attempt: int) -> int:
    if not 0 <= attempt < EXACT:
        raise ValueError(f"attempt: an integer from 0 to 2^53 - 1 is needed, it is {attempt}")
    return attempt


def _submitted(answer: Any) -> Attached | Refusal | Busy:
    if isinstance(answer, list) and len(cast(list[Any], answer)) == 5:
        why, wait, due, limit, things = cast(list[Any], answer)
        return Busy(Refusal(why), _seconds(wait), _seconds(due), int(limit) if limit else None, things.decode())
    return _attached(answer)


def _seconds(microseconds: bytes) -> float | None:
    return int(microseconds) / 1e6 if microseconds else None


def _attached(answer: Any) -> Attached | Refusal:
    if isinstance(answer, ResponseError):  # of one among several
        raise answer
    if isinstance(answer, int):
        return Refusal(answer)
    record, position, starts_in, first, tokens, tops, prompt, weights, engines, reason, final, *times = answer
    lines = (line.split(" ", 1) for line in engines.decode().splitlines())
    finish = None
    if int(reason):
        finish = Finish(Reason(int(reason)), int(final), Times(*map(int, times[:4])), int(times[4] or 0))
    made = [(int(i), engine) for i, engine in lines]
    tokens, starts = unpack_tokens(tokens), _seconds(starts_in)
    return Attached(record, position, tokens, made, finish, first, starts, tops, prompt, weights.decode())


def _info(text: bytes) -> dict[str, str]:
    """The fields of an answer of INFO."""
    lines = (line.partition(":") for line in text.decode().splitlines())
    return {name: value.strip() for name, colon, value in lines if colon}


def _lease(text: bytes) -> EngineState:
    counter, term, owner = text.decode().split(" ", 2)
    return EngineState(owner or None, int(term), int(counter))


def _claim_answer(answer: Any) -> ClaimAnswer | None:
    if answer is None:
        return None
    last_claim, needs, *held = answer
    return ClaimAnswer([_claimed(*one) for one in held], int(last_claim), needs)


def _claimed(
    request_id: bytes,
    claim: bytes,
    order: bytes,
    priority: bytes,
    record: bytes,
    tokens: bytes,
    losses: bytes,
    deadline: bytes,
    submitted: bytes,
    queued: bytes,
    taken: bytes,
    weights: bytes,
    prefix_at: bytes,
    overtaken: bytes,
    handed: bytes,
) -> Claimed:
    return Claimed(
        request_id.decode(),
        int(claim),
        int(order),
        int(priority),
        record,
        unpack_tokens(tokens),
        int(losses),
        None if deadline == b"" else int(deadline) / 1e6,
        int(submitted),
        int(queued),
        int(taken),
        weights.decode(),
        prefix_at.decode(),
        int(overtaken),
        handed,
    )
