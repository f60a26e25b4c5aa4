"""Served tokens equal transformers' generate (5.23) for checkpoints by chance, or a refusal names the key that asks for
more. Fields of generation_config.json that the log names are taken out of transformers' one; all others stay."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from endpoint.test_tokenizer_folder import TEXT
from endpoint.test_validation import made
from reference import TIE
from safetensors import safe_open
from sweep import ENCODERS, KINDS, make_folder, names
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, GenerationConfig
from worker.driver import Sampled, TinyEngine, make_stage

from orca.v1.orca_pb2 import GenerateRequest, Sampling, TokenIds
from orca_common.checkpoint import generation_fields, read_checkpoint
from orca_common.errors import FailedPrecondition
from orca_endpoint.requests.defaults import not_followed, read_defaults
from orca_endpoint.text.tokenizer_folder import STANDARD, TokenizerFolder
from orca_endpoint.text.vocabulary import Vocabulary

SAMPLE, FOLDERS = 20, int(os.environ.get("FOLDERS", "400"))
PROMPTS = ([7], [101, 33, 9, 9, 54, 200, 17], [5, 250] * 9)
NEW_TOKENS, SLOTS, BLOCK = 8, 256, 16
# What a refusal of a folder of the sweep may name, and the value that asks for it.
REFUSED = {
    "dynamic": r"rotary positions of the kind 'dynamic'",
    "longrope": r"rotary positions of the kind 'longrope'",
    "bad_words_ids": r"bad_words_ids a list, not lists of one token each",
}
TABLES = {"embed_tokens", "embed_in", "wte", "lm_head", "embed_out"}  # a model that is not tied has two of them


async def served(folder: Path, kernels: str) -> list[Sampled]:
    """The greedy answers that an endpoint and a rank make, cut where the scheduler ends them."""
    checkpoint = read_checkpoint(folder)
    vocabulary = Vocabulary(folder / "tokenizer.json", follows=not checkpoint.has_encoder)
    vocabulary.check_fits(checkpoint.vocab_size)
    defaults = read_defaults(folder, checkpoint.vocab_size)
    validator = made(folder, vocabulary, forced_end=defaults.forced_end)
    engine, answers = TinyEngine(make_stage(folder, SLOTS, BLOCK, kernels=kernels), SLOTS, BLOCK), list[Sampled]()
    for prompt in PROMPTS:
        sampling = Sampling(**dict(defaults.sampling) | {"temperature": 0.0})  # type: ignore[arg-type]
        asked = GenerateRequest(
            token_ids=TokenIds(ids=prompt), max_new_tokens=NEW_TOKENS, sampling=sampling, logprobs=True
        )
        record = (await validator.generate(asked)).record
        answer = Sampled(prompt, NEW_TOKENS, {field.name: value for field, value in record.sampling.ListFields()})
        engine.run([answer])
        ends = [n for n, token in enumerate(answer.made) if token in record.end_token_ids]
        del answer.made[ends[0] + 1 if ends else NEW_TOKENS :]
        answers.append(answer)
    return answers


def generated(folder: Path, kind: str, named: set[str]) -> list[tuple[list[int], torch.Tensor, torch.Tensor]]:
    """transformers' tokens, their processed scores, and the logits, [T, V] each."""
    torch.set_num_threads(1)
    of = AutoModelForSeq2SeqLM if kind in ENCODERS else AutoModelForCausalLM
    model: Any = of.from_pretrained(folder, dtype=torch.float32).eval()
    _, said = generation_fields(folder)
    known = GenerationConfig().to_dict().keys()
    model.generation_config = GenerationConfig(
        **{name: value for name, value in said.items() if name in known - named - {"transformers_version"}}
    )
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        more = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True}
        made = model.generate(  # with a cache 5.23 fails for a decoder that is deeper than the encoder
            ids, attention_mask=torch.ones_like(ids), **more, use_cache=False, output_scores=True, output_logits=True
        )
        tokens = made.sequences[0, 1 if kind in ENCODERS else len(prompt) :].tolist()
        found.append((tokens, torch.cat(made.scores), torch.cat(made.logits)))
    return found


def refusals(folder: Path) -> list[str]:
    """Those that a folder may get: by its files alone."""
    text = json.dumps([json.loads(path.read_text()) for path in sorted(folder.glob("*config.json"))])
    found = [way for key, way in REFUSED.items() if key in text]
    tied = AutoConfig.from_pretrained(folder).tie_word_embeddings
    with safe_open(folder / "model.safetensors", "pt") as file:
        stored = {name.rpartition(".weight")[0].rpartition(".")[2] for name in file.keys()}  # noqa: SIM118
    return found if tied else [*found, *(f"lack {name}.weight" for name in TABLES - stored)]


async def check(folder: Path, name: str) -> str | None:
    """Raises AssertionError where a folder's tokens are others. Returns the refusal of one that is refused."""
    make_folder(folder, name)
    kind, _, number = name.rsplit("-", 2)
    refusal, answers = None, list[Sampled]()
    try:
        answers = await served(folder, "torch" if int(number) % 8 else "auto")  # all were 5 GB in one process
    except FailedPrecondition as error:
        refusal = str(error)
    if refusal is not None:
        assert any(re.search(way, refusal) for way in refusals(folder)), (name, refusal)
        return refusal
    named, (_, said) = set(not_followed(folder, kind)), generation_fields(folder)
    for answer, (tokens, scores, logits) in zip(answers, generated(folder, kind, named), strict=True):
        first, second = scores.topk(2).values.T
        ties = [n for n, distance in enumerate((first - second).tolist()) if distance < TIE]
        decided = min(ties, default=len(tokens))
        assert answer.made[:decided] == tokens[:decided], (name, named)
        assert decided < len(tokens) or len(answer.made) == len(tokens)
        if kind == "marian":  # its bad words have no logits here
            logits[:, [token for (token,) in said.get("bad_words_ids") or ()]] = -torch.inf
        right = logits[0].log_softmax(-1)[answer.made[0]].item()
        assert answer.logprobs[0] == pytest.approx(right, abs=1e-3), name
    theirs = AutoTokenizer.from_pretrained(folder)
    assert {token: text for token, text in TokenizerFolder(folder).named.items() if token in STANDARD} == {
        token: text for token, text in theirs.special_tokens_map.items() if isinstance(text, str) and token in STANDARD
    }, name
    assert Vocabulary(folder / "tokenizer.json").encode(TEXT) == theirs(TEXT)["input_ids"], name
    return None


async def check_all(root: Path, wanted: list[str]) -> int:
    """Checks folders. Returns how many of them were served."""
    return sum([await check(root / name, name) is None for name in wanted])


@pytest.mark.parametrize("kind", KINDS)
async def test_a_sample(tmp_path: Path, kind: str) -> None:
    await check_all(tmp_path, [name for name in names(SAMPLE) if name.startswith(f"{kind}-")])


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
async def test_every_folder(tmp_path: Path, kind: str) -> None:
    """FOLDERS of the environment says how many."""
    wanted = [name for name in names(FOLDERS) if name.startswith(f"{kind}-")]
    assert await check_all(tmp_path, wanted) >= len(wanted) / 2
