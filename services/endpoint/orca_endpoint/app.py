"""The endpoint service from start to end: settings in, ports out, drain at SIGTERM."""

import asyncio
import json
import logging
import secrets
from contextlib import suppress

from orca_common import logs, service
from orca_common.checkpoint import read_checkpoint, resolve_model
from orca_common.errors import OrcaError, Unavailable
from orca_common.telemetry import Telemetry
from orca_pool.pool import Pool

from .delivery import RETRY, Delivery
from .endpoint import Endpoint
from .grpc_door import GrpcDoor, address
from .http_door import HttpDoor
from .settings import EndpointSettings
from .text import Vocabulary

log = logging.getLogger(__name__)

HEALTH = 0.1  # seconds between looks at the readiness
LEAVE_SECONDS = 3.0  # for each of: calls to end, detaches to be sent, the registration to be removed


class Application:
    """One endpoint process. `start`, then `drain`; tests use it in their own loop."""

    def __init__(self, settings: EndpointSettings) -> None:
        """Raises FailedPrecondition when the model cannot be read."""
        self._settings = settings
        self._checkpoint = read_checkpoint(resolve_model(settings.model))
        tokenizer = self._checkpoint.tokenizer_file
        self.vocabulary = Vocabulary(tokenizer) if tokenizer else None
        self._telemetry = Telemetry("orca-endpoint", secrets.token_hex(4))
        self._pool = Pool(settings.redis_url, settings.pool)
        self._pulse = service.LoopPulse()
        self._starting: str | None = "starting"
        self.delivery = Delivery(self._pool)
        self.endpoint = Endpoint(
            settings, self._checkpoint, self.vocabulary, self._pool, self.delivery, self._telemetry
        )
        self.status = self._status_port()
        self._grpc, self._http = GrpcDoor(self.endpoint), HttpDoor(self.endpoint)
        self.tasks: list[asyncio.Task[None]] = []
        self.ports: dict[str, str] = {}

    def _status_port(self) -> service.StatusPort:
        host, port = self._settings.host, self._settings.status_port
        try:
            return service.StatusPort(host, port, self._reason, self._pulse.alive)
        except OSError as error:
            raise Unavailable(f"status_port: {host}:{port} cannot be listened on ({error})") from None

    def _reason(self) -> str | None:
        return self._starting or self.endpoint.not_ready()

    async def start(self) -> None:
        """Listens once the pool has agreed to the model. Raises FailedPrecondition when it is another model's."""
        settings = self._settings
        await self._pool.__aenter__()
        await self._identify()
        ports = {
            "grpc": await self._grpc.start(settings.host, settings.port),
            "http": await self._http.start(settings.host, settings.http_port),
            "status": self.status.port,
        }
        self.ports = {name: address(settings.host, port) for name, port in ports.items()}
        work = {
            "renewal": self.delivery.renew(),
            "reader": self.delivery.read(),
            "http": self._http.serve(),
            "health": self._health(),
        }
        self.tasks = [asyncio.create_task(body, name=name) for name, body in work.items()]
        self._starting = None

    async def drain(self, seconds: float) -> None:
        """Accepts nothing new, waits for the streams, ends what is left UNAVAILABLE, leaves the pool."""
        log.info("leaving", extra={"calls": self.delivery.count})
        self.endpoint.draining = True
        await self._grpc.serving(False)
        with suppress(TimeoutError):
            await asyncio.wait_for(self.delivery.idle(), seconds)
        self.delivery.end_calls()
        with suppress(TimeoutError):
            await asyncio.wait_for(self.delivery.idle(), LEAVE_SECONDS)
        await self._http.stop()
        await self._grpc.stop(LEAVE_SECONDS)
        await self.delivery.settled(LEAVE_SECONDS)
        with suppress(TimeoutError, Unavailable):
            await asyncio.wait_for(self.delivery.leave(), LEAVE_SECONDS)

    async def close(self) -> None:
        """Ends what is left, as a death would."""
        await service.cancel(*self.tasks)
        await self._http.stop()
        await self._grpc.stop(0)
        await self.delivery.close()
        await self._pool.__aexit__(None, None, None)
        self.status.close()
        self._pulse.close()
        self._telemetry.close()

    async def _identify(self) -> None:
        """Agrees with the pool on the model; waits for a pool that is away."""
        model = self._checkpoint
        while True:
            try:
                await self._pool.identify(model.digest, model.max_positions, model.vocab_size)
                return
            except Unavailable as error:
                self._starting = str(error)
                log.info("waiting for the pool", extra={"reason": str(error)})
                await asyncio.sleep(RETRY)

    async def _health(self) -> None:
        """Keeps gRPC's health at what the status port says."""
        await self.endpoint.watch()
        shown: bool | None = None
        while True:
            ready = self.endpoint.not_ready() is None
            if ready != shown:
                await self._grpc.serving(ready)
                shown = ready
            await asyncio.sleep(HEALTH)


async def serve(settings: EndpointSettings) -> None:
    """Runs until SIGTERM or SIGINT. One line of JSON on standard output tells the ports."""
    stop = service.stop_event()
    app = Application(settings)
    starting = asyncio.create_task(app.start(), name="start")
    waiting = asyncio.create_task(service.until(stop), name="stop")
    try:
        await asyncio.wait([starting, waiting], return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            return
        await starting
        print(json.dumps(app.ports), flush=True)
        await service.until(stop, *app.tasks)
        await app.drain(settings.drain_seconds)
    finally:
        await service.cancel(starting, waiting)
        await app.close()


def main(settings: EndpointSettings | None = None) -> None:
    """`python -m orca_endpoint`: settings from the environment, unless given."""
    settings = settings or EndpointSettings.load()
    logs.configure("orca-endpoint", settings.log_level)
    try:
        service.run(lambda: serve(settings))
    except OrcaError as error:
        raise SystemExit(f"orca-endpoint: {error}") from None
