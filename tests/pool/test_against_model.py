"""Random operations on the real pool and on the model, side by side: same answers, same state, after each one.

Operations come twice, late, from old owners and incarnations, after pauses, and to a Redis that forgot. (An operation
whose answer was lost is one that comes twice.) Some sentences of docs/pool.md are also checked directly on what Redis
holds.
"""

import asyncio
import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from pool.lab import CONSTANTS, Lab
from pool.model import Model, Request, prefix_digest
from properties import examples
from servers import RedisServer

from orca_pool.records import BY_ARRIVAL, NO_LOAD, CommitRow, CommittedToken, EngineInfo, EngineState, Reason, Turn
from orca_pool.wire import KEY_SIZE, pack_tokens

REQUESTS = st.sampled_from([f"r{i}" for i in range(4)])
ENDPOINTS = st.sampled_from(["e0", "e1", "e2"])
ENGINES = st.sampled_from(["g0", "g0", "g1", "g2"])
OWNERS = st.sampled_from(["s0", "s1"])
ATTEMPTS = st.integers(1, 3)
SHIFTS = st.sampled_from([0, 0, 1, -1])  # from what is attached, committed or claimed
SECONDS = st.sampled_from([0.0, 0.2, 0.5, 0.5, 0.7, 1.0, 1.6, 5.0])
SIZES = st.sampled_from([4, 8, 13, 24, 32, 40])
USUALLY = st.sampled_from([True] * 5 + [False])
SOMETIMES = st.sampled_from([False, False, True])
SELDOM = st.sampled_from([False] * 7 + [True])
ENDS = st.sampled_from([None, None, None, Reason.LENGTH, Reason.EOS])


class SideBySide(RuleBasedStateMachine):
    url: str
    runner: asyncio.Runner

    def __init__(self) -> None:
        super().__init__()
        constants = replace(CONSTANTS, retain_requests=2, overtakings=2)
        self.lab = Lab(self.url, constants=constants)
        self.model = Model(constants)
        self.sent: list[tuple[str, tuple[Any, ...], Mapping[str, Any]]] = []
        self.versions: dict[str, str] = {}  # of the engines' claims, as the last renewal told
        self.leases: list[tuple[str, str, int]] = []  # every lease that was ever given
        self.committed: dict[tuple[str, int], list[CommittedToken]] = {}
        self.snapshot: tuple[list[bytes], Model] | None = None
        self.now = self.lab.now
        self.roles: dict[str, str] = {}
        self.runner.run(self.lab.__aenter__())
        self.model.now = self.lab.now

    def teardown(self) -> None:
        self.runner.run(self.lab.__aexit__())

    def do(self, name: str, *args: Any, **options: Any) -> Any:
        """Does one operation on both, and compares the answers."""
        self.sent.append((name, args, options))
        expected = getattr(self.model, name)(*args, **options)
        answer = self.runner.run(getattr(self.lab.pool, name)(*args, **options))
        assert answer == expected, f"{name}{args}{options}: the pool answers {answer}, the model {expected}"
        return answer

    # -- arguments that are mostly right, and sometimes out of date
    def lease(self, engine: str, right: bool, which: int) -> tuple[str, str, int]:
        g = self.model.engines.get(engine)
        if (right or not self.leases) and g is not None and g.owner is not None:
            return engine, g.owner, g.term
        return self.leases[which % len(self.leases)] if self.leases else (engine, "s0", 7)

    def request(self, request_id: str) -> Request | None:
        return self.model.requests.get(request_id)

    def attempt(self, request_id: str, shift: int) -> int:
        r = self.request(request_id)
        return max(0, (r.attempt if r else 1) + shift)

    def adapter(self, which: int) -> str:
        """One of the table, or one that is not there."""
        known = [*self.model.table, "gone@1"]
        return known[which % len(known)]

    # -- a pool that works
    @initialize(formed=USUALLY, sizes=st.lists(SIZES, max_size=3), split=st.booleans())
    def begin(self, formed: bool, sizes: list[int], split: bool) -> None:
        self.roles = {"g0": "prefill", "g1": "decode", "g2": "prefill"} if split else {}
        self.do("renew_endpoint", "e0", register=True)
        self.do("renew_endpoint", "e1", register=True)
        self.leases.append(("g0", "s0", self.do("acquire", "g0", "s0", None)))
        if formed:
            self.do(
                "renew", *self.leases[0], form=EngineInfo("g0", 1, 1, 32, 0, role=self.roles.get("g0", "")), weights="w"
            )
            if split:
                self.leases.append(("g1", "s1", self.do("acquire", "g1", "s1", None)))
                self.do("renew", *self.leases[1], form=EngineInfo("g1", 1, 1, 32, 0, role="decode"), weights="w")
            for i, max_tokens in enumerate(sizes):
                self.submit(f"r{i}", False, max_tokens, max_tokens, None, 1.0, "e0", 1, True)
            self.an_iteration("g0", 32, 2, None)

    # -- time, and messages of the past
    @rule(seconds=SECONDS)
    def time_passes(self, seconds: float) -> None:
        self.runner.run(self.lab.advance(seconds))
        self.model.now = self.lab.now

    @rule(back=st.integers(0, 30))
    def sent_again(self, back: int) -> None:
        name, args, options = self.sent[-1 - back % len(self.sent)]
        self.do(name, *args, **options)

    @rule()
    def remember(self) -> None:
        self.snapshot = self.runner.run(self.lab.snapshot()), copy.deepcopy(self.model)

    @rule(really=SELDOM)
    def forget(self, really: bool) -> None:
        """A server that comes back without its last writes needs a moment for it. Numbers are new by that alone."""
        if self.snapshot and really:
            kept, model = self.snapshot
            self.model = copy.deepcopy(model)
            self.committed = {(i, r.order): list(r.tokens) for i, r in self.model.requests.items()}
            self.runner.run(self.lab.rollback(kept))
            self.time_passes(0.001)

    # -- endpoints
    @rule(endpoint=ENDPOINTS, register=USUALLY, replaces=SELDOM, other=ENDPOINTS)
    def renew_endpoint(self, endpoint: str, register: bool, replaces: bool, other: str) -> None:
        self.do(
            "renew_endpoint", endpoint, register=register, replaces=other if replaces and other != endpoint else None
        )

    @rule(endpoint=ENDPOINTS, really=SELDOM)
    def leave_endpoint(self, endpoint: str, really: bool) -> None:
        if really:
            self.do("leave_endpoint", endpoint)

    @rule(
        request_id=REQUESTS,
        other_body=SOMETIMES,
        max_tokens=SIZES,
        upfront=SIZES,
        deadline_in=st.sampled_from([None, None, 1.0, 30.0]),
        grace=st.sampled_from([0.0, 1.0, 40.0]),
        endpoint=ENDPOINTS,
        attempt=ATTEMPTS,
        alive=USUALLY,
        turn=st.sampled_from([BY_ARRIVAL, BY_ARRIVAL, Turn(-3_000_000, priority=2), Turn(2_000_000, priority=4)]),
        blocks=st.text("ab", max_size=4),
        adapter=st.sampled_from([None, None, None, 0, 1, 2]),
    )
    def submit(
        self,
        request_id: str,
        other_body: bool,
        max_tokens: int,
        upfront: int,
        deadline_in: float | None,
        grace: float,
        endpoint: str,
        attempt: int,
        alive: bool,
        turn: Turn = BY_ARRIVAL,
        blocks: str = "",
        adapter: int | None = None,
    ) -> None:
        keys = b"".join(blocks[:n].ljust(KEY_SIZE, "-").encode() for n in range(1, len(blocks) + 1))
        if alive:
            self.do("renew_endpoint", endpoint, register=True)
        self.do(
            "submit",
            request_id,
            f"record of {request_id}".encode(),
            f"other {request_id}" if other_body else f"body of {request_id}",
            max_tokens,
            upfront,
            deadline_in=deadline_in,
            detach_grace=grace,
            endpoint=endpoint,
            attempt=attempt,
            max_waiting=4,
            turn=turn,
            keys=keys,
            adapter="" if adapter is None else self.adapter(adapter),
        )

    @rule(
        what=st.sampled_from(["name", "name", "load", "load", "unload", "drop", "show"]),
        names=st.lists(st.sampled_from(["a", "b/c", "d e"]), min_size=1, max_size=2, unique=True),
        folder=st.sampled_from(["/x", "/y"]),
        which=st.integers(0, 5),
    )
    def change_adapters(self, what: str, names: list[str], folder: str, which: int) -> None:
        adapter = self.adapter(which)
        match what:
            case "name":
                self.do("name_adapters", dict.fromkeys(names, folder))
            case "load":
                self.do("load_adapter", names[0], folder, which < 3)
            case "unload":
                self.do("unload_adapter", names[0])
            case "drop":
                self.do("drop_adapter", adapter)
            case _:
                self.do("adapters", which, adapter)

    @rule(
        engine=ENGINES,
        right=USUALLY,
        which=st.integers(0, 9),
        prints=st.lists(st.sampled_from(["p", "p", "q", ""]), min_size=1, max_size=4),
    )
    def tell_adapters(self, engine: str, right: bool, which: int, prints: list[str]) -> None:
        has = [(i, one, "" if one else "why") for i, one in zip([*self.model.table, "gone@1"], prints, strict=False)]
        self.do("tell_adapters", *self.lease(engine, right, which), has)

    @rule(prints=st.lists(st.sampled_from(["p", "p", "q"]), min_size=3, max_size=3))
    def all_tell_adapters(self, prints: list[str]) -> None:
        """As after a start of everything, with files that are perhaps others than before."""
        if not self.model.table:
            self.do("load_adapter", "a", "/x")
        for (engine, g), one in zip(list(self.model.engines.items()), prints, strict=False):
            if g.owner is not None:
                self.do("tell_adapters", engine, g.owner, g.term, [(i, one, "") for i in self.model.table])

    @rule(request_id=REQUESTS, endpoint=ENDPOINTS, shift=SHIFTS, alive=USUALLY, known=st.integers(0, 4), same=USUALLY)
    def attach(self, request_id: str, endpoint: str, shift: int, alive: bool, known: int, same: bool) -> None:
        if alive:
            self.do("renew_endpoint", endpoint, register=True)
        r = self.request(request_id)
        last = None
        if known:
            last = r.tokens[known - 1] if r and same and known <= len(r.tokens) else CommittedToken(7, -0.25, 0)
        attempt = self.attempt(request_id, shift)
        self.do("attach", request_id, endpoint=endpoint, attempt=attempt, known=known, last=last)

    @rule(
        request_id=REQUESTS,
        shift=SHIFTS,
        grace=st.sampled_from([None, None, 0.0, 1.0]),
        at_least=st.sampled_from([0.0, 30.0]),
    )
    def detach(self, request_id: str, shift: int, grace: float | None, at_least: float) -> None:
        self.do("detach", request_id, attempt=self.attempt(request_id, shift), grace=grace, at_least=at_least)

    @rule(request_id=REQUESTS, really=SOMETIMES)
    def cancel(self, request_id: str, really: bool) -> None:
        if really:
            self.do("cancel", request_id)

    @rule(request_id=REQUESTS, back=st.sampled_from([0, 1, 1, 2, 3]), right=st.booleans())
    def finish_at(self, request_id: str, back: int, right: bool) -> None:
        r = self.request(request_id)
        index = max(0, (len(r.tokens) if r else 0) - back)
        tokens = r.tokens[: index + 1] if r and right else [CommittedToken(7, 0.0, 0)] * (index + 1)
        self.do("finish_at", request_id, index, Reason.STOP, prefix_digest(tokens))

    # -- schedulers
    @rule(scheduler=OWNERS, floor=st.sampled_from([1.0, 30.0]))
    def renew_scheduler(self, scheduler: str, floor: float) -> None:
        self.do("renew_scheduler", scheduler, detach_floor=floor)

    @rule(endpoints=st.sets(ENDPOINTS), rounds=st.integers(1, 5))
    def life_goes_on(self, endpoints: set[str], rounds: int) -> None:
        """Some endpoints and a scheduler renew in time. Whoever does not renew dies."""
        for _ in range(rounds):
            self.time_passes(0.5)
            for endpoint in sorted(endpoints):
                self.do("renew_endpoint", endpoint)
            self.do("renew_scheduler", "s0")

    @rule(scheduler=OWNERS, really=SELDOM)
    def leave_scheduler(self, scheduler: str, really: bool) -> None:
        if really:
            self.do("leave_scheduler", scheduler)

    @rule(engine=ENGINES, owner=OWNERS, seen=st.sampled_from(["now", "now", "none", "old"]))
    def acquire(self, engine: str, owner: str, seen: str) -> None:
        g = self.model.engines.get(engine)
        state = None
        if seen != "none" and g is not None:
            state = EngineState(g.owner, g.term, g.counter - (seen == "old"))
        term = self.do("acquire", engine, owner, state)
        if term is not None:
            self.leases.append((engine, owner, term))

    @rule(
        engine=ENGINES,
        right=USUALLY,
        which=st.integers(0, 9),
        epoch=st.none() | st.integers(0, 9),
        reserve=st.none() | st.integers(0, 99),
        slots=st.sampled_from([None, None, 16, 32]),
        weights=st.sampled_from(["", "w", "w", "x"]),
        finishing=SELDOM,
        yields=st.sampled_from([0, 0, 3, 4, 5]),
        again=st.booleans(),
    )
    def renew(
        self,
        engine: str,
        right: bool,
        which: int,
        epoch: int | None,
        reserve: int | None,
        slots: int | None,
        weights: str,
        finishing: bool,
        yields: int,
        again: bool,
    ) -> None:
        form = None if slots is None else EngineInfo(engine, 2, 1, slots, 0, role=self.roles.get(engine, ""))
        lease = self.lease(engine, right, which)
        known = self.versions.get(engine, "") if again else ""
        load = NO_LOAD._replace(rows=1, free=8, finishing=finishing, yields=yields)
        renewed = self.do(
            "renew", *lease, epoch=epoch, reserve=reserve, form=form, weights=weights, known=known, load=load
        )
        if renewed is not None:
            self.versions[engine] = renewed.version

    @rule(
        engine=ENGINES, right=USUALLY, which=st.integers(0, 9), verb=st.sampled_from(["release", "retire", "holding"])
    )
    def release_or_retire(self, engine: str, right: bool, which: int, verb: str) -> None:
        self.do(verb, *self.lease(engine, right, which))

    @rule(engine=ENGINES, right=USUALLY, which=st.integers(0, 9), seconds=st.sampled_from([0.5, 3.0]))
    def expect(self, engine: str, right: bool, which: int, seconds: float) -> None:
        self.do("expect", *self.lease(engine, right, which), seconds)

    @rule(
        engine=ENGINES,
        right=USUALLY,
        which=st.integers(0, 9),
        heard=USUALLY,
        count=st.integers(0, 3),
        slots=st.sampled_from([8, 16, 32]),
        total=st.sampled_from([16, 32]),
        yielding=st.lists(st.tuples(st.sampled_from([2, 3, 4, 5]), st.integers(-4, 4)), max_size=3),
    )
    def claim(
        self,
        engine: str,
        right: bool,
        which: int,
        heard: bool,
        count: int,
        slots: int,
        total: int,
        yielding: list[tuple[int, int]],
    ) -> None:
        g = self.model.engines.get(engine)
        have = g.last_claim if g is not None and heard else 0
        lease = self.lease(engine, right, which)
        last = [(priority, self.model.now + seconds * 1_000_000) for priority, seconds in yielding]
        self.do("claim", *lease, have, count=count, slots=slots, total=total, yielding=last)

    @rule(engine=ENGINES, total=st.sampled_from([16, 32]), count=st.integers(1, 3), finish=ENDS)
    def an_iteration(self, engine: str, total: int, count: int, finish: Reason | None) -> None:
        """Does what a healthy engine does: claims what fits, and commits tokens of all its requests."""
        g = self.model.engines.get(engine)
        if g is None or g.owner is None:
            return
        free = total - sum(r.upfront for r in self.model.requests.values() if r.engine == engine)
        lease = engine, g.owner, g.term
        self.do("claim", *lease, g.last_claim, count=count, slots=free, total=total)
        held = [r for r in self.model.requests.values() if r.engine == engine]
        tokens = [CommittedToken(len(self.sent) * 100 + i, -0.25, len(self.sent)) for i in range(count)]
        ends = [finish, *[None] * len(held)]
        rows = [(r.request_id, r.claim or 0, len(r.tokens), end) for r, end in zip(held, ends, strict=False)]
        handed = b"row 7" if g.role == "prefill" else b""
        batch = [CommitRow(i, claim, base, pack_tokens(tokens), end, handed=handed) for i, claim, base, end in rows]
        self.do("commit", *lease, batch)

    @rule(
        engine=ENGINES,
        right=USUALLY,
        which=st.integers(0, 9),
        rows=st.lists(st.tuples(REQUESTS, USUALLY, st.sampled_from([0, 0, 0, -1, 1]), st.integers(0, 3), ENDS)),
        handed=st.sampled_from([b"", b"", b"row 8"]),
    )
    def commit(
        self, engine: str, right: bool, which: int, rows: list[tuple[str, bool, int, int, Reason | None]], handed: bytes
    ) -> None:
        batch = []
        for request_id, claimed, shift, count, finish in rows:
            r = self.request(request_id)
            last = (r.claim or r.handed_claim) if r else None  # what was handed over may come again
            claim = last if last is not None and claimed else 12345
            base = max(0, (len(r.tokens) if r else 0) + shift)
            tokens = [CommittedToken(len(self.sent) * 100 + i, -0.25, len(self.sent)) for i in range(count)]
            batch.append(CommitRow(request_id, claim, base, pack_tokens(tokens), finish, handed=handed))
        self.do("commit", *self.lease(engine, right, which), batch)

    @rule(
        engine=ENGINES,
        right=USUALLY,
        which=st.integers(0, 9),
        rows=st.dictionaries(REQUESTS, st.tuples(USUALLY, st.booleans()), max_size=3),
    )
    def give_back(self, engine: str, right: bool, which: int, rows: dict[str, tuple[bool, bool]]) -> None:
        claims = {}
        for request_id, (claimed, lost) in rows.items():
            r = self.request(request_id)
            claims[request_id] = (r.claim if r and r.claim is not None and claimed else 12345, lost)
        self.do("give_back", *self.lease(engine, right, which), claims)

    @rule(request_id=REQUESTS, engine=ENGINES, right=USUALLY, which=st.integers(0, 9), claimed=USUALLY)
    def pulled(self, request_id: str, engine: str, right: bool, which: int, claimed: bool) -> None:
        r = self.request(request_id)
        engine = r.engine if r and r.engine else engine
        claim = r.claim if r and r.claim is not None and claimed else 12345
        self.do("pulled", *self.lease(engine, right, which), request_id, claim)

    @rule(engine=ENGINES, times=st.integers(1, 3), total=st.sampled_from([16, 32]))
    def ranks_are_lost(self, engine: str, times: int, total: int) -> None:
        """Loses all that runs, and claims it again, perhaps before a token was made."""
        g = self.model.engines.get(engine)
        for _ in range(times if g is not None and g.owner is not None else 0):
            assert g is not None
            lease = self.lease(engine, True, 0)
            held = {r.request_id: (r.claim or 0, True) for r in self.model.requests.values() if r.engine == engine}
            self.do("give_back", *lease, held)
            self.do("claim", *lease, g.last_claim, count=2, slots=total, total=total)

    # -- after each operation
    @invariant()
    def same_state(self) -> None:
        state, expected = self.runner.run(self.lab.dump()), self.model.dump()
        for dump in (state, expected):  # one entry may hold the packets of different requests in any order
            dump["delivery"] = {
                name: [(n, sorted(packets, key=lambda packet: packet.request_id)) for n, packets in entries]
                for name, entries in dump["delivery"].items()
            }
        for part, content in expected.items():
            assert state[part] == content, f"{part}: Redis holds {state[part]}, the model {content}"
        self.check(state)

    def check(self, state: dict[str, Any]) -> None:
        places = [*state["waiting"], *state["handed"], *(i for ids in state["claimed"].values() for i in ids)]
        ended = [i for i, r in state["requests"].items() if r["state"] == "ended"]
        assert sorted([*places, *ended]) == sorted(state["requests"]), "each request is in one place"
        arrivals = [state["requests"][i]["order"] for i in state["waiting"]]
        assert arrivals == sorted(arrivals), "the queue is in the order of arrival"
        tokens = {(i, r["order"]): state["tokens"].get(i, []) for i, r in state["requests"].items()}
        for request, now in tokens.items():  # what was forgotten may come again, with another arrival
            before = self.committed.get(request, [])
            assert now[: len(before)] == before, f"committed tokens of {request} changed"
        self.committed = tokens
        for stream in state["delivery"].values():
            numbers = [number for number, _ in stream]
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True, (
                "numbers grow by one"
            )


def test_pool_is_the_model(server: RedisServer) -> None:
    with asyncio.Runner() as runner:
        SideBySide.url, SideBySide.runner = server.url, runner
        run_state_machine_as_test(
            SideBySide,
            settings=settings(
                max_examples=examples(160),
                stateful_step_count=60,
                suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
                print_blob=True,
            ),
        )


@pytest.mark.parametrize("rows", [0, 1, 64])
async def test_packed_tokens_come_back(lab: Lab, rows: int) -> None:
    """Python and Lua agree on the binary forms for any count."""
    await lab.endpoint()
    await lab.engine()
    claim = await lab.claimed("r")
    assert await lab.commit("r", claim, 0, rows) == -1
    [entry] = await lab.pool.read("e", None, wait=0)
    [packet] = entry.packets
    assert [token.token_id for token in packet.tokens] == list(range(1000, 1000 + rows))
