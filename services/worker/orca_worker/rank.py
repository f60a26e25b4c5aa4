"""One rank: a process with one GPU.

    ORCA_MODEL=FOLDER python -m orca_worker.rank

Prints `{"address": "host:port", "status": "host:port"}` on standard output when it listens. One that a supervisor has
started first does all that is the same for every rank of the pod, and then reads from standard input which of them it
is: `{"local_rank": 0, "port": 50100}`. Until that line comes it is a spare, with no port and nothing on the GPU.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import signal
import sys
from typing import TYPE_CHECKING

from orca.v1 import worker_pb2_grpc
from orca_common import logs, service
from orca_common.checkpoint import Checkpoint, read_checkpoint, resolve_model
from orca_common.errors import FailedPrecondition
from orca_common.telemetry import Telemetry

from .controller import Controller
from .data_plane import Rendezvous
from .models import check_model_type, import_modules, needs_torch
from .process import die_with_parent, join_address
from .server import listen, new_server
from .settings import RankSettings
from .stage import Stage

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

SERVICE = "orca.v1.Controller"


def open_device(name: str, gpu: int) -> torch.device:
    """The device of a rank, with its driver awake. Raises SystemExit when it is not there.

    Takes seconds in which no loop turns, so it comes before the first heartbeat.
    """
    import torch

    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if gpu >= torch.cuda.device_count():
        raise SystemExit(f"ORCA_DEVICE: GPU {gpu} is needed, counted from 0; there are {torch.cuda.device_count()}")
    device = torch.device("cuda", gpu)
    torch.cuda.set_device(device)
    torch.zeros(1, device=device)
    return device


def prepare(settings: RankSettings) -> Checkpoint:
    """What takes its time before a rank serves, and is the same for all ranks. Raises SystemExit with a sentence."""
    try:
        checkpoint = read_checkpoint(resolve_model(settings.model))
        check_model_type(checkpoint)
    except FailedPrecondition as error:
        raise SystemExit(f"ORCA_MODEL: {error}") from None
    import_modules(checkpoint)
    gc.collect()
    gc.freeze()  # what was imported stays: 70 ms less for the collection when a model is loaded
    return checkpoint


def read_place() -> RankSettings:
    """Waits until the supervisor says which rank this process is. Raises SystemExit when it will never say."""
    line = sys.stdin.readline()
    if not line:
        raise SystemExit(0)
    return RankSettings.load(**json.loads(line))


async def serve(settings: RankSettings, checkpoint: Checkpoint) -> None:
    """Serves until SIGTERM or a failed iteration; the latter ends the process with status 1."""
    stop = service.stop_event()
    gpu = settings.first_gpu + settings.local_rank
    device = open_device(settings.device, gpu) if needs_torch(checkpoint) else None

    pulse = service.LoopPulse()
    telemetry = Telemetry("orca-worker", f"{settings.reachable_host}/{settings.local_rank}")
    failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    stage = Stage(checkpoint, settings.dtype, device, settings.slots, settings.threads)
    rendezvous = Rendezvous(settings.reachable_host, device)
    controller = Controller(checkpoint, stage, telemetry, rendezvous, failure.set_result)
    server, health = await new_server(SERVICE)
    worker_pb2_grpc.add_ControllerServicer_to_server(controller, server)
    port = listen(server, settings.host, settings.port)
    await server.start()
    status = service.StatusPort(settings.host, settings.status_port, controller.ready, pulse.alive)
    address = join_address(settings.reachable_host, port)
    print(json.dumps({"address": address, "status": join_address(settings.host, status.port)}), flush=True)
    log.info("listening", extra={"address": address, "model": checkpoint.name, "device": str(device)})

    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait([stopping, failure], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    log.info("leaving", extra={"failure": failure.result() if failure.done() else None})
    await health.enter_graceful_shutdown()
    finished = await controller.leave(settings.drain_seconds)
    await server.stop(grace=1.0)
    status.close()
    pulse.close()
    telemetry.close()
    sys.stderr.flush()
    # The GPU thread may hang or hold a broken device, and threads that drop process groups may wait for a frozen peer
    # (the interpreter's end in the middle of that is an abort): nothing of them is to be waited for.
    os._exit(1 if failure.done() or not finished else 0)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # before it serves there is nothing to leave in order
    settings = RankSettings.load()
    if settings.supervisor_pid:
        die_with_parent(settings.supervisor_pid)
    logs.configure("worker", settings.log_level)
    checkpoint = prepare(settings)
    if settings.supervisor_pid:
        settings = read_place()
    service.run(lambda: serve(settings, checkpoint))


if __name__ == "__main__":
    main()
