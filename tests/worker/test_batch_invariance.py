"""A request's logits are the same bits alone, in any batch, as increments, and as an initiation after a recovery.

The paper's selective batching makes a batch of whatever is there. With ordinary kernels the order of a sum then depends
on the company, and with it the last bits of a logit, and now and then a token. Ours are the same.
"""

import random
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_gpt2, make_shape
from properties import covering
from torch import Tensor
from worker.company import check_any_company, ways
from worker.driver import Sampled

from orca_kernels.cpu.library import instruction_sets

VOCABULARY, POSITIONS = 211, 64


def some_requests(count: int, seed: int) -> list[Sampled]:
    chance = random.Random(seed)
    return [
        Sampled([chance.randrange(VOCABULARY) for _ in range(chance.randint(1, 50))], 4, {"logprobs": True})
        for _ in range(count)
    ]


def check_company(
    folder: Path,
    logits: list[Tensor],
    kernels: str,
    dtype: str,
    requests: list[Sampled],
    quantize: str | None = None,
) -> None:
    check_any_company(folder, logits, kernels, dtype, requests, quantize=quantize)
    assert len({tuple(request.made) for request in requests}) > len(requests) // 2, (
        "a model that answers all alike tests nothing"
    )


@pytest.mark.parametrize(("kernels", "dtype"), ways())
def test_the_same_bits_in_any_company(tmp_path: Path, logits: list[Tensor], kernels: str, dtype: str) -> None:
    folder = make_gpt2(tmp_path, heads=2, layers=2, hidden=64, vocab=VOCABULARY, positions=POSITIONS, seed=1)
    check_company(folder, logits, kernels, dtype, some_requests(20, seed=2))


SHAPES = (
    "llama, tied, biases, 1 K/V head, large heads",
    "mistral, a window",
    "qwen3, windows of some layers",
    "gemma3, windows but in one layer",
    "neox",
    "gptj",
)


# Their kernels are the same by themselves, on each instruction set and in both types: `tests/kernels` sees that.
@pytest.mark.parametrize(("way", "shape"), covering(ways(), SHAPES, strength=1), ids=str)
def test_other_families(tmp_path: Path, logits: list[Tensor], way: tuple[str, str], shape: str) -> None:
    """Windows too, which end within tiles and within pieces."""
    check_company(make_shape(tmp_path, shape), logits, *way, some_requests(20, seed=2))


@pytest.mark.parametrize(("kernels", "quantize"), covering(instruction_sets(), ("int8", "int4"), strength=1))
def test_weights_in_codes(tmp_path: Path, logits: list[Tensor], kernels: str, quantize: str) -> None:
    """With groups that are not whole, and half of a head in one of them."""
    sizes: dict[str, Any] = {
        "hidden_size": 144,
        "intermediate_size": 301,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
    }
    folder = make_shape(tmp_path, "llama, 2 K/V heads", **sizes)
    check_company(folder, logits, kernels, "bfloat16", some_requests(20, seed=2), quantize=quantize)
