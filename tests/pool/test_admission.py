"""Admission: what the queue promises, from the pace of the engines and from what waits. The time is the test's own.

The engine of these tests runs two requests at a time and makes a token of each in 0.1 s: 20 tokens a second.
"""

from typing import Any

import pytest
from pool.lab import Lab

from orca_pool.records import Attached, Busy, EngineLoad, QueueLimits, Reason, Refusal

PACE = 0.1
ROWS = 2


async def loaded(lab: Lab, room_in: float = 0.0, free: int = 64, engine: str = "g") -> None:
    """The engine's master renews."""
    await lab.pool.renew(engine, *lab.terms[engine], load=EngineLoad(ROWS, free, PACE, room_in))


async def busy(lab: Lab, waiting: int = 0) -> None:
    """Two requests of 10 tokens run, and so many wait."""
    await lab.endpoint()
    await lab.engine()
    await loaded(lab)
    for name in ("run0", "run1"):
        await lab.submit(name, 12, new_tokens=10)
    assert len(await lab.claim(count=2)) == 2
    await loaded(lab, room_in=1.0, free=40)
    for n in range(waiting):
        assert isinstance(await lab.submit(f"wait{n}", 12, new_tokens=10, max_waiting=99), Attached)


async def starts_in(lab: Lab, name: str = "r", **more: Any) -> float | None:
    answer = await lab.submit(name, 12, new_tokens=10, max_waiting=99, **more)
    assert isinstance(answer, Attached)
    return answer.starts_in


async def test_nobody_knows_before_an_engine_has_told_its_pace(lab: Lab) -> None:
    await lab.endpoint()
    await lab.engine()
    assert await starts_in(lab, deadline_in=0.1) is None


async def test_an_idle_engine_begins_at_once(lab: Lab) -> None:
    """Even what cannot end in time: it keeps nobody from anything."""
    await lab.endpoint()
    await lab.engine()
    await loaded(lab)
    assert await starts_in(lab, deadline_in=0.1) == 0
    assert list(await lab.claim()) == ["r"]


async def test_an_engine_whose_requests_have_all_ended_has_room_before_it_says_so(lab: Lab) -> None:
    """Its master's last renewal told of no free slots, and of room in 9 s."""
    await busy(lab)
    await loaded(lab, room_in=9.0, free=0)
    for name in ("run0", "run1"):
        await lab.pool.cancel(name)
    assert await starts_in(lab, deadline_in=2.0) == 0


@pytest.mark.parametrize(("waiting", "expected"), [(0, 1.0), (1, 1.5), (6, 4.0)])
async def test_the_wait_is_for_the_first_room_and_for_those_before(lab: Lab, waiting: int, expected: float) -> None:
    """10 tokens at 20 tokens a second: half a second for each request before."""
    await busy(lab, waiting)
    assert await starts_in(lab) == pytest.approx(expected)


async def test_slots_bound_how_many_run(lab: Lab) -> None:
    """The rows would hold two requests of 60 slots, the slots only one."""
    await lab.endpoint()
    await lab.engine()
    await loaded(lab)
    await lab.submit("large", 60, new_tokens=10)
    await lab.claim()
    await loaded(lab, room_in=1.0, free=4)
    await lab.submit("next", 60, new_tokens=10)
    answer = await lab.submit("last", 60, new_tokens=10)
    assert isinstance(answer, Attached)
    assert answer.starts_in == pytest.approx(2.0)


async def test_a_deadline_that_would_pass_is_refused_at_once(lab: Lab) -> None:
    """It would begin in 4 s and take 1 s."""
    await busy(lab, 6)
    late = await lab.submit("late", 12, new_tokens=10, deadline_in=5.0, max_waiting=99)
    assert isinstance(late, Busy)
    # In 5 / 1.15 s it could wait for 3.35 s: so long is the queue in 0.65 s.
    assert (late.why, late.wait, late.due) == (Refusal.LATE, pytest.approx(4.0), pytest.approx(0.65, abs=0.01))
    assert await starts_in(lab, "patient", deadline_in=6.0) == pytest.approx(4.0)
    assert await lab.pool.attach("late", endpoint="e", attempt=2) is Refusal.UNKNOWN


async def refusal(lab: Lab, **more: Any) -> tuple[Refusal, float, float]:
    answer = await lab.submit("more", 12, new_tokens=10, **more)
    assert isinstance(answer, Busy)
    assert answer.wait is not None
    assert answer.due is not None
    return answer.why, round(answer.wait, 3), round(answer.due, 3)


@pytest.mark.parametrize(("most", "due"), [(6, 1.0), (5, 1.5), (1, 3.5)])
async def test_a_full_queue_says_when_a_place_is_due(lab: Lab, most: int, due: float) -> None:
    """Six wait, and the last of them begins in 3.5 s. Where more wait than may, as many must begin first."""
    await busy(lab, 6)
    assert await refusal(lab, max_waiting=most) == (Refusal.FULL, 4.0, due)


async def test_a_queue_of_many_bytes_says_when_there_is_room(lab: Lab) -> None:
    await busy(lab, 6)
    size = len(b"record of wait0")
    assert await refusal(lab, limits=QueueLimits(6 * size, None, None)) == (Refusal.FULL, 4.0, 1.0)
    assert await refusal(lab, limits=QueueLimits(4 * size, None, None)) == (Refusal.FULL, 4.0, 2.0)


async def test_a_full_tenant_says_when_one_of_its_places_is_due(lab: Lab) -> None:
    """Of its two requests one runs, and makes room in 1 s. Nobody waits, so the queue has no length."""
    await lab.endpoint()
    await lab.engine()
    await loaded(lab)
    for name in ("run0", "run1"):
        await lab.submit(name, 12, new_tokens=10, tenant="a")
    await lab.claim(count=2)
    await loaded(lab, room_in=1.0, free=40)
    two = QueueLimits(None, 2, None)
    assert await refusal(lab, tenant="a", limits=two) == (Refusal.TENANT_FULL, 1.0, 1.0)


async def test_a_tenant_whose_requests_wait_hears_when_they_begin(lab: Lab) -> None:
    """Six of another tenant wait, then two of its own."""
    await busy(lab, 6)
    for name in ("own0", "own1"):
        await lab.submit(name, 12, new_tokens=10, tenant="a", max_waiting=99)
    slots = QueueLimits(None, None, 24)
    why, wait, due = await refusal(lab, tenant="a", limits=slots)
    assert (why, wait) == (Refusal.TENANT_FULL, 5.0)
    assert 1.0 <= due <= 4.0, "one of them must begin; where they stand in the queue is not looked up"


async def test_a_request_that_can_no_longer_end_in_time_is_not_claimed(lab: Lab) -> None:
    await busy(lab)
    await lab.submit("tight", 12, new_tokens=10, deadline_in=2.5)
    await lab.submit("patient", 12, new_tokens=10, deadline_in=60.0)
    await lab.advance(2.0)  # the room came late
    assert list(await lab.claim(count=1)) == ["patient"]
    assert (await lab.record("tight"))["reason"] == Reason.DEADLINE


async def test_idle_engines_share_what_cannot_end_in_time(lab: Lab) -> None:
    """Each has room for half of what waits, and all of it was told that it begins at once."""
    await lab.endpoint()
    for engine in ("g", "h"):
        await lab.engine(engine)
        await loaded(lab, engine=engine)
    for n in range(2 * ROWS):
        assert await starts_in(lab, f"r{n}", deadline_in=0.1) == 0
    assert list(await lab.claim("g", count=ROWS)) == ["r0", "r1"]
    assert list(await lab.claim("h", count=ROWS)) == ["r2", "r3"]


async def test_it_is_claimed_where_nobody_else_waits(lab: Lab) -> None:
    await busy(lab)
    await lab.submit("tight", 12, new_tokens=10, deadline_in=2.5)
    await lab.advance(2.0)
    assert list(await lab.claim(count=1)) == ["tight"]


async def test_requests_that_end_early_make_the_queue_faster(lab: Lab) -> None:
    """Where requests make half of their tokens, the queue is half as long."""
    await lab.endpoint()
    await lab.engine()
    await loaded(lab)
    for n in range(200):
        await lab.submit(f"short{n}", 12, new_tokens=10)
        claims = await lab.claim()
        await lab.commit(f"short{n}", claims[f"short{n}"], 0, 5, Reason.EOS)
    for name in ("run0", "run1"):
        await lab.submit(name, 12, new_tokens=10)
    await lab.claim(count=2)
    await loaded(lab, room_in=1.0, free=40)
    for n in range(6):
        await lab.submit(f"wait{n}", 12, new_tokens=10)
    assert await starts_in(lab) == pytest.approx(1.0 + 1.5, rel=0.05)


async def test_bytes_that_wait_are_bounded(lab: Lab) -> None:
    await busy(lab)
    two = QueueLimits(2 * len(b"record of r0"), None, None)
    for n in range(2):
        assert isinstance(await lab.submit(f"r{n}", limits=two), Attached)
    answer = await lab.submit("r2", limits=two)
    assert isinstance(answer, Busy)
    assert answer.why is Refusal.FULL
    await lab.pool.cancel("r0")
    assert isinstance(await lab.submit("r2", limits=two), Attached)


async def test_a_tenant_has_its_own_limits(lab: Lab) -> None:
    """Requests that run or wait, and slots that wait."""
    await lab.endpoint()
    await lab.engine()
    requests, tokens = QueueLimits(None, 2, None), QueueLimits(None, None, 16)
    claim = await lab.claimed("a0", tenant="a", limits=requests)
    await lab.submit("a1", tenant="a", limits=requests)
    assert await lab.submit("a2", tenant="a", limits=requests) == Busy(Refusal.TENANT_FULL, None, None, 2, "requests")
    assert isinstance(await lab.submit("b0", tenant="b", limits=requests), Attached)
    await lab.commit("a0", claim, 0, 1, Reason.EOS)
    assert isinstance(await lab.submit("a2", tenant="a", limits=requests), Attached)
    assert await lab.submit("a3", tenant="a", limits=tokens) == Busy(Refusal.TENANT_FULL, None, None, 16, "slots")
    await lab.claim()
    assert isinstance(await lab.submit("a3", tenant="a", limits=tokens), Attached)


async def test_a_caller_has_no_more_of_the_queue_than_is_free(lab: Lab) -> None:
    """Alone it has half of it, and others find room, however many come. Requests that it has left count, too."""
    await lab.endpoint()
    await lab.engine()
    for n in range(4):
        assert isinstance(await lab.submit(f"a{n}", tenant="a", max_waiting=8, grace=3600.0), Attached)
        await lab.pool.detach(f"a{n}", attempt=1)
    assert await lab.submit("a4", tenant="a", max_waiting=8) == Busy(Refusal.SHARE_FULL, None, None, 4, "requests")
    for name, count in (("b", 2), ("c", 1)):
        for n in range(count):
            assert isinstance(await lab.submit(f"{name}{n}", tenant=name, max_waiting=8), Attached)
        answer = await lab.submit(f"{name}9", tenant=name, max_waiting=8)
        assert isinstance(answer, Busy)
        assert answer.why is Refusal.SHARE_FULL
    assert await lab.submit("d0", tenant="d", max_waiting=7) == Busy(Refusal.FULL, None)
    claims = await lab.claim(count=5)
    assert isinstance(await lab.submit("a4", tenant="a", max_waiting=8), Attached), "what runs takes no place"
    await lab.pool.give_back("g", *lab.terms["g"], {name: (claim, False) for name, claim in claims.items()})
    assert isinstance(await lab.submit("d0", tenant="d", max_waiting=99), Attached)


async def test_a_caller_has_no_more_bytes_of_the_queue_than_are_free(lab: Lab) -> None:
    await lab.endpoint()
    await lab.engine()
    limits = QueueLimits(4 * len(b"record of a0"), None, None)
    for n in range(2):
        assert isinstance(await lab.submit(f"a{n}", tenant="a", limits=limits), Attached)
    busy = Busy(Refusal.SHARE_FULL, None, None, 2 * len(b"record of a0"), "bytes")
    assert await lab.submit("a2", tenant="a", limits=limits) == busy
    assert isinstance(await lab.submit("b0", tenant="b", limits=limits), Attached)
    assert await lab.submit("a2", limits=limits) != busy, "a request of no caller has no share"


async def test_the_refusal_of_a_share_says_when_there_is_room(lab: Lab) -> None:
    """Six of it wait, and as many must begin as it has more than are free, and one."""
    await busy(lab)
    for n in range(6):
        assert isinstance(await lab.submit(f"a{n}", 12, new_tokens=10, tenant="a", max_waiting=99), Attached)
    assert await refusal(lab, tenant="a", max_waiting=12) == (Refusal.SHARE_FULL, 4.0, 1.0)
    assert await refusal(lab, tenant="a", max_waiting=10) == (Refusal.SHARE_FULL, 4.0, 2.0)


async def test_an_engine_that_does_not_run_promises_nothing(lab: Lab) -> None:
    await busy(lab)
    await lab.pool.renew("g", *lab.terms["g"])
    assert await starts_in(lab, deadline_in=0.1) is None
