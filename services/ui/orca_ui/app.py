"""The service of the live page from start to end."""

import asyncio
import logging
import socket
import sys
import time
from contextlib import suppress

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from orca_common import service
from orca_common.address import join_address
from orca_common.api_keys import ApiKeys
from orca_common.errors import OrcaError
from orca_common.hosts import Hosts
from orca_common.http_server import Server
from orca_common.listening import listen
from orca_common.roles import Role, dns_names, roles_in
from orca_common.service import ALIVE_SECONDS, LoopPulse, StatusPort
from orca_common.tls import MutualTls, transport_of

from .chats import Chats
from .feeds import QUIET_SECONDS, Feeds
from .pages import application
from .picture import Picture
from .settings import UiSettings
from .stories import Stories
from .viewers import Viewers

log = logging.getLogger(__name__)

TICK = 0.2  # seconds between two messages to the browsers
UNSEEN = 1.0  # seconds more between two looks at what has changed, while no browser looks
SPARE_CONNECTIONS = 256  # beside those of viewers: for files and chats


class UiApp:
    """One process that serves the page, as `service.serve` runs it."""

    def __init__(self, settings: UiSettings) -> None:
        """Raises FailedPrecondition when keys or certificates cannot be read."""
        self._settings = settings
        keys, transport = ApiKeys(settings.api_keys, settings.api_keys_file), transport_of(settings.tls_dir)
        self._status = StatusPort(settings.host, settings.status_port, lambda: None, LoopPulse(ALIVE_SECONDS).alive)
        self._picture = Picture()
        self._viewers = Viewers(settings.max_viewers, lambda: self._picture.whole(time.time()))
        addresses = [one.strip() for one in settings.scheduler_status.split(",") if one.strip()]
        self._feeds = Feeds(addresses, self._picture)
        self._stories = Stories(lambda: self._feeds.addresses)
        mutual = transport.certificates if isinstance(transport, MutualTls) else None
        self._chats = Chats(
            settings.endpoint_url, None if mutual is None else lambda: mutual.client_context("http/1.1")
        )
        hosts = Hosts(settings.host, settings.host_names, keyed=keys.required)
        certified = mutual is not None and settings.client_certificates
        config = uvicorn.Config(
            application(self._viewers, self._picture, self._stories, self._chats, keys, hosts),
            http=Certified if certified else HttpToolsProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=settings.max_viewers + SPARE_CONNECTIONS,
        )
        config.load()
        if mutual is not None:
            config.ssl = mutual.server_context(client_certificates=settings.client_certificates, alpn="http/1.1")
        self._server = Server(config)
        self._socket: socket.socket | None = None

    async def start(self) -> dict[str, str]:
        settings = self._settings
        self._socket = listen("ui_port", settings.host, settings.ui_port, shared=settings.ports_kept)
        ports = {"http": self._socket.getsockname()[1], "status": self._status.port}
        return {name: join_address(settings.host, port) for name, port in ports.items()}

    async def run(self) -> None:
        assert self._socket is not None
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._feeds.run())
            tasks.create_task(self._ticking())
            tasks.create_task(self._server.serve(sockets=[self._socket]))

    async def _ticking(self) -> None:
        """Sends the changes to the browsers, and follows the feeds in full while a browser looks."""
        seen = time.monotonic()  # when somebody looked last
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(UNSEEN):
                    await self._viewers.looking.wait()
            await asyncio.sleep(TICK)
            self._viewers.publish(self._picture.changes(time.time()))
            if len(self._viewers):
                seen = time.monotonic()
            looks = time.monotonic() - seen < QUIET_SECONDS
            if self._feeds.full and not looks:
                self._picture.rest()
            self._feeds.follow(looks)

    async def drain(self) -> None:
        """Ends the streams: browsers connect again."""
        self._viewers.close()

    async def close(self) -> None:
        self._viewers.close()
        if self._socket is not None:
            self._socket.close()
        await self._stories.close()
        await self._chats.close()
        self._status.close()


class Certified(HttpToolsProtocol):
    """Closes a connection whose certificate has another role than client."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if Role.CLIENT not in roles_in(dns_names(transport.get_extra_info("ssl_object").getpeercert())):
            log.info("a certificate of another role than client")
            transport.close()


def main(settings: UiSettings | None = None) -> None:
    """`python -m orca_ui`: settings from flags, environment and file, unless given."""
    settings = settings or UiSettings.load(sys.argv[1:])
    settings.open_log("orca-ui")
    try:
        service.run(lambda: service.serve(lambda: UiApp(settings)))
    except OrcaError as error:
        raise SystemExit(f"orca-ui: {settings.said(str(error))}") from None
