"""Greedy and drawn tokens against orca_worker.sampling.sampling, draws bit for bit."""

import math
from itertools import product

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from kernels.device_sampled import draws_of, sampled_on_device
from kernels.triton_device import DEVICE, INTERPRETED, TYPES
from properties import PART
from worker.borders import tokens_near

from orca_kernels.triton.draws import Draws
from orca_kernels.triton.launch import launch
from orca_kernels.triton.sampling import PASS, cut_row, draw_of, greedy, sample
from orca_worker.iteration.rows import ROW
from orca_worker.sampling.sampling import sample as sample_in_torch
from orca_worker.sampling.sampling import uniform


@triton.jit
def draw(seeds, indexes, out):
    """Grid: draws."""
    at = tl.program_id(0) + tl.arange(0, 1)
    tl.store(out + at, draw_of(tl.load(seeds + at), tl.load(indexes + at)))


def test_draws_are_those_of_the_host() -> None:
    seeds = np.array([0, 1, 2**32 - 1, 2**32, 2**63 + 12345, 2**64 - 1, 987654321987654321], np.uint64)
    indexes = np.array([0, 1, 77, 2**31, 2**32 + 5, 3, 4], np.int64)
    out = torch.empty(len(seeds), dtype=torch.float64, device=DEVICE)
    on_device = (torch.from_numpy(seeds).to(DEVICE), torch.from_numpy(indexes).to(DEVICE).view(torch.uint64))
    launch(draw, (len(seeds),), *on_device, out)
    assert out.tolist() == uniform(seeds, indexes).tolist()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("vocabulary", [1, 1000, 1024, 5000])
def test_greedy(vocabulary: int, dtype: torch.dtype) -> None:
    logits = torch.randn(3, vocabulary).mul(5).to(DEVICE, dtype)
    logits[1, vocabulary // 2 :] = 40  # ties: the first one wins
    logits[2, : vocabulary // 2] = -torch.inf
    ids, logprobs = greedy(logits)
    right = logits.double().log_softmax(-1)
    assert ids.tolist() == [int(row.eq(row.max()).nonzero()[0, 0]) for row in logits]
    torch.testing.assert_close(logprobs.double(), right.gather(1, ids[:, None])[:, 0], rtol=1e-5, atol=1e-5)


BAD = [torch.nan, torch.inf]


@pytest.mark.parametrize(("bad", "dtype"), list(zip(BAD, TYPES, strict=True) if INTERPRETED else product(BAD, TYPES)))
@pytest.mark.filterwarnings("ignore:invalid value")  # of the interpreter: infinity - infinity
def test_a_row_without_a_distribution_has_no_log_probability(bad: float, dtype: torch.dtype) -> None:
    """Greedy or drawn, wherever the bad logit stands. Rows beside it are as before."""
    logits = torch.randn(6, 2500).to(DEVICE, dtype)
    logits[1, 1300], logits[2, 0], logits[3, 2499], logits[4] = bad, bad, bad, -torch.inf
    ids, logprobs = greedy(logits)
    assert logprobs.isnan().tolist() == [False, True, True, True, True, False]
    assert all(0 <= token < 2500 for token in ids.tolist())
    requests = np.zeros(6, ROW)
    requests["temperature"], requests["top_k"], requests["top_p"] = [0, 1, 0, 0.7, 1, 1], [0, 0, 0, 5, 5, 5], 0.9
    assert sampled_on_device(logits, requests, np.arange(6)).not_finite == [1, 2, 3, 4]
    ids, logprobs = sample(logits, draws_of(requests, np.arange(6), DEVICE))
    assert logprobs.isnan().tolist() == [False, True, True, True, True, False]
    assert all(0 <= token < 2500 for token in ids.tolist())


def test_sample_is_that_of_the_host() -> None:
    torch.manual_seed(5)
    rows = 40
    logits = torch.randn(rows, 5000).mul(3)
    requests = np.zeros(rows, ROW)
    requests["temperature"] = np.where(np.arange(rows) % 4, np.linspace(0.3, 2, rows), 0)
    requests["temperature"][5] = 1e-35
    requests["seed"] = np.random.default_rng(6).integers(0, 2**64, rows, dtype=np.uint64)
    requests["logprobs"] = True
    draws = np.arange(rows) * 3
    right = sample_in_torch(logits, requests, draws)
    on_device, logits = draws_of(requests, draws, DEVICE), logits.to(DEVICE)
    tokens, logprobs = sample(logits, on_device)
    assert tokens.tolist() == right.token_ids
    assert logprobs.tolist() == pytest.approx(right.logprobs, abs=1e-5)

    at = [7, 30]  # alone: the same bits
    tokens_alone, logprobs_alone = sample(logits[at], Draws(*(each[at] for each in on_device)))
    assert torch.equal(tokens_alone, tokens[at])
    assert torch.equal(logprobs_alone, logprobs[at])


WAYS = [  # of cuts: alone, in each order, and such that nothing is cut
    {"top_k": 1}, {"top_k": 40}, {"top_k": 4999}, {"top_k": 5000}, {"top_p": 1e-9}, {"top_p": 0.7}, {"top_p": 0.9999},
    {"top_p": 1.0}, {"min_p": 0.05}, {"min_p": 1.0}, {"top_k": 200, "top_p": 0.9}, {"top_p": 0.95, "min_p": 0.1},
    {"top_k": 30, "top_p": 0.99, "min_p": 0.3},
]  # fmt: skip


def cut_rows(vocabulary: int, dtype: torch.dtype) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
    """Logits, flat and steep, with ties and without; a request for each way to cut; indexes of draws. Of each way two
    rows, or one in the interpreter (`make fuzz` has both there)."""
    torch.manual_seed(8)
    logits = torch.randn(2 * len(WAYS), vocabulary)
    logits[::2] *= 4
    logits[: len(WAYS)] = logits[: len(WAYS)].mul(2).round().div(2)
    logits[3, 1 + vocabulary // 3 :] = -torch.inf
    requests = np.zeros(len(logits), ROW)
    for row, way in zip(requests, WAYS * 2, strict=True):
        for name, value in {"temperature": 0.8, **way}.items():
            row[name] = value
    requests["temperature"][-3:], requests["temperature"][5] = [0.1, 1.7, 1e-35], 0
    requests["seed"] = np.arange(len(logits)) * 7919
    few = INTERPRETED and PART > 1
    rows = [n + len(WAYS) * (n % 4 > 1) for n in range(len(WAYS))] if few else list(range(len(logits)))
    return logits[rows].to(dtype), requests[rows], np.array(rows) * 5


@pytest.mark.parametrize(("vocabulary", "dtype"), [(1, TYPES[0]), (211, TYPES[-1]), (5000, TYPES[0])])
def test_cuts_leave_the_tokens_that_the_host_leaves(vocabulary: int, dtype: torch.dtype) -> None:
    """By float64 for each token that is drawn, and token by token as the host draws. Alone: the same."""
    logits, requests, indexes = cut_rows(vocabulary, dtype)
    draws = draws_of(requests, indexes, DEVICE)
    tokens, logprobs = sample(logits.to(DEVICE), draws)
    right = sample_in_torch(logits, requests, indexes)
    exact = logits.double().log_softmax(-1)
    for n, (token, theirs) in enumerate(zip(tokens.tolist(), right.token_ids, strict=True)):
        fields = {name: requests[n][name].item() for name in ("temperature", "top_k", "top_p", "min_p", "seed")}
        if fields["temperature"] > 1e-30:
            near = tokens_near(logits[n].double().numpy(), index=int(indexes[n]), **fields)
            assert {token, theirs} <= near, fields
            assert token == theirs or len(near) > 1, fields
        assert float(logprobs[n]) == pytest.approx(float(exact[n, token]), abs=1e-4)
    for n in (2, 10, len(requests) - 6):
        alone, logprob = sample(logits[n : n + 1].to(DEVICE), Draws(*(each[n : n + 1] for each in draws)))
        assert (int(alone), float(logprob)) == (int(tokens[n]), float(logprobs[n]))


def test_the_search_finds_the_distance_of_a_token() -> None:
    """The k-th largest logit's for top-k: no bit more or less. For top-p that of the last of the fewest likeliest."""
    logits, requests, indexes = cut_rows(3000, torch.float32)
    draws, maxima = draws_of(requests, indexes, DEVICE), logits.amax(-1, keepdim=True)
    farthest = torch.empty(len(logits), device=DEVICE)
    launch(
        cut_row, (len(logits),), logits.to(DEVICE), 3000, maxima.to(DEVICE), *draws[:4], farthest,
        V=3000, N=PASS, PIECES=1, PIECES_PADDED=1, num_warps=16,
    )  # fmt: skip
    for n, (row, found) in enumerate(zip(requests, farthest.tolist(), strict=True)):
        if not row["temperature"]:
            assert found == math.inf
            continue
        distances = (maxima[n] - logits[n]) / row["temperature"].astype(np.float32).clip(1e-30)
        kept = distances.sort().values
        if 0 < row["top_k"] < 3000:
            kept = kept[kept <= kept[row["top_k"] - 1]]
        if 0 < row["top_p"] < 1:
            sums = (-kept).exp().double().cumsum(0)
            kept = kept[kept <= kept[int((sums >= row["top_p"] * sums[-1]).int().argmax())]]
        if row["min_p"]:
            kept = kept[kept <= -math.log(row["min_p"])]
        assert (distances <= found).sum() == len(kept), row
        if row["top_k"] and not row["top_p"]:
            assert found == kept[-1] or row["top_k"] >= 3000
