"""A pool on a real server whose time the test sets, and whose whole state the test can read.

The scripts get the time from one function of lua/prelude.lua. Here this function reads a key instead of TIME; nothing
else differs.
"""

import itertools
import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from orca_pool.keys import Keys
from orca_pool.pool import Pool
from orca_pool.records import Attached, Busy, ClaimAnswer, CommitRow, CommittedToken, EngineInfo, Reason, Refusal
from orca_pool.scripts import Constants, sources
from orca_pool.wire import ADDRESS, RECORD_OVERHEAD, pack_tokens, unpack_packets, unpack_tokens

CLOCK = """  local time = call('TIME')
  return time[1] * 1000000 + time[2]
"""
TEST_CLOCK = """  return tonumber(call('GET', PREFIX .. 'now'))
"""
START = 1_700_000_000_000_000  # microseconds
CONSTANTS = Constants(retention=200.0, delivery_length=8, control_length=8)  # short enough to overflow in a test
LAB_COUNT = itertools.count()
# fields of the pool that `model.py` does not keep
NOT_COMPARED = ("schema", "checked", "checked_prefixes", "ended_bytes", "length", "block", "output", "prefix")

# Everything under the pool's prefix: {key, type, content}.
DUMP = """
local out = {}
for _, key in ipairs(redis.call('KEYS', ARGV[1] .. '*')) do
  local kind = redis.call('TYPE', key).ok
  local content
  if kind == 'hash' then content = redis.call('HGETALL', key)
  elseif kind == 'zset' then content = redis.call('ZRANGE', key, 0, -1, 'WITHSCORES')
  elseif kind == 'set' then content = redis.call('SMEMBERS', key)
  elseif kind == 'stream' then content = redis.call('XRANGE', key, '-', '+')
  else content = redis.call('GET', key) end
  out[#out + 1] = { key, content }
end
return out
"""
SNAPSHOT = """
local out = {}
for _, key in ipairs(redis.call('KEYS', ARGV[1] .. '*')) do
  out[#out + 1] = key
  out[#out + 1] = redis.call('DUMP', key)
end
return out
"""
ROLLBACK = """
for _, key in ipairs(redis.call('KEYS', ARGV[1] .. '*')) do redis.call('DEL', key) end
for i = 2, #ARGV, 2 do redis.call('RESTORE', ARGV[i], 0, ARGV[i + 1]) end
"""


def with_test_clock(lua: Mapping[str, str]) -> dict[str, str]:
    """The scripts with a clock that the test sets."""
    assert CLOCK in lua["prelude"]
    return {**lua, "prelude": lua["prelude"].replace(CLOCK, TEST_CLOCK)}


def tokens_of(first: int, count: int, iteration: int = 1) -> list[CommittedToken]:
    """Tokens whose ids tell their indexes."""
    return [CommittedToken(1000 + i, -0.5, iteration) for i in range(first, first + count)]


class Lab:
    """A pool of its own on a shared server. `now` is its time in microseconds. Use it with `async with`."""

    def __init__(self, url: str, lua: Mapping[str, str] | None = None, constants: Constants = CONSTANTS) -> None:
        name = f"lab{next(LAB_COUNT)}"
        self.keys = Keys(name)
        self.pool = Pool(url, name, constants=constants, lua=with_test_clock(lua or sources()))
        self.now = START
        self.terms: dict[str, tuple[str, int]] = {}
        self.heard: dict[str, int] = {}

    async def __aenter__(self) -> "Lab":
        await self.pool.__aenter__()
        await self.advance(0)
        return self

    async def __aexit__(self, *error: Any) -> None:
        # A sweep of another pool looks at some keys of all pools.
        await self.redis("EVAL", ROLLBACK, 1, self.keys.pool, self.keys.prefix)
        await self.pool.__aexit__(None, None, None)

    async def redis(self, *command: str | bytes | int) -> Any:
        return await self.pool._link.command(*command)

    async def advance(self, seconds: float) -> None:
        self.now += round(seconds * 1e6)
        await self.redis("SET", f"{self.keys.prefix}now", self.now)

    async def live(self, seconds: float, *endpoints: str) -> None:
        """Lets time pass while a scheduler and these endpoints renew."""
        for _ in range(round(seconds / 0.5)):
            await self.advance(0.5)
            for endpoint in endpoints:
                assert await self.pool.renew_endpoint(endpoint) is not None
            await self.pool.renew_scheduler("s")

    # -- the usual moves
    async def endpoint(self, name: str = "e") -> str:
        assert await self.pool.renew_endpoint(name, register=True)
        return name

    async def engine(self, name: str = "g", slots: int = 64, owner: str = "s", role: str = "") -> str:
        """An engine that `owner` has acquired and, unless it has no slots, formed."""
        term = await self.pool.acquire(name, owner, None)
        assert term is not None
        self.terms[name], self.heard[name] = (owner, term), 0
        if slots:
            await self.pool.renew(name, owner, term, form=EngineInfo(name, 1, 1, slots, 0, role=role))
        return name

    async def submit(
        self,
        request_id: str,
        max_tokens: int = 8,
        upfront: int | None = None,
        *,
        digest: str = "d",
        deadline_in: float | None = None,
        grace: float = 0.0,
        endpoint: str = "e",
        attempt: int = 1,
        max_waiting: int = 8,
        **more: Any,
    ) -> Attached | Refusal | Busy:
        return await self.pool.submit(
            request_id,
            b"record of " + request_id.encode(),
            digest,
            max_tokens,
            max_tokens if upfront is None else upfront,
            deadline_in=deadline_in,
            detach_grace=grace,
            endpoint=endpoint,
            attempt=attempt,
            max_waiting=max_waiting,
            **more,
        )

    async def claim(self, engine: str = "g", count: int = 8, slots: int = 64, total: int = 64) -> dict[str, int]:
        """Claims as the engine's master does. Returns request ids and their claim numbers."""
        answer = await self.pool.claim(
            engine, *self.terms[engine], self.heard[engine], count=count, slots=slots, total=total
        )
        assert isinstance(answer, ClaimAnswer)
        self.heard[engine] = answer.last_claim
        return {held.request_id: held.claim for held in answer.requests}

    async def commit(
        self,
        request_id: str,
        claim: int,
        base: int,
        count: int,
        finish: Reason | None = None,
        engine: str = "g",
        handed: bytes = b"",
    ) -> int:
        answer = await self.pool.commit(
            engine,
            *self.terms[engine],
            [CommitRow(request_id, claim, base, pack_tokens(tokens_of(base, count)), finish, handed=handed)],
        )
        assert answer is not None
        return answer.rows[0]

    async def claimed(self, request_id: str, count: int = 0, **body: Any) -> int:
        """Submits a request, which an engine claims and commits `count` tokens for. Returns the claim number."""
        assert isinstance(await self.submit(request_id, **body), Attached)
        claim = (await self.claim())[request_id]
        if count:
            assert await self.commit(request_id, claim, 0, count) == -1
        return claim

    async def claimed_by(self, engine: str, request_id: str, **body: Any) -> int:
        """Submits a request, which this engine claims. Returns the claim number."""
        assert isinstance(await self.submit(request_id, **body), Attached)
        return (await self.claim(engine))[request_id]

    async def lose(self, request_id: str, claim: int) -> None:
        """Gives a request back as one that was RUNNING when its engine was lost."""
        await self.pool.give_back("g", *self.terms["g"], {request_id: (claim, True)})

    async def record(self, request_id: str) -> dict[str, Any]:
        return (await self.dump())["requests"][request_id]

    def _check_indexes(self, found: dict[str, Any], single: dict[str, Any]) -> None:
        """What the pool holds twice must say the same."""
        requests = found["requests"].items()
        ended = {i: r["finished"] for i, r in requests if r["state"] == "ended"}
        assert single.pop("ended") == ended
        sizes = (len(found["requests"][i]["record"]) + 16 * len(found["tokens"].get(i, ())) for i in ended)
        assert single["pool"].get("ended_bytes", 0) == sum(RECORD_OVERHEAD + size for size in sizes)
        calls = single.pop("calls")
        for endpoint in single["renewals"]:
            listening = {i: r for i, r in requests if r["state"] != "ended" and r["endpoint"] == endpoint}
            # A call that was detached because its endpoint was gone is not in the set, also if the name came back.
            must = {i for i, r in listening.items() if r["detach_at"] == ""}
            assert must <= calls.get(endpoint, set()) <= set(listening)
        listeners: dict[str, dict[int, bytes]] = {}
        for i, r in ((i, r) for i, r in requests if r["state"] == "claimed"):
            to = ADDRESS.pack(r["attempt"], len(i)) + f"{i}{r['endpoint']}".encode()
            listeners.setdefault(r["engine"], {})[r["claim"]] = to
        assert single.pop("listeners") == listeners

    # -- the whole state
    async def snapshot(self) -> list[bytes]:
        """What Redis holds at this moment."""
        return await self.redis("EVAL", SNAPSHOT, 1, self.keys.pool, self.keys.prefix)

    async def rollback(self, snapshot: list[bytes]) -> None:
        """Makes Redis forget what came after the snapshot. Its time goes on."""
        await self.redis("EVAL", ROLLBACK, 1, self.keys.pool, self.keys.prefix, *snapshot)
        await self.advance(0)

    async def dump(self) -> dict[str, Any]:
        """The pool's state in the form of model.Model.dump."""
        found: dict[str, Any] = {
            name: {} for name in ("claimed", "requests", "tokens", "delivery", "control", "engines", "endpoints")
        }
        names = (
            "pool",
            "due",
            "schedulers",
            "renewals",
            "asking",
            "yielding",
            "expected",
            "leases",
            "sizes",
            "ended",
            "calls",
            "listeners",
            "prefixes",
            "adapters",
            "uses",
            "has",
        )
        load: dict[str, int] = {}
        single: dict[str, Any] = {name: {} for name in names} | {"waiting": [], "handed": []}
        for raw_key, content in await self.redis("EVAL", DUMP, 1, self.keys.pool, self.keys.prefix):
            kind, _, name = raw_key.decode()[len(self.keys.prefix) :].partition(":")
            match kind:
                case "waiting" | "handed":
                    single[kind] = [i.decode() for i in content[::2]]
                case "claimed":
                    found["claimed"][name] = [i.decode() for i in content[::2]]
                case "due" | "schedulers" | "asking" | "yielding" | "expected" | "ended":
                    single[kind] = {k.decode(): int(v) for k, v in _pairs(content)}
                case "endpoints":
                    single["renewals"] = {k.decode(): int(v) for k, v in _pairs(content)}
                case "request":
                    found["requests"][name] = _fields(content)
                case "tokens":
                    found["tokens"][name] = unpack_tokens(content)
                case "delivery":
                    found["delivery"][name] = [
                        (int(entry.partition(b"-")[2]), unpack_packets(f[3], f[1].decode())) for entry, f in content
                    ]
                case "control":
                    found["control"][name] = [f[1].decode() for _, f in content]
                case "engine":
                    found["engines"][name] = _fields(content)
                case "endpoint":
                    found["endpoints"][name] = _fields(content)
                case "pool":
                    single["pool"] = _fields(content)
                case "adapters":
                    single["adapters"] = {k.decode(): json.loads(v) for k, v in _pairs(content)}
                case "uses":
                    single["uses"][name] = {i.decode() for i in content}
                case "has":
                    single["has"][name] = {k.decode(): v.decode() for k, v in _pairs(content)}
                case "prefixes":
                    single["prefixes"] = _fields(content)
                case "load":
                    load = _fields(content)
                case "engines":
                    single["sizes"] = {k.decode(): int(v) for k, v in _pairs(content)}
                case "leases":
                    single["leases"] = {k.decode(): v.decode().split(" ", 2) for k, v in _pairs(content)}
                case "calls":
                    single["calls"][name] = {i.decode() for i in content}
                case "listeners":
                    single["listeners"][name] = {int(k): v for k, v in _pairs(content)}
                case "orphans":
                    pass
                case _:
                    assert kind == "now", f"a key that no table names: {raw_key}"
        self._check_indexes(found, single)
        sizes, leases = single.pop("sizes"), single.pop("leases")
        assert set(sizes) == set(leases) == set(found["engines"])
        for name, engine in found["engines"].items():
            counter, term, owner = leases[name]
            engine |= {"owner": owner, "term": int(term), "counter": int(counter), "slots": sizes[name]}
        kept = single["pool"].items()
        single["pool"] = {k: v for k, v in kept if v and k not in NOT_COMPARED}
        assert load == _load(found)
        for request in found["requests"].values():
            del request["new"], request["tenant"]
        for engine in found["engines"].values():
            for name in ("rows", "free", "pace", "room_at", "listeners"):
                del engine[name]
        return {**found, **single}


def _load(found: dict[str, Any]) -> dict[str, int]:
    """What the pool's `load` must hold, counted anew."""
    load: Counter[str] = Counter()
    for name, request in found["requests"].items():
        if request["state"] != "ended":
            load[f"requests:{request['tenant']}"] += 1
        if request["state"] == "waiting":
            load["tokens"] += max(request["new"] - len(found["tokens"].get(name, [])), 0)
            load["slots"] += request["upfront"]
            load[f"tokens:{request['tenant']}"] += request["max_tokens"]
            load["bytes"] += len(request["record"])
            load[f"waiting:{request['tenant']}"] += 1
            load[f"bytes:{request['tenant']}"] += len(request["record"])
    return dict(+load)


def _pairs(flat: list[bytes]) -> list[tuple[bytes, bytes]]:
    return list(zip(flat[::2], flat[1::2], strict=True))


def _fields(flat: list[bytes]) -> dict[str, Any]:
    """A hash, with numbers as integers."""
    texts = {name.decode(): value.decode() for name, value in _pairs(flat)}
    return {name: int(text) if text.lstrip("-").isdigit() else text for name, text in texts.items()}
