"""T5: RMSNorm before each part, a bias by distance instead of positions, scores without a scale."""

from __future__ import annotations

from ...partition import Place
from ..positions import RelativeBias
from ..recording import Attention, Buffer, Matrix, Norm, Recording, columns
from .configuration import T5Config


def record(config: T5Config, place: Place) -> Recording:
    """The stage of a place. Raises FailedPrecondition when the model cannot be cut so."""
    return _T5(config, place).record()


class _T5:
    def __init__(self, config: T5Config, place: Place) -> None:
        self.config, self.hidden, self.size = config, config.hidden, config.head_size
        self.r = r = Recording(place, config.hidden, config.vocab_size, config.positions)
        self.heads, _ = r.share_of_heads(config.heads, config.heads)
        self.inner = r.share_of_inner(config.inner)
        self.attended = columns(self.heads, self.size)
        width = len(self.attended)
        self.q, self.kv, self.qkv = r.rows(width), r.rows(2 * width), r.rows(3 * width)
        self.normed, self.out, self.middle = r.operand(self.hidden), r.operand(width), r.operand(len(self.inner))

    def record(self) -> Recording:
        r, config = self.r, self.config
        layers = r.place.layers(config.layers)
        crosses = [self.attention(layer, sees_input=True) for layer in range(len(layers))]

        self.embed()
        bias = self.bias("encoder", both_ways=True)
        for index in r.place.layers(config.encoder_layers):
            name = f"encoder.block.{index}.layer."
            self.attend(f"{name}0.", "SelfAttention", "qkv", self.qkv, self.attention(0, sees_input=True, bias=bias))
            self.feed(f"{name}1.")
        if r.place.is_last:
            r.normalize(self.normed, self.norm("encoder.final_layer_norm"), in_place=True)
        r.encoder_ends()

        r.copy(self.normed)
        for index, cross in zip(layers, crosses, strict=True):
            name = f"decoder.block.{index}.layer.1.EncDecAttention."
            r.linear(self.normed, self.parts(name, "kv"), self.kv)
            r.write_kv(self.kv, cross)
        r.decoder_begins(config.start_token)

        self.embed()
        bias = self.bias("decoder", both_ways=False)
        for index, cross in zip(layers, crosses, strict=True):
            name = f"decoder.block.{index}.layer."
            self.attend(f"{name}0.", "SelfAttention", "qkv", self.qkv, self.attention(cross.layer, bias=bias))
            self.attend(f"{name}1.", "EncDecAttention", "q", self.q, cross)
            self.feed(f"{name}2.")
        if r.place.is_last:
            r.normalize(self.normed, self.norm("decoder.final_layer_norm", self.head_scale), of_head=True)
            r.head(self.normed, "shared.weight" if config.tied else "lm_head.weight")
        return r

    def embed(self) -> None:
        if self.r.place.is_first:
            self.r.embed("shared.weight")

    @property
    def head_scale(self) -> float:
        return self.hidden**-0.5 if self.config.scaled_output else 1.0

    def attend(self, layer: str, name: str, parts: str, rows: Buffer, a: Attention) -> None:
        """One part of a layer: norm, attention of rows q or qkv, residual."""
        r, name = self.r, f"{layer}{name}."
        r.normalize(self.normed, self.norm(layer + "layer_norm"))
        r.linear(self.normed, self.parts(name, parts), rows)
        r.attend(rows, a, self.out, writes=len(parts) > 1)
        o = r.matrix(name + "o", self.hidden, self.config.heads * self.size, ins=[self.attended], bias=False)
        r.residual((self.out, o))

    def feed(self, layer: str) -> None:
        r, name = self.r, layer + "DenseReluDense."

        def up(part: str) -> Matrix:
            return r.matrix(name + part, self.config.inner, self.hidden, outs=[self.inner], bias=False)

        r.normalize(self.normed, self.norm(layer + "layer_norm"))
        if self.config.gated:
            r.gated(self.normed, up("wi_0"), up("wi_1"), self.middle, self.config.activation)
        else:
            r.linear(self.normed, up("wi"), self.middle, self.config.activation)
        r.residual((self.middle, r.matrix(name + "wo", self.hidden, self.config.inner, ins=[self.inner], bias=False)))

    def parts(self, name: str, parts: str) -> Matrix:
        """Some of q, k and v, one below the other."""
        width = self.config.heads * self.size
        return Matrix.stacked(
            [self.r.matrix(name + part, width, self.hidden, outs=[self.attended], bias=False) for part in parts]
        )

    def attention(self, layer: int, sees_input: bool = False, bias: RelativeBias | None = None) -> Attention:
        return self.r.attention_of(layer, len(self.heads), self.size, 1.0, sees_input=sees_input, bias=bias)

    def bias(self, part: str, both_ways: bool) -> RelativeBias:
        name = f"{part}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        table = self.r.slice(name, (self.config.buckets, self.config.heads), 1, [self.heads])
        return RelativeBias(table, self.config.buckets, self.config.reach, both_ways)

    def norm(self, name: str, scale: float = 1.0) -> Norm:
        return self.r.norm(name, self.hidden, self.config.epsilon, bias=False, scale=scale)
