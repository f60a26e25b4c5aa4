"""This rank's part of the engine, as its GPU thread sees it: the model's slice, its memory, the requests it holds."""

from __future__ import annotations

import gc
import logging
from typing import TYPE_CHECKING, NamedTuple

from orca.v1 import worker_pb2
from orca_common.checkpoint import Checkpoint

from .batch import build_batch
from .kv import KVManager
from .memory import SLOTS_OF_NOTHING, free_bytes
from .models import Model, Output, load_model
from .rows import Rows

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


class Memory(NamedTuple):
    """What an epoch may use."""

    slots: int
    free_bytes: int
    slot_bytes: int


class Stage:
    """`max_slots` bounds the slots that are offered. Only the GPU thread calls it, but for `rows.held`."""

    def __init__(
        self, checkpoint: Checkpoint, dtype: str, device: torch.device | None, max_slots: int | None, threads: int
    ) -> None:
        self._checkpoint, self._dtype, self._device = checkpoint, dtype, device
        self._max_slots, self._threads = max_slots, threads
        self._model: Model | None = None
        self._kv = KVManager(None)
        self.rows = Rows()

    def form(self, block_size: int) -> Memory:
        """Loads the model unless it is loaded, drops all rows and memory, and says what the memory holds."""
        self.rows.clear()
        self._kv.release()
        if self._model is None:
            self._model = self._load()
            self._kv = KVManager(self._model.kv_shape)
        shape = self._model.kv_shape
        free = free_bytes(self._device, modest=self._max_slots is None)
        slot_bytes = shape.slot_bytes if shape is not None else 0
        slots = free // slot_bytes if slot_bytes else SLOTS_OF_NOTHING
        if self._max_slots is not None:
            slots = min(slots, self._max_slots)
        return Memory(slots - slots % block_size, free, slot_bytes)

    def _load(self) -> Model:
        if self._device is not None and self._threads:
            import torch

            torch.set_num_threads(self._threads)
        model = load_model(self._checkpoint, self._dtype, self._device)
        gc.collect()
        gc.freeze()  # what was loaded stays: no collection need look at it again
        log.info("model loaded", extra={"model": self._checkpoint.name, "dtype": self._dtype})
        return model

    def allocate(self, slots: int, block_size: int) -> None:
        """Allocates the Attention K/V manager's memory."""
        self._kv.allocate(slots, block_size)

    def run(self, iteration: worker_pb2.Iteration) -> Output:
        """One iteration: forget the rows that ended, take in the new ones, run the model, keep what it made."""
        assert self._model is not None
        self.rows.free(iteration.free_rows)
        self._kv.free(iteration.free_rows)
        for initiation in iteration.initiations:
            self.rows.admit(initiation)
            self._kv.admit(initiation.row, initiation.blocks)
        checkpoint = self._checkpoint
        batch = build_batch(iteration, self.rows, self._kv, checkpoint.vocab_size, checkpoint.max_positions)
        output = self._model.run(batch, self._kv)
        self.rows.advance(batch.rows, batch.ends, output.token_ids)
        return output
