"""GPT-NeoX's config.json, without torch."""

from dataclasses import dataclass

from orca_common.checkpoint import Checkpoint

from ..fields import MAX_LAYERS, MAX_WIDTH, Fields
from ..rotary import LARGEST, LEAST_THETA, Rotary


@dataclass(frozen=True)
class NeoXConfig:
    """config.json. Fields that the file leaves out have Hugging Face's defaults."""

    vocab_size: int
    positions: int
    hidden: int
    layers: int
    heads: int
    inner: int
    epsilon: float
    activation: str
    tied: bool
    rotary: Rotary
    attention_bias: bool
    parallel: bool  # attention and feed-forward network read the same hidden states

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> "NeoXConfig":
        """Raises FailedPrecondition with a sentence when the file asks for something that is not supported."""
        fields = Fields(checkpoint, "GPT-NeoX")
        hidden, heads = fields.whole("hidden_size", 6144), fields.whole("num_attention_heads", 64)
        head_size = fields.head_size(hidden, heads)
        positions, part = checkpoint.max_positions, fields.number("rotary_pct", 0.25)
        theta = fields.number("rotary_emb_base", 10_000.0, LEAST_THETA, LARGEST)
        return cls(
            vocab_size=checkpoint.vocab_size,
            positions=positions,
            hidden=hidden,
            layers=fields.whole("num_hidden_layers", 44, MAX_LAYERS),
            heads=heads,
            inner=fields.whole("intermediate_size", 24576, 4 * MAX_WIDTH),
            epsilon=fields.number("layer_norm_eps", 1e-5),
            activation=fields.activation("hidden_act", "gelu"),
            tied=fields.flag("tie_word_embeddings", False),
            rotary=Rotary.read(fields, head_size, positions, theta, part),
            attention_bias=fields.flag("attention_bias", True),
            parallel=fields.flag("use_parallel_residual", True),
        )
