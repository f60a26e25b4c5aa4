"""Cuts what a client sends into frames, and bounds what they may cost, before the library h2 sees them.

h2 takes 5 to 200 us of Python for a frame of 9 bytes. It would buffer a frame of 16 MB before it finds it too long, and
64 CONTINUATION frames before it looks at a header. A connection goes on in turns, so that others are served meanwhile.
"""

from h2.errors import ErrorCodes
from hyperframe.frame import ContinuationFrame, DataFrame, GoAwayFrame, HeadersFrame, PushPromiseFrame, SettingsFrame

HEAD = 9  # bytes before the payload of a frame
PREFACE = 24  # bytes that a client sends before its first frame
LARGEST = 16_384  # bytes of a frame's payload: HTTP/2's default, which we do not change
DATA, HEADERS, PUSH_PROMISE, SETTINGS = DataFrame.type, HeadersFrame.type, PushPromiseFrame.type, SettingsFrame.type
GOAWAY, CONTINUATION = GoAwayFrame.type, ContinuationFrame.type
END_HEADERS, PADDED, PRIORITY = 0x4, 0x8, 0x20  # flags

TURN = 1000  # small frames that are handled before other connections have their turn: 10 ms
HEADER = 200  # small frames that a header costs as much as, and half of one more for each byte: 5 ms at the worst
HEAVY = 20  # small frames that settings cost as much as
FRAMES, FRAMES_A_SECOND = 2000, 200  # small frames that a client may send of its own accord
EARNED = 4  # small frames that it may answer one of ours with
SMALL = 1024  # bytes; DATA frames of this size are what a call needs
SETTINGS_BYTES = 384  # 64 settings; HTTP/2 has seven
FIELDS, UNCOUNTED = 256, 1024  # fields of a header; a shorter header is not counted


class Flood(Exception):
    """The client costs too much."""

    def __init__(self, code: ErrorCodes = ErrorCodes.ENHANCE_YOUR_CALM) -> None:
        super().__init__(code.name)
        self.code = code


class Frames:
    """The frames of one connection that have come but are not handled yet."""

    def __init__(self, header_bytes: int, now: float, frames_a_second: int = FRAMES_A_SECOND) -> None:
        """header_bytes: of one encoded header, padding included."""
        self._header_bytes, self._frames_a_second = header_bytes, frames_a_second
        self._came = bytearray()
        self._preface = PREFACE  # bytes of it that are still to come
        self._block: bytearray | None = None  # a header whose last frame has not come
        self._spare, self._refilled = float(FRAMES), now
        self.more = False  # whole frames wait for another turn
        self.goaway = False  # the client opens no more streams

    @property
    def heading(self) -> bool:
        """Whether a header has begun to come and is not whole."""
        return self._block is not None

    def add(self, data: bytes) -> None:
        self._came += data

    def earn(self) -> None:
        """A frame was sent to the client, to which it may answer."""
        self._spare += EARNED

    def turn(self, now: float) -> bytes:
        """The whole frames of one turn, without GOAWAY, which h2 takes for the connection's end. Raises Flood."""
        came, turn = self._came, TURN
        at = min(self._preface, len(came))
        self._preface -= at
        begin, taken = 0, b""
        self._spare = min(self._spare + self._frames_a_second * (now - self._refilled), FRAMES)
        self._refilled = now
        self.more = False
        while len(came) - at >= HEAD:
            size, kind = int.from_bytes(came[at : at + 3]), came[at + 3]
            if size > LARGEST:
                raise Flood(ErrorCodes.FRAME_SIZE_ERROR)
            end = at + HEAD + size
            if end > len(came):
                break
            if turn <= 0:
                self.more = True
                break
            turn -= self._cost(kind, came, at, end)
            if kind == GOAWAY:
                self.goaway = True
                taken += came[begin:at]
                begin = end
            at = end
        taken += came[begin:at]
        del came[:at]
        return taken

    def _cost(self, kind: int, came: bytearray, at: int, end: int) -> int:
        """What a frame costs of the turn. Raises Flood."""
        own = cost = 1
        if kind in (HEADERS, CONTINUATION, PUSH_PROMISE):
            cost = HEADER + (end - at) // 2
            self._header(kind, came[at + 4], came, at + HEAD, end)
            if kind == HEADERS:
                own = 0  # it begins a call, and these have bounds of their own
        elif kind == SETTINGS:
            own = cost = HEAVY
            if end - at > HEAD + SETTINGS_BYTES:
                raise Flood
        elif kind == DATA and end - at >= SMALL:
            own = 0
        self._spare -= own
        if self._spare < 0:
            raise Flood
        return cost

    def _header(self, kind: int, flags: int, came: bytearray, at: int, end: int) -> None:
        """Looks at a frame of a header. Raises Flood for one that is too long to be decoded."""
        if kind != CONTINUATION:
            self._block = None
            if flags & END_HEADERS and end - at < UNCOUNTED:
                return
            padding = came[at] if flags & PADDED and end > at else 0
            at += (1 if flags & PADDED else 0) + (5 if flags & PRIORITY else 0)
            self._block = came[at : max(end - padding, at)]
        elif self._block is not None:
            self._block += came[at:end]
        if self._block is None:
            return
        if len(self._block) > self._header_bytes:
            raise Flood
        if flags & END_HEADERS:
            if len(self._block) >= UNCOUNTED and fields(self._block) > FIELDS:
                raise Flood
            self._block = None


def fields(block: bytes | bytearray) -> int:
    """How many fields and changes of its table an encoded header has, FIELDS + 1 at most. hpack takes a time for each
    that grows with what follows, so 5 s for a header of 1 MB."""
    count, at = 0, 0
    while at < len(block) and count <= FIELDS:
        first = block[at]
        count += 1
        if first & 0x80:  # an index
            _, at = _number(block, at, 7)
        elif first & 0xE0 == 0x20:  # the table's size
            _, at = _number(block, at, 5)
        else:
            named, at = _number(block, at, 6 if first & 0x40 else 4)
            for _ in range(1 if named else 2):  # a value, or a name and a value
                length, at = _number(block, at, 7)
                at += length
    return count


def _number(block: bytes | bytearray, at: int, bits: int) -> tuple[int, int]:
    """A number of HPACK, and where it ends. What is cut off counts as 0: hpack refuses the header."""
    if at >= len(block):
        return 0, at
    most = (1 << bits) - 1
    number, at = block[at] & most, at + 1
    if number < most:
        return number, at
    shift = 0
    while at < len(block) and shift < 63:
        byte, at = block[at], at + 1
        number += (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    return number, at
