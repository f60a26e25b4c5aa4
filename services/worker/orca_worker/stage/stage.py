"""A rank's part of the engine, as its GPU thread uses it: the model's slice, its memory, the requests it holds."""

from __future__ import annotations

import gc
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from orca.v1 import worker_pb2
from orca_common.block_keys import root_of
from orca_common.checkpoint import Checkpoint
from orca_common.errors import FailedPrecondition

from ..data_plane.blocks import Asked, Block, pull
from ..data_plane.plane import DataPlane, Loopback, PeerLost
from ..iteration.batch import Batch, build_batch, token_count
from ..iteration.handing import Filling, blocks_of, wanted_keys
from ..iteration.kv import KVManager
from ..iteration.model import Compute, Later, Loading, Model, Output
from ..iteration.rows import Rows
from ..machine import SLOTS_OF_NOTHING, free_bytes
from ..models.families import load_model
from ..models.weight_files import fingerprint
from ..partition import SINGLE, Place, Types
from .adapters import LoadedAdapters

if TYPE_CHECKING:
    import torch

    from ..sampling.forms import Masks

log = logging.getLogger(__name__)

PULLS = 4  # from other engines at a time
NOTHING = Output([], [])


class Memory(NamedTuple):
    """The contents of a rank's memory in an epoch."""

    slots: int
    free_bytes: int
    slot_bytes: int


class Unread(NamedTuple):
    """An iteration whose tokens are on the device, or on their way from there."""

    batch: Batch
    later: Later


class Launched(NamedTuple):
    """An iteration that has been run or, where the output comes later, put on the device. Any thread may read it."""

    output: Output
    plane: DataPlane
    times: worker_pb2.StageTimes

    def read(self) -> Output:
        """Waits for the output, if it comes later. Raises as `Stage.launch` does."""
        if self.output.later is None:
            return self.output
        with as_peer_lost(self.plane):
            output = self.output.later.result()
        self.times.computed = self.times.sent = time.time_ns()
        return output


@contextmanager
def as_peer_lost(plane: DataPlane) -> Iterator[None]:
    """Raises PeerLost for whatever happened on a plane that no longer works."""
    try:
        yield
        plane.check()  # an abort ends a GPU's operations without an error, and leaves garbage
    except PeerLost:
        raise
    except Exception:
        plane.check()  # a device's error may be the consequence of an abort
        raise


def _root(admission: worker_pb2.Admission) -> str:
    """The root of a request's keys here: another one for each adapter, whatever root the scheduler gave them."""
    root, adapter = admission.root.hex(), admission.sampling.adapter
    return root_of(f"{root} {adapter}") if adapter else root


class WeightsChanged(Exception):
    """The checkpoint was written over. This rank's process must end: the next one reads the new weights."""


class Stage:
    """Forms and runs iterations. Only the GPU thread calls it, but for `rows.held`, `samples`, `loaded`, `loading` and
    `blocks_of`. `pulled` is called with the end of each pull, in any thread.

    `weights` is the fingerprint of those that it reads. `max_slots` bounds the slots that are offered. `load` makes the
    model's slice of a place, of weights without a fingerprint; without it the checkpoint is read.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        types: Types,
        device: torch.device | None,
        max_slots: int | None,
        compute: Compute,
        load: Callable[[Place], tuple[Model, int]] | None = None,
    ) -> None:
        self._checkpoint, self._types, self._device = checkpoint, types, device
        self._max_slots, self._compute = max_slots, compute
        self.loading = loading = Loading()
        # Without a reference to itself, or a model that is replaced would stay: what is frozen is never collected.
        self._load_model = load or (lambda place: load_model(checkpoint, place, types, device, compute, loading))
        self._of_folder = load is None
        self.weights = self._fingerprint()
        self._model: Model | None = None
        self._place = SINGLE  # of the model
        self._plane: DataPlane = Loopback()
        self._kv = KVManager(None)
        self._owed: deque[Batch] = deque()  # whose tokens are still to come back on the data plane
        self._unread: deque[Unread] = deque()
        self.rows = Rows(checkpoint.start_token, [adapter.name for adapter in checkpoint.adapters])
        self.adapters = LoadedAdapters(checkpoint, device, self.rows.adapters)
        self._masks: Masks | None = None  # from the first request on that asks for a form
        self.pulled: Callable[[worker_pb2.Pulled], None] = lambda pulled: None
        self._fillings: dict[int, Filling] = {}  # by row, until it runs for the first time
        self._pulls: ThreadPoolExecutor | None = None  # from the first pull on

    @property
    def loaded(self) -> bool:
        """Whether this rank has its weights. Any thread may ask."""
        return self._model is not None

    @property
    def samples(self) -> bool:
        """Whether this rank makes the tokens. Any thread may ask."""
        return self._place.samples

    def form(self, block_size: int, place: Place = SINGLE, plane: DataPlane | None = None) -> Memory:
        """Drops all rows and memory, loads the rank's slice unless it is loaded, joins the other ranks.

        Returns what the memory holds. Raises PeerLost, or FailedPrecondition when the weights do not fit.
        """
        self.rows.clear()
        self._owed.clear()
        self._unread.clear()
        self._stop_filling(list(self._fillings))
        self._kv.release()
        if self._model is None or self._place != place:
            self._model = None  # frees its memory before the new one is loaded
            self.adapters.begin(None, self._kv)
            self._model, self._place = self._load(place), place
            self._kv = KVManager(self._model.kv_shape)
            self.adapters.begin(self._model, self._kv)
        self._model.release()
        self._plane = plane if plane is not None else Loopback()
        self._plane.join()
        shape = self._model.kv_shape
        free = free_bytes(self._device, modest=self._max_slots is None)
        slot_bytes = shape.slot_bytes if shape is not None else 0
        slots = free // slot_bytes if slot_bytes else SLOTS_OF_NOTHING
        if self._max_slots is not None:
            slots = min(slots, self._max_slots)
        return Memory(slots - slots % block_size, free, slot_bytes)

    def _load(self, place: Place) -> Model:
        if self._device is not None:
            import torch

            if self._compute.threads:
                torch.set_num_threads(self._compute.threads)
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # this thread's current device
        started = time.monotonic()
        model, bytes_read = self._load_model(place)
        if self._fingerprint() != self.weights or not self.adapters.unchanged:
            raise WeightsChanged(f"other weights than this rank has told lie in {self._checkpoint.folder} now")
        gc.collect()
        gc.freeze()  # the model stays: no later collection needs to look at it
        log.info(
            "model loaded",
            extra={
                "model": self._checkpoint.name,
                "dtype": self._types.weights,
                "kv_dtype": self._types.kv,
                "quantize": self._checkpoint.quantize,
                "kernels": model.kernels,
                "stage": place.stage,
                "tensor_rank": place.tensor_rank,
                "bytes_read": bytes_read,
                "seconds": round(time.monotonic() - started, 3),
            },
        )
        return model

    def _fingerprint(self) -> str:
        of, kv = self._checkpoint, f"kv {self._types.kv}" if self._types.kv == "int8" else None
        return fingerprint(of.folder, of.quantize, kv) if self._of_folder else ""

    def allocate(self, slots: int, block_size: int) -> None:
        """Allocates the Attention K/V manager's memory, and lets the model get ready for it."""
        self._kv.allocate(slots, block_size)
        if self._model is not None:
            with as_peer_lost(self._plane):
                self._model.prepare(self._kv, self._plane)

    def leave(self) -> None:
        """Drops what may hold on to the data plane that was left: NCCL's abort waits for graphs with its operations."""
        if self._model is not None:
            self._model.release()

    def run(self, iteration: worker_pb2.Iteration, times: worker_pb2.StageTimes | None = None) -> Output:
        """Launches one iteration and waits for its output."""
        return self.launch(iteration, times).read()

    def launch(
        self,
        iteration: worker_pb2.Iteration,
        times: worker_pb2.StageTimes | None = None,
        following: worker_pb2.Iteration | None = None,
    ) -> Launched:
        """Runs one iteration: forgets the rows that ended, takes in the new ones, runs the layers, keeps their tokens.

        On a GPU it does not wait for them. Fills in its part of `times`. `following` is the next iteration, if it has
        come already: its hidden states may then arrive while this one computes. Raises PeerLost when the data plane
        failed, anything else when this rank did.
        """
        times = times if times is not None else worker_pb2.StageTimes()
        times.stage, times.tensor_rank = self._place.stage, self._place.tensor_rank
        sent_before, waited_before = self._plane.sent_bytes, self._plane.waited
        self._plane.check()
        try:
            with as_peer_lost(self._plane):
                return Launched(self._run(iteration, times, following), self._plane, times)
        finally:
            times.data_bytes = self._plane.sent_bytes - sent_before
            times.waited = self._plane.waited - waited_before

    def _run(
        self,
        iteration: worker_pb2.Iteration,
        times: worker_pb2.StageTimes,
        following: worker_pb2.Iteration | None,
    ) -> Output:
        model, plane, checkpoint = self._model, self._plane, self._checkpoint
        assert model is not None
        self.rows.free(iteration.free_rows)
        self._kv.free(iteration.free_rows)
        if self._fillings:
            self._stop_filling(iteration.free_rows)
        if iteration.HasField("pull"):
            self._begin_pull(iteration)
            times.started = times.computed = times.sent = time.time_ns()
            return NOTHING
        for admission in iteration.admissions:
            self.rows.admit(admission)
            self._kv.free((admission.row,))
            if admission.root:
                self._kv.tags.begin(admission.row, _root(admission), admission.token_ids)
        for growth in iteration.growths:
            self._kv.grow(growth.row, growth.blocks[:], growth.shared)
        for admission in iteration.admissions:
            self._kv.check_start(admission.row, admission.computed)
        self._kv.check(iteration.rows[:])
        if self._fillings:
            self._check_filled(iteration.rows)
        if not (iteration.tokens or self._place.samples):  # who samples is owed none
            self._collect(self._going_on(iteration))
        needed = False
        if self._place.samples and self.rows.adjusted:
            needed = not self.rows.adjusted.keys().isdisjoint(iteration.rows[len(iteration.admissions) :])
        self._learn(wait=needed)
        batch = build_batch(
            iteration,
            self.rows,
            self._kv,
            checkpoint.vocab_size,
            checkpoint.max_positions,
            tokens_on_device=model.tokens is not None and not needed,
            prefix_lm=checkpoint.prefix_lm,
            reads_tokens=self._place.is_first,
        )
        if batch.adjusted and self._place.samples:
            self._begin_masks(batch)
        incoming = model.incoming(len(batch.token_ids))
        x = plane.receive(*incoming) if incoming is not None else None
        times.started = time.time_ns()
        follows = following is not None and not following.HasField("pull")
        upcoming = model.incoming(token_count(following)) if following is not None and follows else None
        if upcoming is not None:
            plane.expect(*upcoming)
        waited = plane.waited
        output = model.run(batch, self._kv, plane, x)
        times.started += plane.waited - waited  # between the passes of an encoder: told as if it were before them
        times.computed = time.time_ns()
        if output.hidden is not None:
            plane.send(output.hidden)
        if plane.returns_tokens and len(batch.out_at):
            self._return_tokens(batch, output)
        self.rows.advance(batch.rows, batch.ends)
        self._kv.ran(batch.rows, batch.contexts, batch.query_lengths, iteration.outputs, batch.token_ids)
        if batch.drafts and output.token_ids:
            kept = batch.right(output.token_ids, output.without)
            self._know(batch, output.token_ids, kept)
            output = output.of(kept, batch.out_member)
        elif output.token_ids:  # all of them count, of requests that have just run
            self.rows.learn(batch.out_rows, batch.out_ends, np.array(output.token_ids))
        if output.later is not None:
            self._unread.append(Unread(batch, output.later))
        times.sent = time.time_ns()
        return output

    # Requests that another engine has begun

    @property
    def _layout(self) -> str:
        kernels = self._model.kernels.partition(",")[0] if self._model is not None else ""
        return f"{kernels}, {self._kv.layout}"

    def blocks_of(self, asked: Asked) -> Iterator[Block]:
        """The blocks of a request that was handed over. Any thread may ask. Raises FailedPrecondition."""
        return blocks_of(self._kv, self.rows, asked, self._layout)

    def _begin_pull(self, iteration: worker_pb2.Iteration) -> None:
        """Gives a request its row and blocks, and begins to fill these. Where what the other engine has said does not
        fit, the pull has failed."""
        asked, kv = iteration.pull, self._kv
        admission, handed, row = asked.admission, asked.handed, asked.admission.row
        positions, place, wrong = admission.computed, self._place, ""
        if not 0 < positions == handed.positions == len(admission.token_ids) - 1:
            wrong = f"row {row}: {handed.positions} positions of {len(admission.token_ids)} tokens"
        elif len(handed.sources) != place.ranks:
            wrong = f"row {row}: {len(handed.sources)} sources for an engine of {place.ranks} ranks"
        if wrong:
            self._filled(iteration.number, row, 0, wrong)
            return
        self.rows.admit(admission)
        kv.free((row,))
        self._stop_filling((row,))
        root = _root(admission)
        kv.tags.begin(row, root, admission.token_ids)
        kv.grow(row, asked.blocks[:])
        keys = wanted_keys(root, admission.token_ids[:positions], kv.block_size)
        if len(keys) > len(asked.blocks):
            raise FailedPrecondition(f"row {row}: {positions} positions in {len(asked.blocks)} blocks")
        source = handed.sources[place.index]
        question = Asked(handed.epoch, handed.row, handed.claim, positions, self._layout)
        ask = partial(pull, source.address, source.secret, question, len(keys), kv.block_bytes)
        filling = Filling(kv, asked.blocks[: len(keys)], keys, ask, partial(self._filled, iteration.number, row))
        self._fillings[row] = filling
        if self._pulls is None:
            self._pulls = ThreadPoolExecutor(PULLS, "pull")
        self._pulls.submit(filling.run)

    def _filled(self, number: int, row: int, taken: int, error: str) -> None:
        if error:
            log.warning("keys and values were not pulled: %s", error, extra={"row": row, "iteration": number})
        self.pulled(worker_pb2.Pulled(number=number, bytes=taken, error=error))

    def _stop_filling(self, rows: Sequence[int]) -> None:
        for row in rows:
            if (filling := self._fillings.pop(row, None)) is not None:
                filling.stop()

    def _check_filled(self, rows: Sequence[int]) -> None:
        """Raises FailedPrecondition where a row runs before its blocks are there."""
        for row in self._fillings.keys() & set(rows):
            if not self._fillings[row].filled:
                raise FailedPrecondition(f"row {row} runs, and its keys and values were not pulled")
            del self._fillings[row]

    def _know(self, batch: Batch, token_ids: Sequence[int], kept: np.ndarray) -> None:
        """Keeps the tokens [O] of an iteration that count, unless another request has their row by now."""
        rows, ends, tokens = batch.out_rows, batch.out_ends, np.array(token_ids)
        which = kept & self.rows.still(rows, batch.requests["claim"])
        if np.count_nonzero(which) < len(which):
            rows, ends, tokens = rows[which], ends[which], tokens[which]
        self.rows.learn(rows, ends, tokens)

    def _begin_masks(self, batch: Batch) -> None:
        """Starts on the masks of requests that ask for a form, so that they are there when the layers have run."""
        if any(one.asked.grammar for one in batch.adjusted.values()):
            if self._masks is None:
                from ..sampling.forms import Masks

                self._masks = Masks(self._checkpoint)
            self._masks.begin(batch)

    def _return_tokens(self, batch: Batch, output: Output) -> None:
        """Sends the sampled tokens to the first stage, whose next iteration may come without them."""
        if self._place.samples:
            self._plane.send_tokens(output.later.tokens if output.later is not None else output.token_ids)
        elif self._place.is_first:
            self._owed.append(batch)
            self._plane.expect_tokens(len(batch.out_at))

    def _going_on(self, iteration: worker_pb2.Iteration) -> list[int]:
        """The rows of an iteration that run a token which is not known here yet."""
        table = self.rows.table
        starts = zip(iteration.rows, iteration.starts, strict=False)
        return [row for row, start in starts if row < len(table) and start >= table["known"][row]]

    def _collect(self, rows: Sequence[int]) -> None:
        """Receives the tokens that `rows` continue from, and all that were owed before those.

        Also receives what must have arrived by now, because no master has more than `pp` iterations in flight. It would
        pile up if no increment ever needed it.
        """
        place, owed = self._place, self._owed
        if rows and place.is_first and not self._plane.returns_tokens:
            raise FailedPrecondition("increments without tokens: this epoch does not return them to the first stage")
        wanted = set(rows)
        last = max((i for i, one in enumerate(owed) if not wanted.isdisjoint(one.out_rows.tolist())), default=-1)
        on_device = self._model.tokens if self._model is not None else None
        for _ in range(max(last + 1, len(owed) - place.pipeline_parallel)):
            one, tokens = owed.popleft(), self._plane.receive_tokens()
            of, still = one.out_rows, self.rows.still(one.out_rows, one.requests["claim"])
            if on_device is None or one.drafts:
                token_ids = tokens.tolist()
                self._plane.check()  # plain torch on a GPU: an aborted receive has left garbage
                kept = one.right(token_ids)
                self._know(one, token_ids, kept)
                still &= one.newest(kept)
            if on_device is not None:
                on_device.learn(of, tokens, still)

    def _learn(self, wait: bool) -> None:
        """Takes in what has come from the device since; with `wait` all that will.

        The host needs its tokens for adjusted requests, whose penalties depend on them.
        """
        while self._unread and (wait or self._unread[0].later.is_there()):
            one = self._unread.popleft()
            token_ids = one.later.result().token_ids
            self._know(one.batch, token_ids, one.batch.right(token_ids))
