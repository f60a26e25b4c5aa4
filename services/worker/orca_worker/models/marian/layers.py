"""Marian, the original Transformer (Vaswani et al., "Attention Is All You Need"): sinusoids, LayerNorm behind each
residual."""

from __future__ import annotations

from ...partition import Place
from ..positions import Sinusoids
from ..recording import Attention, Buffer, Matrix, Norm, Recording, columns
from .configuration import MarianConfig

EPSILON = 1e-5  # no field says so


def record(config: MarianConfig, place: Place) -> Recording:
    """The stage of a place. Raises FailedPrecondition when the model cannot be cut so."""
    return _Marian(config, place).record()


class _Marian:
    def __init__(self, config: MarianConfig, place: Place) -> None:
        self.config, self.hidden = config, config.hidden
        self.r = r = Recording(place, config.hidden, config.vocab_size, config.positions)
        self.heads, _ = r.share_of_heads(config.heads, config.heads)
        self.attended = columns(self.heads, config.head_size)
        width = len(self.attended)
        self.q, self.kv, self.qkv = r.rows(width), r.rows(2 * width), r.rows(3 * width)
        self.normed, self.out = r.operand(self.hidden), r.operand(width)

    def record(self) -> Recording:
        r, config = self.r, self.config
        layers = r.place.layers(config.layers)
        crosses = [self.attention(layer, sees_input=True) for layer in range(len(layers))]
        to_feed = [r.operand(len(r.share_of_inner(inner))) for inner in (config.encoder_inner, config.inner)]

        self.begin()
        for index in r.place.layers(config.encoder_layers):
            name = f"encoder.layers.{index}."
            self.attend(name + "self_attn", "qkv", self.qkv, self.attention(0, sees_input=True))
            self.feed(name, config.encoder_inner, to_feed[0])
            r.normalize(self.normed, self.norm(name + "final_layer_norm"), in_place=True)
        r.encoder_ends()

        r.copy(self.normed)
        for index, cross in zip(layers, crosses, strict=True):
            r.linear(self.normed, self.parts(f"decoder.layers.{index}.encoder_attn.", "kv"), self.kv)
            r.write_kv(self.kv, cross)
        r.decoder_begins(config.start_token)

        self.begin()
        for index, cross in zip(layers, crosses, strict=True):
            name, is_last = f"decoder.layers.{index}.", index == config.layers - 1
            self.attend(name + "self_attn", "qkv", self.qkv, self.attention(cross.layer))
            self.attend(name + "encoder_attn", "q", self.q, cross)
            self.feed(name, config.inner, to_feed[1])
            r.normalize(self.normed, self.norm(name + "final_layer_norm"), of_head=is_last, in_place=not is_last)
        if r.place.is_last:
            bias = r.slice("final_logits_bias", (1, config.vocab_size), 1, [r.tokens])
            r.head(self.normed, "shared.weight" if config.tied else "lm_head.weight", bias, config.never_made)
        return r

    def begin(self) -> None:
        """Embeds the tokens, or goes on from the states of the stage before."""
        if self.r.place.is_first:
            scale = self.hidden**0.5 if self.config.scale_embedding else 1.0
            self.r.embed("shared.weight", Sinusoids(self.config.positions, self.hidden), scale)
        self.r.copy(self.normed)

    def attend(self, name: str, parts: str, rows: Buffer, a: Attention) -> None:
        """One part of a layer: attention of rows q or qkv, residual, norm."""
        r = self.r
        r.linear(self.normed, self.parts(name + ".", parts), rows)
        r.attend(rows, a, self.out, writes=len(parts) > 1)
        r.residual((self.out, r.matrix(name + ".out_proj", self.hidden, self.hidden, ins=[self.attended])))
        r.normalize(self.normed, self.norm(name + "_layer_norm"), in_place=True)

    def feed(self, layer: str, inner: int, middle: Buffer) -> None:
        r, mine = self.r, [self.r.share_of_inner(inner)]
        up = r.matrix(layer + "fc1", inner, self.hidden, outs=mine)
        r.linear(self.normed, up, middle, self.config.activation)
        r.residual((middle, r.matrix(layer + "fc2", self.hidden, inner, ins=mine)))

    def parts(self, name: str, parts: str) -> Matrix:
        """Some of q, k and v, one below the other."""
        return Matrix.stacked(
            [self.r.matrix(f"{name}{part}_proj", self.hidden, self.hidden, outs=[self.attended]) for part in parts]
        )

    def attention(self, layer: int, sees_input: bool = False) -> Attention:
        size = self.config.head_size
        return self.r.attention_of(layer, len(self.heads), size, size**-0.5, sees_input=sees_input)

    def norm(self, name: str) -> Norm:
        return self.r.norm(name, self.hidden, EPSILON)
