"""Adapters: engines make the tokens of transformers' models into which each adapter was merged by plain torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_shape
from lora import Lora, load, make_lora
from worker.driver import Sampled, TinyEngine, make_stage
from worker.engines import in_process
from worker.test_quantize import make, requests_for

from orca_kernels.cpu.library import instruction_sets

FAMILIES = ("gpt2", "llama, 2 K/V heads", "gemma3, windows but in one layer", "neox", "gptj", "t5", "marian")


def make_loras(folder: Path, base: Path) -> list[Lora]:
    """Three unlike ones: of all modules, of few with a rank of two panels, of one with patterns."""
    every = make_lora(folder / "every", base, "every", seed=1)
    layers = sorted({name.rpartition(".")[2] for name in every.changes})
    return [
        every,
        make_lora(folder / "wide", base, "wide", seed=2, rank=19, targets=layers[::2], use_rslora=True),
        make_lora(
            folder / "odd", base, "odd", seed=3, rank=1, ranks={layers[-1]: 3}, alphas={layers[-1]: 2}, alpha=5, size=1
        ),
    ]


def requests_of(loras: Sequence[Lora | None], vocabulary: int, seed: int = 5) -> list[Sampled]:
    """One request of each; None: of the model alone."""
    requests = requests_for(vocabulary, len(loras), seed)
    for request, lora in zip(requests, loras, strict=True):
        request.sampling = {} if lora is None else {"adapter": lora.adapter.name}
    return requests


def check(base: Path, requests: Sequence[Sampled], loras: Sequence[Lora | None]) -> None:
    """Each token against the merged model's after those before it."""
    models: dict[str | None, Any] = {}
    for request, lora in zip(requests, loras, strict=True):
        name = None if lora is None else lora.adapter.name
        if name not in models:
            models[name] = load(base) if lora is None else lora.merged(base)
        assert request.made == expected(models[name], request), name


@torch.inference_mode()
def expected(model: Any, request: Sampled) -> list[int]:
    """The likeliest tokens after those that were made before them."""
    prompt, made = request.prompt, request.made[:-1]
    if model.config.is_encoder_decoder:
        start = model.config.decoder_start_token_id
        of = model(torch.tensor([prompt]), decoder_input_ids=torch.tensor([[start, *made]]), use_cache=False)
        logits = of.logits[0]
    else:
        logits = model(torch.tensor([[*prompt, *made]]), use_cache=False).logits[0, len(prompt) - 1 :]
    if model.config.model_type == "marian":
        logits[:, model.config.pad_token_id] = -torch.inf
    return logits.argmax(1).tolist()


@pytest.mark.parametrize("shape", FAMILIES)
def test_tokens_equal_merged_models(tmp_path: Path, shape: str) -> None:
    """By the kernels of this machine and in plain torch; requests of the model itself are among them."""
    base, vocabulary = make(tmp_path / "base", shape)
    loras = make_loras(tmp_path, base)
    of = [*loras, None, *loras[::-1], None, *loras]
    for kernels in ("auto", "torch"):
        stage = make_stage(base, 700, 16, kernels=kernels, adapters=[lora.adapter for lora in loras])
        requests = requests_of(of, vocabulary)
        TinyEngine(stage, 700, 16).run(requests)
        check(base, requests, of)
    made = {tuple(request.made) for request in requests}
    assert len(made) > len(loras), "adapters that change nothing test nothing"


@pytest.mark.parametrize("kernels", [*instruction_sets(), "torch"])
def test_each_instruction_set(tmp_path: Path, kernels: str) -> None:
    base, vocabulary = make(tmp_path / "base", "llama, 2 K/V heads")
    loras = make_loras(tmp_path, base)
    of = [*loras, None]
    stage = make_stage(base, 400, 16, kernels=kernels, adapters=[lora.adapter for lora in loras])
    TinyEngine(stage, 400, 16).run(requests := requests_of(of, vocabulary))
    check(base, requests, of)


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("shape", ["gpt2", "llama, 2 K/V heads", "t5"])
async def test_several_ranks(tmp_path: Path, shape: str, tp: int, pp: int) -> None:
    base, vocabulary = make(tmp_path / "base", shape)
    loras = make_loras(tmp_path, base)
    of, adapters = [*loras, None, *loras], [lora.adapter for lora in loras]
    async with in_process(base, tp, pp, slots=600, adapters=adapters) as (master, _):
        await master.run(requests := requests_of(of, vocabulary))
    check(base, requests, of)


def test_thirty_two_of_sixty_four_in_one_iteration(tmp_path: Path) -> None:
    base, vocabulary = make(tmp_path / "base", "llama, 2 K/V heads")
    loras = [make_lora(tmp_path / f"{n}", base, f"a-{n}", seed=n) for n in range(64)]
    stage = make_stage(base, 32 * 48, 16, adapters=[lora.adapter for lora in loras])
    engine, of = TinyEngine(stage, 32 * 48, 16), loras[::2]
    requests = requests_of(of, vocabulary)
    engine.step(requests, [])
    for _ in range(requests[0].new_tokens - 1):
        engine.step([], requests)
    check(base, requests, of)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_bits_do_not_depend_on_the_batch(tmp_path: Path, dtype: str, quantize: str | None) -> None:
    """A request's logprobs are the same alone and among others, and those of the model itself without adapters."""
    base, vocabulary = make(tmp_path / "base", "llama, 2 K/V heads")
    loras = make_loras(tmp_path, base)
    of, adapters = [*loras, None, *loras, None], [lora.adapter for lora in loras]
    seen = list[list[list[float]]]()
    for max_batch, seed in ((1, 0), (8, 1), (5, 2)):
        stage = make_stage(base, 600, 16, dtype, quantize=quantize, adapters=adapters)
        requests = requests_of(of, vocabulary)
        for request in requests:
            request.sampling["logprobs"] = True
        TinyEngine(stage, 600, 16, seed).run(requests, max_batch)
        seen.append([request.logprobs for request in requests])
    assert seen[0] == seen[1] == seen[2]
    plain = requests_of([None] * len(of), vocabulary)
    for request in plain:
        request.sampling["logprobs"] = True
    TinyEngine(make_stage(base, 600, 16, dtype, quantize=quantize), 600, 16).run(plain)
    assert [seen[0][3], seen[0][7]] == [plain[3].logprobs, plain[7].logprobs]
