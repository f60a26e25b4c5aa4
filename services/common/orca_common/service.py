"""The life of a service, from its start to the end of its drain, and its status port."""

import asyncio
import gc
import json
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar
from urllib.parse import parse_qsl

from .hosts import Hosts
from .listening import cannot_listen

if TYPE_CHECKING:
    from .metrics import Metrics

log = logging.getLogger(__name__)
T = TypeVar("T")

STREAM_SECONDS = 0.1  # between two lines of a stream of the status port
SELDOM_SECONDS = 0.5  # the same of one that no person reads
MOST_STREAMS = 8  # at a time; each has a thread
POLL_SECONDS = 10.0  # between looks of the status port's thread at whether it is to end: `close` wakes it
ALIVE_SECONDS = 2.0  # between two turns of a pulse that is only asked whether the loop is alive


class Answer(NamedTuple):
    """An answer of the status port in JSON."""

    status: int
    body: Mapping[str, Any]


Query = Mapping[str, str]  # the values of a URL's query by name; of several, the last


class StatusPort:
    """Answers `/livez`, `/readyz` and `/metrics` over plain HTTP, in threads of its own: under any load.

    `ready` returns why the service is not ready, None when it is. `alive` returns whether its event loop still runs.
    `more` returns what else `/readyz` tells, whether the service is ready or not. `pages` answer further paths. All are
    called in these threads, and so are the readers of `metrics`.

    `streams` are paths whose answers do not end: each makes a reader, which is called every STREAM_SECONDS, or those of
    `seldom` every SELDOM_SECONDS, for the next line, empty where there is nothing new, until the client or the service
    leaves.
    """

    def __init__(
        self,
        host: str,
        port: int,
        ready: Callable[[], str | None],
        alive: Callable[[], bool],
        more: Callable[[], Mapping[str, Any]] = dict,
        metrics: "Metrics | None" = None,
        pages: Mapping[str, Callable[[Query], Answer]] = MappingProxyType({}),
        streams: Mapping[str, Callable[[], Callable[[], bytes]]] = MappingProxyType({}),
        seldom: Collection[str] = (),
        shared: bool = False,
    ) -> None:
        """Listens. shared: a process of ours keeps the port, by SO_REUSEPORT.

        Raises Unavailable when the port cannot be had."""
        closed, hosts = threading.Event(), Hosts(host)
        self._closed = closed
        places = threading.BoundedSemaphore(MOST_STREAMS)

        class Handler(BaseHTTPRequestHandler):
            timeout = 5  # seconds for a client to send its request
            error_content_type = "text/plain;charset=utf-8"
            error_message_format = "%(code)d %(message)s\n"

            def do_GET(self) -> None:
                if (refusal := hosts.refusal(self.headers.get_all("Host", []))) is not None:
                    self.send_error(421, f"Host: {refusal}")
                    return
                if self.path == "/metrics" and metrics is not None:
                    self.answer(200, *metrics.render(self.headers.get("Accept", "")))
                    return
                if self.path in streams:
                    self.stream(streams[self.path](), SELDOM_SECONDS if self.path in seldom else STREAM_SECONDS)
                    return
                path, _, query = self.path.partition("?")
                if path in pages:
                    page = pages[path](dict(parse_qsl(query)))
                    self.answer(page.status, json.dumps(page.body).encode(), "application/json")
                    return
                reason = None if alive() else "the service's event loop has not run for 10 s"
                said: dict[str, Any] = {}
                if self.path == "/readyz":
                    reason = reason or ready()
                    said |= more()
                elif self.path != "/livez":
                    self.send_error(404)
                    return
                body = json.dumps({"ok": reason is None, "reason": reason} | said).encode()
                self.answer(200 if reason is None else 503, body, "application/json")

            def answer(self, status: int, body: bytes, content_type: str) -> None:
                self.send_response(status)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def stream(self, read: Callable[[], bytes], seconds: float) -> None:
                if not places.acquire(blocking=False):
                    self.send_error(503, f"there are {MOST_STREAMS} readers already")
                    return
                try:
                    self.send_response(200)
                    self.send_header("Content-Type", "application/jsonl")
                    self.end_headers()
                    while not closed.is_set():
                        if line := read():
                            self.wfile.write(line)  # a client that does not read for `timeout` is given up
                        closed.wait(seconds)
                finally:
                    places.release()

            def log_message(self, format: str, *args: object) -> None:
                log.debug(format, *args)

        class Server(ThreadingHTTPServer):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
            allow_reuse_port = shared

            def handle_error(self, request: object, client_address: object) -> None:
                """Logs the exception of a request, which the library would print as plain text."""
                if isinstance(sys.exception(), OSError):
                    log.debug("a client of the status port has left", exc_info=True)
                else:
                    log.exception("the status port failed")

        try:
            self._server = Server((host, port), Handler)
        except OSError as error:
            raise cannot_listen("status_port", host, port, error) from None
        self._host = host
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(POLL_SECONDS,), name="status", daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        stopping = threading.Thread(target=self._server.shutdown)
        stopping.start()
        while stopping.is_alive():
            with suppress(OSError):  # a connection wakes the server's thread
                socket.create_connection((self._host, self.port), timeout=1).close()
            stopping.join(0.05)
        self._server.server_close()


class LoopPulse:
    """Measures whether the event loop runs on time. It ends with its loop.

    A process that was late itself cannot know whether a silent peer is dead, so it asks here first.
    """

    def __init__(self, interval: float = 0.25) -> None:
        self._interval = interval
        self._loop = asyncio.get_running_loop()
        self.last = self._loop.time()
        # For `alive`: another thread may not ask the loop for its time, because uvloop writes a cache then.
        self._turned = time.monotonic()
        self.late_at = -1e9  # when the loop was last late by more than 0.5 s, on its own clock
        self._loop.call_later(interval, self._turn)

    def _turn(self) -> None:
        now = self._loop.time()
        if now - self.last > self._interval + 0.5:
            self.late_at = now
        self.last, self._turned = now, time.monotonic()
        self._loop.call_later(self._interval, self._turn)

    def alive(self) -> bool:
        """Whether the loop ran in the last 10 s. May be called in any thread."""
        return time.monotonic() - self._turned < 10

    def on_time(self, window: float) -> bool:
        """Whether the loop was on time during the last `window` seconds. Only for the loop's own thread."""
        now = self._loop.time()
        return now - self.last < self._interval + 0.5 and now - self.late_at > window


def stop_event() -> asyncio.Event:
    """An event that SIGTERM and SIGINT set."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


class App(Protocol):
    """A service, as `serve` runs it: start, run, drain, close."""

    async def start(self) -> dict[str, str]:
        """Begins to listen. Returns its addresses by name, for the line on standard output."""
        ...

    async def run(self) -> None:
        """Works until it is cancelled. Returning or raising means that the service has failed."""
        ...

    async def drain(self) -> None:
        """Leaves in order, within the bound that the settings give. Follows a failed `run` too."""
        ...

    async def close(self) -> None:
        """Frees what is left. Always called last, even after a start that failed."""
        ...


async def serve(make: Callable[[], App]) -> None:
    """Makes a service and runs it until SIGTERM or SIGINT, then drains it.

    Prints one line of JSON with its addresses when it listens. A signal during the start closes the service without a
    drain. Raises what ended `start` or `run`; a `run` that returns is a RuntimeError.
    """
    stop = stop_event()  # first, so that a signal during the start ends it in order
    app = make()  # quick: what takes its time belongs into `start`, which a signal cancels
    try:
        addresses = await _unless(stop, app.start())
        if addresses is None:
            return
        print(json.dumps(addresses), flush=True)
        try:
            await _unless(stop, _running(app))
        finally:
            await app.drain()
    finally:
        await app.close()


async def _running(app: App) -> None:
    await app.run()
    raise RuntimeError(f"{type(app).__name__} ended by itself")


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """Returns the work's result; None when it was cancelled because `stop` was set first."""
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        await cancel(working, stopping)


async def in_thread(work: Callable[[], T]) -> T:
    """Runs blocking work in a thread of its own. When cancelled, the caller goes on at once.

    The process can then end while the work still runs. It would wait for the threads of `asyncio.to_thread`.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(set_outcome: Callable[[Any], None], outcome: object) -> None:
        if not done.done():
            set_outcome(outcome)

    def body() -> None:
        try:
            outcome = done.set_result, work()
        except BaseException as error:  # a panic of a library in Rust is no Exception, and the caller waits
            outcome = done.set_exception, error
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=body, name="start", daemon=True).start()
    return await done


async def cancel(*tasks: asyncio.Task[Any]) -> None:
    """Ends tasks and waits for them."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs a service's main coroutine on uvloop."""
    import uvloop

    gc.freeze()  # what is imported stays: no later collection looks at it, which took 70 ms as a rank loaded its model
    gc.enable()  # a process that starts quickly has disabled it for its imports
    # An iteration makes a few hundred short-lived containers and no cycles. Collecting at every 700 objects, Python's
    # default, took 4 % of a scheduler's time. But each gRPC call leaves a cycle of gRPC's own, 5 objects and 1 KB: now
    # 2,000 calls wait for a collection.
    gc.set_threshold(10_000)

    async def body() -> None:
        asyncio.get_running_loop().set_exception_handler(_unretrieved)
        await main()  # called inside the loop, which what it constructs may ask for

    uvloop.run(body())


def _unretrieved(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Logs an error that no task takes, except a lookup's. uvloop goes on with the lookup of a connection that was
    cancelled (findings/uvloop-cancelled-lookup.sh), and its caller has said why it gave up."""
    if not isinstance(context.get("exception"), socket.gaierror):
        loop.default_exception_handler(context)
