"""One rank: a process with one GPU.

    ORCA_MODEL=FOLDER python -m orca_worker.rank.app

Prints `{"address": "host:port", "status": "host:port"}` on standard output when it listens. The rank of a pod is forked
by the pod's fork server, which has imported all this. It takes no settings from the environment, but reads them from
standard input, one line: `{"model": "FOLDER", "local_rank": 0, "port": 50100, ..}`. A rank that cannot work with its
settings prints `{"refused": "why"}` and ends.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # until `service.run`: modules stay, and looking for garbage among them takes a sixth of their import

import asyncio
import json
import logging
import os
import signal
import sys
from contextlib import AsyncExitStack, suppress
from importlib import import_module
from typing import TYPE_CHECKING, Never

from orca_common import logs, service
from orca_common.adapters import read_adapters
from orca_common.address import join_address
from orca_common.checkpoint import Checkpoint, read_checkpoint, resolve_model
from orca_common.errors import FailedPrecondition, OrcaError
from orca_common.metrics import Metrics
from orca_common.telemetry import Telemetry
from orca_common.tls import transport_of

from ..data_plane.rendezvous import Rendezvous
from ..iteration.model import Compute
from ..machine import kernels_needed
from ..models.dtype import choose_types, kernels_are_used
from ..models.families import check_type, family_of, modules_of
from ..processes.process import die_with_parent, name_process
from ..settings import RankSettings
from ..stage.stage import Stage
from .controller import Controller

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


class RankFailed(Exception):
    """An iteration failed, so the rank's memory cannot be trusted any more, or an epoch's groups cannot be left."""


def open_device(name: str, gpu: int) -> torch.device:
    """The device of a rank, with its driver initialized. Raises SystemExit when it is not there.

    Blocks for seconds, so it must come before the first heartbeat.
    """
    import torch

    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if gpu >= torch.cuda.device_count():
        raise SystemExit(f"device: GPU {gpu} is needed, counted from 0; there are {torch.cuda.device_count()}")
    device = torch.device("cuda", gpu)
    torch.cuda.set_device(device)
    torch.zeros(1, device=device)
    return device


def prepare(settings: RankSettings) -> Checkpoint:
    """Does what is slow before the rank listens. Raises SystemExit with a sentence."""
    try:
        adapters = read_adapters(settings.adapters)
        folder = resolve_model(settings.model, check_type)
        checkpoint = read_checkpoint(folder, settings.quantize, adapters, settings.adapters_folder)
        family = family_of(checkpoint)
    except FailedPrecondition as error:
        raise SystemExit(str(error)) from None
    for module in modules_of(checkpoint):
        import_module(module)
    if family.needs_torch and kernels_needed(settings.device, settings.kernels):
        try:  # loads them; a checkout's first start builds them
            kernels_are_used(Compute(settings.threads, settings.kernels))
        except FailedPrecondition as error:
            raise SystemExit(str(error)) from None
    return checkpoint


def told_settings() -> RankSettings:
    """Waits for the settings from the supervisor. Raises SystemExit when it does not need this process any more."""
    line = sys.stdin.readline()
    if not line:
        raise SystemExit(0)
    # All settings are told, so none is taken from the environment, which may have other values for the supervisor.
    return RankSettings(**json.loads(line))


class RankApp:
    """A rank as a service: its controller behind gRPC, and its status port."""

    def __init__(self, settings: RankSettings, checkpoint: Checkpoint) -> None:
        self._settings, self._checkpoint = settings, checkpoint
        self._open = AsyncExitStack()
        self._finished = True  # the GPU thread has ended in order

    async def start(self) -> dict[str, str]:
        """Opens the device and listens.

        Raises SystemExit when the device or the port is not to be had, Unavailable when the status port is not.
        """
        settings, checkpoint, host = self._settings, self._checkpoint, self._settings.reachable_host
        gpu = settings.first_gpu + settings.local_rank
        device = open_device(settings.device, gpu) if family_of(checkpoint).needs_torch else None
        pulse = service.LoopPulse(service.ALIVE_SECONDS)
        telemetry = Telemetry("orca-worker", host, str(settings.local_rank))
        self._open.callback(telemetry.close)

        self._failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        compute = Compute(settings.threads, settings.kernels, settings.cuda_graphs, settings.cuda_graphs_tp)
        try:
            types = choose_types(settings.dtype, settings.kv_dtype, device, compute)
        except FailedPrecondition as error:
            raise SystemExit(str(error)) from None
        stage = Stage(checkpoint, types, device, settings.slots, compute)
        rendezvous = Rendezvous(host, device, settings.host, checkpoint.has_encoder)
        transport = transport_of(settings.tls_dir)
        self._controller = Controller(checkpoint, stage, telemetry, rendezvous, transport, self._failure.set_result)
        told = lambda: {"loading": stage.loading.sentence, "loaded": stage.loaded}  # noqa: E731
        metrics, rank, ready = Metrics("worker"), (str(settings.local_rank),), self._controller.ready
        metrics.read("orca_rank_ready", lambda: [(rank, ready() is None)])
        metrics.read("orca_rank_weights_loaded", lambda: [(rank, stage.loaded)])
        status = service.StatusPort(settings.host, settings.status_port, ready, pulse.alive, told, metrics)
        self._open.callback(status.close)
        self._server = self._controller.server()
        self._open.push_async_callback(self._server.stop, 1.0)
        address = join_address(host, await self._server.start(settings.host, settings.port))
        log.info("listening", extra={"address": address, "model": checkpoint.name, "device": str(device)})
        return {"address": address, "status": join_address(settings.host, status.port)}

    async def run(self) -> None:
        """Waits for a failure after which the rank cannot go on. Raises RankFailed."""
        raise RankFailed(await asyncio.shield(self._failure))

    async def drain(self) -> None:
        log.info("leaving", extra={"failure": self._failure.result() if self._failure.done() else None})
        self._finished = await self._controller.leave(self._settings.drain_seconds)

    async def close(self) -> None:
        await self._open.aclose()

    async def live(self) -> Never:
        """Serves, then ends the process: with status 0 after SIGTERM, with 1 after a failure or an unfinished drain.

        The process ends without the interpreter's own clean-up. That would wait for threads that may never end: the GPU
        thread may hang on a broken device, and a thread that leaves a process group may wait for a frozen peer. An end
        of the interpreter while such a thread is at work aborts the process.
        """
        status = 0
        try:
            await service.serve(lambda: self)
        except RankFailed:  # the reason is in the log already
            status = 1
        sys.stderr.flush()
        os._exit(status if self._finished else 1)


def main(supervisor: int | None = None) -> None:
    """Runs a rank. `supervisor`: the pid of the process that tells its settings; without it the environment does."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # before it serves there is nothing to leave in order
    try:
        _run(supervisor)
    except SystemExit as end:
        if isinstance(end.code, str):
            with suppress(OSError):  # the supervisor has ended
                os.write(sys.stdout.fileno(), f"{json.dumps({'refused': end.code})}\n".encode())
        raise


def _run(supervisor: int | None) -> None:
    if supervisor is not None:
        settings = told_settings()  # comes when the supervisor knows the process, so it is the parent by then
        die_with_parent(supervisor)
        name_process(f"orca-rank-{settings.local_rank}")
    else:
        settings = RankSettings.load()
    logs.configure("orca-worker", settings.log_level)
    checkpoint = prepare(settings)
    try:
        service.run(RankApp(settings, checkpoint).live)
    except OrcaError as error:
        raise SystemExit(f"orca-rank: {error}") from None


if __name__ == "__main__":
    main()
