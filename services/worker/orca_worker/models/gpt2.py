"""GPT-2 with selective batching (paper section 3.2), from a Hugging Face checkpoint.

Shapes: T tokens of all B requests of the batch, H hidden size, heads x D = H, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from orca_common.checkpoint import Checkpoint
from orca_common.errors import FailedPrecondition
from orca_kernels.reference import SplitAttention

from ..batch import Batch
from ..kv import KVManager, KVShape
from ..weights import Weights

Activation = Callable[[Tensor], Tensor]
tanh_gelu = partial(functional.gelu, approximate="tanh")

ACTIVATIONS: dict[str, Activation] = {
    "gelu": functional.gelu,
    "gelu_python": functional.gelu,
    "gelu_new": tanh_gelu,
    "gelu_fast": tanh_gelu,
    "gelu_accurate": tanh_gelu,
    "gelu_pytorch_tanh": tanh_gelu,
    "relu": functional.relu,
    "silu": functional.silu,
    "swish": functional.silu,
    "tanh": torch.tanh,
}


@dataclass(frozen=True)
class GPT2Config:
    """config.json, with the defaults that Hugging Face gives to what it leaves out."""

    vocab_size: int
    positions: int
    hidden: int
    layers: int
    heads: int
    inner: int
    epsilon: float
    activation: Activation
    tied: bool
    scale_attention: bool
    scale_by_layer: bool

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> "GPT2Config":
        """Raises FailedPrecondition with a sentence when the file asks for what this model does not do."""
        given = checkpoint.config

        def refuse(problem: str) -> FailedPrecondition:
            return FailedPrecondition(f"model: config.json of {checkpoint.name} {problem}")

        def positive(name: str, default: int) -> int:
            value: Any = given.get(name, default)
            if not isinstance(value, int) or value < 1:
                raise refuse(f"gives {name} {value!r}, not a positive number")
            return value

        hidden, heads = positive("n_embd", 768), positive("n_head", 12)
        activation = given.get("activation_function", "gelu_new")
        if activation not in ACTIVATIONS:
            raise refuse(f"asks for the activation {activation}; GPT-2 here has {', '.join(ACTIVATIONS)}")
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
            layers=positive("n_layer", 12),
            heads=heads,
            inner=positive("n_inner", 4 * hidden) if given.get("n_inner") is not None else 4 * hidden,
            epsilon=float(given.get("layer_norm_epsilon", 1e-5)),
            activation=ACTIVATIONS[activation],
            tied=bool(given.get("tie_word_embeddings", True)),
            scale_attention=bool(given.get("scale_attn_weights", True)),
            scale_by_layer=bool(given.get("scale_attn_by_inverse_layer_idx", False)),
        )


@dataclass(frozen=True)
class Linear:
    weight: Tensor  # [out, in]
    bias: Tensor  # [out]

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class LayerNorm:
    weight: Tensor  # [H]
    bias: Tensor  # [H]
    epsilon: float

    def __call__(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)


class Layer:
    """One Transformer layer."""

    def __init__(self, config: GPT2Config, index: int, weights: Weights) -> None:
        self.heads = config.heads
        self.scale = (config.hidden // config.heads) ** -0.5 if config.scale_attention else 1.0
        if config.scale_by_layer:
            self.scale /= index + 1
        hidden, inner, name = config.hidden, config.inner, f"h.{index}."

        def linear(part: str, size_in: int, size_out: int) -> Linear:
            # GPT-2 keeps [in, out]
            weight = weights.get(name + part + ".weight", size_in, size_out).t().contiguous()
            return Linear(weight, weights.get(name + part + ".bias", size_out))

        self.norm_1 = layer_norm(weights, name + "ln_1", config)
        self.qkv = linear("attn.c_attn", hidden, 3 * hidden)
        self.merge = linear("attn.c_proj", hidden, hidden)
        self.norm_2 = layer_norm(weights, name + "ln_2", config)
        self.up = linear("mlp.c_fc", hidden, inner)
        self.down = linear("mlp.c_proj", inner, hidden)
        self.activation = config.activation

    def __call__(self, x: Tensor, attention: SplitAttention, keys: Tensor, values: Tensor) -> Tensor:
        """x [T, H], keys and values [n_blocks, heads, block_size, D] -> [T, H]."""
        q, k, v = self.qkv(self.norm_1(x)).view(len(x), 3, self.heads, -1).unbind(1)  # each [T, heads, D]
        attention.write(k, v, keys, values)
        x = x + self.merge(attention(q, keys, values, self.scale).flatten(1))
        return x + self.down(self.activation(self.up(self.norm_2(x))))


def layer_norm(weights: Weights, name: str, config: GPT2Config) -> LayerNorm:
    weight, bias = weights.get(name + ".weight", config.hidden), weights.get(name + ".bias", config.hidden)
    return LayerNorm(weight, bias, config.epsilon)


class GPT2:
    """All layers of the model, on one device."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config = GPT2Config.read(checkpoint)
        self.dtype, self.device = dtype, device
        weights = Weights(checkpoint.folder, "transformer.", dtype, device)
        self.token_embedding = weights.get("wte.weight", config.vocab_size, config.hidden)
        self.position_embedding = weights.get("wpe.weight", config.positions, config.hidden)
        self.layers = [Layer(config, index, weights) for index in range(config.layers)]
        self.norm = layer_norm(weights, "ln_f", config)
        head = "lm_head.weight"
        self.head = self.token_embedding if config.tied else weights.get(head, config.vocab_size, config.hidden)

    @property
    def kv_shape(self) -> KVShape:
        config = self.config
        return KVShape(len(self.layers), config.heads, config.hidden // config.heads, self.dtype, self.device)

    def forward(self, batch: Batch, kv: KVManager) -> Tensor:
        """Logits [B, V] of the token behind each request's last one."""
        config, on = self.config, self.device
        attention = SplitAttention(
            torch.from_numpy(kv.block_table(batch.rows, int(batch.ends.max()))).to(on),
            batch.query_lengths,
            batch.contexts,
            torch.from_numpy(batch.slots).to(on),
            heads=config.heads,
            block_size=kv.block_size,
        )
        x = functional.embedding(torch.from_numpy(batch.token_ids).to(on), self.token_embedding)  # [T, H]
        x = x + functional.embedding(torch.from_numpy(batch.positions).to(on), self.position_embedding)
        for layer, keys, values in zip(self.layers, kv.keys, kv.values, strict=True):
            x = layer(x, attention, keys, values)
        x = x[torch.from_numpy(batch.last).to(on)]  # [B, H]
        return functional.linear(self.norm(x), self.head)
