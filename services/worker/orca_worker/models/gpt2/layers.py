"""The parts of GPT-2, each as the slice of one rank: embedding, Transformer layer, head.

Shapes: T tokens of all B requests of the batch, H hidden size, heads x D = H, V vocabulary. A rank has its share of the
heads, of the inner size and of the vocabulary (slices.py). Hidden states are whole on every rank.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from orca_kernels.reference import SplitAttention
from orca_kernels.transfer import to_device

from ...partition import Place
from ..weights import WeightSource
from .configuration import GPT2Config

Activation = Callable[[Tensor], Tensor]
AllReduce = Callable[[Tensor], Tensor]

ACTIVATIONS: dict[str, Activation] = {
    "gelu": functional.gelu,
    "tanh_gelu": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
    "silu": functional.silu,
    "tanh": torch.tanh,
}


class Linear:
    """A slice of a linear operation, of its columns (outputs) or of its rows (inputs).

    With rows, the ranks' results must be summed, so only one rank has the bias; on the others it is None.
    """

    def __init__(self, weights: WeightSource, name: str) -> None:
        self.weight = weights.get(name + ".weight").t().contiguous()  # [out, in]; GPT-2 keeps [in, out]
        self.bias = weights.find(name + ".bias")  # [out]

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


class LayerNorm:
    """Layer normalization of whole hidden states."""

    def __init__(self, weights: WeightSource, name: str, epsilon: float) -> None:
        self.weight, self.bias, self.epsilon = weights.get(name + ".weight"), weights.get(name + ".bias"), epsilon

    def __call__(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)


class Embedding:
    """Token and position embeddings. Each rank looks up what it holds; the sum over the ranks is the hidden states."""

    def __init__(self, config: GPT2Config, place: Place, weights: WeightSource) -> None:
        self.vocabulary = place.tensor_share(config.vocab_size)
        self.is_whole = len(self.vocabulary) == config.vocab_size
        self.tokens = weights.get("wte.weight")  # [V of this rank, H]
        self.positions = weights.find("wpe.weight")  # [positions, H], or None

    def __call__(self, ids: Tensor, positions: Tensor, all_reduce: AllReduce) -> Tensor:
        """ids, positions [T], on the device -> [T, H]."""
        if self.is_whole:
            x = functional.embedding(ids, self.tokens)
        else:
            ids = ids - self.vocabulary.start
            elsewhere = (ids < 0) | (ids >= len(self.vocabulary))
            x = functional.embedding(ids.masked_fill(elsewhere, 0), self.tokens)
            x.masked_fill_(elsewhere[:, None], 0)
        if self.positions is not None:
            x = x + functional.embedding(positions, self.positions)
        return all_reduce(x)


class Layer:
    """One Transformer layer."""

    def __init__(self, config: GPT2Config, place: Place, index: int, weights: WeightSource) -> None:
        self.heads = config.heads // place.tensor_parallel
        self.scale = config.head_size**-0.5 if config.scale_attention else 1.0
        if config.scale_by_layer:
            self.scale /= index + 1
        name = f"h.{index}."
        self.norm_1 = LayerNorm(weights, name + "ln_1", config.epsilon)
        self.qkv = Linear(weights, name + "attn.c_attn")
        self.merge = Linear(weights, name + "attn.c_proj")
        self.norm_2 = LayerNorm(weights, name + "ln_2", config.epsilon)
        self.up = Linear(weights, name + "mlp.c_fc")
        self.down = Linear(weights, name + "mlp.c_proj")
        self.activation = ACTIVATIONS[config.activation]

    def __call__(
        self, x: Tensor, attention: SplitAttention, keys: Tensor, values: Tensor, all_reduce: AllReduce
    ) -> Tensor:
        """x [T, H], keys and values [n_blocks, heads, block_size, D] -> [T, H]."""
        q, k, v = self.qkv(self.norm_1(x)).view(len(x), 3, self.heads, -1).unbind(1)  # each [T, heads, D]
        attention.write(k, v, keys, values)
        x = x + all_reduce(self.merge(attention(q, keys, values, self.scale).flatten(1)))
        return x + all_reduce(self.down(self.activation(self.up(self.norm_2(x)))))


class Head:
    """The end of the last stage: final norm, and logits."""

    def __init__(
        self, config: GPT2Config, weights: WeightSource, embedding: Tensor | None, device: torch.device
    ) -> None:
        self.device = device
        self.norm = LayerNorm(weights, "ln_f", config.epsilon)
        tied = embedding if embedding is not None else weights.find("wte.weight")
        self.weight = tied if config.tied and tied is not None else weights.get("lm_head.weight")  # [V of this rank, H]

    def __call__(self, x: Tensor, at: np.ndarray) -> Tensor:
        """Hidden states x [T, H], flat indexes at [n] -> logits [n, V of this rank] of the tokens that follow them."""
        return functional.linear(self.norm(x[to_device(torch.from_numpy(at), self.device)]), self.weight)


def hidden_states(x: Tensor) -> Tensor:
    """The end of an earlier stage: the hidden states x [T, H], in the type that they are sent in."""
    return x.float() if x.device.type == "cpu" else x
