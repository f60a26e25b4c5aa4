"""GPT-J's config.json, without torch."""

from dataclasses import dataclass

from orca_common.checkpoint import Checkpoint

from ..fields import MAX_LAYERS, MAX_WIDTH, Fields
from ..rotary import Rotary


@dataclass(frozen=True)
class GPTJConfig:
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

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> "GPTJConfig":
        """Raises FailedPrecondition with a sentence when the file asks for something that is not supported."""
        fields = Fields(checkpoint, "GPT-J")
        hidden, heads = fields.whole("n_embd", 4096), fields.whole("n_head", 16)
        head_size = fields.head_size(hidden, heads)
        turned = fields.whole("rotary_dim", 64)
        if turned > head_size or turned % 2:
            raise fields.refuse(f"turns {turned} of {head_size} elements of a head, not an even part of them")
        return cls(
            vocab_size=checkpoint.vocab_size,
            positions=checkpoint.max_positions,
            hidden=hidden,
            layers=fields.whole("n_layer", 28, MAX_LAYERS),
            heads=heads,
            inner=fields.whole("n_inner", 4 * hidden, 4 * MAX_WIDTH),
            epsilon=fields.number("layer_norm_epsilon", 1e-5),
            activation=fields.activation("activation_function", "gelu_new"),
            tied=fields.flag("tie_word_embeddings", False),
            rotary=Rotary(turned, checkpoint.max_positions, 10_000.0),
        )
