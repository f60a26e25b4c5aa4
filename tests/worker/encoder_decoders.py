"""Small random models with an encoder, as Hugging Face folders, and what transformers makes of them."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import MarianConfig, MarianMTModel, PreTrainedModel, T5Config, T5ForConditionalGeneration


def make_t5(folder: Path, *, seed: int, tied: bool = True, **config: Any) -> Path:
    """A T5 with random weights whose continuations differ. `config` overrides T5Config."""
    torch.manual_seed(seed)
    fields: dict[str, Any] = {
        "vocab_size": 97,
        "d_model": 24,
        "d_kv": 8,
        "d_ff": 40,
        "num_layers": 2,
        "num_decoder_layers": 2,
        "num_heads": 3,
        "decoder_start_token_id": 0,
        "eos_token_id": None,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 20,
    }
    model = T5ForConditionalGeneration(T5Config(**(fields | config), tie_word_embeddings=tied))
    for name, weight in model.named_parameters():
        normal(name, weight, 3.0)
    torch.nn.init.normal_(model.shared.weight)
    model.save_pretrained(folder)
    if (
        not tied
    ):  # transformers 5.23 saves no head of its own, and forgets that there was one: the form of published files
        weights = load_file(folder / "model.safetensors")
        weights["lm_head.weight"] = torch.randn_like(weights["shared.weight"]) * 3
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        says = (folder / "config.json").read_text()
        (folder / "config.json").write_text(says.replace('"tie_word_embeddings": true', '"tie_word_embeddings": false'))
    return folder


def make_marian(folder: Path, *, seed: int, never: list[list[int]] | None = None, **config: Any) -> Path:
    """A Marian with random weights. `config` overrides MarianConfig; never: its bad_words_ids."""
    torch.manual_seed(seed)
    fields: dict[str, Any] = {
        "vocab_size": 97,
        "d_model": 24,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 3,
        "decoder_attention_heads": 3,
        "encoder_ffn_dim": 40,
        "decoder_ffn_dim": 50,
        "max_position_embeddings": 64,
        "pad_token_id": 96,
        "decoder_start_token_id": 96,
        "eos_token_id": None,
    }
    model = MarianMTModel(MarianConfig(**(fields | config)))
    for name, weight in model.named_parameters():
        if "embed_positions" not in name:
            normal(name, weight, 3.0)
    torch.nn.init.normal_(model.final_logits_bias)
    model.generation_config.bad_words_ids = never
    model.save_pretrained(folder)
    return folder


def normal(name: str, weight: Tensor, scale: float) -> None:
    """Biases and norms are 0 and 1 by default, and a test would not notice them."""
    if weight.dim() == 1:
        torch.nn.init.normal_(weight, mean=float("norm" in name and name.endswith("weight")), std=0.1)
    elif "relative_attention_bias" in name:
        torch.nn.init.normal_(weight, std=2.0)
    else:
        torch.nn.init.normal_(weight, std=scale / weight.shape[1] ** 0.5)


def load(folder: Path) -> PreTrainedModel:
    kind = MarianMTModel if '"model_type": "marian"' in (folder / "config.json").read_text() else None
    return (kind or T5ForConditionalGeneration).from_pretrained(folder).eval()


@torch.inference_mode()
def step_logits(model: PreTrainedModel, prompt: list[int], made: list[int]) -> Tensor:
    """The logits [len(made) + 1, V] behind the start token and each token that was made."""
    start = model.config.decoder_start_token_id
    ids = torch.tensor([prompt])
    decoder_ids = torch.tensor([[start, *made]])
    logits = model(ids, torch.ones_like(ids), decoder_input_ids=decoder_ids, use_cache=False).logits[0]
    for (never,) in model.generation_config.bad_words_ids or ():
        logits[:, never] = -torch.inf
    return logits


def greedy(model: PreTrainedModel, prompt: list[int], new_tokens: int) -> list[int]:
    made: list[int] = []
    for _ in range(new_tokens):
        made.append(int(step_logits(model, prompt, made)[-1].argmax()))
    return made
