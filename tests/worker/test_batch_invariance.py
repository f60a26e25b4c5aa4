"""A request's logits are the same bits alone, in any batch, as increments, and as an initiation after a recovery.

The paper's selective batching makes a batch of whatever is there. With ordinary kernels the order of a sum then depends
on the company, and with it the last bits of a logit, and now and then a token. Ours are the same.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_gpt2, make_shape
from torch import Tensor
from worker.driver import Sampled, TinyEngine, make_stage

from orca_kernels.cpu.library import instruction_sets
from orca_worker.models import cpu

VOCABULARY, POSITIONS, SLOTS = 211, 64, 64 * 64


@pytest.fixture
def logits(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The logits that each iteration samples from: [B, V] in the batch's order."""
    seen: list[Tensor] = []
    sample = cpu.sample

    def look(of_batch: Tensor, *rest: Any) -> Any:
        seen.append(of_batch.clone())
        return sample(of_batch, *rest)

    monkeypatch.setattr(cpu, "sample", look)
    return seen


def some_requests(count: int, seed: int) -> list[Sampled]:
    chance = random.Random(seed)
    return [
        Sampled([chance.randrange(VOCABULARY) for _ in range(chance.randint(1, 50))], 4, {"logprobs": True})
        for _ in range(count)
    ]


def alone(engine: TinyEngine, logits: list[Tensor], requests: list[Sampled]) -> list[list[Tensor]]:
    """Each request's logits, one [V] a token, when it has the engine for itself."""
    found = []
    for request in requests:
        logits.clear()
        engine.run([request])
        found.append([row[0] for row in logits])
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kernels", instruction_sets())
def test_the_same_bits_in_any_company(tmp_path: Path, logits: list[Tensor], kernels: str, dtype: str) -> None:
    folder = make_gpt2(tmp_path, heads=2, layers=2, hidden=64, vocab=VOCABULARY, positions=POSITIONS, seed=1)
    check_any_company(folder, logits, kernels, dtype, some_requests(200, seed=2))


SHAPES = (
    "llama, tied, biases, 1 K/V head, large heads",
    "mistral, a window",
    "qwen3, windows of some layers",
    "gemma3, windows but in one layer",
    "neox",
    "gptj",
)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kernels", instruction_sets())
def test_other_families(tmp_path: Path, logits: list[Tensor], kernels: str, dtype: str, shape: str) -> None:
    """Windows too, which end within tiles and within pieces."""
    check_any_company(make_shape(tmp_path, shape), logits, kernels, dtype, some_requests(40, seed=2))


def check_any_company(folder: Path, logits: list[Tensor], kernels: str, dtype: str, requests: list[Sampled]) -> None:
    reference = make_stage(folder, SLOTS, 16, dtype, kernels, threads=1)
    expected = alone(TinyEngine(reference, SLOTS, 16), logits, requests)
    assert len({tuple(request.made) for request in requests}) > 20, "a model that answers all alike tests nothing"

    chance = random.Random(3)
    for block_size, threads, piece in ((16, 2, 512), (1, 1, 512), (5, 2, 7)):
        engine = TinyEngine(make_stage(folder, SLOTS, block_size, dtype, kernels, threads), SLOTS, block_size, seed=4)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cpu, "PIECE", piece)  # an iteration's tokens run in several pieces
            waiting = [(i, Sampled(one.prompt, 4, one.sampling)) for i, one in enumerate(requests)]
            chance.shuffle(waiting)
            running: list[tuple[int, Sampled]] = []
            while waiting or running:
                new = [waiting.pop() for _ in range(min(len(waiting), chance.randint(0 if running else 1, 6)))]
                # A recovery: the request begins again with what it has made as an initiation.
                lost = [member for member in running if chance.random() < 0.2]
                kept = [member for member in running if member not in lost]
                for _, request in lost:
                    engine.free(request)
                logits.clear()
                engine.step([request for _, request in new + lost], [request for _, request in kept])
                for row, (i, request) in zip(logits[0], new + lost + kept, strict=True):
                    assert torch.equal(row, expected[i][len(request.made) - 1])
                    assert request.made == requests[i].made[: len(request.made)]
                for _, request in [member for member in new + lost + kept if len(member[1].made) == 4]:
                    engine.free(request)
                running = [member for member in new + lost + kept if len(member[1].made) < 4]
