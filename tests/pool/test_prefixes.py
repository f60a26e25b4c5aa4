"""A conversation's next turn goes to the engine that has its prefix, and what waits for an engine is overtaken so often
at most."""

import asyncio
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pool.lab import CONSTANTS, Lab
from servers import RedisServer

from orca_common.block_keys import keys_of, root_by
from orca_pool.records import FINISHING_LOAD, ClaimAnswer, Claimed, CommitRow, EngineInfo, Reason
from orca_pool.wire import MOST_KEYS, pack_keys, pack_tokens

ALL = 1 << 20  # slots


def turn(conversation: int, number: int, tenant: str = "") -> bytes:
    """The keys of a turn's prompt: blocks of 4, three more with each turn. All conversations begin alike."""
    tokens = [7] * 8 + [1000 * conversation + n for n in range(12 * number + 5)]
    return pack_keys(keys_of(root_by("tenant", tenant, ""), tokens, 4)[1:])


async def claims(lab: Lab, engine: str, count: int) -> list[Claimed]:
    answer = await lab.pool.claim(engine, *lab.terms[engine], lab.heard[engine], count=count, slots=ALL, total=ALL)
    assert isinstance(answer, ClaimAnswer)
    lab.heard[engine] = answer.last_claim
    return answer.requests


async def two_engines(lab: Lab) -> None:
    await lab.endpoint()
    for engine in ("g", "h"):
        await lab.engine(engine, slots=ALL)


async def test_the_next_turn_goes_where_the_turn_before_it_went(lab: Lab) -> None:
    await two_engines(lab)
    await lab.submit("a0", keys=turn(1, 1))
    assert [one.request_id for one in await claims(lab, "h", 1)] == ["a0"]
    await lab.submit("a1", keys=turn(1, 2))
    await lab.submit("b0", keys=turn(2, 1))
    taken = await claims(lab, "g", 2)
    assert [(one.request_id, one.prefix_at, one.overtaken) for one in taken] == [("b0", "", 0)]
    taken = await claims(lab, "h", 2)
    assert [(one.request_id, one.prefix_at, one.overtaken) for one in taken] == [("a1", "h", 1)]
    standing = await lab.pool.look_up("a1")
    assert standing is not None
    assert (standing.prefix_at, standing.overtaken) == ("h", 1)


async def test_other_tenants_and_prompts_that_end_alike_go_anywhere(lab: Lab) -> None:
    await two_engines(lab)
    for name, keys in (("a", turn(1, 0)), ("b", turn(2, 0)), ("c", turn(3, 1, "x"))):
        await lab.submit(name, keys=keys)
    assert turn(1, 0) != turn(2, 0)
    assert len(await claims(lab, "h", 3)) == 3
    system = turn(1, 0)[: 2 * 8]  # the blocks with which all conversations begin
    for name in ("d", "e"):
        await lab.submit(name, keys=system)
    await claims(lab, "h", 2)
    await lab.submit("f", keys=system)
    await lab.submit("g", keys=turn(3, 2, "y"))
    assert [(one.request_id, one.prefix_at) for one in await claims(lab, "g", 3)] == [("f", ""), ("g", "")]


@pytest.mark.parametrize("how", ["time", "epoch", "master", "release", "retire", "finishing"])
async def test_no_request_waits_for_what_is_gone(lab: Lab, how: str) -> None:
    """The engine is busy for too long, was formed anew, has another master or none, is no more, or is about to go."""
    await two_engines(lab)
    claim = await lab.claimed_by("h", "a0", keys=turn(1, 1))
    assert await lab.commit("a0", claim, 0, 1, Reason.LENGTH, engine="h") == -1
    await lab.submit("a1", keys=turn(1, 2))
    assert await claims(lab, "g", 1) == []
    match how:
        case "time":
            await lab.advance(CONSTANTS.prefix_wait)
        case "epoch":
            await lab.pool.renew("h", *lab.terms["h"], epoch=9)
        case "master":
            await lab.pool.release("h", *lab.terms["h"])
            assert await lab.pool.acquire("h", "t", None) is not None
        case "release":
            await lab.pool.release("h", *lab.terms["h"])
        case "finishing":
            await lab.pool.renew("h", *lab.terms["h"], load=FINISHING_LOAD)
        case _:
            await lab.pool.retire("h", *lab.terms["h"])
    renewed = await lab.pool.renew("g", *lab.terms["g"])
    assert renewed is not None
    assert renewed.needs == 8
    assert [one.request_id for one in await claims(lab, "g", 1)] == ["a1"]


async def test_who_was_overtaken_so_often_calls_an_engine_with_room(lab: Lab) -> None:
    """The one that has overtaken it has no slots for it; another one asks."""
    await two_engines(lab)
    await lab.engine("i", slots=ALL)
    await lab.claimed_by("h", "a0", keys=turn(1, 1))
    await lab.submit("a1", 64, keys=turn(1, 2))
    for n in range(CONSTANTS.overtakings):
        await lab.submit(f"b{n}", 4, max_waiting=99)
    assert await lab.claim("i", total=1) == {}  # it asks
    hints = f"{lab.keys.prefix}control:i"
    before = await lab.redis("XLEN", hints)
    assert len(await lab.claim("g", slots=40)) == CONSTANTS.overtakings
    assert await lab.redis("XLEN", hints) == before + 1


async def test_what_is_known_of_a_prompt_goes_with_its_request(server: RedisServer) -> None:
    async with Lab(server.url, constants=CONSTANTS.__class__(retain_requests=1)) as lab:
        await two_engines(lab)
        for n in range(3):
            claim = await lab.claimed_by("g", f"a{n}", keys=turn(n, 1))
            assert await lab.commit(f"a{n}", claim, 0, 1, Reason.LENGTH) == -1
        assert len(await lab.redis("HKEYS", f"{lab.keys.prefix}prefixes")) == 1


async def test_what_is_known_of_a_prompt_goes_with_a_record_that_redis_evicted(lab: Lab) -> None:
    await two_engines(lab)
    for n in range(3):
        await lab.submit(f"a{n}", keys=turn(n, 1))
    for n in range(2):
        await lab.redis("DEL", f"{lab.keys.prefix}request:a{n}")
    for _ in range(3):
        await lab.live(0.5, "e")
    assert await lab.redis("HVALS", f"{lab.keys.prefix}prefixes") == [b"1a2"]


async def test_long_prompts_tell_their_last_blocks(lab: Lab) -> None:
    await two_engines(lab)
    tokens = list(range(4 * (MOST_KEYS + 300)))
    keys = keys_of(root_by("shared", "", ""), tokens, 4)[1:]
    assert len(pack_keys(keys)) == 8 * MOST_KEYS
    await lab.claimed_by("h", "a", keys=pack_keys(keys[: MOST_KEYS + 20]))
    await lab.submit("b", keys=pack_keys(keys))
    assert await claims(lab, "g", 1) == []
    assert [one.prefix_at for one in await claims(lab, "h", 1)] == ["h"]


MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("turn"), st.integers(0, 3), st.just(0)),
        st.tuples(st.sampled_from(["g", "g", "h", "i"]), st.integers(1, 12), st.just(0)),
        st.tuples(st.just("wait"), st.sampled_from([0.1, 0.3]), st.just(0)),
        st.tuples(st.just("lost"), st.sampled_from(["g", "h", "i"]), st.just(0)),
    ),
    min_size=10,
    max_size=60,
)


def test_what_waits_is_overtaken_so_often_at_most(server: RedisServer) -> None:
    """Whatever comes, and whichever engine claims how much: the pool counts each overtaking, and bounds them."""

    @settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
    @given(MOVES)
    def check(moves: list[tuple[str, float, int]]) -> None:
        asyncio.run(overtakings(server.url, moves))

    check()


async def overtakings(url: str, moves: list[tuple[str, float, int]]) -> None:
    async with Lab(url) as lab:
        await lab.endpoint()
        for engine in ("g", "h", "i"):
            await lab.engine(engine, slots=ALL)
        turns, waiting = Counter[int](), list[str]()  # the queue, in its order
        passed = Counter[str]()  # how many were taken before each
        epoch = 1
        for what, much, _ in moves:
            match what:
                case "turn":
                    conversation = int(much)
                    turns[conversation] += 1
                    name = f"{conversation}-{turns[conversation]}"
                    await lab.submit(name, keys=turn(conversation, turns[conversation]), max_waiting=100)
                    waiting.append(name)
                case "wait":
                    await lab.advance(much)
                case "lost":
                    epoch += 1
                    await lab.pool.renew(
                        str(much), *lab.terms[str(much)], epoch=epoch, form=EngineInfo(str(much), 1, 1, ALL, epoch)
                    )
                case engine:
                    taken = await claims(lab, engine, int(much))
                    for one in taken:
                        before = waiting[: waiting.index(one.request_id)]
                        passed.update(before)
                        waiting.remove(one.request_id)
                    for one in taken:
                        assert one.overtaken == passed[one.request_id] <= CONSTANTS.overtakings
                    rows = [CommitRow(one.request_id, one.claim, 0, pack_tokens([]), Reason.LENGTH) for one in taken]
                    await lab.pool.commit(engine, *lab.terms[engine], rows)
        for name in waiting:
            standing = await lab.pool.look_up(name)
            assert standing is not None
            assert standing.overtaken == passed[name] <= CONSTANTS.overtakings
