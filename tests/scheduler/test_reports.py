"""A rank's reports are checked as they come: a wrong one is a verdict on that rank, and nothing else ends."""

import math
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from scheduler.test_master import Bench, Rank, bench

from orca.v1 import worker_pb2 as pb
from orca.v1.pool_pb2 import PoolRequest
from orca.v1.sampling_pb2 import SamplingParams
from orca_common.scores import SCORE, TOP
from orca_pool.records import Claimed
from orca_scheduler import timers
from orca_scheduler.core.core import Member
from orca_scheduler.master.output import Held
from orca_scheduler.master.reports import first_tokens, made_of, problem_of

VOCABULARY = 256


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing surer follows, so that the master need not wait for it."""
    monkeypatch.setattr(timers, "DOUBT", 0.05)


def iteration_report(iteration: pb.Iteration, **fields: Any) -> pb.Report:
    given = {"epoch": iteration.epoch, "number": iteration.number, "token_ids": [5]} | fields
    return pb.Report(iteration=pb.IterationReport(**given))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no token": ({"token_ids": []}, "has 0 tokens for 1 requests"),
    "two tokens": ({"token_ids": [5, 6]}, "has 2 tokens for 1 requests"),
    "a token of no vocabulary": ({"token_ids": [VOCABULARY]}, "has a token 256 of a vocabulary of 256"),
    "the largest token": ({"token_ids": [(1 << 32) - 1]}, "has a token 4294967295"),
    "more logprobs": ({"logprobs": [-0.5, -0.5]}, "has 2 logprobs for 1 requests"),
    "not finite": ({"not_finite": [1]}, "names token 1 of 1"),
    "stuck": ({"stuck": [(1 << 32) - 1]}, "names token 4294967295 of 1"),
    "waiting": ({"waiting": [1]}, "names token 1 of 1"),
    "waiting twice": ({"waiting": [0, 0]}, "names a place without a token twice"),
    "waiting and stuck": ({"waiting": [0], "stuck": [0]}, "names a place without a token twice"),
    "tops that were not asked for": (
        {"tops": [pb.Scores(index=0, scores=TOP.pack(5, -1.0))]},
        "has 8 bytes of top logprobs",
    ),
    "tops of another request": ({"tops": [pb.Scores(index=7, scores=b"")]}, "has the top logprobs of token 7 of 1"),
    "a prompt of another request": ({"prompts": [pb.Scores(index=1)]}, "has the logprobs of prompt 1 of 1"),
    "a prompt that was not asked for": (
        {"prompts": [pb.Scores(index=0, scores=SCORE.pack(-1.0))]},
        "has 4 bytes of a prompt's",
    ),
    "an iteration of the future": ({"number": 1 << 62}, "iteration 4611686018427387904, which it was never sent"),
}


async def goes_on(this: Bench, rank: Rank, name: str) -> None:
    """The engine has formed again, and the request ends with right tokens."""
    again = await this.iteration(10)
    assert [list(begins.token_ids) for begins in again.admissions] == [[1, 2]]
    rank.report(again, 9)
    assert await this.finished(name) == [9]
    assert not this.running.done()


@pytest.mark.parametrize("case", WRONG)
async def test_a_wrong_report_is_a_verdict(case: str) -> None:
    """It ended the scheduler's process, with all its engines. Reports behind it are not believed either."""
    fields, sentence = WRONG[case]
    rank = Rank()
    async with bench(rank) as this:
        await this.submit("r", [1, 2], 1)
        first = await this.iteration()
        rank._reports.put_nowait(iteration_report(first, **fields))
        rank._reports.put_nowait(iteration_report(first, token_ids=[6]))
        await goes_on(this, rank, "r")
        assert len(rank.verdicts) == 1
        assert sentence in rank.verdicts[0]


async def test_a_rank_is_believed_however_many_iterations_it_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers are too high above the last iteration that was sent, not above the one that the rank began with."""
    monkeypatch.setattr("orca_scheduler.ranks.rank.UNDER_WAY", 0)
    rank = Rank()
    async with bench(rank) as this:
        await this.submit("r", [1, 2], 2)
        rank.report(await this.iteration(), 9)
        rank.report(await this.iteration(), 8)
        assert await this.finished("r") == [9, 8]
        assert rank.verdicts == []


async def test_nothing_behind_a_wrong_report_is_believed() -> None:
    """The batch that ran beside it came back first then, which ended the scheduler's process."""
    rank = Rank()
    async with bench(rank, run_ahead=1) as this:
        await this.submit("r", [1, 2], 2)
        first, second = await this.iteration(), await this.iteration()
        ranks = this.master._ranks
        assert ranks is not None
        for wrong_or_right in (iteration_report(first, token_ids=[5, 6]), iteration_report(second)):
            ranks._ranks[0]._heard(wrong_or_right.SerializeToString())  # both, before the master looks at one
        again = await this.iteration(10)
        assert [list(begins.token_ids) for begins in again.admissions] == [[1, 2]]
        rank.report(again, 8)
        rank.report(await this.iteration(), 9)
        assert await this.finished("r") == [8, 9]
        assert len(rank.verdicts) == 1
        assert not this.running.done()


@pytest.mark.parametrize("raw", [b"\xff", b"\x0a\x05abc", bytes(range(256))])
async def test_bytes_that_are_no_report(raw: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank()
    async with bench(rank) as this:
        await this.submit("r", [1, 2], 1)
        await this.iteration()
        ranks = this.master._ranks
        assert ranks is not None
        ranks._ranks[0]._heard(raw)
        await goes_on(this, rank, "r")
        assert f"{len(raw)} bytes that are no report" in rank.verdicts[0]


async def test_a_long_error_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    rank = Rank()
    async with bench(rank) as this:
        await this.submit("r", [1, 2], 1)
        first = await this.iteration()
        rank._reports.put_nowait(iteration_report(first, token_ids=[], error="x" * (1 << 20)))
        await goes_on(this, rank, "r")
        assert len(rank.verdicts[0]) < 3000


def held_of(claim: int, **sampling: Any) -> Held:
    record = PoolRequest(prompt_ids=[1, 2, 3], sampling=SamplingParams(**sampling))
    claimed = Claimed(f"r{claim}", claim, 0, 3, record.SerializeToString(), [], 0, None, 0, 0, 0)
    return Held(claimed, record, None, bytearray(), 0, top_size=record.sampling.top_logprobs * TOP.size)


MEMBERS = [Member(claim, claim, 0, 3, int(samples), (), None) for claim, samples in ((1, True), (2, False), (3, True))]
HELD = {1: held_of(1, top_logprobs=2, prompt_logprobs=True), 2: held_of(2), 3: held_of(3)}
TOPS = TOP.pack(5, -1.0) + TOP.pack(255, math.nan)
RIGHT: dict[str, Any] = {
    "token_ids": [5, 255],
    "logprobs": [-0.5, math.nan],
    "tops": [pb.Scores(index=0, scores=TOPS)],
    "prompts": [pb.Scores(index=0, scores=(SCORE.pack(-0.5) + TOPS) * 3)],
}


def test_a_right_report() -> None:
    for fields in (RIGHT, RIGHT | {"prompts": []}, RIGHT | {"logprobs": []}, RIGHT | {"stuck": [0], "tops": []}):
        assert problem_of(pb.IterationReport(**fields), MEMBERS, (), HELD, VOCABULARY) is None
    nothing = RIGHT | {"token_ids": [1 << 31, 5], "not_finite": [0], "tops": []}
    there = problem_of(pb.IterationReport(**nothing), MEMBERS, (), HELD, VOCABULARY)
    assert there is None, "what stands there is no token"


@pytest.mark.parametrize(("start", "count", "scored"), [(0, 2, 3), (0, 3, 3), (1, 1, 1), (1, 2, 1), (2, 1, 0)])
def test_the_parts_of_a_prompt(start: int, count: int, scored: int) -> None:
    """Each has scores of the tokens behind its own, and the first one of its first token, too."""
    members = [Member(1, 1, start, count, int(start + count == 3), (), None)]
    tokens: dict[str, Any] = {"token_ids": [5], "tops": RIGHT["tops"]} if members[0].outputs else {}
    for places, right in ((scored, True), (scored + 1, False)):
        prompt = pb.Scores(index=0, scores=(SCORE.pack(-0.5) + TOPS) * places)
        report = pb.IterationReport(prompts=[prompt], **tokens)
        assert (problem_of(report, members, (), HELD, VOCABULARY) is None) is right


BREAKS: list[Callable[[random.Random, pb.IterationReport], object]] = [
    lambda chance, report: report.token_ids.append(chance.randrange(1 << 32)),
    lambda chance, report: report.token_ids.pop(),
    lambda chance, report: report.token_ids.__setitem__(chance.randrange(2), chance.randrange(VOCABULARY, 1 << 32)),
    lambda chance, report: report.logprobs.append(chance.random()),
    lambda chance, report: report.not_finite.append(chance.randrange(2, 1 << 32)),
    lambda chance, report: report.stuck.append(chance.randrange(2, 1 << 32)),
    lambda chance, report: report.tops.add(
        index=chance.randrange(1 << 32), scores=chance.randbytes(chance.randint(1, 40))
    ),
    lambda chance, report: report.tops.pop(),
    lambda chance, report: setattr(report.tops[0], "scores", report.tops[0].scores[: chance.randrange(16)]),
    lambda chance, report: report.prompts.add(index=0, scores=report.prompts[0].scores),
    lambda chance, report: report.prompts.add(index=chance.randrange(1, 1 << 32), scores=chance.randbytes(4)),
    lambda chance, report: setattr(
        report.prompts[0], "scores", report.prompts[0].scores + chance.randbytes(chance.randint(1, 99))
    ),
]


def test_ten_thousand_wrong_reports() -> None:
    """Each is found, and said in a sentence. None raises, also where several are in one report."""
    chance = random.Random(3)
    for _ in range(10_000):
        report = pb.IterationReport(**RIGHT)
        chance.choice(BREAKS)(chance, report)
        assert problem_of(report, MEMBERS, (), HELD, VOCABULARY), report
        for broken in chance.sample(BREAKS, 3):
            with suppress(IndexError):  # another one took it away
                broken(chance, report)
        problem_of(report, MEMBERS, (), HELD, VOCABULARY)


GUESSED = [
    Member(1, 1, 0, 3, 1, (), None),
    Member(2, 2, 5, 4, 4, (), 9),
    Member(3, 3, 5, 2, 2, (), 9),
]
DRAFTS = 10, 11, 12, 7
PLAIN = {claim: held_of(claim) for claim in (1, 2, 3)}
WITH_DRAFTS: dict[str, Any] = {"token_ids": [5, 10, 11, 99, 8], "made": [1, 3, 1]}


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({}, None),
        ({"token_ids": [5, 10, 11, 12, 13, 7, 1], "made": [1, 4, 2]}, None),
        ({"token_ids": [5, 4, 8], "made": []}, None),
        ({"token_ids": [5, 4, 8], "made": [], "stuck": [1]}, None),
        ({"made": [1, 3]}, "has numbers of tokens of 2 requests, not of 3"),
        ({"made": [1, 3, 2]}, "has 5 tokens for 3 requests"),
        ({"token_ids": [5, 10, 8], "made": [1, 0, 2]}, "has 0 tokens of a request that makes 1 to 4"),
        ({"token_ids": [5, 10, 11, 12, 13, 7], "made": [2, 3, 1]}, "has 2 tokens of a request that makes 1 to 1"),
        ({"token_ids": [5, 10, 12, 99, 8]}, "has tokens behind a draft that was wrong"),
        ({"not_finite": [2]}, "has tokens beside a place that has no token"),
        ({"stuck": [5]}, "names token 5 of 5"),
        ({"token_ids": [5, 10, 11, 256, 8]}, "has a token 256 of a vocabulary of 256"),
        ({"tops": [pb.Scores(index=5, scores=b"")]}, "has the top logprobs of token 5 of 5, or twice"),
    ],
)
def test_reports_of_drafts(fields: dict[str, Any], problem: str | None) -> None:
    assert problem_of(pb.IterationReport(**(WITH_DRAFTS | fields)), GUESSED, DRAFTS, PLAIN, VOCABULARY) == problem


def test_the_tokens_of_a_report() -> None:
    report = pb.IterationReport(**WITH_DRAFTS)
    firsts = first_tokens(report, GUESSED)
    assert firsts == {1: 0, 2: 1, 3: 4}
    assert made_of(report, firsts.values()) == (((5,), (10, 11, 99), (8,)), (), ())
    report.stuck.append(4)
    assert made_of(report, firsts.values()) == (((5,), (10, 11, 99), ()), (2,), ())


async def test_random_bytes_from_a_rank_end_no_scheduler() -> None:
    """On the lane, whatever the engine is about to do; the process that lied is ended, others go on."""
    chance, rank = random.Random(7), Rank()
    async with bench(rank) as this:
        await this.formed()
        for n in range(8):
            await this.put(f"r{n}", [1, 2], 3)  # each ends as poison at its third loss
            iteration = await this.iteration(10)
            ranks = this.master._ranks
            assert ranks is not None
            report = iteration_report(iteration).SerializeToString()
            for _ in range(200):
                raw = bytearray(report if chance.random() < 0.7 else chance.randbytes(chance.randint(0, 60)))
                for _ in range(chance.randint(1, 4)):
                    if raw:
                        raw[chance.randrange(len(raw))] = chance.randrange(256)
                ranks._ranks[0]._heard(bytes(raw))
            ranks._ranks[0].wrong("enough")
        assert not this.running.done(), this.running
