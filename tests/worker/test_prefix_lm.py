"""Prefix LMs: the tokens of a prompt see each other. transformers is given the same mask."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_gpt2, make_shape
from iterations import begins, iteration_of
from properties import PART
from reference import PrefixLM, Reference
from torch import Tensor
from worker.company import check_any_company, ways
from worker.driver import Sampled, TinyEngine, make_stage
from worker.engines import in_process
from worker.logits import InTransformers, prompt_of, seen_by
from worker.test_batch_invariance import some_requests
from worker.test_families import change_config, requests_for

from orca_common.checkpoint import read_checkpoint
from orca_common.errors import FailedPrecondition
from orca_kernels.cpu.library import instruction_sets
from orca_worker.device import model as device_model
from orca_worker.models.families import check_partition

SHAPES = ("llama, tied, biases, 1 K/V head, large heads", "llama, 10 heads", "qwen3, large heads", "neox", "gptj")


def make(folder: Path, shape: str, **config: Any) -> Path:
    if shape != "gpt2":
        return make_shape(folder, shape, orca_prefix_lm=True, **config)
    sizes = {"heads": 3, "layers": 2, "hidden": 36, "vocab": 211, "positions": 64, "seed": 3}
    return make_gpt2(folder, **sizes, orca_prefix_lm=True, **config)


@pytest.mark.parametrize("shape", [*SHAPES, "gpt2"])
def test_tokens_equal_transformers(tmp_path: Path, shape: str) -> None:
    """In `make test` by this machine's kernels and one of the others; the logits below are those of all of them."""
    folder = make(tmp_path, shape)
    right, causal = (
        [of(folder).greedy(one.prompt, one.new_tokens) for one in requests_for(211, 10, seed=4)]
        for of in (PrefixLM, Reference)
    )
    assert right != causal
    others = ["torch", "device-loop"]
    for kernels in ["auto", *(others if PART == 1 else [others[[*SHAPES, "gpt2"].index(shape) % 2]])]:
        engine = TinyEngine(make_stage(folder, 576, 5, kernels=kernels), 576, 5, seed=2)
        requests = requests_for(211, 10, seed=4)
        engine.run(requests)
        assert [request.made for request in requests] == right, kernels
        assert engine.mixed


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_near_float64(tmp_path: Path, shape: str) -> None:
    """By each instruction set of this machine, in plain torch and in the loop of a GPU. (By Triton: test_stage.py.)"""
    folder = make(tmp_path, shape)
    oracle, right = InTransformers(folder, torch.float64), dict[tuple[int, ...], Tensor]()
    for kernels in ("torch", "device-loop", *instruction_sets()):
        requests = [Sampled(one.prompt, 4, {"logprobs": True}) for one in requests_for(211, 5, seed=3)]
        for tokens, made in seen_by(make_stage(folder, 400, 16, kernels=kernels), requests):
            if tokens not in right:
                right[tokens] = oracle.logits(tokens, prompt_of(tokens, requests))
            assert (made - right[tokens]).abs().max() < 2e-4, kernels  # logits are about 4, and up to 13


@pytest.mark.parametrize(("kernels", "dtype"), ways())
def test_the_same_bits_in_any_company(tmp_path: Path, logits: list[Tensor], kernels: str, dtype: str) -> None:
    """Alone and beside others, in pieces shorter than prompts, and after a recovery, whose old answer is no prompt.

    Heads of 32, for which a CPU with tiles has kernels of its own.
    """
    folder = make(tmp_path, "llama, 2 K/V heads", head_dim=32)
    check_any_company(folder, logits, kernels, dtype, some_requests(24, seed=2))


@pytest.mark.parametrize("piece", [4, 20])
def test_prompts_that_are_longer_than_a_piece_of_a_gpus_loop(
    tmp_path: Path, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_model, "PIECE", piece)
    folder = make(tmp_path, "llama, 10 heads")
    requests = requests_for(211, 10, seed=4)
    TinyEngine(make_stage(folder, 576, 16, kernels="device-loop"), 576, 16, seed=2).run(requests)
    oracle = PrefixLM(folder)
    for request in requests:
        assert request.made == oracle.greedy(request.prompt, request.new_tokens)


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2)])
async def test_cuts(tmp_path: Path, tp: int, pp: int) -> None:
    folder = make(tmp_path, "llama, tied, biases, 1 K/V head, large heads")
    requests = requests_for(211, 6, seed=pp)
    async with in_process(folder, tp, pp, seed=tp) as (master, _):
        await master.run(requests)
    oracle = PrefixLM(folder)
    for request in requests:
        assert request.made == oracle.greedy(request.prompt, request.new_tokens)


def test_a_part_of_a_prompt_is_refused(tmp_path: Path) -> None:
    iteration = iteration_of([begins(7, [1, 2, 3, 4], [3])])
    iteration.counts[0], iteration.outputs[0] = 2, 0
    with pytest.raises(FailedPrecondition, match="a part of a prompt, to a prefix LM"):
        make_stage(make(tmp_path, "llama, 2 K/V heads"), 64, 4).run(iteration)


@pytest.mark.parametrize(
    ("shape", "value", "sentence"),
    [
        (
            "qwen2, a window in the upper layer",
            True,
            "asks for orca_prefix_lm, which a model with windows here does not have",
        ),
        ("llama, 2 K/V heads", "yes", "gives orca_prefix_lm 'yes', not true or false"),
        ("llama, 2 K/V heads", 1, "gives orca_prefix_lm 1, not true or false"),
    ],
)
def test_it_is_refused(tmp_path: Path, shape: str, value: Any, sentence: str) -> None:
    change_config(make_shape(tmp_path, shape), orca_prefix_lm=value)
    with pytest.raises(FailedPrecondition, match=f"^model: config.json of .* {sentence}$"):
        check_partition(read_checkpoint(tmp_path), 1, 2)
