"""Who goes first in the queue: classes over arrivals, and fair shares of tenants."""

import random
import re
from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pool.lab import Lab
from servers import RedisServer

from orca_common.priorities import Priority, lift_of
from orca_pool.records import Attached, Busy, EngineLoad, Turn

AGING = 10.0
LAST = 10_000


def turn(priority: Priority) -> Turn:
    return Turn(lift_of(priority, AGING))


async def test_classes_go_first_until_others_have_waited(lab: Lab) -> None:
    await lab.endpoint()
    await lab.engine()
    await lab.submit("old", turn=turn(Priority.NORMAL))
    await lab.advance(AGING - 1)
    await lab.submit("low", turn=turn(Priority.LOW))
    first = await lab.submit("high", turn=turn(Priority.HIGH))
    assert isinstance(first, Attached)
    assert first.position == 1
    await lab.advance(2)
    behind = await lab.submit("late", turn=turn(Priority.HIGH))  # `old` has waited longer than a class is worth
    assert isinstance(behind, Attached)
    assert behind.position == 3
    urgent = await lab.submit("urgent", turn=turn(Priority.URGENT))
    assert isinstance(urgent, Attached)
    assert urgent.position == 1
    assert list(await lab.claim(count=5, slots=64)) == ["urgent", "high", "old", "late", "low"]


async def test_a_strict_class_is_never_overtaken(lab: Lab) -> None:
    await lab.endpoint()
    await lab.engine()
    await lab.submit("old", turn=Turn(lift_of(Priority.NORMAL, float("inf"))))
    await lab.advance(86_400)
    await lab.submit("high", turn=Turn(lift_of(Priority.HIGH, float("inf"))))
    assert list(await lab.claim(count=2)) == ["high", "old"]


async def test_a_request_comes_back_to_its_place(lab: Lab) -> None:
    """After a loss of its engine, too, whatever came meanwhile."""
    await lab.endpoint()
    await lab.engine()
    await lab.submit("high", turn=turn(Priority.HIGH))
    claims = await lab.claim(count=1)
    await lab.advance(AGING / 2)
    await lab.submit("normal", turn=turn(Priority.NORMAL))
    await lab.submit("urgent", turn=turn(Priority.URGENT))
    await lab.pool.give_back("g", *lab.terms["g"], {"high": (claims["high"], True)})
    standing = await lab.pool.look_up("high")
    assert standing is not None
    assert standing.position == 2
    assert list(await lab.claim(count=3)) == ["urgent", "high", "normal"]


@pytest.mark.parametrize("seed", range(3))
async def test_every_request_starts_within_its_bound(lab: Lab, seed: int) -> None:
    """A random day with more urgent work than the engine does: no request waits for one that came `aging` seconds for
    each class between them later."""
    draw = random.Random(seed)
    await lab.endpoint()
    await lab.engine()
    came = dict[str, tuple[float, Priority]]()
    waiting, now = set[str](), 0.0
    for n in range(120):
        step = draw.uniform(0, 2)
        await lab.advance(step)
        now += step
        kind = Priority.URGENT if draw.random() < 0.7 else draw.choice([*Priority])
        name = f"r{n}"
        await lab.submit(name, turn=turn(kind), max_waiting=999)
        came[name] = now, kind
        waiting.add(name)
        if n % 2:
            [(claimed, claim)] = (await lab.claim(count=1)).items()
            waiting.discard(claimed)
            at, its = came[claimed]
            for other in waiting:
                since, kind = came[other]
                assert at <= since + AGING * (kind - its) + 1e-3, (claimed, other)
            await lab.commit(claimed, claim, 0, 1, finish=None)
            await lab.pool.cancel(claimed)


async def served(lab: Lab, weights: Mapping[str, float], sizes: Mapping[str, int], tokens: int) -> Counter[str]:
    """Tokens of tenants whose requests always wait, until `tokens` were served by one engine with four places."""
    counts, running, number = Counter[str](), list[str](), 0

    async def ask(tenant: str) -> None:
        nonlocal number
        number += 1
        size = sizes[tenant]
        name = f"{tenant}{number}"
        await lab.submit(
            name, size, turn=Turn(weight=weights[tenant]), tenant=tenant, max_waiting=999, new_tokens=size - 1
        )

    for tenant in weights:
        for _ in range(6):
            await ask(tenant)
    while counts.total() < tokens:
        for name in await lab.claim(count=4 - len(running), slots=LAST, total=LAST):
            running.append(name)
            await ask(name[0])
        done = running.pop(0)
        counts[done[0]] += sizes[done[0]]
        await lab.pool.cancel(done)
    return counts


@pytest.mark.parametrize(("weights", "sizes"), [
    ({"a": 1.0, "b": 1.0}, {"a": 8, "b": 56}),
    ({"a": 1.0, "b": 3.0}, {"a": 16, "b": 16}),
    ({"a": 2.0, "b": 1.0, "c": 1.0}, {"a": 40, "b": 8, "c": 16}),
])  # fmt: skip
async def test_shares_are_fair(lab: Lab, weights: dict[str, float], sizes: dict[str, int]) -> None:
    """The tokens of tenants that always wait, by weight, differ by at most twice what runs at once: VTC's bound."""
    await lab.endpoint()
    await lab.engine(slots=LAST)
    counts = await served(lab, weights, sizes, 4000)
    by_weight = [counts[tenant] / weight for tenant, weight in weights.items()]
    bound = 2 * 4 * max(sizes[tenant] / weight for tenant, weight in weights.items())
    assert max(by_weight) - min(by_weight) <= bound


async def test_a_tenant_that_was_away_has_no_credit(lab: Lab) -> None:
    """It goes before the backlog of another, and then in turns; who comes with much is not before who has used less."""
    await lab.endpoint()
    await lab.engine(slots=LAST)
    fair = Turn(weight=1.0)
    for n in range(20):
        await lab.submit(f"a{n}", 50, turn=fair, tenant="a", max_waiting=99, new_tokens=49)
    await lab.claim(count=10, slots=LAST, total=LAST)
    for n in range(10):
        await lab.pool.cancel(f"a{n}")
    await lab.claim(count=1, slots=LAST, total=LAST)
    for n in range(4):
        await lab.submit(f"b{n}", 50, turn=fair, tenant="b", max_waiting=99, new_tokens=49)
    order = list(await lab.claim(count=8, slots=LAST, total=LAST))
    assert [name[0] for name in order] in ([*"babababa"], [*"abababab"])


@settings(max_examples=30)
@given(st.sampled_from(Priority), st.sampled_from(Priority), st.floats(0, 1e4))
def test_a_class_is_worth_its_aging(one: Priority, other: Priority, aging: float) -> None:
    assert lift_of(other, aging) - lift_of(one, aging) == (other - one) * round(aging * 1e6)
    assert lift_of(Priority.NORMAL, aging) == 0


async def test_tenants_that_come_together_begin_in_the_order_in_which_they_came(lab: Lab) -> None:
    """More of them than a page of the queue has, whatever their names are; and a claim takes all that fit."""
    await lab.endpoint()
    await lab.engine(slots=LAST)
    names = [f"t{n:02}" for n in reversed(range(40))]
    for name in names:
        await lab.submit(name, 8, turn=Turn(weight=1.0), tenant=name, max_waiting=99, new_tokens=7)
    assert list(await lab.claim(count=40, slots=LAST, total=LAST)) == names


async def test_a_claim_sees_all_of_those_that_have_one_place(lab: Lab) -> None:
    """Orders may be alike; those that it passes by hide no other."""
    await lab.endpoint()
    await lab.engine("large", slots=LAST)
    await lab.engine("g")
    for n in range(20):
        await lab.submit(f"large{n:02}", 100, turn=Turn(lift=-n), max_waiting=99)
        await lab.advance(1e-6)
    for n in range(20, 25):
        await lab.submit(f"small{n}", 4, turn=Turn(lift=-n), max_waiting=99)
        await lab.advance(1e-6)
    standings = [await lab.pool.look_up(name) for name in ("large00", "large19", "small20")]
    assert len({one.order for one in standings if one is not None}) == 1
    assert len(await lab.claim(count=5)) == 5


def test_no_class_is_worth_more_than_a_strict_one() -> None:
    """Orders stay above 0, and far below 2^53, whatever `aging` is."""
    for priority in Priority:
        assert lift_of(priority, 1e12) == lift_of(priority, float("inf"))


async def test_a_request_costs_no_more_where_engines_are_many(lab: Lab) -> None:
    """Engines that are full of requests of its own class are not looked at, however many there are."""
    await lab.endpoint()

    async def reads() -> int:
        stats = (await lab.redis("INFO", "commandstats")).decode()
        return sum(int(count) for count in re.findall(r"cmdstat_hmget:calls=(\d+)", stats))

    costs = list[int]()
    for n in range(30):
        name = await lab.engine(f"g{n:02}")
        load = EngineLoad(8, 64, 0.1, 1.0, yields=int(Priority.NORMAL))
        await lab.pool.renew(name, *lab.terms[name], load=load)
        if n in (9, 29):  # above the number from which on the engines' sums are kept
            await lab.submit(f"before{n}", max_waiting=99)
            before = await reads()
            await lab.submit(f"r{n}", max_waiting=99)
            costs.append(await reads() - before)
    assert costs[0] == costs[1]


async def test_an_engine_without_room_hides_no_other_that_makes_room(lab: Lab) -> None:
    """The lowest class gives way first; and an engine that is left gives way to no request."""
    await lab.endpoint()
    for name, free, yields in (("f", 2, Priority.LOW), ("g", 64, Priority.LOW), ("h", 64, Priority.NORMAL)):
        await lab.engine(name)
        await lab.claimed_by(name, f"of {name}", turn=turn(yields))
        await lab.pool.renew(name, *lab.terms[name], load=EngineLoad(1, free, 0.1, 1.0, yields=int(yields)))
    for name in "fgh":
        await lab.claim(name, slots=0)  # it asks for no more
    before = (await lab.dump())["control"]
    await lab.submit("first", turn=Turn(lift_of(Priority.HIGH, AGING), priority=Priority.HIGH))
    await lab.pool.release("g", *lab.terms["g"])
    await lab.submit("second", turn=Turn(lift_of(Priority.HIGH, AGING), priority=Priority.HIGH))
    hints = (await lab.dump())["control"]
    assert [len(hints.get(name, ())) - len(before.get(name, ())) for name in "fgh"] == [0, 1, 1]


async def test_who_takes_another_one_s_place_is_not_late(lab: Lab) -> None:
    """An engine that is full for long makes room at once for a higher class: so it is said, and no deadline is too
    short for it. Who came too late to go before what runs waits, and is refused where it cannot."""
    await lab.endpoint()
    await lab.engine()
    for n in range(2):
        await lab.claimed(f"low{n}", turn=turn(Priority.LOW))
    load = EngineLoad(2, 48, 0.1, 100.0, yields=int(Priority.LOW))
    await lab.pool.renew("g", *lab.terms["g"], load=load)
    high = Turn(lift_of(Priority.HIGH, AGING), priority=Priority.HIGH)
    before = len((await lab.dump())["control"]["g"])
    first = await lab.submit("first", deadline_in=10.0, turn=high)
    assert isinstance(first, Attached)
    assert first.starts_in == 0
    await lab.pool.cancel("first")
    large = await lab.submit("large", 50, deadline_in=10.0, turn=high)
    assert isinstance(large, Busy), "no slots are free for it"
    await lab.advance(2 * AGING + 1)
    late = await lab.submit("late", deadline_in=10.0, turn=high)
    assert isinstance(late, Busy)
    assert len((await lab.dump())["control"]["g"]) == before + 1


async def test_a_commit_costs_no_more_where_engines_with_roles_are_many(server: RedisServer) -> None:
    """Whether what it begins can be gone on with is seen at the first engine that decodes."""

    async def commands(engines: int) -> Counter[str]:
        async with Lab(server.url) as lab:
            await lab.endpoint()
            for n in range(engines):
                name = await lab.engine(f"engine-{n}", role="prefill" if n < engines // 2 else "decode")
                await lab.pool.renew(name, *lab.terms[name], weights="w")
            claim = await lab.claimed_by("engine-0", "a")
            await lab.submit("b")
            assert await lab.commit("a", claim, 0, 1, engine="engine-0") == -1
            await lab.redis("CONFIG", "RESETSTAT")
            assert await lab.commit("a", claim, 1, 1, engine="engine-0") == -1
            stats = (await lab.redis("INFO", "commandstats")).decode()
        return Counter({name: int(calls) for name, calls in re.findall(r"cmdstat_(\S+):calls=(\d+)", stats)})

    few, many = await commands(2), await commands(16)
    assert few == many
    assert few["hmget"] == 3
