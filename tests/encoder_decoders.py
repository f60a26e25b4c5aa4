"""Small random models with an encoder, as Hugging Face folders, and what transformers makes of them."""

import json
import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from reference import Reference
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import MarianConfig, MarianMTModel, T5Config, T5ForConditionalGeneration
from worker.borders import tokens_near


def make_t5(folder: Path, *, seed: int, tied: bool = True, **config: Any) -> Path:
    """A T5 with random weights whose continuations differ. `config` overrides T5Config.

    An untied one has the form of published files: transformers 5.23 saves no head beside the embedding.
    """
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
    tie: dict[str, Any] = {"tie_word_embeddings": tied}
    model = T5ForConditionalGeneration(T5Config(**(fields | config | tie)))
    randomize(model)
    torch.nn.init.normal_(model.shared.weight)
    model.save_pretrained(folder)
    if not tied:
        weights = load_file(folder / "model.safetensors")
        weights["lm_head.weight"] = torch.randn_like(weights["shared.weight"]) * 3
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        change(folder, tie_word_embeddings=False)
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
    randomize(model)
    torch.nn.init.normal_(model.final_logits_bias)
    model.generation_config.bad_words_ids = never
    model.save_pretrained(folder)
    return folder


def randomize(model: torch.nn.Module) -> None:
    """Biases and norms are 0 and 1 by default, and a test would not notice them. Sinusoids stay."""
    for name, weight in model.named_parameters():
        if "embed_positions" in name:
            continue
        if weight.dim() == 1:
            torch.nn.init.normal_(weight, mean=float("norm" in name and name.endswith("weight")), std=0.1)
        else:
            torch.nn.init.normal_(weight, std=2.0 if "relative" in name else 3.0 / weight.shape[1] ** 0.5)


def change(folder: Path, **fields: Any) -> None:
    """Changes fields of a checkpoint's config.json; None takes one away."""
    path = folder / "config.json"
    says = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in says.items() if value is not None}))


ERRORS = 16  # a token is decided where the two largest logits are this number of errors apart


class Seq2Seq(Reference):
    """A T5 or a Marian in transformers' own code. Its weights may be rounded to another type."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32, weights: torch.dtype = torch.float32) -> None:
        torch.set_num_threads(1)
        self._folder, self._weights = folder, weights
        self._encoded: tuple[list[list[int]], Any] = [], None  # the last prompt, and what the encoder made of it
        kind = json.loads((folder / "config.json").read_text())["model_type"]
        of: Any = {"t5": T5ForConditionalGeneration, "marian": MarianMTModel}[kind]
        self._model = of.from_pretrained(folder, dtype=dtype).eval()
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.copy_(parameter.to(weights))

    @torch.inference_mode()
    def logits(self, prompt: Sequence[int], made: Sequence[int]) -> Tensor:
        """[len(made) + 1, V] behind the start token and behind each token that was made.

        Without a cache, with which transformers 5.23 fails for a decoder that is deeper than the encoder.
        """
        model: Any = self._model
        ids = torch.tensor([list(prompt)])
        if self._encoded[0] != ids.tolist():
            self._encoded = ids.tolist(), model.get_encoder()(ids, torch.ones_like(ids))
        of_decoder = torch.tensor([[model.config.decoder_start_token_id, *made]])
        whole = {"attention_mask": torch.ones_like(ids), "encoder_outputs": self._encoded[1]}
        logits = model(**whole, decoder_input_ids=of_decoder, use_cache=False).logits[0]
        for (never,) in model.generation_config.bad_words_ids or ():
            logits[:, never] = -math.inf
        return logits

    @cached_property
    def _exact(self) -> "Seq2Seq":
        return Seq2Seq(self._folder, torch.float64, self._weights)

    def continued(self, prompt: Sequence[int], max_new_tokens: int) -> tuple[list[int], float]:
        """The distance is 0 where rounding may decide a token: float32's error is too large a part of the distance.

        T5's scores have no scale, and a small error grows: one of 0.03 was seen here, in logits of 27.
        """
        made: list[int] = []
        while len(made) < max_new_tokens:
            rounded, exact = (of.logits(prompt, made)[-1].double() for of in (self, self._exact))
            first, second = exact.topk(2).values.tolist()
            if first - second < ERRORS * float((rounded - exact).abs().max()):
                return made, 0.0
            made.append(int(exact.argmax()))
        return made, math.inf


class Drawn(Seq2Seq):
    """Its tokens are drawn: the likeliest ones of a Marian with random weights are all the same."""

    def sampling(self, prompt: Sequence[int]) -> dict[str, Any]:
        return {"temperature": 3.0, "seed": sum(prompt)}

    def continued(self, prompt: Sequence[int], max_new_tokens: int) -> tuple[list[int], float]:
        """The tokens that Orca draws from these logits. The distance is 0 where rounding decides a draw."""
        made: list[int] = []
        while len(made) < max_new_tokens:
            logits = self.logits(prompt, made)[-1].double().numpy()
            near = tokens_near(logits, index=len(made), **self.sampling(prompt))
            if len(near) > 1:
                return made, 0.0
            made += near
        return made, math.inf
