"""GPT-2: LayerNorm before each part, learned positions. Its files keep linear operations as [in, out]."""

from __future__ import annotations

from ...partition import Place
from ..recording import Recording, columns
from .configuration import GPT2Config


def record(config: GPT2Config, place: Place) -> Recording:
    """The stage of a place. Raises FailedPrecondition when the model cannot be cut so."""
    r = Recording(place, config.hidden, config.vocab_size, config.positions)
    hidden, size = config.hidden, config.head_size
    heads, _ = r.share_of_heads(config.heads, config.heads)
    inner = r.share_of_inner(config.inner)
    attended, of_qkv = columns(heads, size), [columns(heads, size, part * hidden) for part in range(3)]
    qkv = r.rows(3 * len(attended))
    normed, out, middle = r.operand(hidden), r.operand(len(attended)), r.operand(len(inner))

    if place.is_first:
        r.embed("wte.weight", positions=("wpe.weight", config.positions))
    for index in place.layers(config.layers):
        name = f"h.{index}."
        scale = (size**-0.5 if config.scale_attention else 1.0) / (index + 1 if config.scale_by_layer else 1)
        r.normalize(normed, r.norm(name + "ln_1", hidden, config.epsilon))
        r.linear(normed, r.matrix(name + "attn.c_attn", 3 * hidden, hidden, outs=of_qkv, transposed=True), qkv)
        r.attend(qkv, r.attention(len(heads), len(heads), size, scale), out)
        r.residual((out, r.matrix(name + "attn.c_proj", hidden, hidden, ins=[attended], transposed=True)))
        r.normalize(normed, r.norm(name + "ln_2", hidden, config.epsilon))
        up = r.matrix(name + "mlp.c_fc", config.inner, hidden, outs=[inner], transposed=True)
        r.linear(normed, up, middle, config.activation)
        r.residual((middle, r.matrix(name + "mlp.c_proj", hidden, config.inner, ins=[inner], transposed=True)))
    if place.is_last:
        r.normalize(normed, r.norm("ln_f", hidden, config.epsilon), of_head=True)
        r.head(normed, "wte.weight" if config.tied else "lm_head.weight")
    return r
