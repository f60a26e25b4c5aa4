"""A model that computes nothing: it waits as long as config.json says, and makes up the next token.

config.json: `model_type` "orca_timed", `vocab_size`, `n_positions`, `seconds` an iteration of each stage (0: no wait)
and, for tests of failures, `abort_on_token`: the process aborts when it reads that token. It has no weights. Its only
tensors are one number from stage to stage and one among the tensor ranks, which make the ranks wait for each other as
those of a real model. A single rank needs no torch. What an iteration costs here is the control plane's share.
"""

from __future__ import annotations

import math
import os
import time
from typing import TYPE_CHECKING

import numpy as np

from orca_common.checkpoint import Checkpoint
from orca_common.scores import NOTHING, SCORE, TOP

from ...data_plane.plane import DataPlane
from ...iteration.batch import Batch
from ...iteration.kv import KVManager, KVShape
from ...iteration.model import Output
from ...partition import Place

if TYPE_CHECKING:
    import torch
    from torch import Tensor

TWENTY_NINE, THIRTY_TWO, MULTIPLIER = np.uint64(29), np.uint64(32), np.uint64(0x94D049BB133111EB)


class TimedModel:
    """`Model` that waits."""

    tokens = None

    def __init__(self, checkpoint: Checkpoint, place: Place) -> None:
        self._place = place
        self._vocab_size = np.uint64(checkpoint.vocab_size)
        self._seconds = float(checkpoint.config.get("seconds", 0))
        self._abort_on = checkpoint.config.get("abort_on_token")
        self._one: Tensor | None = None
        if place.ranks > 1:
            import torch

            self._one = torch.ones(1)

    @property
    def kernels(self) -> str:
        return "none"

    @property
    def kv_shape(self) -> KVShape | None:
        return None

    def prepare(self, kv: KVManager, plane: DataPlane) -> None:
        pass

    def release(self) -> None:
        pass

    def incoming(self, tokens: int) -> tuple[tuple[int, ...], torch.dtype] | None:
        return None if self._one is None else ((1,), self._one.dtype)

    def run(self, batch: Batch, kv: KVManager, plane: DataPlane, x: Tensor | None) -> Output:
        if self._abort_on is not None and self._abort_on in batch.token_ids:
            os.abort()
        if self._seconds:
            time.sleep(self._seconds)
        if self._one is not None:
            plane.all_reduce(self._one.clone())
            if not self._place.is_last:
                return Output([], [], self._one)
        if not self._place.samples:
            return Output([], [])
        last = batch.out_at
        token_ids = (mix(batch.token_ids[last], batch.positions[last]) % self._vocab_size).tolist()
        logprobs = [0.0 if wanted else math.nan for wanted in batch.requests["logprobs"].tolist()]
        tops = {
            n: place(token_ids[n], one.asked.top_logprobs)
            for n, one in batch.adjusted.items()
            if one.asked.top_logprobs
        }
        return Output(token_ids, logprobs, tops=tops, prompts=scored_prompts(batch) if batch.scored else {})


def place(token: int, wanted: int) -> bytes:
    """The tops of a place where `token` is certain."""
    return TOP.pack(token, 0.0) + NOTHING * (wanted - 1) if wanted else b""


def scored_prompts(batch: Batch) -> dict[int, bytes]:
    """Logprobs of the prompts that ask for them: every token that comes is certain."""
    scores = {}
    for n, one in batch.scored.items():
        wanted, start = one.asked.top_logprobs, batch.contexts[n]
        first = SCORE.pack(math.nan) + NOTHING * wanted if start == 0 else b""
        rest = one.tokens[start + 1 : min(int(batch.ends[n]) + 1, one.prompt)].tolist()
        scores[n] = first + b"".join(SCORE.pack(0.0) + place(token, wanted) for token in rest)
    return scores


def mix(token_ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """token_ids, positions [B] -> [B] uint64, mixed: two rounds of multiply and shift, with SplitMix64's constants."""
    x = (token_ids * 0x1E3779B97F4A7C15 + positions * 0x3F58476D1CE4E5B9).view(np.uint64)
    x = (x ^ x >> TWENTY_NINE) * MULTIPLIER
    return x ^ x >> THIRTY_TWO
