"""What a caller of Pool can rely on beside the rules (test_rules.py): answers, sizes, times, errors."""

import pytest
from pool.lab import START, Lab, tokens_of
from pool.model import prefix_digest
from servers import RedisServer

from orca_common.errors import FailedPrecondition
from orca_common.reservation import Reservation
from orca_common.scores import TOP
from orca_pool.keys import Keys
from orca_pool.pool import Pool
from orca_pool.records import (
    FINISHING_LOAD,
    Attached,
    Busy,
    CommitAnswer,
    CommitRow,
    EngineInfo,
    EngineLoad,
    EngineUse,
    ModelIdentity,
    Reason,
    Refusal,
)
from orca_pool.scripts import Constants
from orca_pool.wire import RECORD_OVERHEAD, pack_tokens


async def test_identity(lab: Lab) -> None:
    assert await lab.pool.identity() is None
    await lab.pool.identify("gpt2", 1024, 50257)
    await lab.pool.identify("gpt2", 1024, 50257)
    with pytest.raises(FailedPrecondition, match="gpt2"):
        await lab.pool.identify("opt", 2048, 50272)
    assert await lab.pool.identity() == ModelIdentity("gpt2", 1024, 50257, 0)
    await lab.engine(slots=64)
    assert await lab.pool.identity() == ModelIdentity("gpt2", 1024, 50257, 64, Reservation(1))
    later = Reservation(16, output=False)
    await lab.pool.renew("g", *lab.terms["g"], form=EngineInfo("g", 1, 1, 32, 0, "", "another", later))
    assert await lab.pool.identity() == ModelIdentity("gpt2", 1024, 50257, 64, later)


async def test_engine_infos_are_those_that_formed(lab: Lab) -> None:
    await lab.engine("b")
    await lab.engine("a", slots=0)
    await lab.pool.renew("b", *lab.terms["b"], epoch=7, form=EngineInfo("b", 2, 3, 128, 7, "", "paper"))
    assert await lab.pool.engine_infos() == [EngineInfo("b", 2, 3, 128, 7, "", "paper")]


async def test_engines_tell_what_they_hold_and_have_room_for(lab: Lab) -> None:
    await lab.endpoint()
    for engine, slots in (("a", 0), ("b", 64), ("c", 128)):
        await lab.engine(engine, slots=slots)
    await lab.submit("q")
    await lab.claim("c", count=1)
    await lab.pool.renew("c", *lab.terms["c"], load=EngineLoad(8, 112, 0.1, 1.0))
    assert await lab.pool.engine_uses() == {
        "b": EngineUse(0, 0, 0, 64),
        "c": EngineUse(1, 8, 112, 128),
    }
    await lab.pool.renew("c", *lab.terms["c"], load=FINISHING_LOAD)
    assert (await lab.pool.engine_uses())["c"] == EngineUse(1, 0, 0, 128)


async def test_how_a_request_stands(lab: Lab) -> None:
    await lab.endpoint()
    await lab.engine()
    assert await lab.pool.look_up("r") is None
    await lab.submit("q")
    await lab.submit("r", attempt=3)
    waiting = await lab.pool.look_up("r")
    assert waiting is not None
    assert (waiting.state, waiting.position, waiting.engine, waiting.reason) == ("waiting", 2, "", None)
    assert 0 < waiting.times.submitted <= waiting.now
    await lab.advance(1)
    claims = await lab.claim(count=2)
    await lab.commit("r", claims["r"], 0, 1)
    claimed = await lab.pool.look_up("r")
    assert claimed is not None
    assert (claimed.state, claimed.position, claimed.engine, claimed.tokens) == ("claimed", 0, "g", 1)
    assert claimed.order == waiting.order
    await lab.commit("r", claims["r"], 1, 2, Reason.EOS)
    ended = await lab.pool.look_up("r")
    assert ended is not None
    assert (ended.state, ended.engine, ended.tokens, ended.reason) == ("ended", "", 3, Reason.EOS)
    assert ended.times.submitted < ended.times.claimed <= ended.times.first_token <= ended.times.finished


async def test_a_request_is_shown_to_a_reader(lab: Lab) -> None:
    """All of it, at each moment of its life; the call that listens goes on."""
    await lab.endpoint()
    await lab.engine()
    assert await lab.pool.show("r") is None
    submitted = await lab.submit("r", attempt=3)
    assert isinstance(submitted, Attached)
    claims = await lab.claim(count=1)
    await lab.commit("r", claims["r"], 0, 2)
    running = await lab.pool.show("r")
    assert running is not None
    assert (running.record, len(running.tokens), running.finish) == (submitted.record, 2, None)
    await lab.commit("r", claims["r"], 2, 1, Reason.EOS)
    ended = await lab.pool.show("r")
    assert ended is not None
    assert ended.finish is not None
    assert (len(ended.tokens), ended.finish.reason, ended.finish.output_tokens) == (3, Reason.EOS, 3)
    again = await lab.pool.attach("r", endpoint="e", attempt=3)
    assert isinstance(again, Attached), "no newer call has taken over"
    assert again.tokens == ended.tokens


async def test_a_stream_from_submit_to_finish(lab: Lab) -> None:
    """Every moment is by Redis's clock, and stands in the packet's finish and in that of a later attach."""
    await lab.endpoint()
    await lab.engine()
    first = await lab.submit("r")
    assert isinstance(first, Attached)
    assert (first.position, first.tokens, first.finish) == (1, [], None)
    second = await lab.submit("q", attempt=3)
    assert isinstance(second, Attached)
    assert second.position == 2
    await lab.advance(1)
    claim = (await lab.claim(count=1))["r"]
    await lab.advance(1)
    await lab.commit("r", claim, 0, 1)
    await lab.advance(1)
    await lab.commit("r", claim, 1, 2, Reason.EOS)
    one, two = await lab.pool.read("e", None, wait=0)
    assert [one.number, two.number] == [1, 2]
    [packet] = two.packets
    assert (packet.request_id, packet.first, packet.engine, packet.tokens) == ("r", 1, "g", tokens_of(1, 2))
    assert packet.finish is not None
    times = packet.finish.times
    moments = (times.submitted, times.claimed, times.first_token, times.finished)
    assert moments == tuple(START + seconds * 1_000_000 for seconds in (0, 1, 2, 3))
    found = await lab.pool.attach("r", endpoint="e", attempt=2)
    assert isinstance(found, Attached)
    assert (found.finish, found.tokens, found.engines) == (packet.finish, tokens_of(0, 3), [(0, "g")])
    assert found.record == b"record of r"


async def test_scores_come_with_their_tokens(lab: Lab) -> None:
    """Once, in the packets and in the answer of an attach, cut as the tokens are; a repeated commit adds nothing."""
    await lab.endpoint()
    await lab.engine()
    claim, plain = await lab.claimed("r"), await lab.claimed("plain", 2)
    tops = [TOP.pack(n, -n) + TOP.pack(n + 1, -n - 1) for n in range(4)]

    def row(base: int, count: int, finish: Reason | None = None) -> CommitRow:
        made = pack_tokens(tokens_of(base, count))
        return CommitRow(
            "r", claim, base, made, finish, b"".join(tops[base : base + count]), b"" if base else b"prompt"
        )

    async def answers(rows: list[CommitRow]) -> list[int]:
        answer = await lab.pool.commit("g", *lab.terms["g"], rows)
        assert answer is not None
        return answer.rows

    assert await answers([row(0, 1)]) == [-1]
    assert await answers([row(0, 1)]) == [1], "a repetition: the pool has one token"
    both = [CommitRow("plain", plain, 2, pack_tokens(tokens_of(2, 1)), None), row(1, 2)]
    assert await answers(both) == [-1, -1]
    packets = [packet for entry in await lab.pool.read("e", None, wait=0) for packet in entry.packets]
    assert [p.tops for p in packets if p.request_id == "r"] == [tops[0], tops[1] + tops[2]]
    assert [p.tops for p in packets if p.request_id == "plain"] == [b"", b""]
    await lab.pool.finish_at("r", 1, Reason.STOP, prefix_digest(tokens_of(0, 2)))
    found = await lab.pool.attach("r", endpoint="e", attempt=2)
    assert isinstance(found, Attached)
    assert (found.tokens, found.tops, found.prompt) == (tokens_of(0, 2), tops[0] + tops[1], b"prompt")
    rest = await lab.pool.attach("r", endpoint="e", attempt=3, known=1, last=tokens_of(0, 1)[0])
    assert isinstance(rest, Attached)
    assert (rest.tokens, rest.tops, rest.prompt) == (tokens_of(1, 1), tops[1], b"")
    lost = await lab.pool.attach("plain", endpoint="e", attempt=2)
    assert isinstance(lost, Attached)
    assert (lost.tops, lost.prompt) == (b"", b"")


async def test_one_entry_per_endpoint_and_commit(lab: Lab) -> None:
    await lab.endpoint("e")
    await lab.endpoint("f")
    await lab.engine()
    for request_id, endpoint in (("a", "e"), ("b", "f"), ("c", "e")):
        await lab.submit(request_id, endpoint=endpoint)
    rows = [CommitRow(i, claim, 0, pack_tokens(tokens_of(0, 1)), None) for i, claim in (await lab.claim()).items()]
    assert await lab.pool.commit("g", *lab.terms["g"], rows) == CommitAnswer([-1, -1, -1], 0)
    assert [[p.request_id for p in entry.packets] for entry in await lab.pool.read("e", None, wait=0)] == [["a", "c"]]
    assert [[p.request_id for p in entry.packets] for entry in await lab.pool.read("f", None, wait=0)] == [["b"]]


async def test_a_change_of_a_listener_that_another_commit_saw(lab: Lab) -> None:
    """Batches in flight take turns: what a commit learns of its own requests says nothing about the others."""
    await lab.endpoint("e")
    await lab.endpoint("f")
    await lab.engine()
    for request_id in ("a", "b"):
        await lab.submit(request_id)
    claims = await lab.claim()
    for base in range(3):
        if base == 2:
            await lab.pool.attach("b", endpoint="f", attempt=2)
        for request_id, claim in claims.items():
            assert await lab.commit(request_id, claim, base, 1) == -1
    [entry] = await lab.pool.read("f", None, wait=0)
    assert [(p.request_id, p.first) for p in entry.packets] == [("b", 2)]


async def test_engines_that_made_the_tokens(lab: Lab) -> None:
    """A claim that brought no token is not listed."""
    await lab.endpoint()
    await lab.engine("g")
    await lab.engine("h")
    await lab.engine("i")
    await lab.submit("r", max_tokens=8)
    for engine, count in (("g", 2), ("h", 0), ("i", 1)):
        claim = (await lab.claim(engine))["r"]
        base = 0 if engine == "g" else 2
        await lab.commit("r", claim, base, count, engine=engine)
        await lab.pool.give_back(engine, *lab.terms[engine], {"r": (claim, False)})
    found = await lab.pool.attach("r", endpoint="e", attempt=2)
    assert isinstance(found, Attached)
    assert found.engines == [(0, "g"), (2, "i")]


async def test_the_queue_is_bounded(lab: Lab) -> None:
    await lab.endpoint()
    await lab.engine()
    assert isinstance(await lab.submit("a", max_waiting=1), Attached)
    assert await lab.submit("b", max_waiting=1) == Busy(Refusal.FULL, None)
    assert isinstance(await lab.submit("a", max_waiting=1), Attached)
    await lab.claim()
    assert isinstance(await lab.submit("b", max_waiting=1), Attached)


async def test_a_long_queue_is_walked_page_by_page(lab: Lab) -> None:
    """Forty requests are too large for this engine; one behind them fits."""
    await lab.endpoint()
    await lab.engine()
    await lab.engine("small", slots=16)
    for i in range(40):
        await lab.submit(f"large{i}", 60, max_waiting=99)
    await lab.submit("little", max_waiting=99)
    assert list(await lab.claim("small", slots=16, total=16)) == ["little"]


async def test_claims_carry_all_that_an_engine_needs(lab: Lab) -> None:
    await lab.endpoint()
    await lab.engine()
    claim = await lab.claimed("r", 3, deadline_in=10.0)
    await lab.advance(4)
    held = await lab.pool.holding("g", *lab.terms["g"])
    assert held is not None
    [request] = held.requests
    assert (request.request_id, request.claim, request.order) == ("r", claim, START)
    assert (request.record, request.tokens) == (b"record of r", tokens_of(0, 3))
    assert (request.deadline_in, request.losses, request.submitted) == (6.0, 0, START)
    assert (held.last_claim, held.needs) == (claim, 0)


async def test_masters_learn_the_moments_of_what_the_pool_did(lab: Lab) -> None:
    """A request's wait and its stay at an engine, each time, are moments of the pool's clock alone."""
    await lab.endpoint()
    await lab.engine()
    lease, second = lab.terms["g"], 1_000_000
    await lab.submit("r")
    await lab.advance(1)
    claim = (await lab.claim())["r"]
    await lab.advance(2)
    moment = await lab.pool.give_back("g", *lease, {"r": (claim, False)})
    assert moment == START + 3 * second
    assert await lab.pool.give_back("g", "another", 1, {"r": (claim, False)}) is None
    await lab.advance(4)
    claim = (await lab.claim())["r"]
    held = await lab.pool.holding("g", *lease)
    assert held is not None
    (request,) = held.requests
    moments = (request.submitted, request.queued_at, request.taken_at)
    assert moments == (START, START + 3 * second, START + 7 * second)
    await lab.advance(5)
    row = CommitRow("r", claim, 0, pack_tokens(tokens_of(0, 1)), Reason.EOS)
    assert await lab.pool.commit("g", *lease, [row]) == CommitAnswer([-1], 0, START + 12 * second)
    found = await lab.pool.look_up("r")
    assert found is not None
    assert found.times.finished == START + 12 * second


async def test_a_request_begins_where_its_upfront_slots_are_free(lab: Lab) -> None:
    """Fewer than it fills at the end, or more: an engine's policy says, and the pool counts."""
    await lab.endpoint()
    await lab.engine()
    for request_id in ("a", "b"):
        await lab.submit(request_id, 9, upfront=16)
    answer = await lab.pool.claim("g", *lab.terms["g"], 0, count=8, slots=31, total=64)
    assert answer is not None
    assert [held.request_id for held in answer.requests] == ["a"]


async def test_the_smallest_stop_stays(lab: Lab) -> None:
    await lab.endpoint()
    await lab.engine()
    await lab.claimed("r", 6)
    for index, stands in ((3, 4), (4, 4), (1, 2)):
        digest = prefix_digest(tokens_of(0, index + 1))
        assert await lab.pool.finish_at("r", index, Reason.STOP, digest) == "ok"
        found = await lab.pool.attach("r", endpoint="e", attempt=1)
        assert isinstance(found, Attached)
        assert found.finish is not None
        assert (found.finish.output_tokens, len(found.tokens)) == (stands, stands)


async def test_detach_with_no_grace_ends_at_once(lab: Lab) -> None:
    await lab.endpoint()
    await lab.engine()
    claim = await lab.claimed("r", 1)
    await lab.pool.detach("r", attempt=1, grace=0.0)
    assert (await lab.record("r"))["reason"] == Reason.DETACHED
    assert (await lab.pool.hints("g", None, wait=0))[1] == ["r"]
    assert await lab.commit("r", claim, 1, 1) == -2


async def test_an_end_hints_of_the_next_request_by_its_upfront_slots(lab: Lab) -> None:
    """An engine with less room than a request reserves would claim in vain, however long the request may become."""
    await lab.endpoint()
    await lab.engine()
    assert not await lab.claim(slots=16)  # it asks, and has room for 16
    await lab.submit("a", max_tokens=8, upfront=24)
    await lab.submit("b", max_tokens=8, upfront=24)
    await lab.pool.detach("a", attempt=1, grace=0.0)
    assert (await lab.pool.hints("g", None, wait=0))[1] == []
    await lab.submit("c", max_tokens=8, upfront=12)
    assert (await lab.pool.hints("g", None, wait=0))[1] == [""]


async def test_an_expired_request_is_not_claimed(lab: Lab) -> None:
    await lab.endpoint()
    await lab.engine()
    await lab.submit("a", deadline_in=1.0)
    await lab.submit("b")
    await lab.advance(2)
    assert list(await lab.claim(count=1)) == ["b"]
    assert (await lab.record("a"))["reason"] == Reason.DEADLINE


async def test_two_releases_share_nothing(server: RedisServer, lab: Lab) -> None:
    await lab.endpoint()
    async with Lab(server.url) as other:
        assert await other.pool.renew_endpoint("e") is None


async def ended(lab: Lab, *names: str) -> None:
    """Requests that end one after the other, each with a token."""
    for name in names:
        await lab.claimed(name, 1)
        await lab.pool.cancel(name)
        await lab.advance(0.001)


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        (Constants(retention=120.0), ["c"]),  # the others are too old
        (Constants(retain_requests=2), ["b", "c"]),
        (Constants(retain_bytes=2 * (RECORD_OVERHEAD + 27)), ["b", "c"]),  # 11 of the record, 16 of the token
    ],
)
async def test_what_ended_is_kept_within_its_limits(server: RedisServer, limits: Constants, kept: list[str]) -> None:
    async with Lab(server.url, constants=limits) as lab:
        await lab.endpoint()
        await lab.engine()
        await ended(lab, "a", "b")
        await lab.live(121, "e")
        await ended(lab, "c")
        state = await lab.dump()
        assert [sorted(state[part]) for part in ("requests", "tokens")] == [kept, kept]


async def test_a_sweep_forgets_what_is_too_old(server: RedisServer) -> None:
    async with Lab(server.url, constants=Constants(retention=120.0)) as lab:
        await lab.endpoint()
        await lab.engine()
        await ended(lab, "a", "b")
        await lab.live(119, "e")
        assert sorted((await lab.dump())["requests"]) == ["a", "b"]
        await lab.live(2, "e")
        assert not (await lab.dump())["requests"]


async def test_what_ended_before_an_outage_is_forgotten_as_long_after_it(server: RedisServer) -> None:
    async with Lab(server.url, constants=Constants(retention=60.0)) as lab:
        await lab.endpoint()
        await lab.engine()
        await ended(lab, "a")
        await lab.live(1, "e")
        await lab.advance(600)
        await lab.live(60, "e")
        assert list((await lab.dump())["requests"]) == ["a"]
        await lab.live(1, "e")
        assert not (await lab.dump())["requests"]


async def test_numbers_are_times_of_redis(lab: Lab) -> None:
    seconds, _ = await lab.redis("TIME")
    assert await lab.pool.number(0) >= int(seconds) * 1_000_000
    assert await lab.pool.number(2**52) == 2**52 + 1


async def test_the_packages_own_clock(server: RedisServer) -> None:
    """The Lua function that the other tests replace."""
    async with Pool(server.url, "own-clock") as pool:
        registration = await pool.renew_endpoint("e", register=True)
        assert registration is not None
        assert 0 <= await pool.number(0) - registration < 60_000_000


@pytest.mark.parametrize("attempt", [-1, 2**53])
async def test_attempts_that_lua_would_round_are_refused(lab: Lab, attempt: int) -> None:
    with pytest.raises(ValueError, match="attempt"):
        await lab.pool.attach("r", endpoint="e", attempt=attempt)
    assert await lab.pool.attach("r", endpoint="e", attempt=2**53 - 1) is Refusal.UNREGISTERED


def test_a_pools_name_cannot_break_the_hash_tag() -> None:
    with pytest.raises(ValueError, match="braces"):
        Keys("a}b")


async def test_large_attempts_survive_exactly(lab: Lab) -> None:
    await lab.endpoint()
    await lab.engine()
    attempt = 2**53 - 3
    claim = await lab.claimed("r", attempt=attempt)
    await lab.commit("r", claim, 0, 1)
    [entry] = await lab.pool.read("e", None, wait=0)
    assert entry.packets[0].attempt == attempt
    assert await lab.pool.attach("r", endpoint="e", attempt=attempt - 1) is Refusal.STALE


async def test_an_attach_reads_what_lies_beyond_the_known_tokens(lab: Lab) -> None:
    await lab.endpoint()
    await lab.engine()
    await lab.claimed("r", 4)
    tokens = tokens_of(0, 4)
    for known, last, first in (
        (0, None, 0),
        (3, tokens[2], 3),
        (4, tokens[3], 4),
        (3, tokens[1], 0),
        (5, tokens[3], 0),
    ):
        answer = await lab.pool.attach("r", endpoint="e", attempt=1, known=known, last=last)
        assert isinstance(answer, Attached)
        assert (answer.first, answer.tokens) == (first, tokens[first:])
        assert answer.record == (b"" if known else b"record of r")


async def test_streams_are_handed_over_to_an_endpoint_that_renews(lab: Lab) -> None:
    """One that is silent may be dead, though its lease is not over: nobody would take the streams up."""
    await lab.endpoint("e")
    await lab.endpoint("other")
    await lab.advance(0.7)  # a renewal may be late
    assert await lab.pool.renew_endpoint("e")
    assert await lab.pool.hand_over("e") == 1
    await lab.advance(0.1)
    assert await lab.pool.hand_over("e") == 0
