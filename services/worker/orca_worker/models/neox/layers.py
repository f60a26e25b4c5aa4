"""GPT-NeoX: a part of each head is turned, and attention and feed-forward network may run side by side.

Its files keep q, k and v head by head.
"""

from __future__ import annotations

from ...partition import Place
from ..recording import Recording, columns
from .configuration import NeoXConfig


def record(config: NeoXConfig, place: Place) -> Recording:
    """The stage of a place. Raises FailedPrecondition when the model cannot be cut so."""
    r = Recording(place, config.hidden, config.vocab_size, config.positions)
    hidden, size, inner = config.hidden, config.head_size, r.share_of_inner(config.inner)
    heads, _ = r.share_of_heads(config.heads, config.heads)
    attended = columns(heads, size)
    of_qkv = [range((3 * head + part) * size, (3 * head + part + 1) * size) for part in range(3) for head in heads]
    qkv = r.rows(3 * len(attended))
    normed, again, out = r.operand(hidden), r.operand(hidden), r.operand(len(attended))
    middle = r.operand(len(inner))

    if place.is_first:
        r.embed("embed_in.weight")
    for index in place.layers(config.layers):
        name = f"layers.{index}."
        of, bias = name + "attention.", config.attention_bias
        a = r.attention(len(heads), len(heads), size, size**-0.5, rotary=config.rotary)
        merge = r.matrix(of + "dense", hidden, hidden, ins=[attended], bias=bias)
        up = r.matrix(name + "mlp.dense_h_to_4h", config.inner, hidden, outs=[inner])
        down = r.matrix(name + "mlp.dense_4h_to_h", hidden, config.inner, ins=[inner])
        r.normalize(normed, r.norm(name + "input_layernorm", hidden, config.epsilon))
        r.linear(normed, r.matrix(of + "query_key_value", 3 * hidden, hidden, outs=of_qkv, bias=bias), qkv)
        r.attend(qkv, a, out)
        if not config.parallel:
            r.residual((out, merge))
        r.normalize(again, r.norm(name + "post_attention_layernorm", hidden, config.epsilon))
        r.linear(again, up, middle, config.activation)
        r.residual(*([(out, merge)] if config.parallel else []), (middle, down))
    if place.is_last:
        r.normalize(normed, r.norm("final_layer_norm", hidden, config.epsilon), of_head=True)
        r.head(normed, "embed_in.weight" if config.tied else "embed_out.weight")
    return r
