"""Small random checkpoints for tests, as Hugging Face folders."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

logging.disable_progress_bar()


def make_gpt2(
    folder: Path,
    *,
    heads: int,
    layers: int,
    hidden: int,
    vocab: int,
    positions: int,
    seed: int,
    tokenizer: bool = False,
    special: Sequence[str] = (),
    **config: Any,
) -> Path:
    """A GPT-2 with random weights, which are large enough that continuations differ. `config` overrides GPT2Config.

    With `tokenizer` the folder has a byte-level tokenizer.json: ids 0 to 255 are the bytes in its alphabet's order.
    Then `vocab` is at least 256, and higher ids have no text, but for `special` tokens from 256 on.
    """
    torch.manual_seed(seed)
    fields: dict[str, Any] = {
        "n_head": heads,
        "n_layer": layers,
        "n_embd": hidden,
        "vocab_size": vocab,
        "n_positions": positions,
        "initializer_range": 1.0,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    model = GPT2LMHeadModel(GPT2Config(**(fields | config)))
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:  # biases and norms are 0 and 1 by default, and a test would not notice them
            torch.nn.init.normal_(parameter, mean=float("ln_" in name and name.endswith("weight")), std=0.1)
    model.save_pretrained(folder)
    if tokenizer:
        assert vocab >= 256
        make_tokenizer(special).save(str(folder / "tokenizer.json"))
    return folder


# Odd shapes of the other families, by name: model_type and what its config.json says beyond ODD.
ODD: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 70,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "vocab_size": 211,
    "max_position_embeddings": 64,
}
ODD_GPTJ: dict[str, Any] = {
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 6,
    "n_inner": 70,
    "vocab_size": 211,
    "n_positions": 64,
}


def rope(kind: str, **more: float | list[float]) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1000.0, **more}}


SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, 2 K/V heads": ("llama", ODD | {"num_key_value_heads": 2}),
    "llama, tied, biases, 1 K/V head, large heads": (
        "llama",
        ODD
        | {"num_key_value_heads": 1, "head_dim": 10, "tie_word_embeddings": True}
        | {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"},
    ),
    "llama, 3 heads": ("llama", ODD | {"num_attention_heads": 3, "num_key_value_heads": 3}),
    "llama, 5 heads": (
        "llama",
        ODD | {"hidden_size": 40, "num_attention_heads": 5, "num_key_value_heads": 1, "intermediate_size": 33},
    ),
    "llama, 10 heads": (
        "llama",
        ODD | {"hidden_size": 40, "num_attention_heads": 10, "num_key_value_heads": 5, "num_hidden_layers": 3},
    ),
    "llama, long positions of Llama 3": (
        "llama",
        ODD
        | rope(
            "llama3",
            rope_theta=500.0,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=16,
        ),
    ),
    "llama, linear positions": ("llama", ODD | rope("linear", factor=4.0)),
    "llama, YaRN": ("llama", ODD | rope("yarn", factor=4.0, original_max_position_embeddings=16)),
    "llama, YaRN with its numbers": (
        "llama",
        ODD
        | rope("yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=8.0, beta_slow=2.0, mscale=0.7)
        | {"num_key_value_heads": 3},
    ),
    "mistral, a window": ("mistral", ODD | {"num_key_value_heads": 3, "sliding_window": 7}),
    "mistral, 10 heads, all K/V heads, tied, a window": (
        "mistral",
        ODD
        | {"hidden_size": 40, "num_attention_heads": 10, "num_key_value_heads": 10, "sliding_window": 3}
        | {"tie_word_embeddings": True},
    ),
    "mistral, no window": ("mistral", ODD | {"num_key_value_heads": 1, "sliding_window": None}),
    "qwen2, a window in the upper layer": (
        "qwen2",
        ODD | {"num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen2, tied": ("qwen2", ODD | {"num_key_value_heads": 6, "tie_word_embeddings": True}),
    "qwen2, 5 heads, 1 K/V head": (
        "qwen2",
        ODD | {"hidden_size": 40, "num_attention_heads": 5, "num_key_value_heads": 1, "intermediate_size": 33},
    ),
    "qwen3, 3 heads, all K/V heads, tied": (
        "qwen3",
        ODD | {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 8, "tie_word_embeddings": True},
    ),
    "qwen3, large heads": ("qwen3", ODD | {"num_key_value_heads": 2, "head_dim": 12}),
    "qwen3, windows of some layers": (
        "qwen3",
        ODD
        | {"num_key_value_heads": 1, "head_dim": 6, "num_hidden_layers": 3, "use_sliding_window": True}
        | {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "gemma3, windows but in one layer": (
        "gemma3_text",
        ODD
        | {"num_key_value_heads": 2, "head_dim": 10, "num_hidden_layers": 3, "sliding_window": 4}
        | {"query_pre_attn_scalar": 16, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "gemma3, 1 K/V head, untied, biases, long positions": (
        "gemma3_text",
        ODD
        | {"num_key_value_heads": 1, "head_dim": 8, "sliding_window": 6, "tie_word_embeddings": False}
        | {"attention_bias": True, "layer_types": ["full_attention", "sliding_attention"]}
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            }
        },
    ),
    "neox": ("gpt_neox", ODD | {"rotary_pct": 0.5}),
    "neox, in series, tied": (
        "gpt_neox",
        ODD | {"use_parallel_residual": False, "attention_bias": False, "tie_word_embeddings": True, "rotary_pct": 1.0},
    ),
    "neox, 5 heads": ("gpt_neox", ODD | {"hidden_size": 40, "num_attention_heads": 5, "rotary_pct": 0.25}),
    "gptj": ("gptj", ODD_GPTJ | {"rotary_dim": 6}),
    "gptj, 5 heads": ("gptj", ODD_GPTJ | {"n_embd": 40, "n_head": 5, "rotary_dim": 2}),
    "gptj, whole heads": ("gptj", ODD_GPTJ | {"n_head": 3, "rotary_dim": 16, "activation_function": "relu"}),
}


def make_shape(folder: Path, shape: str, *, seed: int = 3, shards: bool = False, **config: Any) -> Path:
    """A checkpoint of one of SHAPES with random weights, of which `config` overrides fields.

    Matrices have a standard deviation of 3 / sqrt(inputs), with which greedy streams differ; norms and biases are not
    those of a model that has not been trained. `shards`: several safetensors files and an index.
    """
    kind, fields = SHAPES[shape]
    fields = {"bos_token_id": None, "eos_token_id": None, **fields, **config}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **fields)).float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 3 / parameter.shape[1] ** 0.5, generator=generator)
            else:
                is_norm = name.endswith("weight") and kind != "gemma3_text"  # which adds 1 itself
                values = torch.rand(parameter.shape, generator=generator) - 0.5
                parameter.copy_(values / 2 + is_norm)
    model.save_pretrained(folder, max_shard_size="20KB" if shards else "1GB")
    assert (folder / "model.safetensors.index.json").exists() == shards
    return folder


def make_tokenizer(special: Sequence[str] = (), pieces: Sequence[str] = ()) -> Tokenizer:
    """A tokenizer with a token for each byte, for each beginning of a piece, and special ones behind them."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocabulary = {letter: i for i, letter in enumerate(sorted(level.alphabet()))}
    merges = list[tuple[str, str]]()
    for ((letters, _),) in map(level.pre_tokenize_str, pieces):
        for n in range(1, len(letters)):
            if letters[: n + 1] not in vocabulary:
                merges.append((letters[:n], letters[n]))
                vocabulary[letters[: n + 1]] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = level
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    return tokenizer


def make_timed(
    folder: Path,
    *,
    vocab: int = 256,
    positions: int = 2048,
    seconds: float = 0,
    tokenizer: bool = False,
    **config: Any,
) -> Path:
    """A model that only waits, `seconds` for each iteration (model_type orca_timed); `tokenizer` as in make_gpt2."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = {"model_type": "orca_timed", "vocab_size": vocab, "n_positions": positions, "seconds": seconds, **config}
    (folder / "config.json").write_text(json.dumps(fields))
    if tokenizer:
        assert vocab >= 256
        make_tokenizer().save(str(folder / "tokenizer.json"))
    return folder
