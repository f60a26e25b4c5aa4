"""Small random checkpoints for tests, as Hugging Face folders."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel
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


def make_tokenizer(special: Sequence[str] = ()) -> Tokenizer:
    """A tokenizer with a token for each byte, and special ones behind them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
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
