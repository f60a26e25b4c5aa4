"""GPT-2 with selective batching (paper section 3.2), from a Hugging Face checkpoint: a rank's slice of it.

Shapes: T tokens of all B requests of the batch, H hidden size, heads x D = H, V vocabulary; of the heads, the inner
size and the vocabulary a rank has its share (partition.py). Hidden states are whole on every rank.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from orca_kernels.reference import SplitAttention
from orca_kernels.transfer import to_device

from ..batch import Batch
from ..data_plane import DataPlane
from ..kv import KVManager, KVShape
from ..partition import Place, layers_of, share
from ..weights import WeightSource
from .gpt2_config import GPT2Config

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
    """A slice of a linear operation: of its columns (outputs), or of its rows (inputs): then the ranks' results are to
    be summed. The bias is None on a rank that has no share of it."""

    def __init__(self, weights: WeightSource, name: str) -> None:
        self.weight = weights.get(name + ".weight").t().contiguous()  # [out, in]; GPT-2 keeps [in, out]
        self.bias = weights.find(name + ".bias")  # [out]

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


class LayerNorm:
    def __init__(self, weights: WeightSource, name: str, epsilon: float) -> None:
        self.weight, self.bias, self.epsilon = weights.get(name + ".weight"), weights.get(name + ".bias"), epsilon

    def __call__(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)


class Embedding:
    """Token and position embeddings: a rank adds what it has of them, the sum over the ranks is the hidden states."""

    def __init__(self, config: GPT2Config, place: Place, weights: WeightSource, device: torch.device) -> None:
        self.device = device
        self.vocabulary = share(config.vocab_size, place.tensor_parallel, place.tensor_rank)
        self.is_whole = len(self.vocabulary) == config.vocab_size
        self.tokens = weights.get("wte.weight")  # [V of this rank, H]
        self.positions = weights.find("wpe.weight")  # [positions, H], or None

    def __call__(self, batch: Batch, x: Tensor | None, all_reduce: AllReduce) -> Tensor:
        """-> [T, H]; the first stage has no `x`."""
        ids = to_device(torch.from_numpy(batch.token_ids), self.device)
        if self.is_whole:
            x = functional.embedding(ids, self.tokens)
        else:
            ids = ids - self.vocabulary.start
            elsewhere = (ids < 0) | (ids >= len(self.vocabulary))
            x = functional.embedding(ids.masked_fill(elsewhere, 0), self.tokens)
            x.masked_fill_(elsewhere[:, None], 0)
        if self.positions is not None:
            x = x + functional.embedding(to_device(torch.from_numpy(batch.positions), self.device), self.positions)
        return all_reduce(x)


def arrived(batch: Batch, x: Tensor | None, all_reduce: AllReduce) -> Tensor:
    """The beginning of a later stage: hidden states [T, H] of the one before."""
    assert x is not None
    return x


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
    """The end of the last stage."""

    def __init__(
        self, config: GPT2Config, weights: WeightSource, embedding: Tensor | None, device: torch.device
    ) -> None:
        self.device = device
        self.norm = LayerNorm(weights, "ln_f", config.epsilon)
        tied = embedding if embedding is not None else weights.find("wte.weight")
        self.weight = tied if config.tied and tied is not None else weights.get("lm_head.weight")  # [V of this rank, H]

    def __call__(self, batch: Batch, x: Tensor) -> Tensor:
        """x [T, H] -> logits [B, V of this rank] of the token behind each request's last one."""
        return functional.linear(self.norm(x[to_device(torch.from_numpy(batch.last), self.device)]), self.weight)


def hidden_states(batch: Batch, x: Tensor) -> Tensor:
    """The end of an earlier stage: x [T, H] as it is."""
    return x


class GPT2:
    """The layers of one stage between its two ends, on one device."""

    def __init__(
        self, config: GPT2Config, place: Place, weights: WeightSource, dtype: torch.dtype, device: torch.device
    ):
        self.config, self.dtype, self.device = config, dtype, device
        self.vocabulary_shares = [
            len(share(config.vocab_size, place.tensor_parallel, rank)) for rank in range(place.tensor_parallel)
        ]
        embedding = Embedding(config, place, weights, device) if place.is_first else None
        self.begin = embedding or arrived
        self.layers = [Layer(config, place, index, weights) for index in layers_of(config, place)]
        self.heads = config.heads // place.tensor_parallel
        table = embedding.tokens if embedding is not None else None
        self.end = Head(config, weights, table, device) if place.is_last else hidden_states

    @property
    def kv_shape(self) -> KVShape:
        return KVShape(len(self.layers), self.heads, self.config.head_size, self.dtype, self.device)

    def incoming(self, tokens: int) -> tuple[tuple[int, ...], torch.dtype]:
        return (tokens, self.config.hidden), self.dtype

    def forward(self, batch: Batch, kv: KVManager, plane: DataPlane, x: Tensor | None) -> Tensor:
        """Hidden states [T, H] of the stage before -> of this one; at the last: logits [B, V of this rank] of the token
        behind each request's last one."""
        attention = SplitAttention(
            to_device(torch.from_numpy(kv.block_table(batch.rows, int(batch.ends.max()))), self.device),
            batch.query_lengths,
            batch.contexts,
            to_device(torch.from_numpy(batch.slots), self.device),
            heads=self.heads,
            block_size=kv.block_size,
        )
        x = self.begin(batch, x, plane.all_reduce)
        for layer, keys, values in zip(self.layers, kv.keys, kv.values, strict=True):
            x = layer(x, attention, keys, values, plane.all_reduce)
        return self.end(batch, x)
