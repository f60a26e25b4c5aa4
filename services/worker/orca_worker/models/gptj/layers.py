"""GPT-J: attention and feed-forward network read one norm side by side.

It turns neighbours, elements 2j and 2j + 1 of a head. Products of queries and keys stay the same when both have their
elements in another order, so those rows are read with the even ones first, and turned like everybody's.
"""

from __future__ import annotations

from ...partition import Place
from ..recording import Matrix, Recording, columns
from .configuration import GPTJConfig


def record(config: GPTJConfig, place: Place) -> Recording:
    """The stage of a place. Raises FailedPrecondition when the model cannot be cut so."""
    r = Recording(place, config.hidden, config.vocab_size, config.positions)
    hidden, size, inner = config.hidden, config.head_size, r.share_of_inner(config.inner)
    heads, _ = r.share_of_heads(config.heads, config.heads)
    attended, turned = columns(heads, size), config.rotary.size
    in_order = [
        part
        for first in range(attended.start, attended.stop, size)
        for part in (
            *(range(i, i + 1) for odd in range(2) for i in range(first + odd, first + turned, 2)),
            range(first + turned, first + size),
        )
    ]
    qkv, normed = r.rows(3 * len(attended)), r.operand(hidden)
    out, middle = r.operand(len(attended)), r.operand(len(inner))

    if place.is_first:
        r.embed("wte.weight")
    for index in place.layers(config.layers):
        name = f"h.{index}."
        parts = [
            r.matrix(f"{name}attn.{part}_proj", hidden, hidden, outs=cut, bias=False)
            for part, cut in (("q", in_order), ("k", in_order), ("v", [attended]))
        ]
        r.normalize(normed, r.norm(name + "ln_1", hidden, config.epsilon))
        r.linear(normed, Matrix.stacked(parts), qkv)
        r.attend(qkv, r.attention(len(heads), len(heads), size, size**-0.5, rotary=config.rotary), out)
        r.linear(normed, r.matrix(name + "mlp.fc_in", config.inner, hidden, outs=[inner]), middle, config.activation)
        r.residual(
            (out, r.matrix(name + "attn.out_proj", hidden, hidden, ins=[attended], bias=False)),
            (middle, r.matrix(name + "mlp.fc_out", hidden, config.inner, ins=[inner])),
        )
    if place.is_last:
        r.normalize(normed, r.norm("ln_f", hidden, config.epsilon), of_head=True)
        bias = r.slice("lm_head.bias", (config.vocab_size,), ranges=[r.tokens])
        r.head(normed, "wte.weight" if config.tied else "lm_head.weight", bias)
    return r
