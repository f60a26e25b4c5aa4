"""The Llama shape: RMSNorm before each part, rotary positions, shared key/value heads, a gated feed-forward network.

Gemma has norms behind the parts, too, under one name that Llama has for the norm before the second part.
"""

from __future__ import annotations

from ...partition import Place
from ..recording import Matrix, Norm, Recording, columns
from .configuration import LlamaConfig


def record(config: LlamaConfig, place: Place) -> Recording:
    """The stage of a place. Raises FailedPrecondition when the model cannot be cut so."""
    r = Recording(place, config.hidden, config.vocab_size, config.positions)
    hidden, size, inner = config.hidden, config.head_size, r.share_of_inner(config.inner)
    heads, kv_heads = r.share_of_heads(config.heads, config.kv_heads)
    queries, keys = columns(heads, size), columns(kv_heads, size)
    qkv = r.rows(len(queries) + 2 * len(keys))
    normed, out, middle = r.operand(hidden), r.operand(len(queries)), r.operand(len(inner))

    def norm(name: str, width: int = hidden) -> Norm:
        return r.norm(name, width, config.epsilon, bias=False, offset=config.norm_offset)

    def norm_after(name: str) -> Norm | None:
        return norm(name) if config.norms_behind else None

    if place.is_first:
        r.embed("embed_tokens.weight", scale=config.embedding_scale)
    for index in place.layers(config.layers):
        name = f"layers.{index}."
        of = name + "self_attn."
        parts = [
            r.matrix(of + part, n * size, hidden, outs=[cut], bias=config.qkv_bias)
            for part, n, cut in (
                ("q_proj", config.heads, queries),
                ("k_proj", config.kv_heads, keys),
                ("v_proj", config.kv_heads, keys),
            )
        ]
        norms = {}
        if config.normed_heads:
            norms = {f"{part}_norm": norm(of + part[0] + "_norm", size) for part in ("query", "key")}
        where = {"rotary": config.rotary[index], "window": config.windows[index]}
        a = r.attention(len(heads), len(kv_heads), size, config.score_scale, **where, **norms)
        r.normalize(normed, norm(name + "input_layernorm"))
        r.linear(normed, Matrix.stacked(parts), qkv)
        r.attend(qkv, a, out)
        o = r.matrix(of + "o_proj", hidden, config.heads * size, ins=[queries], bias=config.out_bias)
        r.residual((out, o), norm=norm_after(name + "post_attention_layernorm"))
        before = "pre_feedforward_layernorm" if config.norms_behind else "post_attention_layernorm"
        r.normalize(normed, norm(name + before))
        gate, up = (
            r.matrix(f"{name}mlp.{part}_proj", config.inner, hidden, outs=[inner], bias=config.mlp_bias)
            for part in ("gate", "up")
        )
        r.gated(normed, gate, up, middle, config.activation)
        down = r.matrix(name + "mlp.down_proj", hidden, config.inner, ins=[inner], bias=config.mlp_bias)
        r.residual((middle, down), norm=norm_after(name + "post_feedforward_layernorm"))
    if place.is_last:
        r.normalize(normed, norm("norm"), of_head=True)
        r.head(normed, "embed_tokens.weight" if config.tied else "lm_head.weight")
    return r
