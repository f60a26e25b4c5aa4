"""The library h2, with short ways for DATA. Each token is a frame of its own, for which h2's objects and states take
10 us to send and 11 to receive, and these 1.5 and 2 (AVX2)."""

import struct
from typing import TYPE_CHECKING

from h2.connection import ConnectionState, H2Connection
from h2.events import DataReceived, Event
from h2.stream import StreamState
from h2.windows import WindowManager

if TYPE_CHECKING:
    from h2._typing import Buffer

HEAD = struct.Struct(">BHBBI")  # of a frame: its length in two parts, type, flags, stream
DATA = 0
CLOSED = ConnectionState.CLOSED
SENDING = (StreamState.OPEN, StreamState.HALF_CLOSED_REMOTE)
TALKING = (ConnectionState.CLIENT_OPEN, ConnectionState.SERVER_OPEN)
RECEIVING = (StreamState.OPEN, StreamState.HALF_CLOSED_LOCAL)


class Http2(H2Connection):
    """h2's connection. What it puts on the wire, and what it refuses, is the same."""

    @property
    def unsent(self) -> bool:
        """Whether there is something for the wire."""
        return bool(self._data_to_send)

    def room(self, stream_id: int) -> int:
        """Bytes that may be sent on an open stream in one piece now."""
        own = self.streams[stream_id].outbound_flow_control_window
        return min(own, self.outbound_flow_control_window, self.max_outbound_frame_size)

    def send_data(
        self, stream_id: int, data: bytes | memoryview, end_stream: bool = False, pad_length: int | None = None
    ) -> None:
        """All that is not `send_plain`'s is h2's to do, or to refuse."""
        if end_stream or pad_length is not None or not self.send_plain(stream_id, data):
            super().send_data(stream_id, data, end_stream, pad_length)

    def send_plain(self, stream_id: int, data: bytes | memoryview) -> bool:
        """Sends DATA that ends nothing: it changes no state but the windows. Returns False, and sends nothing, where it
        would not fit or h2 would refuse it."""
        stream, size = self.streams.get(stream_id), len(data)
        if (
            stream is None
            or stream.state_machine.state not in SENDING
            or self.state_machine.state is CLOSED
            or not 0 < size <= self.max_outbound_frame_size
            or size > self.outbound_flow_control_window
            or size > stream.outbound_flow_control_window
        ):
            return False
        self._data_to_send += HEAD.pack(size >> 16, size & 0xFFFF, DATA, 0, stream_id)
        self._data_to_send += data
        self.outbound_flow_control_window -= size
        stream.outbound_flow_control_window -= size
        return True

    def receive_data(self, data: "Buffer") -> list[Event]:
        """DATA that ends nothing, up to the first frame that is anything else. From there on all is h2's."""
        buffer, streams, events = self.incoming_buffer, self.streams, list[Event]()
        if buffer._preamble_len or buffer._headers_buffer or self.state_machine.state not in TALKING:
            return super().receive_data(data)
        came, at, shared = buffer._data, 0, self._inbound_flow_control_window_manager
        came += data
        while len(came) - at >= HEAD.size:
            high, low, kind, flags, number = HEAD.unpack_from(came, at)
            size, stream = high << 16 | low, streams.get(number)
            end = at + HEAD.size + size
            if (
                kind != DATA
                or flags
                or stream is None
                or stream.state_machine.state not in RECEIVING
                or not stream.state_machine.headers_received
                or stream._expected_content_length is not None
                or size > self.max_inbound_frame_size
                or size > min(shared.current_window_size, stream._inbound_window_manager.current_window_size)
            ):
                del came[:at]
                return events + super().receive_data(b"")
            if len(came) < end:
                break
            shared.current_window_size -= size
            stream._inbound_window_manager.current_window_size -= size
            stream._actual_content_length += size
            piece = bytes(came[at + HEAD.size : end])
            events.append(DataReceived(stream_id=number, data=piece, flow_controlled_length=size))
            at = end
        del came[:at]
        return events

    def acknowledge_received_data(self, acknowledged_size: int, stream_id: int) -> None:
        """Until a window is half used up, h2 says nothing and only counts."""
        stream, size = self.streams.get(stream_id), acknowledged_size
        if stream is not None and stream.open and size > 0:
            shared, own = self._inbound_flow_control_window_manager, stream._inbound_window_manager
            if silent(shared, size) and silent(own, size):
                shared._bytes_processed += size
                own._bytes_processed += size
                return
        super().acknowledge_received_data(size, stream_id)


def silent(window: WindowManager, size: int) -> bool:
    """Whether so many bytes more that were taken in are no reason for a WINDOW_UPDATE."""
    return window.current_window_size > 0 and window._bytes_processed + size < window.max_window_size // 2
