"""A model of time alone: it waits as long as config.json says and makes up the next token.

config.json: `model_type` "orca_timed", `vocab_size`, `n_positions`, `seconds` an iteration (0: no wait) and, for tests
of failures, `abort_on_token`: the process aborts when it reads that token. No weights, no tensors, no torch: what an
iteration costs here is the control plane's share.
"""

import math
import os
import time

import numpy as np

from orca_common.checkpoint import Checkpoint

from ..batch import Batch
from ..kv import KVManager, KVShape
from . import Output

TWENTY_NINE, THIRTY_TWO, MULTIPLIER = np.uint64(29), np.uint64(32), np.uint64(0x94D049BB133111EB)


class TimedModel:
    def __init__(self, checkpoint: Checkpoint) -> None:
        self._vocab_size = np.uint64(checkpoint.vocab_size)
        self._seconds = float(checkpoint.config.get("seconds", 0))
        self._abort_on = checkpoint.config.get("abort_on_token")

    @property
    def kv_shape(self) -> KVShape | None:
        return None

    def run(self, batch: Batch, kv: KVManager) -> Output:
        if self._abort_on is not None and self._abort_on in batch.token_ids:
            os.abort()
        if self._seconds:
            time.sleep(self._seconds)
        last = batch.last
        token_ids = (mix(batch.token_ids[last], batch.positions[last]) % self._vocab_size).tolist()
        return Output(token_ids, [0.0 if wanted else math.nan for wanted in batch.requests["logprobs"].tolist()])


def mix(token_ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """token_ids, positions [B] -> [B] uint64, mixed: two rounds of multiply and shift, with SplitMix64's constants."""
    x = (token_ids * 0x1E3779B97F4A7C15 + positions * 0x3F58476D1CE4E5B9).view(np.uint64)
    x = (x ^ x >> TWENTY_NINE) * MULTIPLIER
    return x ^ x >> THIRTY_TWO
