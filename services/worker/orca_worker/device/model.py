"""The GPU loop: one iteration on a CUDA device, without waiting for it. **Not run on a GPU yet.**

A batch with initiations is launched kernel by kernel; its work hides the launches. A batch of increments alone is
padded to the next bucket and replayed as a graph. Both run the same function, `_iterate`, on `Inputs`.

Tokens stay on the device: `_iterate` finds those of increments in the token table, and its sampling writes the next
ones there. So the next iteration can be launched before the host has read these.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from orca_kernels.transfer import to_device
from orca_kernels.triton.plan import Bounds

from ..data_plane.plane import DataPlane, Loopback
from ..iteration.batch import Batch
from ..iteration.device_tokens import DeviceTokens
from ..iteration.kv import KVManager
from ..iteration.model import Output
from ..partition import Place
from ..sampling.sampling import Layers, OfStage, score_prompts
from ..sampling.scoring import tops
from .graphs import BUCKETS, Recorder, bucket_of
from .inputs import Inputs, host_plan
from .sampling import Tokens, choose_cut, choose_on_device, is_cut

log = logging.getLogger(__name__)

Head = Callable[[Tensor | None], Tensor]  # flat indexes [n] on the device, None: all -> logits [n, V of this rank]


class DeviceLayers(Layers, Protocol):
    """The layers of a stage, which read nothing of the host."""

    device: torch.device
    max_positions: int
    group: int  # query heads to a key/value head

    def forward(self, inputs: Inputs, ids: Tensor, kv: KVManager, plane: DataPlane, x: Tensor | None) -> Tensor | Head:
        """Token ids [T], hidden states x [T, H] of the stage before -> those of this stage, or what makes logits."""
        ...


class Made(NamedTuple):
    """What `_iterate` leaves on the device, padding included."""

    hidden: Tensor | None = None  # [T, H], at every stage but the last
    head: Head | None = None
    logits: Tensor | None = None  # [B, V], on the rank that samples
    chosen: Tensor | None = None  # [3, B], see sampling.py


class Recorded(NamedTuple):
    """A bucket: where its inputs go, and what replays it."""

    inputs: Inputs
    x: Tensor | None  # [bucket, H], at every stage but the first
    replay: Callable[[], Made]


class DeviceModel(OfStage[DeviceLayers]):
    """`Model` of a stage on a CUDA device. `recorder` None: no graphs."""

    def __init__(self, model: DeviceLayers, place: Place, recorder: Callable[[], Recorder] | None) -> None:
        super().__init__(model)
        self._place = place
        # Tensor ranks add up in the middle of each layer. What NCCL does in a graph, or an abort to it, was never seen.
        self._recorder = recorder if place.tensor_parallel == 1 else None
        self._recorded: dict[int, Recorded] = {}
        self.tokens = DeviceTokens(model.device) if place.is_first else None

    @torch.inference_mode()
    def prepare(self, kv: KVManager) -> None:
        """Records all buckets over this memory. If one fails there are no graphs in this epoch; the log says so."""
        self.release()
        if self._recorder is None:
            return
        recorder, started = self._recorder(), time.monotonic()
        try:
            for bucket in reversed(BUCKETS):  # the largest first: the others fit into its memory
                self._recorded[bucket] = self._record(recorder, bucket, kv)
        except RuntimeError:
            self.release()
            log.warning("no CUDA graphs: kernels are launched one by one", exc_info=True)
            return
        seconds = round(time.monotonic() - started, 3)
        log.info("CUDA graphs", extra={"buckets": BUCKETS, "bytes": recorder.bytes, "seconds": seconds})

    def release(self) -> None:
        """Drops the recordings, and with the last of them the memory that they share."""
        self._recorded.clear()

    def _record(self, recorder: Recorder, bucket: int, kv: KVManager) -> Recorded:
        model = self.model
        bounds = Bounds.of_increments(bucket, model.max_positions, group=model.group, block_size=kv.block_size)
        inputs, x = Inputs(bounds, model.device).clear(), None
        if not self._place.is_first:
            shape, dtype = model.incoming(bucket)
            x = torch.zeros(shape, dtype=dtype, device=model.device)
        return Recorded(inputs, x, recorder.record(partial(self._iterate, inputs, kv, Loopback(), x)))

    def _iterate(self, inputs: Inputs, kv: KVManager, plane: DataPlane, x: Tensor | None) -> Made:
        """One iteration, of which the host does nothing but launch kernels, the same ones for the same bounds."""
        ids = inputs.given if self.tokens is None else self.tokens.find(inputs.rows_of_tokens, inputs.given)
        end = self.model.forward(inputs, ids, kv, plane, x)
        if isinstance(end, Tensor):
            return Made(hidden=end)
        logits = plane.gather(end(inputs.last), self.model.vocabulary_shares)
        if logits is None:
            return Made(head=end)
        chosen = choose_on_device(logits, inputs.temperatures, inputs.seeds, inputs.draws)
        if self.tokens is not None:
            self.tokens.put(inputs.rows, chosen[0].long())
        return Made(head=end, logits=logits, chosen=chosen)

    @torch.inference_mode()
    def run(self, batch: Batch, kv: KVManager, plane: DataPlane, x: Tensor | None) -> Output:
        cut = is_cut(batch.requests, batch.adjusted, sum(self.model.vocabulary_shares))
        temperatures = np.where(cut, 0.0, batch.requests["temperature"])
        plan = host_plan(batch, kv, self.model.group)
        recorded = self._recorded_for(batch)
        if recorded is None:
            inputs = Inputs(plan.bounds, self.model.device, all_sample=len(batch.sampled) == len(batch))
            inputs.load(batch, plan, temperatures)
            made = self._iterate(inputs, kv, plane, x)
        else:
            recorded.inputs.load(batch, plan, temperatures)
            if recorded.x is not None and x is not None:
                recorded.x[: len(batch)].copy_(x)
            made = recorded.replay()
        if made.hidden is not None:
            # The next replay writes the same memory, and the data plane sends from a stream of its own.
            return Output([], [], made.hidden if recorded is None else made.hidden[: len(batch)].clone())
        return self._sampled(batch, plane, made, cut)

    def _recorded_for(self, batch: Batch) -> Recorded | None:
        """The bucket for a batch in which each token is followed by a new one."""
        bucket = bucket_of(len(batch)) if len(batch.token_ids) == len(batch.sampled) else None
        return self._recorded.get(bucket) if bucket is not None else None

    def _sampled(self, batch: Batch, plane: DataPlane, made: Made, cut: np.ndarray) -> Output:
        n, prompts, head = len(batch.sampled), {}, made.head
        assert head is not None
        if batch.scored:
            at = lambda places: head(to_device(torch.from_numpy(places), self.model.device))  # noqa: E731
            prompts = score_prompts(at, batch, plane, self.model.vocabulary_shares)
        if made.logits is None or made.chosen is None or not n:
            return Output([], [], prompts=prompts)
        if cut.any():
            choose_cut(made.logits[:n], made.chosen, cut, batch.requests, batch.draws, batch.adjusted)
            if self.tokens is not None:
                rows = to_device(torch.from_numpy(batch.rows[batch.sampled]), self.model.device)
                self.tokens.put(rows, made.chosen[0, :n].long())
        later = Tokens(made.chosen[:, :n], batch.requests["logprobs"])
        if not batch.adjusted and not prompts:
            return Output([], [], later=later)
        return later.result()._replace(tops=tops(made.logits[:n], batch.adjusted), prompts=prompts)
