"""Attention that torch batches over dense keys and values, as FasterTransformer's kernel does (paper section 6.1).

Everything else is the compiled kernels' as in Orca's ranks, so Figure 9a's engines differ in their attention alone. A
block of the memory has the room of a longest sequence: keys [rows, heads, longest, head size] are dense, and a batch's
are a view of them. Its rows stand at one position, as those of a request-level engine do.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from orca_common.checkpoint import Checkpoint
from orca_common.errors import FailedPrecondition
from orca_kernels.cpu.program import Operand, Rows
from orca_worker.data_plane.plane import DataPlane
from orca_worker.iteration.batch import Batch
from orca_worker.iteration.kv import KVManager
from orca_worker.iteration.model import Compute, Loading, Model
from orca_worker.models.cpu import Load, Section, StageOnCPU
from orca_worker.models.families import family_of
from orca_worker.models.recorded import RecordedFamily
from orca_worker.models.recording import Attend, Attention
from orca_worker.partition import Place, Types


class By(StrEnum):
    """Which attention an engine has."""

    KERNELS = "kernels"
    TORCH = "torch"


def batching(checkpoint: Checkpoint, types: Types, compute: Compute) -> Callable[[Place], tuple[Model, int]]:
    """Makes a rank's slice of a model as `Stage` takes it. Raises FailedPrecondition for other shapes than GPT's, and
    where the compiled kernels cannot be had."""
    family = family_of(checkpoint)
    if not isinstance(family, RecordedFamily):
        raise FailedPrecondition(f"attention: {checkpoint.name} has none")
    ours: RecordedFamily[Any] = replace(family, on_cpu=BatchedAttention)

    def load(place: Place) -> tuple[Model, int]:
        model, read = ours.load(checkpoint, place, types, torch.device("cpu"), compute, Loading())
        if not isinstance(model, BatchedAttention):
            raise FailedPrecondition("attention: torch batches it beside the compiled kernels, which cannot be had")
        return model, read

    return load


class Call(NamedTuple):
    """A layer's attention, from queries, keys and values [T, 3 * width] to the rows that it makes [T, width]."""

    of: Attention
    qkv: Rows
    made: Rows

    @property
    def width(self) -> int:
        return self.of.heads * self.of.head_size


class BatchedAttention(StageOnCPU):
    """A stage whose program stops where torch attends."""

    def __init__(self, *given: Any) -> None:
        self._calls: dict[int, Call] = {}  # by the step that ends the section before
        super().__init__(*given)
        self._whole_members = True

    def _attend(self, operation: Attend, qkv: Rows, out: Operand, load: Load) -> None:
        of = operation.attention
        if of != Attention(of.layer, of.heads, of.heads, of.head_size, of.scale) or not operation.writes:
            raise FailedPrecondition("attention: torch batches that of GPT's shape, and this model has another")
        self._close_section(None)
        call = Call(of, qkv, self.program.rows(of.heads * of.head_size))
        self._calls[self.program.length] = call
        self.program.copy(call.made, call.width, out)

    def _after(self, section: Section, batch: Batch, kv: KVManager, plane: DataPlane, start: int, end: int) -> None:
        super()._after(section, batch, kv, plane, start, end)
        if (call := self._calls.get(section.last)) is not None:
            self._run(call, batch, kv, start, end)

    def _run(self, call: Call, batch: Batch, kv: KVManager, start: int, end: int) -> None:
        """Raises FailedPrecondition where rows of the batch do not stand at one position."""
        tokens, part = end - start, batch.between(start, end)
        members = len(part.rows)
        positions = batch.positions[start:end].reshape(members, -1) if tokens % members == 0 else None
        if positions is None or (positions != positions[0]).any() or int(batch.ends.max()) > kv.block_size:
            raise FailedPrecondition("attention: torch batches rows of one position, in blocks of a longest sequence")
        first, last = int(positions[0, 0]), int(positions[0, -1]) + 1
        if first and last - first > 1:
            raise FailedPrecondition("attention: torch batches whole prompts, or one token of each")
        of = call.of
        qkv = torch.from_numpy(self.program.view(call.qkv, tokens, 3 * call.width)).view(
            members, last - first, 3, of.heads, of.head_size
        )
        q, k, v = qkv.permute(2, 0, 3, 1, 4).to(kv.keys.dtype)  # [members, heads, tokens of each, head size]
        at = dense(kv.block_table(part.rows, 1)[:, 0].tolist())
        for cache, new in ((kv.keys[of.layer], k), (kv.values[of.layer], v)):
            cache[at, :, first:last] = new
        keys, values = (cache[of.layer][at][:, :, :last] for cache in (kv.keys, kv.values))
        made = scaled_dot_product_attention(q, keys, values, is_causal=last - first > 1, scale=of.scale)
        rows = torch.from_numpy(self.program.view(call.made, tokens, call.width))
        rows.copy_(made.transpose(1, 2).reshape(tokens, call.width))


def dense(blocks: Sequence[int]) -> slice | Tensor:
    """The blocks as a view of the memory where they lie one behind the other, as in a batch that fills the engine."""
    if list(blocks) == list(range(blocks[0], blocks[0] + len(blocks))):
        return slice(blocks[0], blocks[0] + len(blocks))
    return torch.tensor(blocks)
