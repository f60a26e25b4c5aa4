"""The browsers that look: one encoding for all of them, and for each a queue with an end."""

import asyncio
import json
from collections import deque
from collections.abc import Callable
from typing import Any

from starlette.types import Receive, Scope, Send

BEHIND = 10  # messages that wait for a browser; one that is further behind gets the whole picture instead
SEND_SECONDS = 20.0  # for a browser to take a message; then it is given up, and connects again when it can
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # nginx would keep events back
]


def event_of(picture: dict[str, Any]) -> bytes:
    """A picture, or what has changed of one, as a server-sent event."""
    return b"data: " + json.dumps(picture, separators=(",", ":")).encode() + b"\n\n"


class Viewer:
    """One browser. A queue of None means that it needs the whole picture."""

    def __init__(self) -> None:
        self.waiting: deque[bytes] | None = None
        self.news = asyncio.Event()
        self.news.set()

    def put(self, event: bytes) -> None:
        if self.waiting is not None:
            self.waiting.append(event)
            if len(self.waiting) > BEHIND:
                self.waiting = None
        self.news.set()


class Viewers:
    """All browsers that look. `whole` makes the whole picture; it is encoded once for all that need it at a time."""

    def __init__(self, most: int, whole: Callable[[], dict[str, Any]]) -> None:
        self._most, self._make = most, whole
        self._all: set[Viewer] = set()
        self._encoded: bytes | None = None
        self.looking = asyncio.Event()  # somebody looks
        self.closed = False

    def __len__(self) -> int:
        return len(self._all)

    @property
    def full(self) -> bool:
        return len(self._all) >= self._most

    def publish(self, changes: dict[str, Any]) -> None:
        """Sends the changes to all browsers."""
        self._encoded = None
        if self._all:
            event = event_of(changes)
            for viewer in self._all:
                viewer.put(event)

    def close(self) -> None:
        """Ends all streams."""
        self.closed = True
        for viewer in self._all:
            viewer.news.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one browser until it leaves, as an application of ASGI."""
        viewer = Viewer()
        self._all.add(viewer)
        self.looking.set()
        leaving = asyncio.ensure_future(_wait_until_left(receive))
        leaving.add_done_callback(lambda _: viewer.news.set())
        try:
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            while not self.closed:
                await viewer.news.wait()  # or until it has left
                if leaving.done():
                    return
                viewer.news.clear()
                async with asyncio.timeout(SEND_SECONDS):
                    await send({"type": "http.response.body", "body": self._next(viewer), "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        except TimeoutError:
            pass  # the connection is closed: the answer is not complete
        finally:
            leaving.cancel()
            self._all.discard(viewer)
            if not self._all:
                self.looking.clear()

    def _next(self, viewer: Viewer) -> bytes:
        """Returns the next message of a browser."""
        if viewer.waiting is None:
            viewer.waiting = deque()
            if self._encoded is None:
                self._encoded = event_of(self._make())
            return self._encoded
        events = b"".join(viewer.waiting)
        viewer.waiting.clear()
        return events


async def _wait_until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
