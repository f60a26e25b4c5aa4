"""GPT-2 with selective batching (paper section 3.2): the layers of one stage, on one device."""

from functools import partial

import torch
from torch import Tensor

from orca_kernels.reference import SplitAttention
from orca_kernels.transfer import to_device

from ...data_plane.plane import DataPlane
from ...iteration.batch import Batch
from ...iteration.kv import KVManager, KVShape
from ...partition import Place, share
from ...sampling.sampling import EndOfModel
from ..weights import WeightSource
from .configuration import GPT2Config
from .layers import Embedding, Head, Layer, hidden_states


class GPT2:
    """One stage: the embedding of the first one, its layers, the head of the last one."""

    kernels = "torch"

    def __init__(
        self, config: GPT2Config, place: Place, weights: WeightSource, dtype: torch.dtype, device: torch.device
    ):
        self.config, self.dtype, self.device = config, dtype, device
        self.vocabulary_shares = [
            len(share(config.vocab_size, place.tensor_parallel, rank)) for rank in range(place.tensor_parallel)
        ]
        self.embedding = Embedding(config, place, weights) if place.is_first else None
        self.layers = [Layer(config, place, index, weights) for index in place.layers(config.layers)]
        self.heads = config.heads // place.tensor_parallel
        table = self.embedding.tokens if self.embedding is not None else None
        self.head = Head(config, weights, table, device) if place.is_last else None

    @property
    def kv_shape(self) -> KVShape:
        return KVShape(len(self.layers), self.heads, self.config.head_size, self.dtype, self.device)

    def incoming(self, tokens: int) -> tuple[tuple[int, ...], torch.dtype]:
        """On a CPU float32, as that of the compiled kernels: the stages of an engine need not run the same."""
        return (tokens, self.config.hidden), torch.float32 if self.device.type == "cpu" else self.dtype

    def forward(self, batch: Batch, kv: KVManager, plane: DataPlane, x: Tensor | None) -> Tensor | EndOfModel:
        """x: hidden states [T, H] of the stage before -> those of this stage.

        At the last stage: what makes logits of them, at the flat indexes that are wanted.
        """
        attention = SplitAttention(
            to_device(torch.from_numpy(kv.block_table(batch.rows, int(batch.ends.max()))), self.device),
            batch.query_lengths,
            batch.contexts,
            to_device(torch.from_numpy(batch.slots), self.device),
            heads=self.heads,
            block_size=kv.block_size,
        )
        if self.embedding is not None:
            ids, positions = (
                to_device(torch.from_numpy(each), self.device) for each in (batch.token_ids, batch.positions)
            )
            x = self.embedding(ids, positions, plane.all_reduce)
        else:
            assert x is not None
            x = x.to(self.dtype)
        for layer, keys, values in zip(self.layers, kv.keys, kv.values, strict=True):
            x = layer(x, attention, keys, values, plane.all_reduce)
        return hidden_states(x) if self.head is None else partial(self.head, x)
