"""Greedy and drawn tokens against orca_worker.sampling.sampling, draws bit for bit."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from kernels.device_sampled import sampled_on_device
from kernels.triton_device import DEVICE, TYPES

from orca_kernels.triton.launch import launch
from orca_kernels.triton.sampling import draw_of, greedy, sample
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


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.filterwarnings("ignore:invalid value")  # of the interpreter: infinity - infinity
def test_a_row_without_a_distribution_has_no_log_probability(bad: float, dtype: torch.dtype) -> None:
    """Greedy or drawn, wherever the bad logit stands. Rows beside it are as before."""
    logits = torch.randn(6, 2500).to(DEVICE, dtype)
    logits[1, 1300], logits[2, 0], logits[3, 2499], logits[4] = bad, bad, bad, -torch.inf
    ids, logprobs = greedy(logits)
    assert logprobs.isnan().tolist() == [False, True, True, True, True, False]
    assert all(0 <= token < 2500 for token in ids.tolist())
    requests = np.zeros(6, ROW)
    requests["temperature"], requests["top_k"] = [0, 1, 0, 0.7, 1, 1], [0, 0, 0, 5, 5, 5]  # some go on to plain torch
    assert sampled_on_device(logits, requests, np.arange(6)).not_finite == [1, 2, 3, 4]
    temperatures = torch.tensor([0.0, 1.0, 0.0, 0.7, 1.0, 1.0]).to(DEVICE)
    numbers = torch.arange(6).to(DEVICE)
    ids, logprobs = sample(logits, temperatures, numbers, numbers)
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
    temperatures = torch.from_numpy(requests["temperature"].astype(np.float32))
    seeds = torch.from_numpy(requests["seed"].copy()).view(torch.int64)
    indexes = torch.from_numpy(draws).to(DEVICE)
    logits, temperatures, seeds = logits.to(DEVICE), temperatures.to(DEVICE), seeds.to(DEVICE)
    tokens, logprobs = sample(logits, temperatures, seeds, indexes)
    assert tokens.tolist() == right.token_ids
    assert logprobs.tolist() == pytest.approx(right.logprobs, abs=1e-5)

    at = [7, 30]  # alone: the same bits
    tokens_alone, logprobs_alone = sample(logits[at], temperatures[at], seeds[at], indexes[at])
    assert torch.equal(tokens_alone, tokens[at])
    assert torch.equal(logprobs_alone, logprobs[at])
