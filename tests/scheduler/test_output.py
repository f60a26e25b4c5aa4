"""What an engine's master still has to commit of a request, tokens and scores together."""

import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

from orca.v1.pool_pb2 import PoolRequest
from orca.v1.sampling_pb2 import SamplingParams
from orca_common.block_keys import keys_of, root_of
from orca_common.scores import NOTHING, TOP, unpack_tops
from orca_pool.records import Claimed, Committed, CommittedToken, Reason
from orca_pool.wire import TOKEN
from orca_scheduler.core.core import Member
from orca_scheduler.master.ngrams import LOOKS_BACK
from orca_scheduler.master.output import MISSES, Outputs


def held(count: int, committed: int) -> Outputs:
    """A request with `count` tops a token, of which so many tokens were committed before the claim."""
    outputs = Outputs()
    add(outputs, 1, count, committed)
    return outputs


def add(outputs: Outputs, claim: int, count: int = 0, committed: int = 0) -> None:
    record = PoolRequest(request_id="r", sampling=SamplingParams(top_logprobs=count)).SerializeToString()
    tokens = [CommittedToken(n, -1.0, n) for n in range(committed)]
    assert outputs.add(Claimed("r", claim, 1, 3, record, tokens, 0, None, 0, 0, 0), 0.0)


def test_scores_go_with_their_tokens() -> None:
    outputs = held(1, committed=2)
    for n in (2, 3):
        if n == 2:
            outputs.scored(1, b"p")
        outputs.append(1, TOKEN.pack(n, -1.0, n), None, TOP.pack(n, -n))
    (row,) = outputs.take()
    assert (row.base, len(row.tokens) // TOKEN.size, row.tops) == (2, 2, TOP.pack(2, -2) + TOP.pack(3, -3))
    assert row.prompt == b"", "the pool has it since token 0"
    assert outputs.answered([row], [3]) == ([], [], [])  # the pool has the first of them
    (row,) = outputs.take()
    assert (row.base, row.tops) == (3, TOP.pack(3, -3))


def test_a_prompt_has_its_scores_once() -> None:
    """Its engine is lost before its first token, and again behind it, before anything was committed."""
    outputs = held(1, committed=0)
    for parts in ((b"a",), (b"a", b"b")):
        outputs.admitted(1, 0)
        for part in parts:
            outputs.scored(1, part)
    outputs.append(1, TOKEN.pack(5, -1.0, 1), None, TOP.pack(5, -1))
    outputs.admitted(1, 0)
    (row,) = outputs.take()
    assert row.prompt == b"ab"


def test_tokens_that_the_pool_lost_have_lost_their_scores() -> None:
    """The tokens before this claim are known here, and committed again; what was beside them is not."""
    outputs = held(2, committed=2)
    outputs.append(1, TOKEN.pack(2, -1.0, 2), None, TOP.pack(2, -2) + TOP.pack(9, -9))
    outputs.append(1, TOKEN.pack(3, -1.0, 3), Reason.LENGTH, TOP.pack(3, -3) + TOP.pack(8, -8))
    (row,) = outputs.take()
    assert outputs.answered([row], [1]) == ([], [], []), "its end is to be sent again"
    (row,) = outputs.take()
    assert (row.base, len(row.tokens) // TOKEN.size, row.finish) == (1, 3, Reason.LENGTH)
    assert row.tops.startswith(NOTHING * 2)
    assert unpack_tops(row.tops, 2) == [(), ((2, -2.0), (9, -9.0)), ((3, -3.0), (8, -8.0))]
    assert outputs.answered([row], [Committed.OK]) == ([], [1], [])
    assert math.isnan(TOP.unpack(NOTHING)[1])


def test_a_plain_request_has_none() -> None:
    outputs = held(0, committed=0)
    outputs.append(1, TOKEN.pack(5, -1.0, 1), None)
    (row,) = outputs.take()
    assert (row.tops, row.prompt) == (b"", b"")


def test_only_what_was_sent_counts_as_committed() -> None:
    outputs = held(0, committed=0)
    outputs.append(1, TOKEN.pack(5, -1.0, 1), None)
    rows = outputs.take()
    outputs.append(1, TOKEN.pack(6, -1.0, 2), None)  # while the commit is under way
    assert outputs.answered(rows, [Committed.OK]) == ([], [], [])
    (row,) = outputs.take()
    assert (row.base, row.tokens) == (1, TOKEN.pack(6, -1.0, 2))


def test_nothing_is_sent_of_a_request_that_is_gone() -> None:
    outputs = held(0, committed=0)
    outputs.append(1, TOKEN.pack(5, -1.0, 1), None)
    outputs.drop(1)
    assert not outputs.take()


def test_a_hand_over_whose_answer_was_lost_is_said_again() -> None:
    """Until the pool has it: the request is handed over then, and not gone, so its row stays."""
    outputs = held(0, committed=2)
    outputs.append(1, TOKEN.pack(2, -1.0, 2), None)
    outputs.hand_over(1, b"here")
    (first,) = outputs.take()
    outputs.unanswered([first])
    (again,) = outputs.take()
    assert again == first
    assert outputs.answered([again], [3]) == ([], [], []), "the pool has the token"
    (again,) = outputs.take()
    assert (again.base, again.tokens, again.handed) == (3, b"", b"here")
    assert outputs.answered([again], [Committed.OK]) == ([], [], [1])
    assert not outputs.held


def made(outputs: Outputs, claim: int, tokens: Sequence[int]) -> None:
    for token in tokens:
        outputs.append(claim, TOKEN.pack(token, -1.0, 1), None)


def found(outputs: Outputs, claims: Sequence[int], made: Sequence[Sequence[int]], most: int) -> list[tuple[int, ...]]:
    """The drafts that are offered to requests."""
    numbers = outputs.offers(claims, made, most) or [0] * len(claims)
    members = [Member(claim, 0, 0, 1 + n, 1 + n, (), None) for claim, n in zip(claims, numbers, strict=True)]
    return [tuple(outputs.drafts([member])) for member in members]


def test_drafts_follow_tokens_that_came_without_any() -> None:
    """A batch without a place for drafts asks for none, and the next one's know its tokens."""
    outputs = held(0, committed=0)
    made(outputs, 1, (1, 2, 3, 4))
    assert found(outputs, [1, 2], [(1, 2, 3), (9,)], 2) == [(4, 1), ()]
    made(outputs, 1, (1, 2, 3, 5, 6, 7, 5))
    assert found(outputs, [1], [(6, 7)], 3) == [(5, 6, 7)]


def test_a_long_text_is_read_beside_no_other() -> None:
    """Each takes milliseconds, and the engine waits for all of them."""
    outputs, half = held(0, committed=0), list(range(LOOKS_BACK // 2 + 1))
    for claim in (2, 3, 4):
        add(outputs, claim)
        made(outputs, claim, half)
    made(outputs, 1, half[: LOOKS_BACK // 2 - 1])
    turn = partial(found, outputs, [2, 3, 1, 4], [(0, 1, 2)] * 4, 1)
    assert turn() == [(3,), (), (3,), ()]
    for claim in (1, 2):
        made(outputs, claim, (0, 1, 2))
    assert turn() == [(0,), (3,), (0,), ()]
    for claim in (1, 2, 3):
        made(outputs, claim, (0, 1, 2))
    assert turn() == [(0,), (0,), (0,), (3,)]


def test_a_long_text_is_read_beside_short_ones() -> None:
    """Texts that are looked at at times only have a few new tokens in each call."""
    outputs = held(0, committed=0)
    add(outputs, 2)
    made(outputs, 1, (1, 2, 3, 4))
    made(outputs, 2, range(LOOKS_BACK + 1))
    assert found(outputs, [1, 2], [(1, 2, 3), (10, 11, 12)], 1) == [(4,), (13,)]


def test_a_text_without_drafts_is_looked_at_less_and_less_often() -> None:
    """And again at each token once there was one."""
    outputs, looked = held(0, committed=0), list[int]()
    one = outputs.held[1]
    for n in range(8 * MISSES):
        before = one.misses
        assert outputs.offers([1], [(n,)], 4) == ()
        made(outputs, 1, (n,))
        looked += [n] * (one.misses > before)
    assert [b - a for a, b in pairwise(looked)] == [
        *[1] * (MISSES - 1), *[2] * MISSES, *[3] * MISSES, *[4] * (len(looked) - 3 * MISSES)
    ]  # fmt: skip
    offers = 0
    for n in range(MISSES):
        offers += outputs.offers([1], [(n,)], 4) == (4,)
        made(outputs, 1, (n,))
    assert offers >= MISSES - 6
    assert one.misses == 0


def test_one_that_waits_keeps_its_drafts() -> None:
    """Its last position runs again, with the same ones; its text has not grown."""
    outputs = held(0, committed=0)
    made(outputs, 1, (1, 2, 3, 4))
    assert outputs.offers([1], [(1, 2, 3)], 2) == (2,)
    made(outputs, 1, (1, 2, 3))
    assert outputs.offers([1], [()], 2) == ()
    assert outputs.drafts([Member(1, 0, 6, 3, 3, (), 3), Member(2, 1, 0, 9, 1, (), None)]) == [4, 1]


def test_keys_come_with_the_tokens_that_fill_blocks() -> None:
    """Of requests that share blocks, and are there; several where a block is small, or drafts were right."""
    outputs, root = held(0, committed=3), root_of("a")
    add(outputs, 2)
    one = outputs.held[1]
    one.record.prompt_ids.extend(range(10, 16))
    text = [*range(10, 16), 0, 1, 2]
    assert one.keys(root, 4) == keys_of(root, text, 4)
    assert outputs.keys([2, 1, 9], [(5,), (3, 4), (6,)]) == ()
    more = list(range(5, 14))
    keys = keys_of(root, [*text, 3, 4, *more], 4)
    assert outputs.keys([2, 1], [(5,), more]) == tuple((1, key) for key in keys[3:])
    assert len(keys) == 6
