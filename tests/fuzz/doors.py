"""The HTTP door as a whole: an endpoint on a loopback port, with a real pool, whose engine answers what is right.

An input is JSON with `method`, `target`, `headers` and `body`, and is then sent as a request that any parser can read:
its answer may have every status but 500, and must come. Any other input goes onto the connection as it is. No callback
of the event loop may take longer than 5 ms of CPU time.
"""

import asyncio
import gc
import json
import logging
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from endpoint.harness import EOS, make_model, world
from servers import redis_server

from orca.v1.pool_pb2 import PoolRequest
from orca_endpoint.calls import call

LONGEST = 0.005  # seconds of CPU time of one callback
SECONDS = 20.0  # until an answer has come
TRIES = 3  # a callback is slow where it is slow each time
TOKEN = re.compile(r"[^!#$%&'*+.^_`|~0-9A-Za-z-]")
CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
LENGTHS = {"content-length", "transfer-encoding", "connection", "host", "expect"}  # the message's own
KNOWN = re.compile(rb"\r\nx-orca-request: ([!-~]+)", re.IGNORECASE)
STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


class Watch:
    """Times the callbacks of this process's event loops, from inside, while what else takes their time is paused."""

    def __init__(self) -> None:
        self.longest, self.what = 0.0, ""

    def begin(self) -> None:
        self.longest = 0.0

    @contextmanager
    def watching(self) -> Iterator[None]:
        run, healing = asyncio.Handle._run, (call.HEALING, call.HEALING_STEP)

        def timed(handle: asyncio.Handle) -> None:
            began = time.thread_time()
            run(handle)
            took = time.thread_time() - began
            if took > self.longest:
                self.longest, self.what = took, repr(handle)

        asyncio.Handle._run = timed  # type: ignore[method-assign]
        call.HEALING = call.HEALING_STEP = 0.0  # seconds that a stream waits for tokens of which nothing is known
        logging.disable()  # a line for each broken request
        gc.collect()
        gc.freeze()  # as a service does
        gc.disable()
        try:
            yield
        finally:
            asyncio.Handle._run = run  # type: ignore[method-assign]
            call.HEALING, call.HEALING_STEP = healing
            logging.disable(logging.NOTSET)
            gc.unfreeze()
            gc.enable()


class Door:
    """A target. The endpoint starts with the first input."""

    def __init__(self, folder: Path, runner: asyncio.Runner) -> None:
        self._folder, self._runner = folder, runner
        self._watch, self._inputs, self._known = Watch(), 0, b"req-1"

    def __call__(self, raw: bytes) -> None:
        if not self._inputs:
            self._runner.run(self._start())
        self._inputs += 1
        if self._inputs % 500 == 0:
            gc.collect()
        slow = list[str]()
        for _ in range(TRIES):
            self._watch.begin()
            self._runner.run(self._send(raw))
            if self._watch.longest <= LONGEST:
                return
            slow.append(f"{1000 * self._watch.longest:.1f} ms: {self._watch.what}")
        raise AssertionError(f"slow each time: {slow}")

    def close(self) -> None:
        """Ends the endpoint and its pool, where they were started."""
        if self._inputs:
            self._served.cancel()
            self._runner.run(self._end())

    async def _end(self) -> None:
        await asyncio.gather(self._served, return_exceptions=True)

    async def _start(self) -> None:
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._served = asyncio.create_task(self._serve(ready))
        self._address, _, port = (await ready).rpartition(":")
        self._port = int(port)

    async def _serve(self, ready: "asyncio.Future[str]") -> None:
        model = make_model(self._folder / "tiny")
        (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
        with redis_server() as redis:
            async with world(redis.url, model) as orca, orca.background(self._answer):
                with self._watch.watching():
                    ready.set_result(orca.serving.addresses["http"])
                    await asyncio.Event().wait()

    def _answer(self, record: PoolRequest) -> Sequence[int]:
        """Three tokens at most: the inputs are many."""
        return [5, 6, EOS][: record.max_new_tokens]

    async def _send(self, raw: bytes) -> None:
        request = built(raw)
        reader, writer = await asyncio.open_connection(self._address, self._port)
        try:
            async with asyncio.timeout(SECONDS):
                if request is None:
                    writer.write(raw)
                    writer.write_eof()
                    statuses = STATUS.findall(await _rest(reader))
                else:
                    method, message = request
                    writer.write(message.replace(b"/req-1", b"/" + self._known, 1))
                    head = await _answered(reader, method)
                    if made := KNOWN.search(head):
                        self._known = made[1]  # a stream that may be resumed
                    statuses = STATUS.findall(head)
        finally:
            writer.close()
        assert b"500" not in statuses, statuses


def built(raw: bytes) -> tuple[str, bytes] | None:
    """The method and the whole message of an input; None: it has another form."""
    try:
        given = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(given, dict):
        return None
    method = TOKEN.sub("", _text(given.get("method", "GET"))) or "GET"
    target = "/" + re.sub(r"[^!-~]", "%20", _text(given.get("target", "/"))).lstrip("/")
    lines = [f"{method} {target} HTTP/1.1", "Host: localhost", "Connection: close"]
    headers = given.get("headers")
    for name, value in (headers if isinstance(headers, dict) else {}).items():
        if (name := TOKEN.sub("", name)) and name.lower() not in LENGTHS:
            lines.append(f"{name}: {CONTROL.sub('', _text(value))}")
    body = given.get("body")
    content = b"" if body is None else _bytes(body if isinstance(body, str) else json.dumps(body))
    head = "\r\n".join([*lines, f"Content-Length: {len(content)}", "", ""])
    return method, _bytes(head) + content


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


async def _answered(reader: asyncio.StreamReader, method: str) -> bytes:
    """The head of an answer that came whole."""
    while True:
        head = await reader.readuntil(b"\r\n\r\n")
        found = STATUS.match(head)
        assert found is not None, head
        if not found[1].startswith(b"1"):
            break
    body, lower = await _rest(reader), head.lower()
    if method != "HEAD" and (length := re.search(rb"\r\ncontent-length: (\d+)", lower)):
        assert len(body) == int(length[1]), "cut"
    if method != "HEAD" and b"\r\ntransfer-encoding: chunked" in lower:
        assert body.endswith(b"0\r\n\r\n"), "cut"
    return head


async def _rest(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionError:  # behind an answer that came before all of the input was read
        return b""
