"""GPT-2's config.json, without torch."""

from dataclasses import dataclass
from pathlib import Path

from orca_common.checkpoint import Checkpoint

from ..fields import ACTIVATIONS, MAX_LAYERS, MAX_WIDTH, Fields


@dataclass(frozen=True)
class GPT2Config:
    """config.json. Fields that the file leaves out have Hugging Face's defaults."""

    vocab_size: int
    positions: int
    hidden: int
    layers: int
    heads: int
    inner: int
    epsilon: float
    activation: str  # a value of ACTIVATIONS
    tied: bool
    scale_attention: bool
    scale_by_layer: bool

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> "GPT2Config":
        """Raises FailedPrecondition with a sentence when the file asks for something that is not supported."""
        fields = Fields(checkpoint, "GPT-2")
        hidden, heads = fields.whole("n_embd", 768), fields.whole("n_head", 12)
        fields.head_size(hidden, heads)
        fields.refuse_given("add_cross_attention", "cross attention")
        fields.refuse_given("pruned_heads", "pruned heads")
        return cls(
            vocab_size=checkpoint.vocab_size,
            positions=checkpoint.max_positions,
            hidden=hidden,
            layers=fields.whole("n_layer", 12, MAX_LAYERS),
            heads=heads,
            inner=fields.whole("n_inner", 4 * hidden, 4 * MAX_WIDTH),
            epsilon=fields.number("layer_norm_epsilon", 1e-5),
            activation=fields.activation("activation_function", "gelu_new"),
            tied=fields.flag("tie_word_embeddings", True),
            scale_attention=fields.flag("scale_attn_weights", True),
            scale_by_layer=fields.flag("scale_attn_by_inverse_layer_idx", False),
        )

    def checkpoint(self, name: str) -> Checkpoint:
        """A checkpoint with this configuration and no files, for a model whose weights come from elsewhere."""
        says = {
            "n_embd": self.hidden,
            "n_layer": self.layers,
            "n_head": self.heads,
            "n_inner": self.inner,
            "layer_norm_epsilon": self.epsilon,
            "activation_function": next(given for given, kept in ACTIVATIONS.items() if kept == self.activation),
            "tie_word_embeddings": self.tied,
            "scale_attn_weights": self.scale_attention,
            "scale_attn_by_inverse_layer_idx": self.scale_by_layer,
        }
        return Checkpoint(Path(name), name, says, "gpt2", self.vocab_size, self.positions, (), digest="")
