"""Writes GGUF files from the format's description, and checkpoints of Llama's shape in them."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

NUMBERS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 8, "BF16": 30}
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def value_of(value: Any) -> tuple[int, bytes]:
    """A field's type and bytes."""
    match value:
        case bool():
            return 7, struct.pack("<?", value)
        case int():
            return 4, struct.pack("<I", value)
        case float():
            return 6, struct.pack("<f", value)
        case str():
            return 8, text(value)
        case list():
            parts = [value_of(one) for one in value]
            return 9, struct.pack("<IQ", parts[0][0] if parts else 4, len(parts)) + b"".join(raw for _, raw in parts)
    raise TypeError(value)


def gguf(
    fields: Mapping[str, Any], tensors: Mapping[str, tuple[int, tuple[int, ...], bytes]], version: int = 3
) -> bytes:
    """tensors: type, row-major shape and bytes of each."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(fields))
    for name, value in fields.items():
        kind, raw = value_of(value)
        head += text(name) + struct.pack("<I", kind) + raw
    data = b""
    for name, (kind, shape, raw) in tensors.items():
        head += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, len(data))
        data += raw + bytes(-len(raw) % 32)
    return head + bytes(-len(head) % 32) + data


def blocks(x: np.ndarray, kind: str) -> tuple[bytes, np.ndarray]:
    """x [rows, inputs] float32 -> a tensor's bytes, and the numbers that they stand for."""
    if kind == "F32":
        return x.tobytes(), x
    if kind == "F16":
        return x.astype(np.float16).tobytes(), x.astype(np.float16).astype(np.float32)
    if kind == "BF16":
        upper = (x.view(np.uint32) >> 16).astype(np.uint16)
        return upper.tobytes(), (upper.astype(np.uint32) << 16).view(np.float32)
    groups = x.reshape(-1, 32)
    reach = 127 if kind == "Q8_0" else 7
    scale = (np.abs(groups).max(1, keepdims=True) / reach).astype(np.float16)
    codes = np.clip(np.rint(groups / scale.astype(np.float32)), -reach, reach).astype(np.int8)
    found = (codes.astype(np.float32) * scale.astype(np.float32)).reshape(x.shape)
    if kind == "Q8_0":
        return np.concatenate([scale.view(np.uint8), codes.view(np.uint8)], 1).tobytes(), found
    above = (codes + 8).astype(np.uint8)
    return np.concatenate([scale.view(np.uint8), above[:, :16] | above[:, 16:] << 4], 1).tobytes(), found


def permuted(x: np.ndarray, heads: int) -> np.ndarray:
    """Rows of heads that turn halves -> of heads that turn neighbours."""
    return x.reshape(heads, 2, len(x) // heads // 2, -1).swapaxes(1, 2).reshape(x.shape)


def make_gguf(folder: Path, file: Path, kinds: Mapping[str, str], **more: Any) -> dict[str, np.ndarray]:
    """A checkpoint in safetensors as GGUF. kinds: the types of matrices by a part of their name here, "" for others.

    `more`: fields. Returns the numbers of the tensors by their names in the checkpoint.
    """
    config = json.loads((folder / "config.json").read_text())
    arch = {"mistral": "llama"}.get(config["model_type"], config["model_type"])
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    rotary = config.get("rope_parameters") or {}
    fields: dict[str, Any] = {
        "general.architecture": arch,
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": heads,
        f"{arch}.attention.head_count_kv": kv_heads,
        f"{arch}.attention.key_length": config.get("head_dim") or config["hidden_size"] // heads,
        f"{arch}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{arch}.rope.freq_base": float(rotary.get("rope_theta", 10000.0)),
        **more,
    }
    found, tensors = {}, {}
    for name, given in load_file(folder / "model.safetensors").items():
        stem, _, end = name.rpartition(".")
        layer = stem.split(".")[2] if stem.startswith("model.layers.") else None
        part = stem.removeprefix(f"model.layers.{layer}.")
        theirs = (f"blk.{layer}." if layer is not None else "") + f"{NAMES[part]}.{end}"
        x = given.astype(np.float32)
        kind = "F32" if x.ndim == 1 else next(kinds[key] for key in sorted(kinds, reverse=True) if key in theirs)
        turned = arch == "llama" and NAMES[part] in ("attn_q", "attn_k")
        n = heads if NAMES[part] == "attn_q" else kv_heads
        raw, numbers = blocks(np.ascontiguousarray(permuted(x, n) if turned else x), kind)
        back = numbers.reshape(n, len(x) // n // 2, 2, -1).swapaxes(1, 2).reshape(x.shape) if turned else numbers
        found[name], tensors[theirs] = back.copy(), (NUMBERS[kind], x.shape, raw)
    file.write_bytes(gguf(fields, tensors))
    return found
