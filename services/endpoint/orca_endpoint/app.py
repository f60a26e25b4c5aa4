"""The endpoint as a service: settings in, ports out, drain at SIGTERM."""

import asyncio
import logging
import secrets
import sys
from collections.abc import Awaitable
from contextlib import AsyncExitStack, suppress

from orca_common import service
from orca_common.address import join_address
from orca_common.api_keys import ApiKeys
from orca_common.checkpoint import Checkpoint, read_checkpoint, resolve_model
from orca_common.errors import OrcaError, Unavailable
from orca_common.metrics import Metrics
from orca_common.telemetry import Telemetry
from orca_common.tls import transport_of
from orca_pool.outage import Outage
from orca_pool.pool import Pool
from orca_pool.retry import reached

from .api.methods import methods
from .calls.delivery import Delivery
from .calls.endpoint import Endpoint
from .grpc.door import GrpcDoor
from .http.door import HttpDoor
from .requests.defaults import Defaults, not_followed, read_defaults
from .requests.limits import Limits, connections_allowed
from .settings import EndpointSettings
from .text.chat_template import ChatTemplate, read_chat_template
from .text.native_stderr import keep_python_writing
from .text.vocabulary import Vocabulary

log = logging.getLogger(__name__)

HEALTH = 0.5  # seconds between looks at the readiness
HAND_OVER_SECONDS = 0.5  # for streams to be handed over, and between looks at clients whose last call has ended
FLUSH_SECONDS = 0.1  # for the statuses of the last calls to be written, before connections are closed
# Seconds beyond `drain_seconds` for all that a drain still has to do: calls end, connections close, detaches are sent,
# the registration is removed. The chart's grace has 15 more than `drain_seconds`, and Redis may be frozen.
LEAVE_SECONDS = 6.0
STEP_SECONDS = 2.0  # of these for one step


class EndpointApp:
    """One endpoint process, run by `service.serve`. Tests start, drain and close it in their own loop."""

    vocabulary: Vocabulary | None
    delivery: Delivery
    endpoint: Endpoint
    limits: Limits

    def __init__(self, settings: EndpointSettings) -> None:
        self._settings = settings
        self._starting: str | None = "the model is being read"
        self._failed = False
        self._outage = Outage()
        self._tasks: list[asyncio.Task[None]] = []
        self._open = AsyncExitStack()  # closes what `start` opened, the last first

    async def start(self) -> dict[str, str]:
        """Listens once the pool has agreed to the model. Returns the addresses of the ports grpc, http and status.

        Waits for a pool that is away; probes are answered meanwhile. Raises FailedPrecondition when the model, the keys
        or the certificates cannot be read, or the pool serves another model; Unavailable when a port cannot be had.
        """
        settings = self._settings
        keys = ApiKeys(settings.api_keys, settings.api_keys_file)
        transport = transport_of(settings.tls_dir)
        pulse = service.LoopPulse(service.ALIVE_SECONDS)
        metrics = Metrics("endpoint")
        status = service.StatusPort(
            settings.host, settings.status_port, self._not_ready, pulse.alive, self._calls, metrics
        )
        self._open.callback(status.close)
        self._checkpoint, self.vocabulary, template, defaults = await service.in_thread(
            self._read_model  # perhaps a download
        )
        telemetry = Telemetry(
            "orca-endpoint", secrets.token_hex(4), share=settings.trace_share, slow=settings.trace_slow
        )
        self._open.callback(telemetry.close)
        self._pool = Pool.of(settings)
        self.delivery = Delivery(self._pool)
        self.endpoint = Endpoint(
            settings,
            self._checkpoint,
            self.vocabulary,
            template,
            defaults,
            self._pool,
            self.delivery,
            telemetry,
            metrics,
            keys.grant_of,
        )
        self._open.push_async_callback(self._pool.close)
        self._open.push_async_callback(self.delivery.close)
        self._open.push_async_callback(self.endpoint.close)
        self.endpoint.chats.warm()
        self.limits, connections = Limits(settings), connections_allowed(settings.max_connections)
        self._grpc = GrpcDoor(self.endpoint, keys, transport, self.limits, connections)
        refused = self.endpoint.metrics.refused
        self._http = HttpDoor(methods(self.endpoint), settings, keys, transport, self.limits, connections, refused)
        self._open.push_async_callback(self._grpc.stop, 0)
        self._open.push_async_callback(self._http.stop)
        self._starting = "the request pool has not answered yet"
        await self._pool.__aenter__()
        await reached(self._identify)
        await reached(self.endpoint.adapters.begin)
        ports = {
            "grpc": await self._grpc.start(settings.host, settings.port),
            "http": await self._http.start(settings.host, settings.http_port),
            "status": status.port,
        }
        work = {
            "renewal": self.delivery.renew(),
            "reader": self.delivery.read(),
            "http": self._http.serve(),
            "engines": self.endpoint.follow(),
            "adapters": self.endpoint.adapters.follow(),
            "health": self._health(),
        }
        self._tasks = [asyncio.create_task(body, name=name) for name, body in work.items()]
        self._starting = None
        return {name: join_address(settings.host, port) for name, port in ports.items()}

    def _read_model(self) -> tuple[Checkpoint, Vocabulary | None, ChatTemplate | None, Defaults]:
        checkpoint = read_checkpoint(resolve_model(self._settings.model))
        tokenizer, folder = checkpoint.tokenizer_file, checkpoint.folder
        vocabulary = Vocabulary(tokenizer, follows=not checkpoint.has_encoder) if tokenizer else None
        if vocabulary is not None:
            vocabulary.check_fits(checkpoint.vocab_size)
            if (
                vocabulary.end is not None
                and checkpoint.eos_token_ids
                and vocabulary.end not in checkpoint.eos_token_ids
            ):
                ends = {"tokenizer": vocabulary.end, "model": list(checkpoint.eos_token_ids)}
                log.warning(
                    "the tokenizer ends a text with another token than the model; chats end with either", extra=ends
                )
        if others := not_followed(folder, checkpoint.model_type):
            log.warning("the model asks for ways to generate that Orca does not have", extra={"fields": others})
        return checkpoint, vocabulary, read_chat_template(folder), read_defaults(folder, checkpoint.vocab_size)

    def _not_ready(self) -> str | None:
        return self._starting or self.endpoint.not_ready()

    def _calls(self) -> dict[str, int]:
        """The fields of `/readyz` beside the readiness: open calls. Called in the status port's thread."""
        return {} if self._starting else {"calls": self.delivery.count}

    async def run(self) -> None:
        """Waits for the background tasks, which go on until `close`: a drain needs them. Raises what ended one."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        self._failed = True
        for task in done:
            task.result()
        raise RuntimeError(f"{', '.join(task.get_name() for task in done)} ended without an error")

    async def drain(self) -> None:
        """Accepts nothing new, hands streams over, waits for the others, ends the rest UNAVAILABLE, leaves the pool.

        New calls get UNAVAILABLE and go elsewhere. Where another endpoint stays, or the pool does not say, streams
        whose clients will come back end at once. A failed endpoint does not wait for streams: without its background
        tasks they get no tokens.
        """
        log.info("leaving", extra={"calls": self.delivery.count})
        now = asyncio.get_running_loop().time
        streams_end = now() + (0 if self._failed else self._settings.drain_seconds)
        end = streams_end + LEAVE_SECONDS
        self.endpoint.draining = True
        self._grpc.serving(False)
        closing = [asyncio.create_task(self._http.stop())]
        await self.delivery.hand_over(STEP_SECONDS)
        await _until(min(now() + HAND_OVER_SECONDS, streams_end), self.delivery.idle())
        sending_away = asyncio.create_task(self._send_away())
        await _until(streams_end, self.delivery.idle())
        await service.cancel(sending_away)
        if self.delivery.count:
            log.warning("drain_seconds have passed: streams end UNAVAILABLE", extra={"calls": self.delivery.count})
        self.delivery.end_calls()
        await _until(now() + STEP_SECONDS, self.delivery.idle())
        await asyncio.sleep(FLUSH_SECONDS)
        self._grpc.cut()
        closing.append(asyncio.create_task(self._grpc.stop(STEP_SECONDS)))
        await _until(end - STEP_SECONDS, asyncio.gather(*closing))
        await self.delivery.settled(max(end - STEP_SECONDS - now(), 0))
        await _until(end, self.delivery.leave())

    async def _send_away(self) -> None:
        """Closes the connections of gRPC clients whose calls have ended, so that their next calls go elsewhere."""
        while True:
            self._grpc.cut(spare=True)
            await asyncio.sleep(HAND_OVER_SECONDS)

    async def close(self) -> None:
        """Frees what is left. Without a drain before, streams end as at the death of the process."""
        await service.cancel(*self._tasks)
        await self._open.aclose()

    async def _identify(self) -> None:
        """Agrees with the pool on the model."""
        model = self._checkpoint
        try:
            warning = await self._pool.check_durable(self._settings.allow_volatile_redis)
            if warning is not None:
                log.warning(warning)
            await self._pool.identify(model.digest, model.max_positions, model.vocab_size)
        except Unavailable as error:
            self._starting = str(error)
            self._outage.away(error)
            raise
        self._outage.back()

    async def _health(self) -> None:
        """Keeps the status of gRPC's health service equal to the status port's, and looks at the connections."""
        await self.endpoint.watch()
        shown: bool | None = None
        while True:
            ready = self.endpoint.not_ready() is None
            if ready != shown:
                self._grpc.serving(ready)
                shown = ready
            self._grpc.look(self._http.connections.peers.total())
            await asyncio.sleep(HEALTH)


async def _until(moment: float, work: Awaitable[object]) -> None:
    """Waits for a step of a drain until a moment of the loop's clock. The drain goes on without what is away."""
    with suppress(TimeoutError, Unavailable):
        async with asyncio.timeout_at(moment):
            await work


def main(settings: EndpointSettings | None = None) -> None:
    """`python -m orca_endpoint`: settings from flags, environment and file, unless given."""
    settings = settings or EndpointSettings.load(sys.argv[1:])
    keep_python_writing()
    settings.open_log("orca-endpoint")
    try:
        service.run(lambda: service.serve(lambda: EndpointApp(settings)))
    except OrcaError as error:
        raise SystemExit(f"orca-endpoint: {settings.said(str(error))}") from None
