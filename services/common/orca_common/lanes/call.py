"""The part of a call that both sides share: it cuts bytes into messages, and sends messages as there is room."""

from collections.abc import Iterator

from ..errors import OrcaError
from .connection import Connection

PREFIX = 5  # bytes before a message: whether it is compressed, and its length
MAX_UNSENT = 64 << 20  # bytes of a call that wait for room, beyond one message
MAX_RECEIVED = 64 << 20  # bytes of a message that comes: an iteration with 64 prompts of 128,000 tokens has 24 MB


class Unreadable(OrcaError):
    """A message is too long, or compressed, although neither side offers compression."""


class Call:
    """One side of a call on a stream of a connection."""

    def __init__(self, connection: Connection, number: int) -> None:
        self._connection, self._number = connection, number
        self._came, self._unsent = bytearray(), bytearray()
        self._closing = self.closed = False  # nothing follows what is unsent; all was sent
        self.gone = False  # nothing can be sent any more

    @property
    def waits(self) -> bool:
        """Whether sent bytes still wait for room in the window."""
        return bool(self._unsent)

    def overfull(self) -> bool:
        """Whether more than MAX_UNSENT bytes of earlier messages wait for room."""
        return len(self._unsent) > MAX_UNSENT

    def put(self, message: bytes) -> None:
        """Sends a message without waiting. The part that does not fit the window follows later."""
        self._unsent += b"\0" + len(message).to_bytes(4) + message
        self.room()

    def room(self) -> None:
        """There may be room for more to send."""
        if not self.gone and not self.closed and (self._unsent or self._closing):
            sent = self._connection.send(self._number, self._unsent, last=self._closing)
            self.closed = self._closing and sent

    def messages(self, data: bytes) -> Iterator[bytes]:
        """Yields the messages that these bytes complete. Raises Unreadable; for a long one before it has come whole."""
        came = self._came
        came += data
        while len(came) >= PREFIX:
            compressed, size = came[0], int.from_bytes(came[1:PREFIX])
            if size > MAX_RECEIVED:
                raise Unreadable(f"a message has {size} bytes; at most {MAX_RECEIVED}")
            end = PREFIX + size
            if len(came) < end:
                return
            message = bytes(came[PREFIX:end])
            del came[:end]
            if compressed:
                raise Unreadable("a message is compressed, which was not offered")
            yield message
