"""Which table the head has: the files decide where config.json ties them, as transformers 5 does.

Merges of adapters write files whose config.json says that they are tied and that have a head of their own."""

import logging
from pathlib import Path

import pytest
import torch
from checkpoints import make_gpt2, make_shape
from encoder_decoders import Seq2Seq, change, make_marian, make_t5
from properties import covering
from reference import Reference
from safetensors.torch import load_file, save_file
from worker.driver import TinyEngine, make_stage
from worker.test_families import requests_for

from orca_common.checkpoint import read_checkpoint
from orca_common.errors import FailedPrecondition
from orca_worker.models.families import topology
from orca_worker.partition import Types

SHAPES = (
    "llama, 2 K/V heads",
    "qwen2, a window in the upper layer",
    "gemma3, windows but in one layer",
    "neox",
    "gptj",
)
FAMILIES = ("gpt2", *SHAPES, "t5", "marian")
ENCODERS = ("t5", "marian")
LOG = "orca_worker.models.tables"


def make(folder: Path, family: str) -> Path:
    """A model that config.json ties."""
    if family == "gpt2":
        return make_gpt2(folder, heads=3, layers=2, hidden=36, vocab=211, positions=64, seed=3)
    if family == "t5":
        return make_t5(folder, seed=3, vocab_size=211)
    if family == "marian":
        return make_marian(folder, seed=3, vocab_size=211, pad_token_id=210, decoder_start_token_id=210)
    return make_shape(folder, family, tie_word_embeddings=True)


def names_of(folder: Path) -> tuple[str, str]:
    """The names of the table of tokens and of a head in a family's files."""
    weights = load_file(folder / "model.safetensors")
    table = next(
        name
        for name in weights
        if name.endswith(("wte.weight", "embed_in.weight", "embed_tokens.weight", "shared.weight"))
    )
    return table, "embed_out.weight" if table.endswith("embed_in.weight") else "lm_head.weight"


def rewrite(folder: Path, way: str) -> None:
    """Puts a head beside the table, the same or another one, or the table under the head's name alone."""
    table, head = names_of(folder)
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    if way == "other":
        weights[head] = torch.randn(weights[table].shape, generator=generator)
    elif way == "equal":
        weights[head] = weights[table].clone()
    elif way == "head alone":
        weights[head] = weights.pop(table)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(("family", "way"), covering(list(FAMILIES), ("other", "equal", "head alone"), strength=1))
def test_tokens_equal_transformers(tmp_path: Path, family: str, way: str, caplog: pytest.LogCaptureFixture) -> None:
    folder = make(tmp_path, family)
    about = {"model": str(folder), "head": names_of(folder)[1]}
    rewrite(folder, way)
    caplog.set_level(logging.WARNING, LOG)
    engine = TinyEngine(make_stage(folder, 576, 5), 576, 5, seed=1)
    requests = requests_for(211, 6, 1)
    engine.run(requests)
    reference = Seq2Seq(folder) if family in ENCODERS else Reference(folder)
    for request in requests:
        assert request.made == reference.greedy(request.prompt, request.new_tokens)
    assert len({tuple(request.made) for request in requests}) > 3
    assert [(r.getMessage(), {name: vars(r)[name] for name in about}) for r in caplog.records if r.name == LOG][:1] == (
        [("the files have another head than config.json ties", about)] if way == "other" else []
    )


def test_a_head_of_its_own_counts(tmp_path: Path) -> None:
    """In what a rank needs of memory; the same one twice does not."""
    sizes = {}
    for way in ("none", "equal", "other"):
        folder = make(tmp_path / way, "llama, 2 K/V heads")
        rewrite(folder, way)
        (share,) = topology(read_checkpoint(folder), 1, 1, Types.of("float32"))
        sizes[way] = share.weight_bytes
    assert sizes["none"] == sizes["equal"]
    assert sizes["other"] - sizes["none"] == 211 * 48 * 4


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("own", [True, False])
def test_t5s_head_and_the_scale_of_its_outputs_are_two_questions(tmp_path: Path, own: bool, scaled: bool) -> None:
    """transformers 5 writes `tie_word_embeddings: true` for all, beside `scale_decoder_outputs`."""
    folder = make_t5(tmp_path, seed=3, tied=True, vocab_size=211)
    change(folder, scale_decoder_outputs=scaled)
    if own:
        rewrite(folder, "other")
    engine = TinyEngine(make_stage(folder, 576, 5), 576, 5, seed=1)
    requests = requests_for(211, 4, 1)
    for request in requests:
        request.sampling["logprobs"] = True
    engine.run(requests)
    reference = Seq2Seq(folder)
    for request in requests:
        logits = reference.logits(request.prompt, request.made[:-1])
        assert request.made == logits.argmax(-1).tolist()
        right = logits.log_softmax(-1).max(-1).values
        assert request.logprobs == pytest.approx(right.tolist(), abs=1e-3)


def test_a_third_table_is_refused(tmp_path: Path) -> None:
    folder = make_t5(tmp_path, seed=3)
    weights = load_file(folder / "model.safetensors")
    weights["decoder.embed_tokens.weight"] = weights["shared.weight"] + 1
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        FailedPrecondition, match=r"decoder\.embed_tokens\.weight in .* has other numbers than shared\.weight"
    ):
        make_stage(folder, 576, 5)


def test_marian_without_a_bias_of_its_head(tmp_path: Path) -> None:
    """transformers makes it of zeros."""
    folder = make_marian(tmp_path, seed=3)
    weights = load_file(folder / "model.safetensors")
    del weights["final_logits_bias"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    engine = TinyEngine(make_stage(folder, 576, 5), 576, 5, seed=1)
    requests = requests_for(95, 4, 1)
    engine.run(requests)
    reference = Seq2Seq(folder)
    assert all(request.made == reference.greedy(request.prompt, request.new_tokens) for request in requests)
