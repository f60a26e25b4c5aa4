"""GPT-2's config.json, without torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orca_common.bounded_file import shown
from orca_common.checkpoint import Checkpoint
from orca_common.errors import FailedPrecondition

MAX_LAYERS, MAX_WIDTH = 4096, 1 << 17  # above those of any published model

# Hugging Face's names of activations -> our names of the functions
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "tanh_gelu",
    "gelu_fast": "tanh_gelu",
    "gelu_accurate": "tanh_gelu",
    "gelu_pytorch_tanh": "tanh_gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}


@dataclass(frozen=True)
class GPT2Config:
    """config.json. What it leaves out has Hugging Face's defaults."""

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
        given = checkpoint.config

        def refuse(problem: str) -> FailedPrecondition:
            return FailedPrecondition(f"model: config.json of {checkpoint.name} {problem}")

        def positive(name: str, default: int, most: int) -> int:
            value: Any = given.get(name, default)
            if type(value) is not int or not 1 <= value <= most:
                raise refuse(f"gives {name} {shown(value)}, not a number from 1 to {most}")
            return value

        hidden, heads = positive("n_embd", 768, MAX_WIDTH), positive("n_head", 12, MAX_WIDTH)
        activation, epsilon = given.get("activation_function", "gelu_new"), given.get("layer_norm_epsilon", 1e-5)
        if not isinstance(activation, str) or activation not in ACTIVATIONS:
            raise refuse(f"asks for the activation {shown(activation)}; GPT-2 here has {', '.join(ACTIVATIONS)}")
        if type(epsilon) not in (int, float) or not 0 <= epsilon < 1:
            raise refuse(f"gives layer_norm_epsilon {shown(epsilon)}, not a number from 0 to 1")
        if hidden % heads:
            raise refuse(f"cuts a hidden size of {hidden} in {heads} heads")
        if given.get("add_cross_attention"):
            raise refuse("asks for cross attention, which GPT-2 here does not have")
        if given.get("pruned_heads"):
            raise refuse("asks for pruned heads, which GPT-2 here does not have")
        if given.get("quantization_config"):
            raise refuse("asks for quantized weights, which GPT-2 here does not read")
        return cls(
            vocab_size=checkpoint.vocab_size,
            positions=checkpoint.max_positions,
            hidden=hidden,
            layers=positive("n_layer", 12, MAX_LAYERS),
            heads=heads,
            inner=positive("n_inner", 4 * hidden, 4 * MAX_WIDTH) if given.get("n_inner") is not None else 4 * hidden,
            epsilon=float(epsilon),
            activation=ACTIVATIONS[activation],
            tied=bool(given.get("tie_word_embeddings", True)),
            scale_attention=bool(given.get("scale_attn_weights", True)),
            scale_by_layer=bool(given.get("scale_attn_by_inverse_layer_idx", False)),
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
