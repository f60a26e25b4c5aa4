"""A request's logits in any company are those that it has alone, bit for bit: also after a recovery, and in pieces."""

import random
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest
import torch
from properties import PART, first
from torch import Tensor
from worker.driver import Sampled, TinyEngine, make_stage

from orca_kernels.cpu.library import instruction_sets
from orca_worker.models import cpu

SLOTS = 64 * 64
MULTIPLY_BFLOAT16 = {"amx", "avx512_bf16"}
DTYPES = ("float32", "bfloat16")
SETTINGS = first(2, [(16, 2, 512), (5, 2, 7), (1, 1, 512)])


def ways() -> list[tuple[str, str]]:
    """Each instruction set of this machine with a type: bfloat16 where it multiplies that, otherwise one or the other.
    In `make fuzz` with both."""
    names = instruction_sets()
    if PART == 1:
        return list(product(names, DTYPES))
    return [(name, DTYPES[name in MULTIPLY_BFLOAT16 or n % 2]) for n, name in enumerate(names)]


def alone(engine: TinyEngine, logits: list[Tensor], requests: list[Sampled]) -> list[list[Tensor]]:
    """Each request's logits, one [V] a token, when it has the engine for itself."""
    found = []
    for request in requests:
        logits.clear()
        engine.run([request])
        found.append([row[0] for row in logits])
    return found


def check_any_company(
    folder: Path,
    logits: list[Tensor],
    kernels: str,
    dtype: str,
    requests: list[Sampled],
    settings: Sequence[tuple[int, int, int]] = SETTINGS,
    quantize: str | None = None,
    kv_dtype: str | None = None,
) -> None:
    """logits: the fixture. settings: size of a block, threads, and tokens of a piece."""
    reference = make_stage(folder, SLOTS, 16, dtype, kernels, 1, quantize, kv_dtype=kv_dtype)
    expected = alone(TinyEngine(reference, SLOTS, 16), logits, requests)
    chance = random.Random(3)
    for block_size, threads, piece in settings:
        stage = make_stage(folder, SLOTS, block_size, dtype, kernels, threads, quantize, kv_dtype=kv_dtype)
        engine = TinyEngine(stage, SLOTS, block_size, seed=4)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cpu, "PIECE", piece)  # an iteration's tokens run in several pieces
            waiting = [(i, Sampled(one.prompt, 4, one.sampling)) for i, one in enumerate(requests)]
            chance.shuffle(waiting)
            running: list[tuple[int, Sampled]] = []
            recovered = 0
            while waiting or running:
                new = [waiting.pop() for _ in range(min(len(waiting), chance.randint(0 if running else 1, 6)))]
                # A recovery: the request begins again with what it has made as an initiation.
                lost = [member for member in running if chance.random() < 0.2]
                kept = [member for member in running if member not in lost]
                recovered += len(lost)
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
            assert recovered > 5
