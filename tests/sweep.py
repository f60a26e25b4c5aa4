"""Checkpoints by chance, as transformers writes them: every family, two versions, and what may differ in each file.

A folder is made by its name, `KIND-VERSION-NUMBER`, so one that failed is made again by `make_folder(folder, name)`.
All are written by the installed transformers (5.23). `as_older` rewrites one into what 4.57.6 writes. On 2026-11-28
that version itself loaded and saved 19 such models of the ten kinds: each config.json had the very fields and values,
and the weights the names, that the rewritten one had. So had the files of a tokenizer.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from checkpoints import SHAPES, make_gpt2, make_shape, make_tokenizer, rope
from encoder_decoders import change, make_marian, make_t5
from safetensors.torch import load_file, save_file
from worker.test_tables import rewrite

OLDER, NEWER = "4.57", "5.23"
ENCODERS = ("t5", "marian")
SHAPED = sorted({kind for kind, _ in SHAPES.values()})
KINDS = ("gpt2", *SHAPED, *ENCODERS)
VOCABULARY, POSITIONS = 272, 64

SCALED = {"factor": 4.0, "original_max_position_embeddings": 16}
ROPES: tuple[dict[str, Any], ...] = (
    rope("linear", factor=3.0),
    rope("yarn", **SCALED),
    rope("yarn", **SCALED, beta_fast=8.0, attention_factor=0.7),
    rope("yarn", **SCALED, mscale=0.7, mscale_all_dim=0.4),
    rope("llama3", **SCALED, low_freq_factor=1.0, high_freq_factor=4.0),
)
REFUSED_ROPES = (rope("dynamic", factor=2.0), rope("longrope", **SCALED, short_factor=[1.0], long_factor=[2.0]))
# A field of generation_config.json and values that it may have.
GENERATION: dict[str, tuple[Any, ...]] = {
    "do_sample": (True, False),
    "temperature": (0.7,),
    "top_k": (20, 0),
    "top_p": (0.9,),
    "min_p": (0.05,),
    "top_h": (0.4,),
    "typical_p": (0.9, 1.0),
    "epsilon_cutoff": (0.01,),
    "eta_cutoff": (0.01,),
    "repetition_penalty": (1.3, 0.8),
    "encoder_repetition_penalty": (1.2,),
    "eos_token_id": (3, [3, 7], list(range(40))),
    "forced_eos_token_id": (4, [9, 2]),
    "forced_bos_token_id": (11,),
    "max_new_tokens": (5,),
    "max_length": (40,),
    "min_length": (20, 0),
    "min_new_tokens": (3,),
    "num_beams": (3, 1),
    "num_return_sequences": (1,),
    "early_stopping": (True,),
    "length_penalty": (0.8,),
    "no_repeat_ngram_size": (2,),
    "encoder_no_repeat_ngram_size": (2,),
    "bad_words_ids": ([[5], [6]], [[5, 6]]),
    "suppress_tokens": ([*range(20, 100)],),
    "begin_suppress_tokens": ([*range(100, 200)],),
    "sequence_bias": ([[[5], 30.0]],),
    "exponential_decay_length_penalty": ([2, 1.5],),
    "guidance_scale": (1.5, 1.0),
    "renormalize_logits": (True,),
    "remove_invalid_values": (True,),
    "use_cache": (True, False),
    "pad_token_id": (1,),
    "bos_token_id": (2,),
}


def names(count: int) -> Iterator[str]:
    """The first names, of all kinds and both versions in turn."""
    every = ((kind, version) for kind in KINDS for version in (OLDER, NEWER))
    several = list(every)
    for number in range(count):
        kind, version = several[number % len(several)]
        yield f"{kind}-{version}-{number // len(several)}"


def make_folder(folder: Path, name: str) -> Path:
    """Makes the checkpoint of a name."""
    kind, version, _ = name.rsplit("-", 2)
    chance = random.Random(name)
    _make_model(folder, kind, chance)
    _make_head(folder, chance)
    _say_generation(folder, kind, chance)
    tokens = _make_tokenizer(folder, kind, chance)
    if version == OLDER:
        as_older(folder, tokens, added=chance.random() < 0.8)
    return folder


def _make_model(folder: Path, kind: str, chance: random.Random) -> None:
    config: dict[str, Any] = {"vocab_size": VOCABULARY}
    if chance.random() < 0.7:
        config["tie_word_embeddings"] = chance.random() < 0.5
    seed = chance.randrange(1000)
    if kind == "gpt2":
        config |= _some(chance, scale_attn_weights=False, scale_attn_by_inverse_layer_idx=True, n_inner=50)
        del config["vocab_size"]
        sizes = {"heads": 3, "layers": 2, "hidden": 36, "vocab": VOCABULARY, "positions": POSITIONS}
        make_gpt2(folder, **sizes, seed=seed, **config)
    elif kind == "t5":
        tied = config.pop("tie_word_embeddings", True)
        config |= _some(chance, feed_forward_proj="gated-gelu", num_decoder_layers=3)
        make_t5(folder, seed=seed, tied=tied, **config)
        if chance.random() < 0.5:
            change(folder, scale_decoder_outputs=chance.random() < 0.5)
    elif kind == "marian":
        config.pop("tie_word_embeddings", None)
        config |= {"pad_token_id": VOCABULARY - 1, "decoder_start_token_id": VOCABULARY - 1}
        config |= _some(chance, scale_embedding=True, activation_function="swish")
        make_marian(folder, seed=seed, **config)
        if chance.random() < 0.3:
            weights = load_file(folder / "model.safetensors")
            del weights["final_logits_bias"]
            save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        turned = kind != "gptj"
        if turned and chance.random() < 0.4:
            config |= _rope(kind, chance.choice(ROPES))
        shape = chance.choice([shape for shape, (other, _) in SHAPES.items() if other == kind])
        make_shape(folder, shape, seed=seed, **config)
        if turned and chance.random() < 0.1:
            change(folder, **_rope(kind, chance.choice(REFUSED_ROPES)))


def _some(chance: random.Random, **fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if chance.random() < 0.5}


def _rope(kind: str, given: dict[str, Any]) -> dict[str, Any]:
    """A scaling of rotary positions as a kind has it."""
    chosen = dict(given["rope_parameters"])
    if kind == "gpt_neox":
        chosen["partial_rotary_factor"] = 0.5
    if kind == "gemma3_text":
        local = {"rope_type": "default", "rope_theta": 100.0}
        chosen = {"full_attention": chosen, "sliding_attention": local}
    return {"rope_parameters": chosen}


def _make_head(folder: Path, chance: random.Random) -> None:
    """The head in the file: as it was written, none, another one, the same, or it alone."""
    way = chance.choice(["written", "written", "other", "equal", "head alone", "none"])
    if way == "none":
        weights = load_file(folder / "model.safetensors")
        for head in ("lm_head.weight", "embed_out.weight"):
            weights.pop(head, None)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    elif way != "written":
        rewrite(folder, way)
    if chance.random() < 0.2:
        weights = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _say_generation(folder: Path, kind: str, chance: random.Random) -> None:
    """Fields of generation_config.json, or of config.json where there is no such file."""
    path = folder / "generation_config.json"
    said = {name: chance.choice(values) for name, values in GENERATION.items() if chance.random() < 0.15}
    if kind in ENCODERS and chance.random() < 0.3:
        said["decoder_start_token_id"] = 12
    if chance.random() < 0.15:
        path.unlink()
        change(folder, **said)
    else:
        path.write_text(json.dumps(json.loads(path.read_text()) | said))


CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast", "LlamaTokenizerFast", "")
BY_TYPE = ("gpt2", "gpt_neox", "gptj", "llama", "mistral", "qwen2", "qwen3")  # others need a class for these tokenizers


def _make_tokenizer(folder: Path, type_of: str, chance: random.Random) -> dict[str, Any]:
    """tokenizer.json and tokenizer_config.json. Returns the special tokens that they say, by name or in a list."""
    named = {name: f"<{name[:-6]}>" for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    tokens: dict[str, Any] = {name: text for name, text in named.items() if chance.random() < 0.6}
    if chance.random() < 0.4:
        tokens["extra_special_tokens"] = ["<tool>", "<two>"]
    elif chance.random() < 0.4:
        tokens["extra_special_tokens"] = {"foo_token": "<foo>"}
    make_tokenizer([text for text in every_token(tokens) if chance.random() < 0.7]).save(str(folder / "tokenizer.json"))
    config = {"backend": "tokenizers", **tokens}
    if kind := chance.choice(CLASSES if type_of in BY_TYPE else CLASSES[:-1]):
        config["tokenizer_class"] = kind
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return tokens


def every_token(tokens: dict[str, Any]) -> list[str]:
    """The texts of special tokens, in the order in which they get ids."""
    extra = tokens.get("extra_special_tokens", [])
    named = [text for name, text in tokens.items() if name != "extra_special_tokens"]
    return [*named, *(extra.values() if isinstance(extra, dict) else extra)]


# What 4.57 leaves out of config.json, as the default of its class.
LEFT_OUT: dict[str, tuple[Any, tuple[str, ...]]] = {
    "pad_token_id": (None, KINDS),
    "bos_token_id": (None, ("qwen2", "qwen3", "marian")),
    "is_decoder": (False, KINDS),
    "add_cross_attention": (False, KINDS),
    "tie_word_embeddings": (True, ("gpt2", "gemma3_text", *ENCODERS)),
}


def as_older(folder: Path, tokens: dict[str, Any], added: bool = True) -> None:
    """Rewrites a folder as transformers 4.57.6 writes it.

    added: the ids of tokens are in tokenizer_config.json, not in added_tokens.json, which its slow tokenizers write."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    kind, positions = config["model_type"], config.pop("rope_parameters", None)
    for name, (value, kinds) in LEFT_OUT.items():
        if kind in kinds and config.get(name, value) == value:
            config.pop(name, None)
    if positions is not None:
        scaled = positions
        if kind == "gemma3_text":
            scaled = positions["full_attention"]
            config["rope_local_base_freq"] = positions["sliding_attention"]["rope_theta"]
        config["rope_theta"] = scaled.pop("rope_theta")
        if kind == "gpt_neox":
            config["rotary_emb_base"] = config["rope_theta"]
            config["rotary_pct"] = config["partial_rotary_factor"] = scaled.pop("partial_rotary_factor")
        config["rope_scaling"] = scaled if scaled["rope_type"] != "default" else None
    if kind == "marian":
        config["num_hidden_layers"] = config["encoder_layers"]
    path.write_text(json.dumps(config | {"transformers_version": "4.57.6"}))
    _tokens_as_older(folder, tokens, added)


def _tokens_as_older(folder: Path, tokens: dict[str, Any], added: bool) -> None:
    extra = tokens.get("extra_special_tokens", [])
    older = {name: text for name, text in tokens.items() if name != "extra_special_tokens"}
    if isinstance(extra, list) and extra:
        older["additional_special_tokens"] = extra
    elif isinstance(extra, dict):
        older |= extra
    (folder / "special_tokens_map.json").write_text(json.dumps(older))
    ids = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    known = {token["content"]: token["id"] for token in ids}
    for text in every_token(tokens):
        known.setdefault(text, 256 + len(known))
    given = json.loads((folder / "tokenizer_config.json").read_text()).get("tokenizer_class", "")
    config = {"clean_up_tokenization_spaces": False, **older}
    if given:
        config["tokenizer_class"] = given.replace("TokenizersBackend", "PreTrainedTokenizerFast")
    config["extra_special_tokens"] = extra if isinstance(extra, dict) else {}
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False) | {"special": True}
    if added:
        config["added_tokens_decoder"] = {str(known[text]): {"content": text, **flags} for text in known}
    elif known:
        (folder / "added_tokens.json").write_text(json.dumps(known))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
