"""The request pool as plain Python: what each operation must answer, and what the pool must hold after it.

Written from docs/pool.md, not from the Lua. It has none of Redis's types: a
request is in one place because one field says so. The methods have the signatures of orca_pool.pool.Pool.
"""

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from orca_pool.leases import RENEW_SECONDS
from orca_pool.pool import TAKEN
from orca_pool.records import (
    BY_ARRIVAL,
    NO_LOAD,
    Adapters,
    Attached,
    Busy,
    ClaimAnswer,
    Claimed,
    CommitAnswer,
    CommitRow,
    Committed,
    CommittedToken,
    EngineInfo,
    EngineLoad,
    EngineState,
    Finish,
    Look,
    Packet,
    PoolAdapter,
    Reason,
    Refusal,
    Renewed,
    Times,
    Turn,
)
from orca_pool.scripts import Constants
from orca_pool.wire import KEY_SIZE, unpack_tokens

OTHER_FILES = "its files ({}) are others than those that an engine has read before"


@dataclass
class Request:
    request_id: str
    record: bytes
    digest: str
    max_tokens: int
    upfront: int
    grace: int
    order: int
    priority: int
    submitted: int
    deadline: int | None
    endpoint: str | None
    attempt: int
    state: str = "waiting"  # waiting, claimed, handed, ended
    claim: int | None = None
    engine: str | None = None
    closed: bool = False
    detach_at: int | None = None
    lives: int | None = None  # the grace that ended there, of its last detachment
    losses: int = 0
    loss_at: int = -1
    tokens: list[CommittedToken] = field(default_factory=list)
    engines: list[tuple[int, str]] = field(default_factory=list)
    weights: str = ""  # of the engine that claimed it last
    adapter: str = ""
    keys: tuple[bytes, ...] = ()  # of its prompt's blocks
    place: tuple[str, int, int] | None = None  # engine, term and epoch of its last claim
    prefix_at: tuple[str, int, int] | None = None  # that of the request that it goes on from
    overtaken: int = 0
    handed_at: tuple[str, int, int] | None = None  # who keeps its keys and values for another engine
    handed_claim: int | None = None  # .. by its claim there
    handed: bytes = b""  # .. and where
    was_handed: bool = False  # ever
    reason: Reason | None = None
    final: int = 0
    queued_at: int = 0
    taken_at: int = 0
    claimed_at: int = 0
    first_token: int = 0
    finished: int = 0

    @property
    def finish(self) -> Finish | None:
        if self.reason is None:
            return None
        return Finish(self.reason, self.final, Times(self.submitted, self.claimed_at, self.first_token, self.finished))

    @property
    def tied(self) -> str:
        """The weights that made its tokens: no others go on with it."""
        return self.weights if self.tokens else ""

    @property
    def spelled(self) -> str:
        """Its field `weights`."""
        return f"{self.weights}/{self.adapter}" if self.adapter else self.weights

    @property
    def due(self) -> int | None:
        moments = [at for at in (self.deadline, self.detach_at) if at is not None]
        return min(moments) if moments and self.state != "ended" else None


@dataclass
class Engine:
    owner: str | None = None
    term: int = 0
    counter: int = 0
    epoch: int = 0
    reserved: int = 0
    last_claim: int = 0
    slots: int = 0
    tp: int = 0
    pp: int = 0
    weights: str = ""
    policy: str = ""
    role: str = ""
    finishing: int = 0  # 1: it begins nothing
    yields: int = 0  # the lowest class of requests that give way
    free: int = 0  # slots, as its master told
    rows: int = 0  # places
    hints: list[str] = field(default_factory=list)
    has: dict[str, str] = field(default_factory=dict)  # adapters: + and their fingerprint, or - and why not


@dataclass
class Endpoint:
    number: int
    renewed: int
    entries: int = 0
    stream: list[tuple[int, list[Packet]]] = field(default_factory=list)


class Model:
    """The expected state of a pool. `now` is the pool's time in microseconds; the test sets it."""

    def __init__(self, constants: Constants) -> None:
        self.constants = constants
        self._grace = round(constants.adapter_grace * 1e6)
        self.now = 0
        self.arrival = self.last_claim = self.registration = self.largest = self.reserved = 0
        self.swept = self.back = self.readable = 0
        self.orphaned_calls = False
        self.shrunk = False  # requests may wait that no engine can go on with
        self.expected: dict[str, int] = {}  # weights that may come back, and until when requests wait for them
        self.asking: dict[str, int] = {}  # engines that found nothing to claim, and their free slots
        self.prefixes: dict[
            bytes, tuple[bool, str]
        ] = {}  # last key of a prompt -> is it of one alone, the last of them
        self.requests: dict[str, Request] = {}
        self.engines: dict[str, Engine] = {}
        self.endpoints: dict[str, Endpoint] = {}
        self.schedulers: dict[str, int] = {}
        self.adapters_version = self.last_adapter = 0
        self.retired: int | None = None  # when the sweep looks for adapters that nothing uses
        self.table: dict[str, dict[str, Any]] = {}  # adapters, as the hash has them

    # -- parts that several operations share
    def _number(self, last: int) -> int:
        return max(last + 1, self.now)

    def _queue(self) -> list[Request]:
        return sorted((r for r in self.requests.values() if r.state == "waiting"), key=place)

    def _handed(self) -> list[Request]:
        return sorted((r for r in self.requests.values() if r.state == "handed"), key=place)

    def _queue_of(self, engine: str) -> list[Request]:
        return self._handed() if self.engines[engine].role == "decode" else self._queue()

    def _sides(self) -> list[list[Engine]]:
        """The engines that have formed, in one list or, where they have roles, in one for each role that there is."""
        formed = [g for g in self.engines.values() if g.slots]
        sides = [g for g in formed if g.role != "decode"], [g for g in formed if g.role == "decode"]
        return [side for side in sides if side]

    def _begins(self, g: Engine) -> bool:
        """Whether it begins requests: an engine that prefills does where another one may go on with them."""
        decoding = [other for other in self.engines.values() if other.slots and other.role == "decode"]
        able = [other for other in decoding if other.weights == g.weights and not other.finishing]
        return not g.finishing and (g.role != "prefill" or not decoding or bool(able))

    def _suits(self, g: Engine, r: Request) -> bool:
        """Whether an engine may take a request, as far as weights and adapters are concerned."""
        able = not r.adapter or g.has.get(r.adapter, "").startswith("+")
        return able and (r.tied == g.weights if r.tied else self._begins(g))

    def _let_go(self, r: Request) -> None:
        """Who keeps the request's keys and values may forget them."""
        if r.handed_at is not None and r.handed_at[0] in self.engines:
            self._hint(r.handed_at[0], f"/{r.handed_claim}")
        r.handed_at, r.handed_claim, r.handed = None, None, b""

    def _kept(self, r: Request) -> bool:
        assert r.handed_at is not None
        return self._place(r.handed_at[0]) == r.handed_at and self.now - r.queued_at < self.constants.keep * 1e6

    def _begin_again(self, r: Request) -> None:
        """A request that was handed over in vain."""
        self._let_go(r)
        if reason := self._hopeless(r):
            self._end(r, reason)
            return
        r.state, r.queued_at = "waiting", self.now
        self._hint_waiting(r.upfront, r)

    def _held(self, engine: str) -> list[Request]:
        return sorted((r for r in self.requests.values() if r.engine == engine), key=place)

    def _fenced(self, engine: str, owner: str, term: int) -> bool:
        lease = self.engines.get(engine)
        return lease is None or (lease.owner, lease.term) != (owner, term)

    def _hint(self, engine: str, text: str) -> None:
        hints = self.engines[engine].hints
        hints.append(text)
        del hints[: -self.constants.control_length]

    def _place(self, engine: str) -> tuple[str, int, int] | None:
        g = self.engines.get(engine)
        return None if g is None or g.owner is None else (engine, g.term, g.epoch)

    def _stands(self, at: tuple[str, int, int]) -> bool:
        return self._place(at[0]) == at and not self.engines[at[0]].finishing

    def _others(self, engine: str, r: Request) -> bool:
        """Whether the request waits for another engine, which has its prefix."""
        at, wait = r.prefix_at, self.constants.prefix_wait * 1e6
        if (
            r.state == "handed"
            or at is None
            or r.overtaken >= self.constants.overtakings
            or self.now - r.queued_at >= wait
        ):
            return False
        return at[0] != engine and self._stands(at)

    def _find_prefix(self, keys: Sequence[bytes]) -> tuple[str, int, int] | None:
        found = [self.prefixes[key] for key in reversed(keys) if key in self.prefixes]
        places = [self.requests[i].place for alone, i in found if alone and i in self.requests]
        return next((at for at in places if at is not None and self._stands(at)), None)

    def _hint_waiting(self, slots: int, r: Request) -> bool:
        asking = [e for e, room in self.asking.items() if room >= slots and not self._others(e, r)]
        handed = r.state == "handed"
        suited = [e for e in asking if self._suits(self.engines[e], r) and (self.engines[e].role == "decode") == handed]
        if suited:
            emptiest = max(suited, key=lambda engine: (self.asking[engine], engine))
            del self.asking[emptiest]
            self._hint(emptiest, "")
        return bool(suited)

    def _hint_yielding(self, slots: int, r: Request) -> None:
        lowest = sorted(self.engines.items(), key=lambda engine: (engine[1].yields, engine[0]), reverse=True)
        for name, g in lowest[:16]:
            held = self._held(name)[: g.rows]
            behind = 0 < g.rows == len(held) and held[-1].order > r.order
            if behind and g.yields > r.priority and g.free >= slots and not g.finishing:
                self._hint(name, "")
                return

    def _needs(self, engine: str) -> int:
        g = self.engines[engine]
        total = g.slots
        mine = (r for r in self._queue_of(engine)[:16] if not self._others(engine, r))
        fitting = (r for r in mine if r.max_tokens <= total and self._suits(g, r))
        first = next(fitting, None)
        return 0 if first is None else total if first.losses >= 2 else first.upfront

    def _deliver(self, endpoint: str | None, packets: list[Packet]) -> None:
        if endpoint in self.endpoints:
            listener = self.endpoints[endpoint]
            listener.entries += 1
            listener.stream.append((listener.entries, packets))
            del listener.stream[: -self.constants.delivery_length]

    def _close(self, r: Request, reason: Reason, final: int) -> None:
        r.state, r.reason, r.final, r.finished, r.claim, r.engine = "ended", reason, final, self.now, None, None
        self._let_go(r)
        self._forget(2)

    def _forget(self, most: int) -> None:
        ended = sorted((r.finished, r.request_id) for r in self.requests.values() if r.state == "ended")
        for finished, request_id in ended[:most]:
            count = sum(r.state == "ended" for r in self.requests.values())
            old = self.now - max(finished, self._readable()) > self.constants.retention * 1e6
            if old or count > self.constants.retain_requests:
                r = self.requests.pop(request_id)
                if r.keys and self.prefixes.get(r.keys[-1], (True, ""))[1] == request_id:
                    del self.prefixes[r.keys[-1]]

    def _end(self, r: Request, reason: Reason, final: int | None = None) -> None:
        """Ends a request outside of a commit."""
        engine = r.engine
        self._close(r, reason, len(r.tokens) if final is None else final)
        self._deliver(r.endpoint, [Packet(r.request_id, r.attempt, r.final, "", [], r.finish)])
        if engine is not None:
            self._hint(engine, r.request_id)
        elif queue := self._queue():
            self._hint_waiting(queue[0].upfront, queue[0])

    def _supersede(self, r: Request) -> None:
        finish = Finish(Reason.ABORTED, 0, Times(0, 0, 0, 0))
        self._deliver(r.endpoint, [Packet(r.request_id, r.attempt, 0, "", [], finish)])

    def _overdue(self, r: Request) -> Reason | None:
        if r.deadline is not None and self.now >= r.deadline:
            return Reason.DEADLINE
        return Reason.DETACHED if r.detach_at is not None and self.now >= self._grace_end(r) else None

    def _grace_end(self, r: Request) -> int:
        """The end of its detach grace, which begins anew after an outage."""
        assert r.detach_at is not None
        assert r.lives is not None
        return max(r.detach_at, self._back() + r.lives)

    def _back(self) -> int:
        """When clients could reach the pool again after the last outage: now, if no sweep has seen it yet."""
        return self.now if self.now - self.swept > self.constants.lease * 1e6 else self.back

    def _readable(self) -> int:
        """The same after the last outage that was long."""
        return self.now if self.now - self.swept > self.constants.long_outage * 1e6 else self.readable

    def _remove_endpoint(self, endpoint: str) -> None:
        self.orphaned_calls |= self.endpoints.pop(endpoint, None) is not None

    def _attached(self, r: Request) -> Attached:
        position = self._queue().index(r) + 1 if r.state == "waiting" else 0
        tokens = r.tokens[: r.final] if r.state == "ended" else list(r.tokens)
        return Attached(r.record, position, tokens, list(r.engines), r.finish, weights=r.spelled if r.tokens else "")

    def _full(self, r: Request) -> Claimed:
        assert r.claim is not None
        left = None if r.deadline is None else (r.deadline - self.now) / 1e6
        at = r.prefix_at[0] if r.prefix_at else ""
        about = (r.losses, left, r.submitted, r.queued_at, r.taken_at, r.spelled, at, r.overtaken)
        return Claimed(r.request_id, r.claim, r.order, r.priority, r.record, list(r.tokens), *about, r.handed)

    # -- endpoints
    def renew_endpoint(
        self, incarnation: str, *, register: bool = False, replaces: str | None = None, read: int = 0
    ) -> int | None:
        if replaces is not None:
            self._remove_endpoint(replaces)
        if incarnation not in self.endpoints:
            if not register:
                return None
            self.registration = self._number(self.registration)
            self.endpoints[incarnation] = Endpoint(self.registration, self.now)
        else:
            stream = self.endpoints[incarnation].stream
            stream[:] = [entry for entry in stream if entry[0] > read]
        self.endpoints[incarnation].renewed = self.now
        return self.endpoints[incarnation].number

    def leave_endpoint(self, incarnation: str) -> None:
        self._remove_endpoint(incarnation)

    def submit(
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
        turn: Turn = BY_ARRIVAL,
        keys: bytes = b"",
        adapter: str = "",
    ) -> Attached | Refusal | Busy:
        if endpoint not in self.endpoints:
            return Refusal.UNREGISTERED
        if request_id in self.requests:
            if self.requests[request_id].digest != body_digest:
                return Refusal.OTHER_BODY
            return self.attach(request_id, endpoint=endpoint, attempt=attempt)
        if self.largest == 0:
            return Refusal.NO_ENGINE
        if max_tokens > self.largest:
            return Refusal.NEVER_FITS
        if adapter and self._lost(adapter):
            return Refusal.NO_ADAPTER
        if len(self._queue()) >= max_waiting:
            return Busy(Refusal.FULL, None)
        self.arrival = self._number(self.arrival)
        deadline = None if deadline_in is None else self.now + round(deadline_in * 1e6)
        grace = round(detach_grace * 1e6)
        r = Request(
            request_id,
            record,
            body_digest,
            max_tokens,
            upfront,
            grace,
            self.arrival + turn.lift,
            turn.priority,
            self.now,
            deadline,
            endpoint,
            attempt,
            queued_at=self.now,
            adapter=adapter,
            keys=tuple(keys[at : at + KEY_SIZE] for at in range(0, len(keys), KEY_SIZE)),
        )
        self.requests[request_id] = r
        if r.keys:
            r.prefix_at = self._find_prefix(r.keys)
            self.prefixes[r.keys[-1]] = (r.keys[-1] not in self.prefixes, request_id)
        if not self._hint_waiting(upfront, r):
            self._hint_yielding(upfront, r)
        return replace(self._attached(r), new=True)

    def attach(
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
        if endpoint not in self.endpoints:
            return Refusal.UNREGISTERED
        r = self.requests.get(request_id)
        if r is None:
            return Refusal.UNKNOWN
        if attempt < r.attempt or (attempt == r.attempt and r.closed):
            return Refusal.STALE
        have = r.tokens[: r.final] if r.state == "ended" else r.tokens
        if seen > len(have):
            over = r.reason not in (None, Reason.STOP)
            return Refusal.OTHER_TOKENS if over else Refusal.FEWER_TOKENS
        if digest and prefix_digest(have[:seen]) != digest:
            return Refusal.OTHER_TOKENS
        if attempt > r.attempt:
            self._supersede(r)
        r.endpoint, r.attempt, r.closed, r.detach_at = endpoint, attempt, False, None
        whole = self._attached(r)
        same = 0 < known <= len(whole.tokens) and whole.tokens[known - 1] == last
        first = known if same else 0
        return replace(whole, record=b"" if known else whole.record, tokens=whole.tokens[first:], first=first)

    def detach(self, request_id: str, *, attempt: int, grace: float | None = None, at_least: float = 0.0) -> None:
        r = self.requests.get(request_id)
        if r is None or r.state == "ended" or attempt < r.attempt:
            return
        if attempt > r.attempt:
            self._supersede(r)
        lives = max(r.grace if grace is None else round(grace * 1e6), round(at_least * 1e6))
        r.endpoint, r.attempt, r.closed, r.detach_at, r.lives = None, attempt, True, self.now + lives, lives
        if lives == 0:
            self._end(r, Reason.DETACHED)

    def cancel(self, request_id: str) -> bool | None:
        r = self.requests.get(request_id)
        if r is None:
            return None
        if r.state == "ended":
            return False
        self._end(r, Reason.CANCELLED)
        return True

    def finish_at(self, request_id: str, index: int, reason: Reason, digest: bytes) -> str:
        r = self.requests.get(request_id)
        if r is None or index >= len(r.tokens):
            return "ahead"
        if prefix_digest(r.tokens[: index + 1]) != digest:
            return "other"
        if r.state != "ended":
            self._end(r, reason, index + 1)
        elif index + 1 < r.final:
            r.final, r.reason = index + 1, reason
        return "ok"

    # -- schedulers
    def renew_scheduler(self, scheduler: str, *, detach_floor: float = 30.0) -> Look:
        before, self.swept = self.swept, self.now
        gap, due = self.now - before, self.now
        outage = gap > self.constants.lease * 1e6
        if gap > self.constants.sweep_gap * 1e6:
            counted = round(RENEW_SECONDS * 1e6)

            def renewed(at: int) -> int:
                return self.now if outage else min(self.now, at + gap - counted)

            for endpoint in self.endpoints.values():
                endpoint.renewed = renewed(endpoint.renewed)
            self.schedulers = {name: renewed(at) for name, at in self.schedulers.items()}
            due = before
            if outage and before:
                self.expected = {weights: until + gap for weights, until in self.expected.items()}
        self._sweep(round(detach_floor * 1e6), due, outage, gap > self.constants.long_outage * 1e6)
        self.schedulers[scheduler] = self.now
        leases = {e: EngineState(g.owner, g.term, g.counter) for e, g in self.engines.items()}
        queue = self._queue()
        oldest = (self.now - queue[0].submitted) / 1e6 if queue else 0.0
        return Look(leases, len(self.schedulers), len(queue), oldest)

    def _sweep(self, floor: int, due: int, outage: bool, long: bool) -> None:
        oldest = self.now - self.constants.lease * 1e6
        for name in [name for name, endpoint in self.endpoints.items() if endpoint.renewed < oldest]:
            self._remove_endpoint(name)
        if outage or not self.endpoints:
            self.back = self.now
        if long or not self.endpoints:
            self.readable = self.now
        self.schedulers = {name: at for name, at in self.schedulers.items() if at >= oldest}
        live = [r for r in self.requests.values() if r.state != "ended"]
        if self.orphaned_calls:
            for r in live:
                if r.endpoint is not None and r.endpoint not in self.endpoints and r.detach_at is None:
                    r.lives = max(r.grace, floor)
                    r.detach_at = self.now + r.lives
            self.orphaned_calls = False
        for r in sorted((r for r in live if r.due is not None), key=lambda r: (r.due, r.request_id)):
            if r.due is not None and r.due <= due:
                if reason := self._overdue(r):
                    self._end(r, reason)
                else:
                    r.detach_at = self._grace_end(r)
        for r in self._handed():
            if not self._kept(r):
                self._begin_again(r)
        if self.engines and all(g.slots for g in self.engines.values()) and self._largest() < self.largest:
            self.largest, self.shrunk = self._largest(), True
        self.shrunk |= any(until <= due for until in self.expected.values())
        self.expected = {weights: until for weights, until in self.expected.items() if until > due}
        if self.shrunk:
            for r in self._queue():
                if reason := self._hopeless(r):
                    self._end(r, reason)
            self.shrunk = False
        self._forget_adapters()
        self._forget(256)

    def _forget_adapters(self) -> None:
        """Those that were unloaded or replaced, and that no request has."""
        if self.retired is None or self.now < self.retired:
            return
        used = self._uses()
        old = [i for i, one in self.table.items() if one["state"] == "retired"]
        since = {i: max(int(self.table[i]["at"]), self.back) for i in old}
        gone = [i for i in old if self.now >= since[i] + self._grace and i not in used]
        for adapter in gone:
            del self.table[adapter]
        self.adapters_version += len(gone)
        self.retired = self.now + round(self.constants.lease * 1e6) if len(gone) < len(old) else None

    def _largest(self) -> int:
        """The slots of the largest request that the engines can run."""
        return min(max(g.slots for g in side) for side in self._sides())

    def _lost(self, adapter: str) -> bool:
        """Whether no engine has an adapter or will have it, of those that there are or of one role."""
        lack = (all(g.has.get(adapter, "").startswith("-") for g in side) for side in self._sides())
        return adapter not in self.table or any(lack)

    def _uses(self) -> dict[str, set[str]]:
        """By an adapter's id its requests that live."""
        uses: dict[str, set[str]] = {}
        for r in self.requests.values():
            if r.adapter and r.state != "ended":
                uses.setdefault(r.adapter, set()).add(r.request_id)
        return uses

    def _hopeless(self, r: Request) -> Reason | None:
        """Why no engine can take a request, now and later. Where none has formed that begins any, it waits for one."""
        if self.largest and r.max_tokens > self.largest:
            return Reason.NEVER_FITS
        if r.adapter and self._lost(r.adapter):
            return Reason.MODEL_CHANGED
        beginning = any(g.slots and g.role != "decode" for g in self.engines.values())
        if not r.tied or not beginning or r.tied in self.expected:
            return None
        able = (any(g.weights == r.tied and g.slots >= r.max_tokens for g in side) for side in self._sides())
        return None if all(able) else Reason.MODEL_CHANGED

    def leave_scheduler(self, scheduler: str) -> None:
        self.schedulers.pop(scheduler, None)

    def acquire(self, engine: str, owner: str, seen: EngineState | None) -> int | None:
        g = self.engines.get(engine)
        if g is not None and g.owner == owner and g.term > (seen.term if seen else 0):
            return g.term
        if seen is None:
            if g is not None and g.owner is not None:
                return None
        elif g is None or EngineState(g.owner, g.term, g.counter) != seen:
            return None
        if g is None:
            g = self.engines[engine] = Engine(reserved=self.reserved)
        g.rows = 0
        g.owner, g.term, g.counter = owner, self._number(g.term), g.counter + 1
        return g.term

    def renew(
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
        if self._fenced(engine, owner, term):
            return None
        g = self.engines[engine]
        g.counter += 1
        g.finishing, g.yields, g.free, g.rows = int(load.finishing), load.yields, load.free, load.rows
        g.epoch, g.reserved = max(g.epoch, epoch or 0), max(g.reserved, reserve or 0)
        if form is not None:
            g.slots, g.tp, g.pp, g.policy = form.slots, form.tensor_parallel, form.pipeline_parallel, form.policy
            g.role = form.role
            self.largest = max(self.largest, self._largest())
            g.has.clear()
        self.shrunk |= form is not None or weights not in ("", g.weights)
        g.weights = weights or g.weights
        claims = {r.request_id: r.claim for r in self._held(engine) if r.claim is not None}
        version = f"{g.last_claim}:{len(claims)}"
        return Renewed(
            None if version == known else claims,
            version,
            self._needs(engine),
            *(g.epoch, g.reserved, g.last_claim, self.adapters_version),
        )

    # -- adapters
    def adapters(self, known: int = 0, about: str = "") -> Adapters:
        table = {} if known == self.adapters_version else self.table
        entries = {
            i: PoolAdapter(i, *(one[name] for name in ("name", "folder", "state", "source", "print")))
            for i, one in table.items()
        }
        engines = {e: g.has.get(about, "") for e, g in self.engines.items() if about and g.slots}
        return Adapters(self.adapters_version, entries, engines)

    def _write(self, adapter: str, **changed: str) -> None:
        self.table[adapter] |= {"at": str(self.now), **changed}
        self.adapters_version += 1

    def _retire(self, adapter: str) -> None:
        if not self.table[adapter]["print"]:  # no engine has ever had it
            del self.table[adapter]
            self.adapters_version, self.shrunk = self.adapters_version + 1, True
            return
        self._write(adapter, state="retired")
        self.retired = self.now + self._grace

    def _newest(self, name: str) -> str | None:
        named = [i for i, one in self.table.items() if one["name"] == name and one["state"] != "retired"]
        return max(named, key=lambda i: self.table[i]["state"] == "pending", default=None)

    def _add_adapter(self, name: str, folder: str, source: str) -> str:
        for i, one in list(self.table.items()):
            if one["name"] == name and one["state"] == "pending":
                self._retire(i)
        self.last_adapter = self._number(self.last_adapter)
        adapter = f"{name}@{self.last_adapter}"
        self.table[adapter] = {"name": name, "folder": folder, "source": source, "print": ""}
        self._write(adapter, state="pending")
        return adapter

    def name_adapters(self, folders: Mapping[str, str]) -> list[str]:
        made = list[str]()
        for name, folder in folders.items():
            has = self.table.get(self._newest(name) or "", {})
            if (has.get("folder"), has.get("source")) != (folder, "setting"):
                made.append(self._add_adapter(name, folder, "setting"))
        for i, one in list(self.table.items()):
            if one["source"] == "setting" and one["state"] != "retired" and one["name"] not in folders:
                self._retire(i)
        return made

    def load_adapter(self, name: str, folder: str, replace: bool = True) -> str:
        has = self.table.get(self._newest(name) or "", {})
        if has.get("source") == "setting":
            return ""
        return TAKEN if has and not replace else self._add_adapter(name, folder, "load")

    def unload_adapter(self, name: str) -> bool:
        has = self._newest(name)
        if has is None or self.table[has]["source"] == "setting":
            return False
        for i, one in list(self.table.items()):
            if one["name"] == name and one["state"] != "retired":
                self._retire(i)
        return True

    def drop_adapter(self, adapter: str) -> None:
        if self.table.get(adapter, {}).get("state") == "pending":
            self._retire(adapter)

    def _write_over(self, adapter: str, fingerprint: str) -> None:
        """All engines have read other files of it."""
        one = self.table.pop(adapter)
        self.last_adapter = self._number(self.last_adapter)
        if one["state"] == "current":
            self.table[f"{one['name']}@{self.last_adapter}"] = one | {"at": str(self.now), "print": fingerprint}
        self.adapters_version, self.shrunk = self.adapters_version + 1, True

    def tell_adapters(self, engine: str, owner: str, term: int, has: Sequence[tuple[str, str, str]]) -> bool:
        if self._fenced(engine, owner, term):
            return False
        g = self.engines[engine]
        g.has.clear()
        for i, fingerprint, why in has:
            if (one := self.table.get(i)) is None:
                continue
            differs = fingerprint and one["print"] not in ("", fingerprint)
            there = bool(fingerprint and not differs)
            said = f"-{OTHER_FILES.format(fingerprint) if differs else why}"
            if differs and all(
                other.has.get(i) == said for other in self.engines.values() if other.slots and other is not g
            ):
                self._write_over(i, fingerprint)
                continue
            g.has[i] = f"+{fingerprint}" if there else said
            if there and one["state"] == "pending":
                for other in self.table.values():
                    if other["name"] == one["name"] and other["state"] == "current":
                        other |= {"state": "retired", "at": str(self.now)}
                        self.retired = self.now + self._grace
                self._write(i, state="current", print=fingerprint)
        told = (i for i, *_ in has if g.has.get(i, "").startswith("-"))
        self.shrunk |= any(self._lost(i) for i in told)
        self._hint(engine, "")
        return True

    def holding(self, engine: str, owner: str, term: int) -> ClaimAnswer | None:
        if self._fenced(engine, owner, term):
            return None
        held = [self._full(r) for r in self._held(engine)]
        return ClaimAnswer(held, self.engines[engine].last_claim, self._needs(engine))

    def release(self, engine: str, owner: str, term: int) -> None:
        if not self._fenced(engine, owner, term):
            self.engines[engine].owner, self.engines[engine].yields = None, 0
            self.asking.pop(engine, None)

    def retire(self, engine: str, owner: str, term: int) -> None:
        if not self._fenced(engine, owner, term) and not self._held(engine):
            self.reserved, self.shrunk = max(self.reserved, self.engines.pop(engine).reserved), True
            self.asking.pop(engine, None)

    def claim(
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
        if self._fenced(engine, owner, term):
            return None
        g = self.engines[engine]
        if have < g.last_claim:
            taken = [r for r in self._held(engine) if r.claim is not None and r.claim > have]
            needs = self._needs(engine)
        else:
            self.asking.pop(engine, None)
            taken, needs, waits = self._take(engine, count, slots, total, list(yielding))
            if waits is not None:
                self._hint_waiting(needs, waits)
        return ClaimAnswer([self._full(r) for r in taken], g.last_claim, needs)

    def _take(
        self, engine: str, count: int, slots: int, total: int, yielding: list[tuple[int, int]]
    ) -> tuple[list[Request], int, Request | None]:
        """What is taken, the slots that the engine must have free to claim again, the request that waits for them."""
        taken: list[Request] = []
        passed: list[Request] = []  # they wait for another engine
        g = self.engines[engine]
        decodes = g.role == "decode"
        for r in self._queue_of(engine):
            if reason := self._overdue(r):
                self._end(r, reason)
                continue
            if decodes and not self._kept(r):
                self._begin_again(r)
                continue
            if r.max_tokens > total or not self._suits(g, r):
                continue
            if self._others(engine, r):
                passed.append(r)
                continue
            held = self._held(engine)
            if any(other.losses >= 2 for other in held) or (r.losses >= 2 and bool(held)):
                return taken, total, r
            if r.upfront > slots:
                return taken, r.upfront, r
            if not count:
                priority, order = yielding[0] if yielding else (0, 0)
                if r.order >= order or r.priority >= priority:
                    return taken, r.upfront, r
                del yielding[0]
            count = max(count - 1, 0)
            g.last_claim = self.last_claim = self._number(max(self.last_claim, g.last_claim))
            r.state, r.claim, r.engine, r.weights = "claimed", g.last_claim, engine, g.weights
            r.taken_at, r.claimed_at = self.now, r.claimed_at or self.now
            r.engines = [line for line in r.engines if line[0] != len(r.tokens)] + [(len(r.tokens), engine)]
            if r.keys and not decodes:
                r.place = self._place(engine)
            slots -= r.upfront
            taken.append(r)
            for other in passed:
                other.overtaken += 1
            if tired := [other for other in passed if other.overtaken >= self.constants.overtakings]:
                return taken, tired[0].upfront, tired[0]
        if any(r.losses >= 2 for r in self._held(engine)):
            return taken, total, None
        if not count or slots <= 0:
            return taken, 1, None
        self.asking[engine] = slots
        return taken, 0, None

    def expect(self, engine: str, owner: str, term: int, seconds: float) -> None:
        if not self._fenced(engine, owner, term) and self.engines[engine].weights:
            weights, until = self.engines[engine].weights, self.now + round(seconds * 1e6)
            self.expected[weights] = max(self.expected.get(weights, 0), until)

    def commit(self, engine: str, owner: str, term: int, rows: Sequence[CommitRow]) -> CommitAnswer | None:
        if self._fenced(engine, owner, term):
            return None
        answers: list[int] = []
        packets: dict[str, list[Packet]] = {}
        handed: list[tuple[Request, int, bytes]] = []
        for row in rows:
            r = self.requests.get(row.request_id)
            if r is None or r.claim != row.claim or r.engine != engine:
                again = bool(row.handed) and row.finish is None and r is not None and r.handed_claim == row.claim
                again = again and r is not None and r.handed_at == self._place(engine)
                answers.append(Committed.OK if again else Committed.GONE)
                continue
            if row.base != len(r.tokens):
                answers.append(len(r.tokens))
                continue
            tokens = unpack_tokens(row.tokens)
            if tokens and not r.tokens:
                r.first_token = self.now
            r.tokens += tokens
            if row.finish is not None:
                self._close(r, row.finish, len(r.tokens))
            if r.endpoint is not None:
                packet = Packet(row.request_id, r.attempt, row.base, engine, tokens, r.finish)
                packets.setdefault(r.endpoint, []).append(packet)
            answers.append(Committed.OK)
            if row.handed and row.finish is None:
                handed.append((r, row.claim, row.handed))
        for r, claim, where in handed:
            if r.state == "ended":
                continue
            r.state, r.claim, r.engine, r.queued_at = "handed", None, None, self.now
            r.handed_at, r.handed_claim, r.handed, r.was_handed = self._place(engine), claim, where, True
            self._hint_waiting(r.upfront, r)
        for endpoint, parts in packets.items():
            self._deliver(endpoint, parts)
        needs = self._needs(engine)
        left = (row.finish is not None or row.handed for row in rows)
        ended = any(gone and said == Committed.OK for gone, said in zip(left, answers, strict=True))
        return CommitAnswer(answers, 0 if self.asking.get(engine, 0) >= needs else needs, self.now if ended else 0)

    def pulled(self, engine: str, owner: str, term: int, request_id: str, claim: int) -> None:
        r = self.requests.get(request_id)
        if not self._fenced(engine, owner, term) and r is not None and (r.claim, r.engine) == (claim, engine):
            self._let_go(r)

    def give_back(self, engine: str, owner: str, term: int, rows: Mapping[str, tuple[int, bool]]) -> int | None:
        if self._fenced(engine, owner, term):
            return None
        for request_id, (claim, lost) in rows.items():
            r = self.requests.get(request_id)
            if r is None or r.claim != claim or r.engine != engine:
                continue
            if lost:
                r.losses = 1 if len(r.tokens) > r.loss_at else r.losses + 1
                r.loss_at = len(r.tokens)
            if r.losses >= 3:
                self._end(r, Reason.INTERNAL)
            else:
                self._let_go(r)
                r.state, r.claim, r.engine, r.queued_at = "waiting", None, None, self.now
                self._hint_waiting(r.upfront, r)
                self.shrunk |= self._hopeless(r) is not None
        return self.now

    # -- the whole state
    def dump(self) -> dict[str, Any]:
        """The state in the form in which lab.Lab.dump reads it from Redis. What is empty has no key."""
        engines = self.engines.items()
        pool = {
            "arrival": self.arrival,
            "claim": self.last_claim,
            "registration": self.registration,
            "slots": self.largest,
            "swept": self.swept,
            "back": self.back,
            "readable": self.readable,
            "reserved": self.reserved,
            "adapters": self.adapters_version,
            "adapter": self.last_adapter,
            "retired": self.retired,
        }
        return {
            "waiting": [r.request_id for r in self._queue()],
            "handed": [r.request_id for r in self._handed()],
            "claimed": {e: [r.request_id for r in self._held(e)] for e in self.engines if self._held(e)},
            "requests": {i: _request_fields(r) for i, r in self.requests.items()},
            "tokens": {i: r.tokens for i, r in self.requests.items() if r.tokens},
            "delivery": {name: endpoint.stream for name, endpoint in self.endpoints.items()},
            "control": {e: g.hints for e, g in engines if g.hints},
            "engines": {
                e: {
                    name: getattr(g, name)
                    for name in Engine.__annotations__
                    if name not in ("hints", "free", "rows", "yields", "has")
                }
                | {"owner": g.owner or ""}
                for e, g in engines
            },
            "adapters": self.table,
            "uses": self._uses(),
            "has": {e: g.has for e, g in engines if g.has},
            "asking": self.asking,
            "yielding": {e: g.yields for e, g in engines if g.yields},
            "expected": self.expected,
            "prefixes": {key.decode(): "+1"[alone] + i for key, (alone, i) in self.prefixes.items()},
            "endpoints": {name: {"number": e.number} for name, e in self.endpoints.items()},
            "renewals": {name: e.renewed for name, e in self.endpoints.items()},
            "schedulers": self.schedulers,
            "due": {i: r.due for i, r in self.requests.items() if r.due is not None},
            "pool": {name: value for name, value in pool.items() if value},
        }


def place(r: Request) -> tuple[int, str]:
    """Its place in a sorted set."""
    return r.order, r.request_id


def _request_fields(r: Request) -> dict[str, Any]:
    def text(value: Any) -> Any:
        return "" if value is None else value

    return (
        {
            "record": r.record.decode(),
            "digest": r.digest,
            "max_tokens": r.max_tokens,
            "upfront": r.upfront,
            "order": r.order,
            "class": r.priority,
            "grace": r.grace,
            "state": r.state,
            "claim": text(r.claim),
            "engine": text(r.engine),
            "endpoint": text(r.endpoint),
            "attempt": r.attempt,
            "closed": int(r.closed),
            "losses": r.losses,
            "loss_at": r.loss_at,
            "reason": int(r.reason or 0),
            "final": r.final,
            "deadline": text(r.deadline),
            "detach_at": text(r.detach_at),
            "engines": "".join(f"{index} {engine}\n" for index, engine in r.engines),
            "submitted": r.submitted,
            "queued_at": r.queued_at,
            "taken_at": r.taken_at,
            "claimed_at": r.claimed_at,
            "first_token": r.first_token,
            "finished": r.finished,
            "weights": r.spelled,
        }
        | ({} if r.lives is None else {"lives": r.lives})
        | (
            {}
            if not r.keys
            else {
                "mark": r.keys[-1].decode(),
                "prefix_at": _spelled(r.prefix_at),
                "overtaken": r.overtaken,
                **({"place": _spelled(r.place)} if r.place else {}),
            }
        )
        | _handed_fields(r)
    )


def _handed_fields(r: Request) -> dict[str, Any]:
    if not r.was_handed:
        return {}
    claim = "" if r.handed_claim is None else r.handed_claim
    return {"handed_at": _spelled(r.handed_at), "handed_claim": claim, "handed": r.handed.decode()}


def _spelled(place: tuple[str, int, int] | None) -> str:
    return "" if place is None else "{1} {2} {0}".format(*place)


def prefix_digest(tokens: Sequence[CommittedToken]) -> bytes:
    """SHA-1 of the token ids, each as 4 bytes little-endian."""
    return hashlib.sha1(b"".join(struct.pack("<I", token.token_id) for token in tokens)).digest()
