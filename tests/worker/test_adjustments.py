"""Penalties, biases, min-p, most probable tokens and prompts' logprobs, against transformers; and over recoveries."""

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import make_gpt2, make_timed
from kernels.device_sampled import sampled_on_device
from reference import TIE, Reference
from transformers import MinNewTokensLengthLogitsProcessor, MinPLogitsWarper
from worker.driver import Sampled, TinyEngine, make_stage
from worker.engines import in_process
from worker.test_sampling import requests_of

from orca.v1.sampling_pb2 import ForcedEnd, NotBefore, SamplingParams
from orca_common.scores import unpack_prompt, unpack_tops
from orca_worker.iteration.rows import Adjusted
from orca_worker.models import device_loop
from orca_worker.sampling import scoring
from orca_worker.sampling.adjusting import adjust, adjusted_rows, stuck, waiting
from orca_worker.sampling.sampling import sample

VOCABULARY, POSITIONS, SLOTS = 97, 48, 12 * 48
KERNELS = pytest.mark.parametrize("kernels", ["auto", "torch"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adjusted")
    return make_gpt2(
        folder, heads=2, layers=2, hidden=16, vocab=VOCABULARY, positions=POSITIONS, seed=3, initializer_range=0.5
    )


def prompts(count: int, seed: int) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(VOCABULARY) for _ in range(chance.randint(1, 20))] for _ in range(count)]


KINDS: list[dict[str, Any]] = [
    {"repetition": 1.7},
    {"repetition": 0.6},
    {"presence": 1.5},
    {"frequency": 0.8},
    {"presence": -0.5, "frequency": 1.2, "repetition": 1.3},
    {"bias": {5: 100.0}},
    {"bias": dict.fromkeys(range(0, VOCABULARY, 2), -100.0), "presence": 2.0},
    {},
]


def params(
    repetition: float = 1.0, presence: float = 0.0, frequency: float = 0.0, bias: dict[int, float] | None = None
) -> dict[str, Any]:
    """Fields of SamplingParams."""
    penalties = {"repetition_penalty": repetition, "presence_penalty": presence, "frequency_penalty": frequency}
    return {**penalties, "logit_bias": bias or {}}


@KERNELS
def test_greedy_tokens_equal_transformers(folder: Path, kernels: str) -> None:
    """In mixed batches, beside requests that ask for nothing."""
    reference = Reference(folder)
    engine = TinyEngine(make_stage(folder, SLOTS, 4, kernels=kernels), SLOTS, 4, seed=1)
    asked = [(prompt, KINDS[n % len(KINDS)]) for n, prompt in enumerate(prompts(24, seed=2))]
    requests = [Sampled(prompt, 9, params(**kind) if kind else {}) for prompt, kind in asked]
    engine.run(requests)
    checked = 0
    for request, (_, kind) in zip(requests, asked, strict=True):
        expected, margin = reference.adjusted(request.prompt, 9, **kind)
        if margin > TIE:
            assert request.made == expected, kind
            checked += 1
    plain = [reference.greedy(request.prompt, 9) for request in requests]
    assert checked > 20
    assert sum(a.made != b for a, b in zip(requests, plain, strict=True)) > 12, "adjustments that change nothing"


@KERNELS
def test_draws_hold_through_recoveries(folder: Path, kernels: str) -> None:
    """A request that starts again as an initiation of prompt and committed tokens draws what it would have drawn."""
    chance = random.Random(4)

    def some() -> list[Sampled]:
        draw = random.Random(5)
        return [
            Sampled(
                prompt,
                10,
                {
                    "temperature": draw.choice([0.0, 0.8, 1.5]),
                    "seed": n,
                    "logprobs": True,
                    "repetition_penalty": draw.uniform(0.5, 2),
                    "presence_penalty": draw.uniform(-2, 2),
                    "frequency_penalty": draw.uniform(-2, 2),
                    "min_p": draw.choice([0, 0.05, 0.3]),
                    "logit_bias": {draw.randrange(VOCABULARY): draw.uniform(-5, 5) for _ in range(3)},
                    "top_logprobs": draw.randint(0, 5),
                },
            )
            for n, prompt in enumerate(prompts(20, seed=6))
        ]

    through, broken = some(), some()
    engine = TinyEngine(make_stage(folder, SLOTS, 4, kernels=kernels), SLOTS, 4, seed=7)
    engine.run(through)
    waiting, running = list(broken), []
    while waiting or running:
        new = [waiting.pop() for _ in range(min(len(waiting), 2))]
        lost = [request for request in running if chance.random() < 0.3]
        for request in lost:
            engine.free(request)
        engine.step(new + lost, [request for request in running if request not in lost])
        running = [request for request in running + new if len(request.made) < 10 or engine.free(request)]
    for one, other in zip(through, broken, strict=True):
        assert other.made == one.made
        assert other.logprobs == pytest.approx(one.logprobs, abs=1e-4)
        assert len(other.tops) == len(one.tops) == (10 if one.sampling["top_logprobs"] else 0)


def test_min_p_keeps_what_transformers_keeps() -> None:
    torch.manual_seed(8)
    logits = torch.randn(1, 40) * 2
    for min_p, temperature in ((0.02, 1.0), (0.2, 0.7), (0.5, 1.6), (1.0, 1.0)):
        warper: Any = MinPLogitsWarper(min_p)
        kept = torch.isfinite(warper(None, logits / temperature))[0]
        draws = 4000
        table = requests_of(*[{"temperature": temperature, "min_p": min_p, "seed": 9}] * draws)
        tokens = sample(logits.expand(draws, -1), table, np.arange(draws)).token_ids
        assert set(tokens) <= set(kept.nonzero()[:, 0].tolist())
        shares = (logits[0] / temperature).softmax(-1) * kept
        counts = torch.tensor(np.bincount(tokens, minlength=40)) / draws
        assert (counts - shares / shares.sum()).abs().max() < 0.05


@KERNELS
@pytest.mark.parametrize("piece", [128, 5])
def test_logprobs_equal_transformers(folder: Path, kernels: str, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the most probable tokens at each place, and of the prompt's own tokens, in any pieces and company."""
    monkeypatch.setattr(scoring, "PIECE", piece)
    monkeypatch.setattr("orca_worker.models.cpu.SCORED_PIECE", piece)
    reference = Reference(folder)
    engine = TinyEngine(make_stage(folder, SLOTS, 4, kernels=kernels), SLOTS, 4, seed=9)
    requests = [
        Sampled(
            prompt,
            4,
            {
                "logprobs": n % 4 > 0,
                "temperature": n % 2,
                "top_logprobs": n % 4,
                "prompt_logprobs": n % 3 > 0,
                "presence_penalty": n % 5,
            },
        )
        for n, prompt in enumerate(prompts(16, seed=10))
    ]
    engine.run(requests)
    for n, request in enumerate(requests):
        expected, count = reference.logprobs(request.prompt + request.made), n % 4
        start = len(request.prompt)
        if count:
            for at, (token, logprob, top) in enumerate(zip(request.made, request.logprobs, request.tops, strict=True)):
                of_place = expected[start + at - 1]
                assert logprob == pytest.approx(float(of_place[token]), abs=1e-3)
                check_top(unpack_tops(top, count)[0], of_place, count)
        if n % 3 == 0:
            assert not request.scored_prompt
            continue
        first, *rest = unpack_prompt(request.scored_prompt, count)
        assert first == (None, ())
        assert len(rest) == start - 1
        for at, (logprob, top) in enumerate(rest):
            assert logprob == pytest.approx(float(expected[at, request.prompt[at + 1]]), abs=1e-3)
            check_top(top, expected[at], count)


def check_top(top: Any, logprobs: torch.Tensor, count: int) -> None:
    assert len(top) == count
    assert [value for _, value in top] == pytest.approx(logprobs.topk(count).values.tolist(), abs=1e-3)
    assert [value for _, value in top] == pytest.approx([float(logprobs[i]) for i, _ in top], abs=1e-3)


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
async def test_engines_of_several_ranks(folder: Path, tp: int, pp: int) -> None:
    """Penalties need the tokens where they are sampled, and prompts' logits are gathered from all tensor ranks."""
    reference = Reference(folder)
    kind: dict[str, Any] = {"repetition": 1.4, "frequency": 0.7}
    asked = {**params(**kind), "prompt_logprobs": True, "top_logprobs": 2}
    requests = [Sampled(prompt, 6, asked if n % 2 else {}) for n, prompt in enumerate(prompts(6, 11))]
    async with in_process(folder, tp, pp, seed=1) as (master, _):
        await master.run(requests)
    for n, request in enumerate(requests):
        tokens, margin = reference.adjusted(request.prompt, 6, **(kind if n % 2 else {}))
        assert request.made == tokens or margin <= TIE
        if n % 2:
            expected = reference.logprobs(request.prompt)
            scored = [value for value, _ in unpack_prompt(request.scored_prompt, 2)]
            values = [float(expected[at, token]) for at, token in enumerate(request.prompt[1:])]
            assert scored == pytest.approx([None, *values], abs=1e-3)


def test_a_model_that_computes_nothing_answers_too(tmp_path: Path) -> None:
    folder = make_timed(tmp_path)
    engine = TinyEngine(make_stage(folder, 64, 4), 64, 4)
    request = Sampled([5, 6, 7], 2, {"logprobs": True, "top_logprobs": 2, "prompt_logprobs": True})
    engine.step([request], [])
    engine.free(request)
    engine.step([request], [])  # behind its first token, which its scores came with
    assert [unpack_tops(top, 2) for top in request.tops] == [[((token, 0.0),)] for token in request.made]
    assert unpack_prompt(request.scored_prompt, 2) == [(None, ()), (0.0, ((6, 0.0),)), (0.0, ((7, 0.0),))]


@pytest.mark.parametrize("kernels", ["auto", "torch", "device-loop"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 7}, {"presence_penalty": 1.0, "logprobs": True}])
def test_a_forced_end_is_the_last_token_and_no_other(folder: Path, kernels: str, sampling: dict[str, Any]) -> None:
    """As ForcedEOSTokenLogitsProcessor of transformers 5.23; also where it starts again before its last token."""
    engine = TinyEngine(make_stage(folder, SLOTS, 4, kernels=kernels), SLOTS, 4)
    forced = {"forced_end": ForcedEnd(token_id=9, max_new_tokens=5)}
    free, ends, again, one = Sampled([5, 6], 5, sampling), *(Sampled([5, 6], 5, sampling | forced) for _ in range(3))
    engine.run([free])
    engine.run([ends, Sampled([7], 9)])
    assert ends.made == [*free.made[:4], 9] != free.made
    again.made, again.logprobs = free.made[:4], free.logprobs[:4]
    engine.step([again], [])
    assert again.made == ends.made
    if "logprobs" in sampling:  # the model's own, as of every token
        right = Reference(folder).logprobs([5, 6, *free.made[:4]])[-1, 9].item()
        assert ends.logprobs[-1] == pytest.approx(right, abs=1e-3)
    one.sampling["forced_end"] = ForcedEnd(token_id=9, max_new_tokens=1)
    engine.step([one], [])
    assert one.made == [9]


@pytest.mark.parametrize("kernels", ["auto", "torch", "device-loop"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.5, "seed": 7}, {"presence_penalty": 1.0}])
def test_no_end_before_the_least_tokens(folder: Path, kernels: str, sampling: dict[str, Any]) -> None:
    """As MinNewTokensLengthLogitsProcessor of transformers 5.23; also where it starts again in between."""
    engine = TinyEngine(make_stage(folder, SLOTS, 4, kernels=kernels), SLOTS, 4)
    free = Sampled([5, 6], 6, sampling)
    engine.run([free])
    ends = sorted({free.made[0], free.made[3]})  # the model would choose them
    held = sampling | {"not_before": NotBefore(min_new_tokens=4, token_ids=ends)}
    kept, again = Sampled([5, 6], 6, held), Sampled([5, 6], 6, held)
    engine.run([kept, Sampled([7], 6)])
    assert not {*kept.made[:4]} & {*ends}
    again.made = kept.made[:2]
    while len(again.made) < 6:
        engine.step([again], [])
        engine.free(again)
    assert again.made == kept.made
    if not sampling:
        reference = Reference(folder)
        for n, token in enumerate(kept.made):
            logprobs = reference.logprobs([5, 6, *kept.made[:n]])[-1:].clone()
            processor = MinNewTokensLengthLogitsProcessor(2, 4, ends)
            right = processor(torch.zeros(1, 2 + n, dtype=torch.long), logprobs)[0]  # type: ignore[arg-type]
            assert right[token] == right.max()


class Newer(Sampled):
    """Asks for a parameter that the endpoint of a newer release knows."""

    @property
    def params(self) -> SamplingParams:
        asked = SamplingParams(**self.sampling)
        asked.MergeFromString(bytes([0xA0, 0x3F, 7]))  # a varint 7 of field 1012
        return asked


@pytest.mark.parametrize("kernels", ["auto", "torch", "device-loop"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 7}, {"presence_penalty": 1.0}])
def test_what_a_rank_does_not_know_is_not_ignored(folder: Path, kernels: str, sampling: dict[str, Any]) -> None:
    """Its request ends; the others of its batch notice nothing."""
    engine = TinyEngine(make_stage(folder, SLOTS, 4, kernels=kernels), SLOTS, 4)
    alone, beside, newer = Sampled([5, 6], 3), Sampled([5, 6], 3), Newer([5, 6], 3, sampling)
    engine.run([alone])
    engine.run([newer, beside])
    assert newer.stuck
    assert not beside.stuck
    assert beside.made == alone.made


def test_a_plain_batch_does_no_work_for_adjustments(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("work that nobody asked for")

    monkeypatch.setattr("orca_worker.sampling.adjusting._adjust", never)
    monkeypatch.setattr("orca_worker.sampling.sampling.tops", never)
    monkeypatch.setattr("orca_worker.models.cpu.PromptScores", never)
    engine = TinyEngine(make_stage(folder, SLOTS, 4), SLOTS, 4)
    engine.run([Sampled(prompt, 4, {"temperature": n % 2}) for n, prompt in enumerate(prompts(4, 12))])


class Allowed:
    """A constraint with a mask that is there, or None."""

    def __init__(self, mask: np.ndarray | None) -> None:
        self._mask = mask

    def allowed(self) -> np.ndarray | None:
        return self._mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [16, 43])
def test_rows_of_a_cpu_are_adjusted_as_on_a_device(vocabulary: int, dtype: torch.dtype) -> None:
    """Also where a mask's last bits are of no token, none is left, or a penalty has made a forbidden logit infinite."""
    torch.manual_seed(3)
    logits = torch.randn(6, vocabulary).abs().to(dtype) + 5
    logits[4, 0] = -math.inf
    some, none, first = (np.array([byte] * -(-vocabulary // 8), np.uint8) for byte in (0b10110101, 0, 0))
    first[0] = 1
    some[-1] |= 0b11111000
    kinds: list[tuple[dict[str, Any], np.ndarray | None]] = [
        ({"repetition_penalty": 1e-38}, some),  # of tokens 0, 1 and 2, of which 1 is forbidden
        ({"logit_bias": {3: 9.0}}, some),
        ({}, none),
        ({}, None),
        ({}, first),  # only the one that cannot be chosen
    ]
    allowed = np.unpackbits(some, count=vocabulary, bitorder="little").astype(bool)

    def adjusted() -> dict[int, Adjusted]:
        made = {n: Adjusted(SamplingParams(**fields, grammar="g"), [0, 1, 2], 1) for n, (fields, _) in enumerate(kinds)}
        for one, (_, mask) in zip(made.values(), kinds, strict=True):
            one.answer = Allowed(mask)
        return made

    before, ends = logits.clone(), np.full(6, 3)
    device, host = adjusted(), adjusted()
    on_device = adjust(logits, device, ends).numpy()
    on_host = [row.copy() for row in adjusted_rows(logits, range(6), host, ends)]
    for these in (device, host):
        assert (stuck(these), waiting(these)) == ([2, 4], [3])
    for n in (0, 1, 3, 5):
        np.testing.assert_array_equal(on_device[n], on_host[n])
    assert np.isposinf(on_host[0][[0, 2]]).all()
    for n in (0, 1):
        assert (np.isneginf(on_host[n]) == ~allowed).all()
    assert on_host[1][3] == -math.inf
    assert on_host[3].argmax() == 2
    assert torch.equal(logits, before)
    table = requests_of(*[{"temperature": n % 2, "prompt": 1, "seed": n} for n in range(6)])
    for temperature in (0.0, 1.0):
        table["temperature"] = temperature
        assert sample(logits, table, np.full(6, 2), adjusted()).token_ids[0] == 0


def test_on_a_device_adjusted_rows_are_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their draws, logprobs and scores come out in the batch's order. (The kernels themselves: tests/kernels.)"""
    torch.manual_seed(13)
    logits = torch.randn(3, 50)
    table = requests_of(
        *[{"temperature": 0.9, "min_p": 0.1, "seed": n, "logprobs": True, "prompt": 1} for n in range(3)]
    )
    draws = np.array([2, 3, 4])
    one = Adjusted(SamplingParams(presence_penalty=3, top_logprobs=2), [1, 2, 3, 4, 5], 1)
    monkeypatch.setattr("kernels.device_sampled.sample", device_loop.sample)
    output = sampled_on_device(logits, table, draws, {1: one})
    expected = sample(logits, table, draws, {1: one})
    assert output.token_ids == expected.token_ids
    assert output.logprobs == pytest.approx(expected.logprobs)
    assert output.tops == expected.tops
    assert list(output.tops) == [1]
    assert not any(math.isnan(value) for value in output.logprobs)
