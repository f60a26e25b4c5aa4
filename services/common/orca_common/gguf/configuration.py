"""The fields of a GGUF file as a config.json: the architectures of Llama's shape that llama.cpp's converter writes."""

import struct
from math import pi
from pathlib import Path
from typing import Any

from ..bounded_file import shown
from ..errors import FailedPrecondition
from .header import Gguf, broken

ARCHITECTURES = ("llama", "qwen2", "qwen3")
# Fields of config.json by those of the file, behind the architecture's name.
FIELDS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}
NEEDED = ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "max_position_embeddings")
# Fields of models that are not served, where they are not 0.
REFUSED = {"expert_count": "a mixture of experts", "attention.sliding_window": "a window"}
TOKENS, HEAD, FREQUENCIES = "token_embd.weight", "output.weight", "rope_freqs.weight"
# Llama 3.1's numbers, which a file has as divisors of its frequencies alone.
LOW, HIGH, BEFORE = 1.0, 4.0, 8192


def configuration(file: Path, of: Gguf, divisors: list[float] | None) -> dict[str, Any]:
    """config.json. divisors: the numbers of FREQUENCIES, where the file has that tensor. Raises FailedPrecondition."""
    arch = of.fields.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise broken(file, f"general.architecture is {shown(arch)}; Orca reads {', '.join(ARCHITECTURES)} in GGUF")
    for name, thing in REFUSED.items():
        if of.fields.get(f"{arch}.{name}"):
            raise broken(file, f"{arch}.{name} asks for {thing}, which is not read from GGUF")
    if of.fields.get("split.count", 1) not in (0, 1):
        raise broken(file, "it is one of several parts of a model: llama-gguf-split --merge makes one file of them")
    if TOKENS not in of.tensors or len(of.tensors[TOKENS].shape) != 2:
        raise broken(file, f"it lacks {TOKENS}")
    found: dict[str, Any] = {"model_type": arch, "vocab_size": of.tensors[TOKENS].shape[0]}
    for ours, theirs in FIELDS.items():
        value = of.fields.get(f"{arch}.{theirs}")
        if value is None and ours in NEEDED:
            raise broken(file, f"it lacks the field {arch}.{theirs}")
        if isinstance(value, list):
            raise broken(file, f"{arch}.{theirs} has a number for each layer, which is not read")
        if value is not None:
            found[ours] = _shortest(value) if isinstance(value, float) else value
    found["tie_word_embeddings"] = HEAD not in of.tensors
    found["attention_bias"] = "blk.0.attn_q.bias" in of.tensors and arch == "llama"
    found["rope_scaling"] = _scaling(file, of, arch, found, divisors)
    ends = [of.fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    found["eos_token_id"] = [end for n, end in enumerate(ends) if end is not None and end not in ends[:n]] or None
    found["bos_token_id"] = of.fields.get("tokenizer.ggml.bos_token_id")
    return {name: value for name, value in found.items() if value is not None}


def _scaling(
    file: Path, of: Gguf, arch: str, config: dict[str, Any], divisors: list[float] | None
) -> dict[str, Any] | None:
    kind, factor = of.fields.get(f"{arch}.rope.scaling.type", "none"), of.fields.get(f"{arch}.rope.scaling.factor")
    if divisors is not None:
        return _llama3(file, config, divisors)
    if kind == "none" or not factor:
        return None
    scaling = {"rope_type": kind, "factor": factor}
    before = of.fields.get(f"{arch}.rope.scaling.original_context_length")
    if before is not None and kind == "yarn":
        scaling["original_max_position_embeddings"] = before
    return scaling


def _llama3(file: Path, config: dict[str, Any], divisors: list[float]) -> dict[str, Any] | None:
    """Finds the factor, and checks that the other numbers are Llama 3.1's."""
    size, theta, factor = 2 * len(divisors), config.get("rope_theta", 10000.0), max(divisors)
    if factor == 1:
        return None
    if type(theta) not in (int, float) or theta <= 0:
        raise broken(file, f"rope.freq_base is {shown(theta)}, not above 0")
    for i, divisor in enumerate(divisors):
        wavelength = 2 * pi * theta ** (2 * i / size)
        smooth = min(max((BEFORE / wavelength - LOW) / (HIGH - LOW), 0), 1)
        wanted = 1 / ((1 - smooth) / factor + smooth)
        if not abs(divisor - wanted) <= 1e-4 * wanted:
            raise broken(file, f"{FREQUENCIES} divides frequency {i} by {divisor:g}; Llama 3.1's would be {wanted:g}")
    numbers = {"factor": factor, "low_freq_factor": LOW, "high_freq_factor": HIGH}
    return {"rope_type": "llama3", **numbers, "original_max_position_embeddings": BEFORE}


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: a file has 1e-6 as 9.99999997e-07."""
    for digits in range(1, 9):
        short = float(f"{value:.{digits}g}")
        try:
            if struct.pack("<f", short) == struct.pack("<f", value):
                return short
        except OverflowError:
            break
    return value


def check_finite(file: Path, fields: dict[str, Any]) -> None:
    """Raises FailedPrecondition for a number that JSON does not have."""
    for name, value in fields.items():
        if isinstance(value, float) and not abs(value) < float("inf"):
            raise FailedPrecondition(f"model: {file} cannot be read ({shown(name)} is {value})")
