"""Draws: their generator, their independence of the batch, their distribution, and the edges of top-k and top-p."""

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import make_gpt2
from properties import examples
from transformers import GPT2LMHeadModel
from worker.borders import nearest_draws, tokens_near
from worker.driver import Sampled, TinyEngine, make_stage

from orca.v1.sampling_pb2 import SamplingParams
from orca_worker.iteration.rows import ROW, Adjusted
from orca_worker.sampling.host_draw import drawn, kth_largest, least_share
from orca_worker.sampling.sampling import draw_at_once, philox, sample, uniform


def requests_of(*given: dict[str, Any]) -> np.ndarray:
    table = np.zeros(len(given), ROW)
    for row, fields in zip(table, given, strict=True):
        for name, value in fields.items():
            row[name] = value
    return table


def tokens_of(logits: torch.Tensor, draws: int, **fields: Any) -> list[int]:
    """One row of logits [V], drawn `draws` times: index 0, 1, .. of one request."""
    table = requests_of(*[fields] * draws)
    return sample(logits.expand(draws, -1), table, np.arange(draws)).token_ids


@pytest.mark.parametrize(
    ("counter", "key", "random"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_published_numbers(counter: str, key: str, random: str) -> None:
    """The known answers of Random123 for philox4x32, 10 rounds (its file kat_vectors)."""

    def words(text: str) -> list[np.ndarray]:
        return [np.array([int(word, 16)], np.uint64) for word in text.split()]

    assert philox(words(counter), words(key)) == words(random)


def test_uniform_is_uniform() -> None:
    n = 40_000
    for seeds, indexes in [(np.full(n, 7), np.arange(n)), (np.arange(n), np.full(n, 3))]:
        u = uniform(seeds, indexes)
        assert (u >= 0).all()
        assert (u < 1).all()
        counts = np.bincount((u * 50).astype(int), minlength=50)
        assert chi_square(counts, np.full(50, 1 / 50)) < 94  # 49 degrees of freedom: p = 0.0001
        assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.02


def test_large_seeds_and_indexes_count() -> None:
    seeds = np.array([1, 1 + (1 << 32), 1 + (1 << 63), (1 << 64) - 1, 1], np.uint64)
    indexes = np.array([5, 5, 5, 5, 5 + (1 << 32)], np.uint64)
    assert len(set(uniform(seeds, indexes).tolist())) == 5


def chi_square(counts: np.ndarray, shares: np.ndarray) -> float:
    expected = shares * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({}, 8),
        ({"temperature": 2.5}, 8),
        ({"top_k": 3}, 3),
        ({"top_k": 8}, 8),
        ({"top_p": 0.75}, None),
        ({"top_k": 5, "top_p": 0.9, "temperature": 0.7}, None),
    ],
    ids=str,
)
def test_distribution(fields: dict[str, float], kept: int | None) -> None:
    logits = torch.tensor([0.3, -1.0, 2.0, 1.9, 0.0, -0.5, 1.0, 0.7])
    fields = {"temperature": 1.0, "seed": 11, **fields}
    shares = np.exp(logits.double().numpy() / fields["temperature"])
    order = np.argsort(-shares)
    if "top_k" in fields:
        shares[order[int(fields["top_k"]) :]] = 0
    shares /= shares.sum()
    if "top_p" in fields:
        n = int(np.argmax(np.cumsum(shares[order]) >= fields["top_p"])) + 1
        shares[order[n:]] = 0
        shares /= shares.sum()
    n = examples(40_000)
    counts = np.bincount(tokens_of(logits, n, **fields), minlength=8)
    possible = shares > 0
    if kept is not None:
        assert possible.sum() == kept
    assert possible.sum() > 1
    assert counts[~possible].sum() == 0
    assert chi_square(counts[possible], shares[possible]) < 30  # at most 7 degrees of freedom: p < 0.0001


def test_a_draw_depends_on_seed_and_index_alone() -> None:
    torch.manual_seed(1)
    logits = torch.randn(40, 211)
    kinds: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {"temperature": 0.0},
        {"temperature": 0.8, "top_k": 20},
        {"temperature": 1.3, "top_p": 0.8, "logprobs": True},
    ]
    table = requests_of(*[{**kinds[i % 4], "seed": i * 1_000_003} for i in range(40)])
    draws = np.arange(40) * 7
    together = sample(logits, table, draws)
    for order in (np.arange(40)[::-1], np.arange(3, 40, 5)):
        some = sample(logits[order.copy()], table[order], draws[order])
        assert some.token_ids == [together.token_ids[i] for i in order]
    for i in range(40):
        alone = sample(logits[i : i + 1], table[i : i + 1], draws[i : i + 1])
        assert alone.token_ids == [together.token_ids[i]]
        assert alone.logprobs == pytest.approx([together.logprobs[i]], nan_ok=True)


def test_logprobs_are_the_same_bits_in_any_company() -> None:
    """Also those of the most probable tokens, and which of equal ones is told, whoever asks for more of them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)  # torch cuts a long row that is alone into a piece for each
    try:
        torch.manual_seed(1)
        logits = torch.randn(64, 50257) * 3
        logits[32:] = logits[32:].round()  # with ties
        table = requests_of(*[{"logprobs": True}] * 64)
        asked = {n: Adjusted(SamplingParams(top_logprobs=1 + n % 20), [1], 1) for n in range(64)}
        together = sample(logits, table, np.arange(64), asked)
        for n in range(64):
            alone = sample(logits[n : n + 1], table[n : n + 1], np.array([n]), {0: asked[n]})
            assert alone.logprobs == [together.logprobs[n]]
            assert alone.tops[0] == together.tops[n]
    finally:
        torch.set_num_threads(threads)


def test_edges() -> None:
    logits = torch.tensor([0.0, 3.0, 3.0, -math.inf, 1.0])
    assert set(tokens_of(logits, 50, temperature=1.0, top_k=1)) == {1, 2}  # ties with the k-th stay
    assert set(tokens_of(logits, 50, temperature=1.0, top_p=1e-9)) == {1, 2}
    assert set(tokens_of(logits, 50, temperature=1e-30)) == {1, 2}
    assert set(tokens_of(logits, 50, temperature=1e-300)) == {1, 2}
    assert set(tokens_of(logits, 2000, temperature=1e30)) == {0, 1, 2, 4}  # what is impossible stays so
    assert tokens_of(logits, 30, temperature=1.0, top_k=99, top_p=1.0, seed=4) == tokens_of(
        logits, 30, temperature=1.0, seed=4
    )
    assert tokens_of(logits, 3) == [1, 1, 1]  # greedy


def test_top_p_of_a_flat_distribution_over_a_large_vocabulary() -> None:
    """Top-p keeps thousands of candidates, which are nearly equal."""
    drawn = tokens_of(torch.linspace(0, 0.1, 5000), 200, temperature=1.0, top_p=0.5, seed=3)
    assert min(drawn) >= 2400


def test_bounds_of_top_k_and_top_p_hold_for_any_row() -> None:
    """Steep and flat rows of all lengths, with ties and with tokens that cannot be chosen."""
    chance = np.random.default_rng(5)
    for _ in range(examples(2000)):
        n = int(chance.choice([1, 2, 7, 63, 64, 65, 129, 700, 5000]))
        values = (chance.standard_normal(n) * chance.choice([0, 0.01, 1, 8])).astype(np.float32)
        values = values.round() if chance.random() < 0.3 else values
        values[chance.random(n) < chance.choice([0, 0.5, 0.99])] = -np.inf
        values[chance.integers(n)] = 0.0
        values -= values.max()
        falling = np.sort(values)[::-1]
        k = int(chance.integers(1, 1 + (n if chance.random() < 0.5 else max(1, n // 64))))
        assert kth_largest(values, k) == falling[k - 1]
        shares, top_p = np.exp(values), float(chance.choice([1e-9, 0.1, 0.5, 0.9, 0.999]))
        largest = np.sort(shares)[::-1]
        sums = largest.cumsum(dtype=np.float64)
        least = least_share(shares, top_p)
        near = [int(np.searchsorted(sums, p * sums[-1])) for p in (top_p - 1e-12, top_p + 1e-12)]
        assert largest[min(near[1], n - 1)] <= least <= largest[near[0]]
        u = float(chance.choice([0.0, chance.random(), np.nextafter(1, 0)]))
        place, cumulative = drawn(shares, u), shares.cumsum(dtype=np.float64)
        assert shares[place] > 0
        assert cumulative[place] - shares[place] <= u * cumulative[-1] * (1 + 1e-12)
        assert cumulative[place] >= u * cumulative[-1] * (1 - 1e-12)


def test_row_by_row_is_as_all_at_once() -> None:
    """What a CPU does, and what a GPU does, on the same logits; with ties, and with all settings beside one another."""
    torch.manual_seed(1)
    chance = np.random.default_rng(1)
    for vocabulary, scale in ((3000, 3.0), (1024, 0.3), (211, 6.0)):
        logits = torch.randn(40, vocabulary) * scale
        logits = logits.round() if vocabulary == 211 else logits
        table = np.zeros(40, ROW)
        table["temperature"], table["seed"] = chance.choice([0.3, 0.8, 1.5], 40), np.arange(40)
        table["top_k"], table["top_p"] = chance.choice([0, 1, 20, 5000], 40), chance.choice([0, 0.1, 0.9, 0.999], 40)
        table["min_p"] = chance.choice([0, 0.05], 40)
        draws = chance.integers(100, size=40)
        together = draw_at_once(logits, table, draws).tolist()
        assert sample(logits, table, draws).token_ids == together
        assert [sample(logits[[i]], table[[i]], draws[[i]]).token_ids[0] for i in range(40)] == together


def test_logprobs_are_of_the_model_not_of_the_temperature() -> None:
    torch.manual_seed(2)
    logits = torch.randn(4, 97) * 3
    table = requests_of(
        {"logprobs": True}, {}, {"logprobs": True, "temperature": 0.3, "seed": 1}, {"temperature": 1.0, "seed": 2}
    )
    output = sample(logits, table, np.zeros(4, np.int64))
    expected = logits.log_softmax(-1)
    for i, (token, logprob) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
        if i in (0, 2):
            assert logprob == pytest.approx(float(expected[i, token]), abs=1e-5)
        else:
            assert math.isnan(logprob)


def test_a_replay_gives_the_same_stream(tmp_path: Path) -> None:
    """A request that starts again with the tokens it had made, in other batches, continues with the same tokens."""
    folder = make_gpt2(tmp_path, heads=3, layers=2, hidden=24, vocab=211, positions=64, seed=3, initializer_range=0.2)
    kinds: list[dict[str, Any]] = [
        {"temperature": 1.0, "seed": 5, "logprobs": True},
        {"temperature": 1.0, "seed": 6},
        {"temperature": 0.7, "top_k": 40, "seed": 5},
        {"temperature": 1.2, "top_p": 0.9, "seed": 7, "logprobs": True},
        {},
    ]

    def fresh() -> list[Sampled]:
        return [Sampled([9, 8, 7, i // 5], 20, kinds[i % 5]) for i in range(10)]

    def engine(seed: int) -> TinyEngine:
        return TinyEngine(make_stage(folder, 640, 8), 640, 8, seed)

    whole = fresh()
    engine(1).run(whole)
    assert len({tuple(request.made) for request in whole}) == 10
    broken = fresh()
    before = engine(2)
    before.step(broken, [])
    for i in range(9):
        before.step([], broken[i:])
    assert len({len(request.made) for request in broken}) == 9
    after = engine(3)
    after.run(broken)
    for again, once in zip(broken, whole, strict=True):
        assert again.made == once.made
        assert again.logprobs == pytest.approx(once.logprobs, abs=1e-4, nan_ok=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sampling_in_company_in_each_dtype(tmp_path: Path, dtype: str) -> None:
    folder = make_gpt2(tmp_path, heads=4, layers=1, hidden=32, vocab=97, positions=64, seed=3)
    engine = TinyEngine(make_stage(folder, 640, 16, dtype), 640, 16)
    requests = [Sampled([i], 12, {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "seed": i}) for i in range(8)]
    engine.run(requests)
    assert all(len(r.made) == 12 and all(0 <= t < 97 for t in r.made) for r in requests)


@pytest.mark.parametrize(
    "fields",
    [{}, {"top_p": 0.999, "temperature": 1.7}, {"top_k": 900, "top_p": 0.95}, {"min_p": 0.02}],
    ids=str,
)
def test_the_last_bits_of_logits_change_a_token_only_at_a_border(fields: dict[str, float]) -> None:
    """Of a flat and of a steep distribution, with the draws that lie nearest to a border; see `borders.py`."""
    torch.manual_seed(3)
    chance = np.random.default_rng(4)
    fields = {"temperature": 1.0, "seed": 17, **fields}
    changed = 0
    for scale in (0.2, 3.0):
        logits = torch.randn(4000) * scale
        draws = nearest_draws(logits.numpy(), 100, 300_000, **fields)  # type: ignore[arg-type]
        table = requests_of(*[fields] * 100)
        nudged = logits * (1 + torch.from_numpy(chance.uniform(-8e-7, 8e-7, (100, 4000))).float())
        first, second = (sample(these, table, draws).token_ids for these in (logits.expand(100, -1), nudged))
        for index, a, b in zip(draws.tolist(), first, second, strict=True):
            changed += a != b
            assert {a, b} <= tokens_near(logits.numpy(), index=index, **fields)  # type: ignore[arg-type]
    assert changed, "no draw was near a border: the test shows nothing"


def test_requests_in_other_batches_in_plain_torch(tmp_path: Path) -> None:
    """60 seeded requests, alone and in random batches: equal, or at the first difference at a border."""
    folder = make_gpt2(tmp_path, heads=4, layers=2, hidden=64, vocab=509, positions=64, seed=5)
    kinds: list[dict[str, Any]] = [{}, {"top_k": 50}, {"top_p": 0.9}]
    chance = random.Random(6)
    prompts = [[chance.randrange(509) for _ in range(chance.randint(1, 30))] for _ in range(60)]

    def run(batch: int) -> list[Sampled]:
        engine = TinyEngine(make_stage(folder, 2560, 8, kernels="torch"), 2560, 8, seed=batch)
        asked = [
            Sampled(prompt, 6, {"temperature": 1.0, "seed": i, **kinds[i % 3]}) for i, prompt in enumerate(prompts)
        ]
        engine.run(asked, max_batch=batch)
        return asked

    exact = GPT2LMHeadModel.from_pretrained(folder).eval().double()
    for one, other in zip(run(1), run(9), strict=True):
        for index, (a, b) in enumerate(zip(one.made, other.made, strict=True)):
            if a != b:
                with torch.inference_mode():
                    logits = exact(torch.tensor([one.prompt + one.made[:index]])).logits[0, -1]
                assert {a, b} <= tokens_near(logits.numpy(), index=index, **one.sampling)  # type: ignore[arg-type]
                break


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 3}, {"logprobs": True}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_without_a_distribution_give_no_token(fields: dict[str, float], dtype: torch.dtype) -> None:
    """NaN or infinity anywhere, or minus infinity everywhere. The tokens of the rows beside are as without them."""
    torch.manual_seed(9)
    good = torch.randn(6, 1300).to(dtype)
    bad = good.clone()
    bad[1, 700], bad[2, 0], bad[3, 1299], bad[4] = math.nan, math.inf, math.nan, -math.inf
    for top_p in (0, 0.9):
        table = requests_of(*[{"seed": 3, "top_p": top_p, **fields}] * 6)
        before, found = (sample(logits, table, np.arange(6)) for logits in (good, bad))
        assert found.not_finite == [1, 2, 3, 4]
        assert not before.not_finite
        assert [found.token_ids[i] for i in (0, 5)] == [before.token_ids[i] for i in (0, 5)]
