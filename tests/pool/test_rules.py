"""The rules of the pool's protocol that Lua carries out, each shown to be needed.

A rule is a scenario that passes with the scripts as they are, and fails when the piece of Lua that carries the rule is
taken out. `test_rule` runs it both ways. The names are those of docs/pool.md. Where a rule stands in several
places of the Lua, each place has a scenario of its own ("claim_cas", "claim_cas, owner and term"). The rules pending,
ep_revive, reconnect, from_zero and lease_reads are not here: the endpoint and the scheduler carry them out.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import pytest
from pool.lab import CONSTANTS, Lab, tokens_of
from pool.model import prefix_digest
from redis.exceptions import ResponseError
from servers import RedisServer

from orca_pool.pool import TAKEN
from orca_pool.records import (
    NO_LOAD,
    Attached,
    CommitAnswer,
    CommitRow,
    CommittedToken,
    EngineInfo,
    EngineState,
    Packet,
    Reason,
    Refusal,
)
from orca_pool.scripts import sources
from orca_pool.wire import pack_tokens

Scenario = Callable[[Lab], Awaitable[None]]


@dataclass(frozen=True)
class Rule:
    """The scenario fails when, in lua/SCRIPT.lua, `old` becomes `new`."""

    name: str
    script: str
    old: str
    new: str
    scenario: Scenario


RULES: list[Rule] = []


def rule(name: str, script: str, old: str, new: str = "") -> Callable[[Scenario], Scenario]:
    def add(scenario: Scenario) -> Scenario:
        RULES.append(Rule(name, script, old, new, scenario))
        return scenario

    return add


async def packets_of(lab: Lab, endpoint: str = "e") -> list[Packet]:
    return [packet for entry in await lab.pool.read(endpoint, None, wait=0) for packet in entry.packets]


async def ready(lab: Lab) -> None:
    await lab.endpoint()
    await lab.engine()


# -- engines with roles
async def handed_over(lab: Lab) -> None:
    """The request "a", which g has handed over; h decodes."""
    await lab.endpoint()
    await lab.engine("g", role="prefill")
    await lab.engine("h", role="decode")
    claim = await lab.claimed("a")
    assert await lab.commit("a", claim, 0, 1, handed=b"row 1") == -1


async def let_go(lab: Lab) -> int:
    """How many hints g has that what it keeps is not needed."""
    return sum(hint.startswith("/") for hint in (await lab.dump())["control"].get("g", []))


@rule("handed", "claim", "decodes and HANDED or WAITING", "WAITING")
async def an_engine_that_decodes_takes_what_was_handed_over_alone(lab: Lab) -> None:
    await handed_over(lab)
    await lab.submit("b")
    assert list(await lab.claim("h")) == ["a"]
    assert list(await lab.claim("g")) == ["b"]


@rule(
    "handed, kept",
    "claim",
    "decodes and request.new and not kept(request.handed_at, request.queued_at, time)",
    "false",
)
async def what_a_lost_engine_has_handed_over_begins_again(lab: Lab) -> None:
    await handed_over(lab)
    await lab.pool.renew("g", *lab.terms["g"], epoch=9)
    assert await lab.claim("h") == {}
    assert list(await lab.claim("g")) == ["a"]


@rule("handed, in vain", "renew_scheduler", "  queue_what_was_handed_in_vain(time)\n  end", "  end")
async def what_no_engine_takes_in_time_begins_again(lab: Lab) -> None:
    await handed_over(lab)
    await lab.live(31, "e")
    assert (await lab.dump())["waiting"] == ["a"]


@rule("handed, once", "commit", "unclaim(id, claims[row], engine)\n    call", "call")
async def a_commit_that_comes_again_hands_nothing_over(lab: Lab) -> None:
    await handed_over(lab)
    assert (await lab.dump())["claimed"] == {}
    await lab.claim("h")
    await lab.commit("a", lab.heard["g"], 0, 1, handed=b"row 1")
    assert (await lab.dump())["claimed"] == {"h": ["a"]}


@rule(
    "handed, again",
    "commit",
    "count = not handed_before(id, row, said) and COMMITTED.GONE or nil",
    "count = COMMITTED.GONE",
)
@rule("handed, again, claim", "commit", " and by == claims[row]", "")
@rule("handed, again, engine", "commit", " and at == place_at(engine)", "")
async def an_engine_whose_answer_was_lost_keeps_what_it_has_handed_over(lab: Lab) -> None:
    """Its commit comes again, and hands nothing over: the row is kept until the other engine has pulled it."""
    await handed_over(lab)
    claim, row = lab.heard["g"], pack_tokens(tokens_of(0, 1))
    answer = await lab.pool.commit("g", *lab.terms["g"], [CommitRow("a", claim, 0, row, None, handed=b"row 1")])
    assert answer == CommitAnswer([-1], 0, lab.now)
    assert await lab.commit("a", claim - 1, 0, 1, handed=b"row 1") == -2
    assert [p.first for p in await packets_of(lab)] == [0]
    assert (await lab.dump())["tokens"]["a"] == tokens_of(0, 1)
    [pulling] = (await lab.claim("h")).values()
    assert await lab.commit("a", claim, 0, 1, engine="h", handed=b"row 1") == -2
    assert await lab.commit("a", claim, 0, 1, handed=b"row 1") == -1
    await lab.pool.pulled("h", *lab.terms["h"], "a", pulling)
    assert await lab.commit("a", claim, 0, 1, handed=b"row 1") == -2


async def with_roles(lab: Lab, prefill: str, decode: str, *, finishing: bool = False) -> None:
    """g prefills and h decodes, of these weights. h perhaps begins nothing more."""
    for engine, role, weights in (("g", "prefill", prefill), ("h", "decode", decode)):
        form = EngineInfo(engine, 1, 1, 64, 0, role=role)
        load = NO_LOAD._replace(finishing=finishing and role == "decode")
        epoch = round(lab.now / 1_000_000)
        await lab.pool.renew(engine, *lab.terms[engine], epoch=epoch, form=form, weights=weights, load=load)


async def roles(lab: Lab, slots: int = 64) -> None:
    """g prefills, h decodes, of this number of slots, and both have weights old."""
    await lab.endpoint()
    await lab.engine("g", role="prefill")
    await lab.engine("h", slots, role="decode")
    for engine in "gh":
        await lab.pool.renew(engine, *lab.terms[engine], weights="old")


@rule("handed, to none", "prelude", "role == 'prefill' and not gone_on_with(weights)", "false")
async def an_update_of_one_role_begins_nothing_that_the_other_cannot_go_on_with(lab: Lab) -> None:
    await roles(lab)
    await with_roles(lab, "old", "new")
    await lab.submit("a")
    assert await lab.claim("g") == {}
    await with_roles(lab, "new", "new")
    await lab.live(1, "e")
    assert list(await lab.claim("g")) == ["a"]


@rule("handed, to one that finishes", "prelude", " and weights == mine and finishing ~= '1'", " and weights == mine")
async def what_is_tied_alone_goes_to_an_engine_that_finishes(lab: Lab) -> None:
    await roles(lab)
    await lab.submit("a")
    claim = (await lab.claim("g"))["a"]
    load = NO_LOAD._replace(finishing=True)
    await lab.pool.renew("h", *lab.terms["h"], load=load)
    await lab.submit("b")
    assert await lab.claim("g") == {}
    assert await lab.commit("a", claim, 0, 1, handed=b"row") == -1
    assert list(await lab.claim("h")) == ["a"]


@rule("same_weights, queue", "prelude", "local side = role == 'decode'", "local side = false")
async def weights_that_only_an_engine_that_decodes_has_are_not_there(lab: Lab) -> None:
    await roles(lab)
    await lab.submit("a")
    claim = (await lab.claim("g"))["a"]
    assert await lab.commit("a", claim, 0, 1, handed=b"row") == -1
    await lab.advance(1)
    await with_roles(lab, "new", "old")
    await lab.live(31, "e")
    assert (await lab.record("a"))["reason"] == Reason.MODEL_CHANGED


@rule(
    "handed, hopeless",
    "prelude",
    "  if reason then\n    end_early(id, reason, committed(id))\n    return",
    "  if false then",
)
async def what_no_engine_that_decodes_can_take_ends(lab: Lab) -> None:
    """Its place in the queue is one where an engine that prefills would take it again and again."""
    await roles(lab)
    await lab.submit("a")
    claim = (await lab.claim("g"))["a"]
    assert await lab.commit("a", claim, 0, 1, handed=b"row") == -1
    form = EngineInfo("h", 1, 1, 64, 0, role="decode")
    await lab.pool.renew("h", *lab.terms["h"], form=form, weights="new")
    await lab.live(29, "e")
    assert (await lab.record("a"))["state"] == "handed", "its weights may come back"
    await lab.advance(2)
    assert await lab.claim("h") == {}
    assert (await lab.record("a"))["reason"] == Reason.MODEL_CHANGED


@rule("never_fit, roles", "prelude", "first == '' or role ~= first", "false")
async def the_largest_request_is_one_that_both_roles_can_run(lab: Lab) -> None:
    await roles(lab, slots=32)
    await lab.submit("a", 48)
    await lab.live(1, "e")
    assert (await lab.record("a"))["reason"] == Reason.NEVER_FITS
    assert await lab.submit("b", 48) is Refusal.NEVER_FITS
    assert isinstance(await lab.submit("c", 32), Attached)


@rule("let_go", "pulled", "\n  let_go(id)\n", "\n")
async def an_engine_learns_that_its_keys_and_values_were_pulled(lab: Lab) -> None:
    await handed_over(lab)
    [claim] = (await lab.claim("h")).values()
    for _ in range(2):
        await lab.pool.pulled("h", *lab.terms["h"], "a", claim)
    assert await let_go(lab) == 1


@rule("let_go, claim", "pulled", "claim_now == claim and holder == engine", "true")
async def only_who_has_a_request_says_that_it_was_pulled(lab: Lab) -> None:
    await handed_over(lab)
    [claim] = (await lab.claim("h")).values()
    await lab.pool.pulled("h", *lab.terms["h"], "a", claim - 1)
    assert (await lab.dump())["control"] == {}


@rule("let_go, end", "prelude", "  let_go(id)\n  add_load('requests:'", "  add_load('requests:'")
async def an_engine_learns_that_what_it_keeps_has_ended(lab: Lab) -> None:
    await handed_over(lab)
    await lab.pool.cancel("a")
    assert await let_go(lab) == 1


@rule("let_go, again", "give_back", "      let_go(id)\n", "")
async def an_engine_learns_that_what_it_keeps_begins_again(lab: Lab) -> None:
    await handed_over(lab)
    [claim] = (await lab.claim("h")).values()
    await lab.pool.give_back("h", *lab.terms["h"], {"a": (claim, False)})
    assert await let_go(lab) == 1
    assert list(await lab.claim("g")) == ["a"]


# -- claiming
@rule("claim_cas", "claim", "if heard < last then", "if false then")
async def a_claim_whose_answer_was_lost_takes_nothing_more(lab: Lab) -> None:
    await ready(lab)
    for request_id in ("a", "b"):
        await lab.submit(request_id)
    first = await lab.pool.claim("g", *lab.terms["g"], 0, count=1, slots=64, total=64)
    again = await lab.pool.claim("g", *lab.terms["g"], 0, count=1, slots=64, total=64)
    assert again == first
    assert (await lab.dump())["waiting"] == ["b"]


@rule("claim_cas, owner and term", "claim", "if fenced(engine, owner, term) then", "if false then")
async def an_old_master_claims_nothing(lab: Lab) -> None:
    await ready(lab)
    old = lab.terms["g"]
    await lab.pool.release("g", *old)
    await lab.pool.acquire("g", "t", None)
    await lab.submit("a")
    assert await lab.pool.claim("g", *old, 0, count=1, slots=64, total=64) is None
    assert (await lab.dump())["waiting"] == ["a"]


@rule("prefix", "claim", "if only and only ~= engine then", "if false then")
async def a_turn_goes_to_the_engine_that_has_its_prefix(lab: Lab) -> None:
    await ready(lab)
    await lab.engine("h")
    await lab.claimed_by("h", "a", keys=b"system--turn one")
    await lab.submit("b", keys=b"system--turn oneturn two")
    assert await lab.claim("g") == {}
    assert list(await lab.claim("h")) == ["b"]


@rule("prefix, place", "prelude", "engine and place_at(engine) == place", "engine")
async def a_new_epoch_has_no_prefix(lab: Lab) -> None:
    await ready(lab)
    await lab.engine("h")
    await lab.claimed_by("h", "a", keys=b"system--turn one")
    await lab.submit("b", keys=b"system--turn oneturn two")
    await lab.pool.renew("h", *lab.terms["h"], epoch=9)
    assert list(await lab.claim("g")) == ["b"]


@rule("prefix, several", "submit", "of:sub(1, 1) == ONE", "true")
async def prompts_that_end_alike_are_no_conversation(lab: Lab) -> None:
    await ready(lab)
    await lab.engine("h")
    for request_id in ("a", "b"):
        await lab.claimed_by("h", request_id, keys=b"system--")
    await lab.submit("c", keys=b"system--")
    assert list(await lab.claim("g")) == ["c"]


async def overtaken(lab: Lab) -> str:
    """A request that waits for another engine, and more behind it than may overtake it. Returns its id."""
    await ready(lab)
    await lab.engine("h")
    await lab.claimed_by("h", "a", keys=b"system--turn one")
    await lab.submit("b", keys=b"system--turn oneturn two")
    for n in range(9):
        await lab.submit(f"c{n}", 4, max_waiting=16)
    return "b"


@rule("overtaking", "claim", "times >= OVERTAKINGS and one or nil", "nil")
async def a_request_is_overtaken_so_often_at_most(lab: Lab) -> None:
    waits = await overtaken(lab)
    assert list(await lab.claim(count=16)) == [f"c{n}" for n in range(8)]
    assert list(await lab.claim(count=16)) == [waits, "c8"]


@rule("overtaking, time", "prelude", " or now() - queued_at >= PREFIX_WAIT")
async def a_request_waits_so_long_for_an_engine_at_most(lab: Lab) -> None:
    waits = await overtaken(lab)
    await lab.advance(0.5)
    assert next(iter(await lab.claim(count=16))) == waits


@rule("never_fit, claim", "claim", "elseif size <= total and suits(", "elseif suits(")
async def a_request_for_a_larger_engine_holds_up_nobody(lab: Lab) -> None:
    await ready(lab)
    await lab.engine("small", slots=16)
    await lab.submit("large", 60)
    await lab.submit("little", 8)
    assert list(await lab.claim("small", slots=16, total=16)) == ["little"]
    assert list(await lab.claim("g")) == ["large"]


@rule("never_fit, sweep", "prelude", "tonumber(slots) > (tonumber(call('HGET', POOL, 'slots')) or math.huge)", "false")
async def what_fits_no_engine_any_more_ends(lab: Lab) -> None:
    await ready(lab)
    await lab.engine("small", slots=16)
    await lab.submit("large", 60)
    await lab.pool.retire("g", *lab.terms["g"])
    await lab.live(1, "e")
    assert (await lab.record("large"))["reason"] == Reason.NEVER_FITS


@rule("never_fit, submit", "submit", "if tonumber(max_tokens) > largest then", "if false then")
async def what_fits_no_engine_is_refused(lab: Lab) -> None:
    await ready(lab)
    assert await lab.submit("a", 65) is Refusal.NEVER_FITS


@rule("unknown_size", "submit", "if largest == 0 then", "if false then")
async def before_any_engine_has_formed_nothing_is_judged(lab: Lab) -> None:
    await lab.endpoint()
    await lab.engine(slots=0)
    assert await lab.submit("a", 65) is Refusal.NO_ENGINE


@rule("never_fit, given back", "give_back", "if hopeless(tied, max_tokens, there) then", "if false then")
async def what_comes_back_and_fits_nowhere_ends(lab: Lab) -> None:
    await ready(lab)
    claim = await lab.claimed("large", max_tokens=60)
    await lab.pool.renew("g", *lab.terms["g"], form=EngineInfo("g", 1, 1, 16, 0))
    await lab.live(1, "e")
    await lab.lose("large", claim)
    await lab.live(1, "e")
    assert (await lab.record("large"))["reason"] == Reason.NEVER_FITS


@rule("never_fit, smaller", "renew_scheduler", "call('HSET', POOL, 'slots', largest, 'shrunk', 0)")
async def the_largest_engine_may_shrink(lab: Lab) -> None:
    await ready(lab)
    await lab.pool.renew("g", *lab.terms["g"], form=EngineInfo("g", 1, 1, 16, 0))
    await lab.live(1, "e")
    assert await lab.submit("a", 60) is Refusal.NEVER_FITS


@rule("never_fit, many", "renew_scheduler", "if #page == 2 * SWEEP_AT_ONCE then", "if false then")
async def more_may_wait_than_one_sweep_looks_at(lab: Lab) -> None:
    await ready(lab)
    await asyncio.gather(*(lab.submit(f"r{n}", 40, max_waiting=999) for n in range(300)))
    await lab.pool.renew("g", *lab.terms["g"], form=EngineInfo("g", 1, 1, 16, 0))
    await lab.live(1, "e")
    assert not await lab.redis("ZCARD", f"{lab.keys.prefix}waiting")


# -- weights
async def with_weights(lab: Lab, engine: str, weights: str, *, slots: int = 64, finishing: bool = False) -> None:
    """The engine has formed with these weights, and perhaps begins nothing more."""
    form, load = EngineInfo(engine, 1, 1, slots, 0), NO_LOAD._replace(finishing=finishing)
    await lab.pool.renew(engine, *lab.terms[engine], form=form, weights=weights, load=load)


async def of_two_weights(lab: Lab) -> int:
    """Engine g of weights old has made a token of `a`, engine h is of weights new. Returns the claim."""
    await ready(lab)
    await lab.engine("h")
    await with_weights(lab, "g", "old")
    await with_weights(lab, "h", "new")
    return await lab.claimed("a", 1)


@rule("same_weights", "claim", " and suits(tied_to(id, request.weights), engine, mine, finishing)")
async def what_has_tokens_goes_on_with_the_weights_that_made_them(lab: Lab) -> None:
    await lab.lose("a", await of_two_weights(lab))
    assert list(await lab.claim("h")) == []
    assert (await lab.claim("g")).keys() == {"a"}


@rule(
    "same_weights, tied",
    "prelude",
    "return (weights or '') ~= '' and committed(id) > 0",
    "return (weights or '') ~= ''",
)
async def what_has_no_token_begins_anywhere(lab: Lab) -> None:
    await of_two_weights(lab)
    claim = await lab.claimed("b")
    await lab.lose("b", claim)
    assert list(await lab.claim("h")) == ["b"]
    assert (await lab.record("b"))["weights"] == "new"


@rule(
    "same_weights, noted",
    "claim",
    """,
    'weights', weights)""",
    ")",
)
async def a_claim_notes_the_weights(lab: Lab) -> None:
    await lab.lose("a", await of_two_weights(lab))
    assert list(await lab.claim("h")) == []


@rule("same_weights, ends", "prelude", "stranded(tied, slots, there) and REASON.MODEL_CHANGED or nil", "nil")
async def what_no_engine_can_go_on_with_ends(lab: Lab) -> None:
    await lab.lose("a", await of_two_weights(lab))
    await with_weights(lab, "g", "new")
    await lab.live(1, "e")
    assert (await lab.record("a"))["reason"] == Reason.MODEL_CHANGED


@rule("same_weights, waits", "prelude", "there ~= nil and tonumber(slots) > (there[weights] or 0)", "not there")
async def without_any_engine_it_waits(lab: Lab) -> None:
    await lab.lose("a", await of_two_weights(lab))
    for engine in "gh":
        await lab.pool.retire(engine, *lab.terms[engine])
    await lab.live(1, "e")
    assert (await lab.record("a"))["state"] == "waiting"


@rule("same_weights, small", "prelude", "tonumber(slots) > (there[weights] or 0)", "not there[weights]")
async def what_fits_no_engine_of_its_weights_ends(lab: Lab) -> None:
    await ready(lab)
    await lab.engine("h", slots=16)
    await with_weights(lab, "g", "old")
    await with_weights(lab, "h", "old", slots=16)
    await lab.lose("a", await lab.claimed("a", 1, max_tokens=60))
    await with_weights(lab, "g", "new")
    await lab.live(1, "e")
    assert (await lab.record("a"))["reason"] == Reason.MODEL_CHANGED


@rule("same_weights, given back", "give_back", "if hopeless(tied, max_tokens, there) then", "if false then")
async def what_comes_back_after_the_change_ends(lab: Lab) -> None:
    claim = await of_two_weights(lab)
    await with_weights(lab, "g", "new")
    await lab.live(1, "e")
    await lab.lose("a", claim)
    await lab.live(1, "e")
    assert (await lab.record("a"))["reason"] == Reason.MODEL_CHANGED


@rule("same_weights, changed", "renew", "call('HSET', POOL, 'shrunk', 0)")
async def a_change_of_weights_is_noticed(lab: Lab) -> None:
    await lab.lose("a", await of_two_weights(lab))
    await lab.live(1, "e")
    await with_weights(lab, "g", "new")
    await lab.live(1, "e")
    assert (await lab.record("a"))["reason"] == Reason.MODEL_CHANGED


@rule("same_weights, retired", "retire", "call('HSET', POOL, 'shrunk', 0)")
async def the_end_of_an_engine_is_noticed(lab: Lab) -> None:
    await lab.lose("a", await of_two_weights(lab))
    await lab.live(1, "e")
    await lab.pool.retire("g", *lab.terms["g"])
    await lab.live(1, "e")
    assert (await lab.record("a"))["reason"] == Reason.MODEL_CHANGED


async def expected(lab: Lab) -> None:
    """Engine g has lost its weights, which requests wait for, and is of others."""
    await lab.lose("a", await of_two_weights(lab))
    await lab.pool.expect("g", *lab.terms["g"], 30.0)
    await with_weights(lab, "g", "new")
    await lab.live(1, "e")


@rule(
    "expected",
    "prelude",
    "for _, weights in ipairs(found and call('ZRANGE', EXPECTED, 0, -1) or {}) do",
    "for _ in ipairs({}) do",
)
async def weights_may_come_back(lab: Lab) -> None:
    await expected(lab)
    assert (await lab.record("a"))["state"] == "waiting"
    await with_weights(lab, "g", "old")
    assert list(await lab.claim("g")) == ["a"]


@rule("expected, bounded", "renew_scheduler", "call('ZREMRANGEBYSCORE', EXPECTED, '-inf', int(due)) > 0", "false")
async def weights_are_not_waited_for_for_ever(lab: Lab) -> None:
    await expected(lab)
    await lab.live(31, "e")
    assert (await lab.record("a"))["reason"] == Reason.MODEL_CHANGED


@rule("expected, outage", "renew_scheduler", "call('ZINCRBY', EXPECTED, int(gap), weights)")
async def an_outage_takes_nothing_from_the_time_in_which_weights_may_come_back(lab: Lab) -> None:
    await expected(lab)
    await lab.advance(60)
    await lab.live(20, "e")
    assert (await lab.record("a"))["state"] == "waiting"
    await lab.live(20, "e")
    assert (await lab.record("a"))["reason"] == Reason.MODEL_CHANGED


@rule("expected, fenced", "expect", "not fenced(engine, owner, term) and ", "")
async def an_old_master_expects_nothing(lab: Lab) -> None:
    await lab.lose("a", await of_two_weights(lab))
    owner, term = lab.terms["g"]
    await lab.pool.expect("g", owner, term - 1, 30.0)
    assert not (await lab.dump())["expected"]


@rule("expected, longest", "expect", "EXPECTED, 'GT', ", "EXPECTED, ")
async def an_engine_shortens_no_wait_of_another(lab: Lab) -> None:
    await ready(lab)
    for engine in ("g", "h"):
        await lab.engine(engine)
        await with_weights(lab, engine, "old")
    await lab.pool.expect("g", *lab.terms["g"], 30.0)
    before = (await lab.dump())["expected"]
    await lab.pool.expect("h", *lab.terms["h"], 3.0)
    assert (await lab.dump())["expected"] == before


@rule("finishing", "prelude", "(weights == '' and not finishing)", "weights == ''")
async def an_engine_that_finishes_begins_nothing(lab: Lab) -> None:
    await lab.lose("a", await of_two_weights(lab))
    await lab.submit("b")
    await with_weights(lab, "g", "old", finishing=True)
    assert list(await lab.claim("g")) == ["a"]
    renewed = await lab.pool.renew("g", *lab.terms["g"], load=NO_LOAD._replace(finishing=True))
    assert renewed is not None
    assert renewed.needs == 0, "nothing waits that this engine may take"
    assert list(await lab.claim("h")) == ["b"]


@rule("same_weights, hinted", "prelude", "suits(tied, engine, mine, finishing) and decodes", "decodes")
async def the_hint_goes_to_an_engine_that_may_take_it(lab: Lab) -> None:
    claim = await of_two_weights(lab)
    assert list(await lab.claim("g", slots=40)) == []
    assert list(await lab.claim("h")) == [], "the emptier one, which asks too"
    await lab.lose("a", claim)
    control = (await lab.dump())["control"]
    assert control == {"g": [""]}


# -- adapters
async def loaded(lab: Lab, *engines: str, folder: str = "/x") -> str:
    """An adapter of the name `legal` that these engines have. Returns its id."""
    adapter = await lab.pool.load_adapter("legal", folder)
    for engine in engines:
        assert await lab.pool.tell_adapters(engine, *lab.terms[engine], [(adapter, "print", "")])
    return adapter


@rule("same_adapter", "prelude", " and (adapter == '' or has_adapter(engine, adapter))")
async def an_engine_claims_requests_of_adapters_that_it_has(lab: Lab) -> None:
    await ready(lab)
    await lab.engine("h")
    await lab.submit("a", adapter=await loaded(lab, "h"))
    await lab.submit("b")
    assert list(await lab.claim("g")) == ["b"]
    assert list(await lab.claim("h")) == ["a"]
    assert (await lab.record("a"))["weights"].startswith("/legal@")


@rule("same_adapter, formed", "renew", "call('DEL', HAS .. engine) -- its ranks", "-- its ranks")
async def ranks_that_formed_anew_have_no_adapter_yet(lab: Lab) -> None:
    await ready(lab)
    adapter = await loaded(lab, "g")
    await with_weights(lab, "g", "w")
    await lab.submit("a", adapter=adapter)
    assert list(await lab.claim("g")) == []
    await lab.pool.tell_adapters("g", *lab.terms["g"], [(adapter, "print", "")])
    assert list(await lab.claim("g")) == ["a"]


@rule("same_adapter, kept", "renew_scheduler", " and not in_use(id) then", " then")
async def an_adapter_is_kept_as_long_as_a_request_has_it(lab: Lab) -> None:
    await ready(lab)
    old = await loaded(lab, "g")
    claim = await lab.claimed("a", 1, adapter=old)
    new = await loaded(lab, "g", folder="/y")
    await lab.live(15, "e")
    assert {i: one.state for i, one in (await lab.pool.adapters()).entries.items()} == {old: "retired", new: "current"}
    await lab.lose("a", claim)
    assert list(await lab.claim("g")) == [], "the engine has told only the new one"
    await lab.pool.tell_adapters("g", *lab.terms["g"], [(old, "print", ""), (new, "print", "")])
    claim = (await lab.claim("g"))["a"]
    await lab.commit("a", claim, 1, 1, Reason.LENGTH)
    await lab.live(4, "e")
    assert list((await lab.pool.adapters()).entries) == [new]
    assert await lab.submit("b", adapter=old) is Refusal.NO_ADAPTER


@rule("same_adapter, evicted", "renew_scheduler", "      call('SREM', USES .. adapter, id)\n")
async def a_record_that_redis_evicted_keeps_no_adapter(lab: Lab) -> None:
    await ready(lab)
    adapter = await loaded(lab, "g")
    await lab.submit("a", adapter=adapter)
    claim = await lab.claimed("b", adapter=adapter)
    await lab.redis("DEL", f"{lab.keys.prefix}request:a")
    await lab.pool.unload_adapter("legal")
    await lab.live(20, "e")
    assert list((await lab.pool.adapters()).entries) == [adapter]
    await lab.commit("b", claim, 0, 1, Reason.LENGTH)
    await lab.live(4, "e")
    assert not (await lab.pool.adapters()).entries


@rule("same_adapter, other files", "tell_adapters", "entry.print ~= '' and entry.print ~= print", "false")
async def an_engine_that_has_read_other_files_does_not_have_the_adapter(lab: Lab) -> None:
    await ready(lab)
    await lab.engine("h")
    adapter = await loaded(lab, "g")
    await lab.pool.tell_adapters("h", *lab.terms["h"], [(adapter, "another", "")])
    await lab.submit("a", adapter=adapter)
    assert list(await lab.claim("h")) == []
    assert list(await lab.claim("g")) == ["a"]


@rule("same_adapter, written over", "tell_adapters", "not written_over(id, entry, print, why) and entry", "entry")
async def files_that_were_written_over_have_an_id_of_their_own_once_all_engines_read_them(lab: Lab) -> None:
    """As when new files lie in the folder of a setting's adapter, and everything is made anew."""
    await ready(lab)
    await lab.engine("h")
    [old] = await lab.pool.name_adapters({"legal": "/x"})

    async def tell(engine: str, has: list[tuple[str, str, str]]) -> dict[str, tuple[str, str]]:
        await with_weights(lab, engine, "w")
        await lab.pool.tell_adapters(engine, *lab.terms[engine], has)
        return {i: (one.state, one.fingerprint) for i, one in (await lab.pool.adapters()).entries.items()}

    for engine in ("g", "h"):
        await tell(engine, [(old, "before", "")])
    await lab.submit("a", adapter=old)
    assert await tell("g", [(old, "after", "")]) == {old: ("current", "before")}, "h has it"
    assert await tell("h", [(old, "third", "")]) == {old: ("current", "before")}, "they read different files"
    await tell("g", [(old, "", "it is gone")])
    assert await tell("h", [(old, "after", "")]) == {old: ("current", "before")}, "g does not read it"
    [(new, entry)] = (await tell("g", [(old, "after", "")])).items()
    assert (new != old, entry) == (True, ("current", "after"))
    assert await lab.pool.name_adapters({"legal": "/x"}) == []
    await lab.live(1, "e")
    assert (await lab.record("a"))["reason"] == Reason.MODEL_CHANGED, "no engine has its files"
    assert await lab.submit("b", adapter=old) is Refusal.NO_ADAPTER
    await lab.submit("c", adapter=new)
    await lab.pool.tell_adapters("h", *lab.terms["h"], [(new, "after", "")])
    assert list(await lab.claim("h")) == ["c"]


@rule("same_adapter, ends", "prelude", "call('HEXISTS', ADAPTERS, adapter) == 0 or hope", "hope")
async def a_request_ends_whose_adapter_is_forgotten(lab: Lab) -> None:
    await ready(lab)
    adapter = await loaded(lab, "g")
    await lab.submit("a", adapter=adapter)
    await lab.redis("HDEL", f"{lab.keys.prefix}adapters", adapter)
    await with_weights(lab, "g", "w")
    await lab.live(1, "e")
    assert (await lab.record("a"))["reason"] == Reason.MODEL_CHANGED


@rule("same_adapter, lost", "prelude", " or hope[true] == false or hope[false] == false")
async def an_adapter_that_no_engine_has_any_more_is_not_waited_for(lab: Lab) -> None:
    """Its files are gone or others, and every engine says so. One that has not told yet may have it."""
    await ready(lab)
    await lab.engine("h")
    adapter = await loaded(lab, "g", "h")
    await lab.submit("a", adapter=adapter)
    await with_weights(lab, "g", "w")
    await with_weights(lab, "h", "w")
    await lab.pool.tell_adapters("g", *lab.terms["g"], [(adapter, "another", "")])
    await lab.live(1, "e")
    assert (await lab.record("a"))["state"] == "waiting"
    await lab.pool.tell_adapters("h", *lab.terms["h"], [(adapter, "", "no such folder")])
    await lab.live(1, "e")
    assert (await lab.record("a"))["reason"] == Reason.MODEL_CHANGED
    assert await lab.submit("b", adapter=adapter) is Refusal.NO_ADAPTER


@rule("same_adapter, lost is noticed", "tell_adapters", "if lost then", "if false then")
async def the_sweep_looks_for_those_of_an_adapter_that_is_lost(lab: Lab) -> None:
    await ready(lab)
    adapter = await loaded(lab, "g")
    await lab.submit("a", adapter=adapter)
    await lab.live(1, "e")
    await lab.pool.tell_adapters("g", *lab.terms["g"], [(adapter, "", "no such folder")])
    await lab.live(1, "e")
    assert (await lab.record("a"))["reason"] == Reason.MODEL_CHANGED


@rule(
    "same_adapter, roles",
    "prelude",
    "call('HGET', ENGINE .. engine, 'role') == 'decode'\n      hope",
    "false\n      hope",
)
async def an_adapter_of_one_role_alone_is_not_there(lab: Lab) -> None:
    await roles(lab)
    adapter = await loaded(lab, "g", "h")
    await lab.submit("a", adapter=adapter)
    claim = (await lab.claim("g"))["a"]
    assert await lab.commit("a", claim, 0, 1, handed=b"row") == -1
    await lab.pool.tell_adapters("h", *lab.terms["h"], [(adapter, "", "does not fit")])
    assert await lab.submit("b", adapter=adapter) is Refusal.NO_ADAPTER
    await lab.live(31, "e")
    assert (await lab.record("a"))["reason"] == Reason.MODEL_CHANGED


@rule("same_adapter, setting", "change_adapters", "entries[has].source == 'setting' or", "")
async def calls_leave_the_adapters_of_settings_alone(lab: Lab) -> None:
    await ready(lab)
    [adapter] = await lab.pool.name_adapters({"legal": "/x"})
    assert await lab.pool.name_adapters({"legal": "/x"}) == []
    assert await lab.pool.load_adapter("legal", "/y") == ""
    assert not await lab.pool.unload_adapter("legal")
    assert (await lab.pool.adapters()).entries[adapter].state == "pending"


@rule("same_adapter, taken", "change_adapters", "elseif what == 'load' and has then", "elseif false then")
async def a_name_is_loaded_once(lab: Lab) -> None:
    await ready(lab)
    first = await lab.pool.load_adapter("legal", "/x", replace=False)
    assert await lab.pool.load_adapter("legal", "/y", replace=False) == TAKEN
    assert [*(await lab.pool.adapters()).entries] == [first]


# -- hints
async def asking(lab: Lab, **free: int) -> None:
    """Engines that find nothing to claim, with so many free slots."""
    await lab.endpoint()
    for engine, slots in free.items():
        await lab.engine(engine)
        assert await lab.claim(engine, slots=slots) == {}


@rule("hint, one", "prelude", "      call('ZREM', ASKING, engine)\n")
async def each_request_is_told_to_one_engine(lab: Lab) -> None:
    await asking(lab, g=32, h=64, i=16)
    for request_id in ("a", "b"):
        await lab.submit(request_id, 8)
    assert (await lab.dump())["control"] == {"h": [""], "g": [""]}


@rule("hint, room", "prelude", "call('ZRANGE', ASKING, '+inf', slots, ", "call('ZRANGE', ASKING, '+inf', 0, ")
async def no_engine_is_told_what_does_not_fit(lab: Lab) -> None:
    await asking(lab, g=32)
    await lab.submit("a", 48)
    assert (await lab.dump())["control"] == {}
    answer = await lab.pool.commit("g", *lab.terms["g"], [])
    assert answer is not None
    assert answer.needs == 48


@rule("hint, next head", "claim", "hint_waiting(needs, waits, only, decodes) -- another engine may have room for it")
async def what_one_engine_leaves_is_told_to_another(lab: Lab) -> None:
    await asking(lab, g=32, h=24)
    await lab.submit("large", 48)
    await lab.submit("a", 20)  # g hears of it, and finds the large one before it
    assert await lab.claim("g", slots=32) == {}
    await lab.engine("x")
    assert list(await lab.claim("x", count=1)) == ["large"]
    assert (await lab.dump())["control"] == {"g": [""], "h": [""]}


@rule("hint, unhinted", "prelude", "return room and tonumber(room) >= slots and 0 or slots", "return slots")
async def who_asks_hears_by_hints_alone(lab: Lab) -> None:
    await asking(lab, g=32, h=24)
    await lab.submit("a", 8)
    for engine, needs in (("g", 8), ("h", 0)):  # g was hinted, and asks no more
        answer = await lab.pool.commit(engine, *lab.terms[engine], [])
        assert answer is not None
        assert answer.needs == needs


# -- what Redis evicted
@rule("restore, waiting", "renew_scheduler", "  if state == 'waiting' and not call", "  if false and not call")
async def a_request_outside_of_its_queue_is_queued_again(lab: Lab) -> None:
    await ready(lab)
    await lab.submit("a")
    await lab.redis("DEL", f"{lab.keys.prefix}waiting")
    await lab.live(60, "e")
    assert (await lab.redis("ZRANGE", f"{lab.keys.prefix}waiting", 0, -1)) == [b"a"]


@rule("restore, claimed", "renew_scheduler", "  if state == 'claimed' and not", "  if false and not")
async def a_claim_that_its_engine_cannot_know_is_queued_again(lab: Lab) -> None:
    await ready(lab)
    claim = await lab.claimed("a", 1)
    await lab.redis("DEL", f"{lab.keys.prefix}claimed:g")
    await lab.live(60, "e")
    assert await lab.commit("a", claim, 1, 1) == -2
    assert list(await lab.claim()) == ["a"]


@rule("restore, record", "claim", "call('ZREM', QUEUE, id) -- Redis has evicted the record")
async def a_queue_goes_on_past_a_lost_record(lab: Lab) -> None:
    await ready(lab)
    await lab.submit("a")
    await lab.submit("b")
    await lab.redis("DEL", f"{lab.keys.prefix}request:a")
    assert list(await lab.claim()) == ["b"]
    assert await lab.redis("ZRANGE", f"{lab.keys.prefix}waiting", 0, -1) == []


@rule("restore, handed", "claim", "decodes and request.new and not kept", "decodes and not kept")
async def a_long_walk_goes_on_past_a_lost_record(lab: Lab) -> None:
    """Of what was handed over, too: more than a page of it."""
    await lab.endpoint()
    await lab.engine("g", slots=400, role="prefill")
    await lab.engine("h", slots=400, role="decode")
    names = [f"r{i:02}" for i in range(22)]
    for name in names:
        claim = await lab.claimed_by("g", name)
        assert await lab.commit(name, claim, 0, 1, handed=b"row") == -1
    await lab.redis("DEL", f"{lab.keys.prefix}request:r00")
    assert list(await lab.claim("h", count=100, slots=400, total=400)) == names[1:]


@rule("restore, first token", "commit", "(base == 0 or said.reason", "(said.reason")
@rule("restore, handed over", "commit", " or said.handed ~= '') and call('EXISTS'", ") and call('EXISTS'")
async def a_commit_makes_no_record_of_what_redis_evicted(lab: Lab) -> None:
    """The other rows of a commit go on, whether the row has its first token or is handed over; and so do sweeps."""
    await lab.endpoint()
    await lab.engine("g", role="prefill")
    gone = [await lab.claimed_by("g", name) for name in ("a", "b", "c")]
    kept = await lab.claimed_by("g", "d")
    assert await lab.commit("c", gone[2], 0, 1) == -1
    for name in ("a", "b", "c"):
        await lab.redis("DEL", f"{lab.keys.prefix}request:{name}")
    rows = [
        CommitRow("a", gone[0], 0, pack_tokens(tokens_of(0, 1)), None),
        CommitRow("b", gone[1], 0, pack_tokens(tokens_of(0, 1)), None, handed=b"row 1"),
        CommitRow("c", gone[2], 1, pack_tokens(tokens_of(1, 1)), None, handed=b"row 2"),
        CommitRow("d", kept, 0, pack_tokens(tokens_of(0, 1)), None),
    ]
    try:
        answer = await lab.pool.commit("g", *lab.terms["g"], rows)
    except ResponseError as error:
        raise AssertionError("the commit fails") from error
    assert answer is not None
    assert answer.rows == [-2, -2, -2, -1]
    assert [p.request_id for p in await packets_of(lab)] == ["c", "d"]
    await lab.live(10, "e")
    assert await lab.redis("KEYS", f"{lab.keys.prefix}request:*") == [f"{lab.keys.prefix}request:d".encode()]


@rule("restore, whole", "renew_scheduler", "  if not order then", "  if false then")
async def a_sweep_removes_what_is_left_of_a_record(lab: Lab) -> None:
    await ready(lab)
    await lab.redis("HSET", f"{lab.keys.prefix}request:a", "state", "handed", "queued_at", lab.now)
    try:
        await lab.live(10, "e")
    finally:
        assert not await lab.redis("EXISTS", f"{lab.keys.prefix}request:a")


@rule("unknown_size, sweep", "renew_scheduler", " and call('ZCOUNT', ENGINES, 0, 0) == 0")
async def an_engine_that_has_not_formed_may_be_large(lab: Lab) -> None:
    await ready(lab)
    await lab.submit("large", 60)
    await lab.engine("new", slots=0)
    await lab.pool.renew("g", *lab.terms["g"], form=EngineInfo("g", 1, 1, 16, 0))
    await lab.live(1, "e")
    assert (await lab.record("large"))["state"] == "waiting"


# -- calls
@rule("attempt, older", "prelude", "if mine < theirs or (", "if (")
async def an_older_call_does_not_come_back(lab: Lab) -> None:
    await ready(lab)
    await lab.submit("a", attempt=2)
    assert await lab.pool.attach("a", endpoint="e", attempt=1) is Refusal.STALE
    assert await lab.submit("a", attempt=1) is Refusal.STALE


@rule("attempt, detached", "prelude", " or (mine == theirs and closed == '1') then", " then")
async def a_late_attach_does_not_undo_its_detach(lab: Lab) -> None:
    await ready(lab)
    await lab.submit("a", attempt=2)
    await lab.pool.detach("a", attempt=2, grace=1.0)
    assert await lab.pool.attach("a", endpoint="e", attempt=2) is Refusal.STALE
    assert isinstance(await lab.pool.attach("a", endpoint="e", attempt=3), Attached)


@rule("packet_attempt", "prelude", "struct.pack(ADDRESS, attempt, #id)", "struct.pack(ADDRESS, 0, #id)")
async def a_packet_names_its_call(lab: Lab) -> None:
    await ready(lab)
    claim = await lab.claimed("a", attempt=5)
    await lab.pool.attach("a", endpoint="e", attempt=6)
    await lab.commit("a", claim, 0, 1)
    assert [packet.attempt for packet in await packets_of(lab)] == [5, 6]


@rule("superseded", "prelude", "if mine ~= theirs then", "if false then")
async def the_older_call_hears_of_the_newer(lab: Lab) -> None:
    await ready(lab)
    await lab.endpoint("f")
    await lab.submit("a", attempt=1)
    await lab.pool.attach("a", endpoint="f", attempt=2)
    said = [(packet.attempt, packet.finish and packet.finish.reason) for packet in await packets_of(lab, "e")]
    assert said == [(1, Reason.ABORTED)]


@rule("detach_fence", "detach", " or attempt < tonumber(attached) then", " then")
async def a_late_detach_leaves_the_newer_call(lab: Lab) -> None:
    await ready(lab)
    await lab.submit("a", attempt=1)
    await lab.pool.attach("a", endpoint="e", attempt=2)
    await lab.pool.detach("a", attempt=1, grace=0.0)
    assert (await lab.record("a"))["state"] == "waiting"


@rule("detach_fence, newer", "detach", "'attempt', ARGV[2], ")
async def a_detach_that_overtook_its_attach_refuses_it(lab: Lab) -> None:
    await ready(lab)
    await lab.submit("a", attempt=1)
    await lab.pool.detach("a", attempt=2, grace=1.0)
    assert await lab.pool.attach("a", endpoint="e", attempt=2) is Refusal.STALE
    said = [(packet.attempt, packet.finish and packet.finish.reason) for packet in await packets_of(lab)]
    assert said == [(1, Reason.ABORTED)]


@rule("registered, submit", "submit", "if not registered(endpoint) then", "if false then")
async def an_unregistered_incarnation_submits_nothing(lab: Lab) -> None:
    await ready(lab)
    assert await lab.submit("a", endpoint="ghost") is Refusal.UNREGISTERED
    assert (await lab.dump())["requests"] == {}


@rule("registered, attach", "attach", "if not registered(endpoint) then", "if false then")
async def an_unregistered_incarnation_attaches_nothing(lab: Lab) -> None:
    await ready(lab)
    await lab.submit("a")
    assert await lab.pool.attach("a", endpoint="ghost", attempt=2) is Refusal.UNREGISTERED
    assert (await lab.record("a"))["endpoint"] == "e"


@rule("cancel_ends", "cancel", "end_early(id, REASON.CANCELLED, committed(id))")
async def cancel_ends_at_once_and_the_engine_hears_of_it(lab: Lab) -> None:
    await ready(lab)
    claim = await lab.claimed("a", 2)
    assert await lab.pool.cancel("a") is True
    assert (await lab.record("a"))["reason"] == Reason.CANCELLED
    assert "a" in (await lab.pool.hints("g", None, wait=0))[1]
    assert await lab.commit("a", claim, 2, 1) == -2
    assert await lab.pool.cancel("a") is False


@rule("digest", "finish_at", "if redis.sha1hex(ids_of(id, final)) ~= digest then", "if false then")
async def a_stop_in_another_text_ends_nothing(lab: Lab) -> None:
    await ready(lab)
    await lab.claimed("a", 4)
    other = prefix_digest([CommittedToken(7, 0.0, 0)] * 3)
    assert await lab.pool.finish_at("a", 2, Reason.STOP, other) == "other"
    assert await lab.pool.finish_at("a", 4, Reason.STOP, prefix_digest(tokens_of(0, 5))) == "ahead"
    assert await lab.pool.finish_at("a", 2, Reason.STOP, prefix_digest(tokens_of(0, 3))) == "ok"
    assert (await lab.record("a"))["final"] == 3


@rule(
    "digest, attach", "prelude", "if digest ~= '' and redis.sha1hex(ids_of(id, seen)) ~= digest then", "if false then"
)
async def a_wrong_digest_disturbs_nobody(lab: Lab) -> None:
    await ready(lab)
    claim = await lab.claimed("a", 4, attempt=5)
    before = await lab.record("a")
    other = prefix_digest([CommittedToken(7, 0.0, 0)] * 3)
    assert await lab.pool.attach("a", endpoint="e", attempt=6, seen=3, digest=other) is Refusal.OTHER_TOKENS
    assert await lab.record("a") == before
    await lab.commit("a", claim, 4, 1)
    assert [packet.finish for packet in await packets_of(lab)] == [None, None]  # none is ABORTED
    right = prefix_digest(tokens_of(0, 3))
    assert isinstance(await lab.pool.attach("a", endpoint="e", attempt=6, seen=3, digest=right), Attached)


@rule("digest, from_index", "prelude", "if seen > count then", "if false then")
async def a_call_from_beyond_the_end_disturbs_nobody(lab: Lab) -> None:
    await ready(lab)
    await lab.claimed("a", 4, attempt=5)
    before = await lab.record("a")
    assert await lab.pool.attach("a", endpoint="e", attempt=6, seen=5) is Refusal.FEWER_TOKENS
    assert await lab.record("a") == before
    await lab.pool.cancel("a")
    assert await lab.pool.attach("a", endpoint="e", attempt=6, seen=5) is Refusal.OTHER_TOKENS


@rule("digest, submit", "submit", "return known_digest == body_digest and", "return")
async def another_body_under_a_known_id_is_refused(lab: Lab) -> None:
    await ready(lab)
    await lab.submit("a", digest="one")
    assert await lab.submit("a", digest="two", attempt=2) is Refusal.OTHER_BODY


# -- delivery
@rule("packet_number", "prelude", "DELIVERY_LENGTH, '0-*'", "DELIVERY_LENGTH, '*'")
async def a_reader_that_fell_behind_sees_a_hole(lab: Lab) -> None:
    await ready(lab)
    claim = await lab.claimed("a", 1)
    [entry] = await lab.pool.read("e", None, wait=0)
    for base in range(1, 12):  # more than the stream keeps
        await lab.commit("a", claim, base, 1)
    later = [entry.number for entry in await lab.pool.read("e", entry.cursor, wait=0)]
    assert later == list(range(5, 13))


@rule("no_mkstream", "prelude", "'NOMKSTREAM', ")
async def a_dead_endpoints_stream_is_not_made_again(lab: Lab) -> None:
    await ready(lab)
    claim = await lab.claimed("a")
    await lab.pool.leave_endpoint("e")
    await lab.commit("a", claim, 0, 1)
    state = await lab.dump()
    assert state["delivery"] == {}
    assert state["endpoints"] == {}


# -- sweeping
@rule(
    "sweep, deadline",
    "renew_scheduler",
    "overdue(deadline, detach_at, lives, time)\n    if reason",
    "nil\n    if reason",
)
async def a_request_ends_at_its_deadline(lab: Lab) -> None:
    await ready(lab)
    claim = await lab.claimed("a", 1, deadline_in=2.0)
    await lab.live(3, "e")
    assert (await lab.record("a"))["reason"] == Reason.DEADLINE
    assert await lab.commit("a", claim, 1, 1) == -2
    assert (await lab.pool.hints("g", None, wait=0))[1] == ["a"]


@rule("sweep, dead endpoint", "renew_scheduler", "    remove_endpoint(endpoint)\n")
async def an_endpoint_that_does_not_renew_is_dead(lab: Lab) -> None:
    await ready(lab)
    await lab.submit("a")
    await lab.live(2.5)
    assert await lab.pool.renew_endpoint("e") is None
    state = await lab.dump()
    assert state["delivery"] == {}
    assert state["requests"]["a"]["detach_at"] != ""


@rule("endpoint_grace", "renew_scheduler", "math.max(tonumber(grace), floor)", "tonumber(grace)")
async def a_dead_endpoints_calls_have_the_longer_grace(lab: Lab) -> None:
    await ready(lab)
    await lab.endpoint("other")
    await lab.submit("a", grace=0.0)
    await lab.pool.leave_endpoint("e")
    await lab.live(29, "other")
    assert (await lab.record("a"))["state"] == "waiting"
    await lab.live(2, "other")
    assert (await lab.record("a"))["reason"] == Reason.DETACHED


@rule("sweep_gap", "renew_scheduler", "if gap > SWEEP_GAP then", "if false then")
async def after_an_outage_every_lease_starts_again(lab: Lab) -> None:
    await ready(lab)
    await lab.live(1, "e")
    await lab.advance(10)
    await lab.pool.renew_scheduler("s")
    await lab.live(1)
    assert await lab.pool.renew_endpoint("e") is not None


@rule("sweep_gap, late looks", "renew_scheduler", "or gap - RENEWAL", "or gap + LEASE")
async def late_looks_find_the_dead(lab: Lab) -> None:
    await ready(lab)
    await lab.endpoint("dead")
    for _ in range(6):
        await lab.advance(0.8)
        assert await lab.pool.renew_endpoint("e") is not None
        await lab.pool.renew_scheduler("s")
    assert await lab.pool.renew_endpoint("e") is not None
    assert await lab.pool.renew_endpoint("dead") is None


@rule("sweep_gap, late looks and deadlines", "renew_scheduler", "due = swept", "due = 0")
async def late_looks_end_what_is_due(lab: Lab) -> None:
    await ready(lab)
    await lab.submit("a", deadline_in=0.5)
    for _ in range(3):
        await lab.advance(0.8)
        await lab.pool.renew_scheduler("s")
    assert (await lab.record("a"))["reason"] == Reason.DEADLINE


@rule("sweep_gap, cut off", "renew_scheduler", "due = swept", "due = time")
async def what_came_due_in_a_gap_ends_at_the_next_look(lab: Lab) -> None:
    await ready(lab)
    await lab.submit("a", deadline_in=2.0)
    await lab.live(0.5, "e")
    await lab.advance(10)
    await lab.pool.renew_scheduler("s")
    assert (await lab.record("a"))["state"] == "waiting"
    await lab.live(0.5, "e")
    assert (await lab.record("a"))["reason"] == Reason.DEADLINE


async def detached_over_an_outage(lab: Lab) -> None:
    """Two requests were detached, one by its client and one by its endpoint's death, when Redis goes away."""
    await ready(lab)
    await lab.submit("a", grace=60)
    await lab.endpoint("dead")
    await lab.submit("b", endpoint="dead")
    await lab.pool.leave_endpoint("dead")
    await lab.live(0.5, "e")
    await lab.pool.detach("a", attempt=1, grace=2.0)
    await lab.advance(60)


async def ended(lab: Lab) -> list[str]:
    return [name for name in "ab" if (await lab.record(name))["state"] == "ended"]


@rule("outage", "prelude", "back_at(time) + (tonumber(lives) or 0)", "0")
async def a_grace_begins_anew_after_an_outage(lab: Lab) -> None:
    await detached_over_an_outage(lab)
    for scheduler in ("s", "t", "s"):  # at one moment
        await lab.pool.renew_scheduler(scheduler)
    assert await ended(lab) == []
    await lab.live(1.7, "e")
    assert await ended(lab) == []
    await lab.live(0.8, "e")
    assert await ended(lab) == ["a"]
    await lab.live(27, "e")
    assert await ended(lab) == ["a"]
    await lab.live(1, "e")
    assert await ended(lab) == ["a", "b"]


@rule("outage, claims", "prelude", "time - (tonumber(swept) or 0) > LEASE and time or", "")
async def nor_is_it_over_for_a_claim_before_the_first_look(lab: Lab) -> None:
    await detached_over_an_outage(lab)
    await lab.claim(count=2)
    assert await ended(lab) == []


@rule("outage, endpoints", "renew_scheduler", "outage or none", "outage")
async def a_grace_begins_when_there_is_an_endpoint_again(lab: Lab) -> None:
    await ready(lab)
    await lab.submit("a")
    await lab.live(60)
    assert (await lab.record("a"))["state"] == "waiting"
    await lab.endpoint("another")
    await lab.live(29, "another")
    assert (await lab.record("a"))["state"] == "waiting"
    await lab.live(2, "another")
    assert (await lab.record("a"))["reason"] == Reason.DETACHED


@rule("outage, ended", "prelude", "> LONG_OUTAGE and time or", "> LONG_OUTAGE and 0 or")
@rule("outage, ended, seen", "renew_scheduler", "long or none", "none")
async def what_ended_before_an_outage_can_be_read_after_it(lab: Lab) -> None:
    await ready(lab)
    await lab.claimed("a", 1)
    await lab.submit("b")
    await lab.pool.cancel("a")
    await lab.live(1, "e")
    await lab.advance(4000)
    await lab.pool.cancel("b")  # each end forgets what is too old, and so does each look
    for scheduler in ("s", "t"):
        await lab.pool.renew_scheduler(scheduler)
    assert isinstance(await lab.pool.attach("a", endpoint="e", attempt=1), Attached)


async def one_that_ended(lab: Lab) -> None:
    """The request "a"."""
    await ready(lab)
    await lab.claimed("a", 1)
    await lab.pool.cancel("a")


@rule("outage, ended, short", "renew_scheduler", "long or none", "outage or none")
async def a_short_outage_keeps_no_answer_longer(lab: Lab) -> None:
    await one_that_ended(lab)
    await lab.live(CONSTANTS.retention - CONSTANTS.long_outage, "e")
    await lab.advance(CONSTANTS.long_outage - 1)
    await lab.live(2, "e")
    assert not (await lab.dump())["requests"]


@rule("outage, ended, endpoints", "renew_scheduler", "long or none", "long")
async def nor_is_an_answer_forgotten_before_there_is_an_endpoint(lab: Lab) -> None:
    await one_that_ended(lab)
    await lab.live(CONSTANTS.retention + 2)
    await lab.endpoint("another")
    await lab.live(1, "another")
    assert isinstance(await lab.pool.attach("a", endpoint="another", attempt=1), Attached)


@rule("outage, ended, evicted", "prelude", "'ended_bytes')) or 0)", "'ended_bytes')))")
async def an_evicted_hash_of_the_pool_stops_no_look(lab: Lab) -> None:
    await one_that_ended(lab)
    await lab.redis("DEL", lab.keys.pool)
    try:
        await lab.pool.renew_scheduler("s")
    except ResponseError as error:
        raise AssertionError("the look failed") from error


@rule("outage, adapters", "renew_scheduler", "math.max(entry.at, back_at(time))", "entry.at")
async def an_endpoint_may_name_an_adapter_that_was_replaced_before_an_outage(lab: Lab) -> None:
    await ready(lab)
    old = await loaded(lab, "g")
    await lab.live(1, "e")
    await loaded(lab, "g", folder="/y")
    await lab.advance(60)
    await lab.pool.renew_scheduler("s")
    assert isinstance(await lab.submit("a", adapter=old), Attached)


# -- numbers and leases
@rule(
    "unique_numbers", "prelude", "return math.max((tonumber(last) or 0) + 1, now())", "return (tonumber(last) or 0) + 1"
)
async def a_redis_that_forgets_gives_no_number_twice(lab: Lab) -> None:
    await lab.endpoint()
    kept = await lab.snapshot()
    numbers = []
    for endpoint in ("x", "y"):
        await lab.advance(0.001)
        registration = await lab.pool.renew_endpoint(endpoint, register=True)
        await lab.engine()
        await lab.claimed("a")
        numbers += [registration, lab.terms["g"][1], lab.heard["g"]]
        await lab.rollback(kept)
    assert len(set(numbers[:3]) & set(numbers[3:])) == 0


@rule(
    "acquire_cas",
    "acquire",
    "elseif owner_now ~= saw_owner or term_now ~= saw_term or counter_now ~= saw_counter then",
    "elseif false then",
)
async def a_lease_that_moved_is_not_taken(lab: Lab) -> None:
    await ready(lab)
    seen = (await lab.pool.renew_scheduler("t"))[0]["g"]
    await lab.pool.renew("g", *lab.terms["g"])
    assert await lab.pool.acquire("g", "t", seen) is None
    now = (await lab.pool.renew_scheduler("t"))[0]["g"]
    assert now == EngineState("s", seen.term, seen.counter + 1)
    term = await lab.pool.acquire("g", "t", now)
    assert term is not None
    assert term > seen.term
    assert await lab.pool.renew("g", *lab.terms["g"]) is None


@rule("acquire_cas, none seen", "acquire", "if (owner_now or '') ~= '' then", "if false then")
async def an_engine_that_appeared_meanwhile_is_not_taken(lab: Lab) -> None:
    await ready(lab)
    assert await lab.pool.acquire("g", "t", None) is None


@rule("acquire_cas, a forgotten release", "acquire", " and tonumber(term_now) > (tonumber(saw_term) or 0)")
async def no_term_is_given_twice_after_a_rollback(lab: Lab) -> None:
    await ready(lab)
    owner, term = lab.terms["g"]
    kept = await lab.snapshot()
    await lab.pool.release("g", owner, term)
    await lab.rollback(kept)
    seen = (await lab.pool.renew_scheduler("t"))[0]["g"]
    again = await lab.pool.acquire("g", owner, seen)
    assert again is not None
    assert again > term
    assert await lab.pool.acquire("g", owner, seen) == again, "this one was sent twice"


@rule("iteration_reserve", "renew", "int(math.max(tonumber(reserve), tonumber(reserved)))", "reserve")
async def a_late_renewal_does_not_lower_the_reserve(lab: Lab) -> None:
    await ready(lab)
    await lab.pool.renew("g", *lab.terms["g"], reserve=200)
    renewed = await lab.pool.renew("g", *lab.terms["g"], reserve=100)
    assert renewed is not None
    assert renewed.reserved == 200


@rule("iteration_reserve, retired", "acquire", "call('HGET', POOL, 'reserved') or 0", "0")
async def an_engine_that_comes_back_goes_on_above_its_reserve(lab: Lab) -> None:
    await ready(lab)
    await lab.pool.renew("g", *lab.terms["g"], reserve=200)
    await lab.pool.retire("g", *lab.terms["g"])
    await lab.engine()
    renewed = await lab.pool.renew("g", *lab.terms["g"])
    assert renewed is not None
    assert renewed.reserved == 200


@rule("reconcile", "renew", "reply[#reply + 1] = { id, claim }")
async def a_renewal_answers_what_the_engine_holds(lab: Lab) -> None:
    await ready(lab)
    claim = await lab.claimed("a")
    renewed = await lab.pool.renew("g", *lab.terms["g"])
    assert renewed is not None
    assert renewed.claims == {"a": claim}
    assert renewed.last_claim == claim


@rule("reconcile, version", "renew", "last_claim .. ':' .. call('ZCARD', CLAIMED .. engine)", "'1:1'")
async def a_renewal_tells_the_claims_when_they_moved(lab: Lab) -> None:
    await ready(lab)
    first = await lab.claimed("a")
    known = ""
    for moved, wanted in ((False, {"a": first}), (False, None), (True, {})):
        if moved:
            await lab.pool.cancel("a")
        renewed = await lab.pool.renew("g", *lab.terms["g"], known=known)
        assert renewed is not None
        assert renewed.claims == wanted
        known = renewed.version
    again = await lab.claimed("b")
    renewed = await lab.pool.renew("g", *lab.terms["g"], known=known)
    assert renewed is not None
    assert renewed.claims == {"b": again}


# -- committing and giving back
@rule(
    "engine_check",
    "commit",
    "NOTHING, listeners[row - first + 1]",
    "NOTHING, listeners[row - first + 1] or address(id, 1)",
)
async def only_the_engine_that_claimed_commits(lab: Lab) -> None:
    await ready(lab)
    claim = await lab.claimed("a")
    await lab.engine("h")
    assert await lab.commit("a", claim, 0, 1, engine="h") == -2
    assert "a" not in (await lab.dump())["tokens"]


@rule("committing, claim", "prelude", "  call('HDEL', LISTENERS .. engine, claim)\n")
async def a_claim_that_was_given_back_commits_nothing(lab: Lab) -> None:
    await ready(lab)
    old = await lab.claimed("a", 1)
    await lab.lose("a", old)
    new = (await lab.claim())["a"]
    assert await lab.commit("a", old, 1, 1) == -2
    assert await lab.commit("a", new, 1, 1) == -1


@rule("committing, base", "commit", "length ~= base * TOKEN_SIZE + #tokens and take_back", "false and take_back")
async def a_commit_sent_twice_appends_once(lab: Lab) -> None:
    await ready(lab)
    claim = await lab.claimed("a", 2)
    assert await lab.commit("a", claim, 0, 2) == 2
    assert await lab.commit("a", claim, 3, 1) == 2
    assert (await lab.dump())["tokens"]["a"] == tokens_of(0, 2)


async def known_to_its_master(lab: Lab, *requests: str) -> list[int]:
    """Requests with two tokens. Their master knows who listens, and makes the packets itself. Returns their claims."""
    await ready(lab)
    claims = [await lab.claimed(request_id, 1) for request_id in requests]
    for request_id, claim in zip(requests, claims, strict=True):
        assert await lab.commit(request_id, claim, 1, 1) == -1
    return claims


NEW_LISTENER = "    call('HSET', LISTENERS .. engine, claim, listener_of(id, attempt, endpoint))\n"
NO_LISTENER = "  call('HDEL', LISTENERS .. engine, claim)\n"


@rule("listeners_number", "commit", "if before == known and", "if")
@rule("listeners_number, attach", "prelude", f"{NEW_LISTENER}    move_listeners(engine)\n", NEW_LISTENER)
async def a_packet_goes_to_the_call_that_listens_now(lab: Lab) -> None:
    [claim] = await known_to_its_master(lab, "a")
    await lab.endpoint("f")
    await lab.pool.attach("a", endpoint="f", attempt=7)
    assert await lab.commit("a", claim, 2, 1) == -1
    assert [(p.first, p.attempt) for p in await packets_of(lab, "f")] == [(2, 7)]


@rule("listeners_number, end", "prelude", f"{NO_LISTENER}  move_listeners(engine)\n", NO_LISTENER)
async def what_ended_takes_no_ready_packet(lab: Lab) -> None:
    [claim] = await known_to_its_master(lab, "a")
    await lab.pool.cancel("a")
    assert await lab.commit("a", claim, 2, 1) == -2
    assert (await lab.dump())["tokens"]["a"] == tokens_of(0, 2)


@rule("listeners_number, claim", "claim", "    move_listeners(engine)\n")
async def a_claim_that_redis_forgot_commits_nothing(lab: Lab) -> None:
    await ready(lab)
    await lab.engine("h")
    await lab.submit("a")
    before = await lab.snapshot()
    claim = (await lab.claim())["a"]
    assert await lab.commit("a", claim, 0, 1) == -1
    await lab.rollback(before)
    await lab.advance(1)
    other = (await lab.claim("h"))["a"]
    assert await lab.commit("a", other, 0, 1, engine="h") == -1
    assert await lab.commit("a", claim, 1, 1) == -2


@rule("ready rows, base", "commit", "if length ~= base * TOKEN_SIZE + #tokens then", "if false then")
@rule("ready rows, all or none", "commit", "for back = i - 3, 1, -3 do", "for back = 0, 1, -3 do")
async def a_wrong_base_among_ready_rows_appends_nothing_twice(lab: Lab) -> None:
    a, b = await known_to_its_master(lab, "a", "b")
    rows = [
        CommitRow("a", a, 2, pack_tokens(tokens_of(2, 1)), None),
        CommitRow("b", b, 3, pack_tokens(tokens_of(3, 1)), None),
    ]
    answer = await lab.pool.commit("g", *lab.terms["g"], rows)
    assert answer is not None
    assert answer.rows == [-1, 2]
    assert (await lab.dump())["tokens"] == {"a": tokens_of(0, 3), "b": tokens_of(0, 2)}
    assert [(p.request_id, p.first) for p in await packets_of(lab)] == [
        ("a", 0),
        ("b", 0),
        ("a", 1),
        ("b", 1),
        ("a", 2),
    ]


@rule("committing, term", "commit", "if fenced(engine, owner, term) then", "if false then")
async def an_old_master_commits_nothing(lab: Lab) -> None:
    await ready(lab)
    claim = await lab.claimed("a")
    old = lab.terms["g"]
    await lab.pool.release("g", *old)
    await lab.pool.acquire("g", "t", None)
    assert await lab.pool.commit("g", *old, []) is None
    with pytest.raises(AssertionError):
        await lab.commit("a", claim, 0, 1)


@rule("give_back_fence, owner and term", "give_back", "if fenced(engine, owner, term) then", "if false then")
async def an_old_master_gives_nothing_back(lab: Lab) -> None:
    await ready(lab)
    claim = await lab.claimed("a")
    old = lab.terms["g"]
    await lab.pool.release("g", *old)
    await lab.pool.acquire("g", "t", None)
    await lab.pool.give_back("g", *old, {"a": (claim, True)})
    assert (await lab.record("a"))["state"] == "claimed"


@rule("give_back_fence, claim", "give_back", "claim_now == claim and ")
async def a_late_give_back_leaves_the_newer_claim(lab: Lab) -> None:
    await ready(lab)
    old = await lab.claimed("a")
    await lab.lose("a", old)
    await lab.claim()
    await lab.lose("a", old)
    record = await lab.record("a")
    assert (record["state"], record["losses"]) == ("claimed", 1)


@rule("give_back_fence, engine", "give_back", " and holder == engine then", " then")
async def only_the_engine_that_claimed_gives_back(lab: Lab) -> None:
    await ready(lab)
    claim = await lab.claimed("a")
    await lab.engine("h")
    await lab.pool.give_back("h", *lab.terms["h"], {"a": (claim, False)})
    assert (await lab.record("a"))["state"] == "claimed"


@rule("progress", "give_back", "count > tonumber(loss_at) and 1 or losses + 1", "losses + 1")
async def a_request_that_gets_on_is_no_poison(lab: Lab) -> None:
    await ready(lab)
    claim = await lab.claimed("a")
    for count in range(5):
        assert await lab.commit("a", claim, count, 1) == -1
        await lab.lose("a", claim)
        assert (await lab.record("a"))["state"] == "waiting"
        claim = (await lab.claim())["a"]


@rule("poison, ends", "give_back", "if losses >= FATAL_LOSSES then", "if false then")
async def the_third_loss_without_a_token_ends_a_request(lab: Lab) -> None:
    await ready(lab)
    claim = await lab.claimed("a", 1)
    for _ in range(2):
        await lab.lose("a", claim)
        claim = (await lab.claim())["a"]
    await lab.lose("a", claim)
    assert (await lab.record("a"))["reason"] == Reason.INTERNAL


@rule("poison, claimed by an empty engine", "claim", " or (suspect and not empty) then", " then")
async def a_suspect_waits_for_an_empty_engine(lab: Lab) -> None:
    await ready(lab)
    await lab.engine("h")
    suspect = await lab.claimed("a")
    await lab.lose("a", suspect)
    await lab.lose("a", (await lab.claim())["a"])
    assert list(await lab.claim("h")) == ["a"]
    busy = await lab.claimed("b")
    await lab.pool.give_back("h", *lab.terms["h"], {"a": (lab.heard["h"], False)})
    assert list(await lab.claim()) == []
    await lab.commit("b", busy, 0, 1, Reason.LENGTH)
    assert list(await lab.claim()) == ["a"]


@rule("poison, alone", "claim", "if alone or (suspect", "if (suspect")
async def a_suspect_runs_alone(lab: Lab) -> None:
    await ready(lab)
    claim = await lab.claimed("a")
    await lab.lose("a", claim)
    await lab.lose("a", (await lab.claim())["a"])
    await lab.submit("b")
    assert list(await lab.claim()) == ["a"]
    assert list(await lab.claim()) == []


@rule("orphans", "retire", " or call('ZCARD', CLAIMED .. engine) > 0 then", " then")
async def an_engine_is_retired_after_its_claims_were_given_back(lab: Lab) -> None:
    await ready(lab)
    claim = await lab.claimed("a")
    await lab.pool.retire("g", *lab.terms["g"])
    assert "g" in (await lab.pool.renew_scheduler("s"))[0]
    await lab.pool.give_back("g", *lab.terms["g"], {"a": (claim, False)})
    await lab.pool.retire("g", *lab.terms["g"])
    state = await lab.dump()
    assert state["engines"] == state["claimed"] == state["control"] == {}
    assert state["waiting"] == ["a"]


NAMES = [rule.name for rule in RULES]


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
async def test_rule(rule: Rule, server: RedisServer) -> None:
    lua = sources()
    assert lua[rule.script].count(rule.old) == 1, f"the Lua of {rule.name} has moved"
    async with Lab(server.url, lua) as lab:
        await rule.scenario(lab)
    without = {**lua, rule.script: lua[rule.script].replace(rule.old, rule.new)}
    async with Lab(server.url, without) as lab:
        with pytest.raises(AssertionError):
            await rule.scenario(lab)


def test_each_rule_of_the_pool_has_a_scenario() -> None:
    rules = {
        *(
            "claim_cas",
            "attempt",
            "packet_attempt",
            "superseded",
            "detach_fence",
            "sweep",
            "cancel_ends",
            "packet_number",
        ),
        *("no_mkstream", "unique_numbers", "orphans", "never_fit", "progress", "give_back_fence", "iteration_reserve"),
        *("endpoint_grace", "digest", "acquire_cas", "sweep_gap", "outage", "unknown_size", "registered"),
        "engine_check",
        "reconcile",
    }
    assert rules <= {name.split(",")[0] for name in NAMES}
