"""The short ways for DATA: beside h2's own connection, whatever it is asked for, and whatever comes."""

from collections.abc import Callable
from typing import Any

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import DataReceived, Event
from h2.exceptions import H2Error
from h2.settings import SettingCodes, Settings
from hyperframe.frame import DataFrame, Frame, HeadersFrame, PingFrame, RstStreamFrame, SettingsFrame, WindowUpdateFrame
from hypothesis import example, given, settings
from hypothesis import strategies as st

from orca_common.http2_data import Http2

REQUEST = [(":method", "POST"), (":scheme", "http"), (":path", "/"), (":authority", "orca")]
STREAMS = st.sampled_from([1, 3, 5])
SIZES = st.integers(0, 40) | st.sampled_from([16_384, 16_385, 65_535, 65_536])

# Each does the same to a server and to its client, whose bytes the server is given.
Step = Callable[[H2Connection, H2Connection], Any]
STEPS = st.one_of(
    st.builds(lambda n: lambda server, client: client.send_headers(n, REQUEST), STREAMS),
    st.builds(lambda n: lambda server, client: client.end_stream(n), STREAMS),
    st.builds(lambda n: lambda server, client: client.reset_stream(n), STREAMS),
    st.builds(lambda n, by: lambda server, client: client.increment_flow_control_window(by, n), STREAMS, SIZES),
    st.builds(lambda by: lambda server, client: client.increment_flow_control_window(by), SIZES),
    st.builds(lambda n: lambda server, client: client.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: n}), SIZES),
    st.just(lambda server, client: client.update_settings({SettingCodes.MAX_FRAME_SIZE: 65_536})),
    st.builds(lambda n: lambda server, client: server.send_headers(n, [(":status", "200")]), STREAMS),
    st.builds(lambda n: lambda server, client: server.reset_stream(n, ErrorCodes.CANCEL), STREAMS),
    st.just(lambda server, client: server.close_connection()),
    st.builds(
        lambda n, size, last, pad: lambda server, client: server.send_data(n, bytes(size), last, pad),
        STREAMS,
        SIZES,
        st.booleans(),
        st.none() | st.integers(-1, 256),
    ),
    st.builds(lambda n, size: lambda server, client: server.send_data(n, memoryview(bytes(size))), STREAMS, SIZES),
)


class Pair:
    """A server of this kind, and a client that grants each stream so much."""

    def __init__(self, kind: type[H2Connection], window: int) -> None:
        self.server = kind(H2Configuration(client_side=False))
        self.client = H2Connection(H2Configuration(client_side=True))
        self.client.local_settings = Settings(initial_values={SettingCodes.INITIAL_WINDOW_SIZE: window})
        self.client.initiate_connection()
        self.server.initiate_connection()
        for n in (1, 3):
            self.client.send_headers(n, REQUEST)
        self.server.receive_data(self.client.data_to_send())

    def take(self, step: Step) -> tuple[str, bytes, int, list[int]]:
        """What the step raised, what the server has put on the wire, and its windows."""
        refused = ""
        try:
            step(self.server, self.client)
            self.server.receive_data(self.client.data_to_send())
        except (H2Error, ValueError, TypeError, KeyError) as error:
            refused = f"{type(error).__name__}: {error}"
        server = self.server
        windows = [stream.outbound_flow_control_window for stream in server.streams.values()]
        return refused, server.data_to_send(), server.outbound_flow_control_window, windows


@settings(deadline=None)
@example(
    steps=[lambda server, client: server.close_connection(), lambda server, client: server.send_data(1, b"late")],
    window=65_535,
)
@given(steps=st.lists(STEPS, max_size=30), window=SIZES)
def test_what_it_sends_and_refuses_is_what_h2_does(steps: list[Step], window: int) -> None:
    ours, theirs = Pair(Http2, window), Pair(H2Connection, window)
    for step in steps:
        assert ours.take(step) == theirs.take(step)


# What comes: frames as a peer may send them, in order or not.
NUMBERS = st.sampled_from([1, 3, 5, 7, 9])
LENGTHS = st.integers(0, 40)


def data(number: int, size: int, flags: set[str], padding: int) -> Frame:
    frame = DataFrame(number, bytes(size), pad_length=padding if "PADDED" in flags else 0, flags=sorted(flags))
    frame.stream_id -= 9 if number == 9 else 0  # 0 is no stream, and DataFrame would refuse it
    return frame


DATA_FRAMES = st.builds(
    data, NUMBERS, LENGTHS, st.sets(st.sampled_from(["END_STREAM", "PADDED"])) | st.just(set[str]()), st.integers(0, 20)
)
FRAMES = st.one_of(
    DATA_FRAMES,
    DATA_FRAMES,
    st.builds(lambda n: RstStreamFrame(n, error_code=8), NUMBERS),
    st.builds(lambda n, by: WindowUpdateFrame(n, window_increment=by), NUMBERS, st.integers(0, 9)),
    st.builds(lambda n: HeadersFrame(n, b"\x00\x03end\x010", flags=["END_HEADERS", "END_STREAM"]), NUMBERS),
    st.builds(lambda n: HeadersFrame(n, b"\x88", flags=["END_HEADERS"]), NUMBERS),
    st.builds(lambda n: HeadersFrame(n, b"\x88"), NUMBERS),  # the header goes on
    st.builds(lambda n: SettingsFrame(0, settings={SettingCodes.INITIAL_WINDOW_SIZE: n}), LENGTHS),
    st.just(PingFrame(0, b"12345678")),
)
CUTS = st.lists(st.integers(1, 120), min_size=1, max_size=5)
HEADS = [b"\x88", b"\x88\x0f\x0d\x0230"]  # an answer; one of 30 bytes


class Hearer:
    """A client or a server of this kind in the midst of its calls: what it makes of bytes that come."""

    def __init__(self, kind: type[H2Connection], *, client: bool, window: int) -> None:
        self.connection = connection = kind(H2Configuration(client_side=client))
        connection.local_settings = Settings(client=client, initial_values={SettingCodes.INITIAL_WINDOW_SIZE: window})
        connection.initiate_connection()
        other = H2Connection(H2Configuration(client_side=not client))
        other.initiate_connection()
        if not client:
            for n in (1, 3, 5):
                other.send_headers(n, REQUEST if n < 5 else [*REQUEST, ("content-length", "30")])
        connection.receive_data(other.data_to_send())
        if client:
            for n in (1, 3, 5, 7):
                connection.send_headers(n, REQUEST, end_stream=n == 3)
            for n, head in ((1, HEADS[0]), (3, HEADS[0]), (5, HEADS[1])):  # the one of 7 is still to come
                connection.receive_data(HeadersFrame(n, head, flags=["END_HEADERS"]).serialize())
        connection.clear_outbound_data_buffer()

    def hear(self, data: bytes, taken: bool) -> tuple[str, list[Any], bytes, list[Any]]:
        """What it refused, told, put on the wire, and how it counts now. taken: it acknowledges what came."""
        connection, refused, events = self.connection, "", list[Event]()
        try:
            events = connection.receive_data(data)
            for event in events:
                if taken and isinstance(event, DataReceived):
                    connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        except (H2Error, ValueError, KeyError) as error:
            refused = f"{type(error).__name__}: {error}"
        windows = [connection._inbound_flow_control_window_manager]
        windows += [stream._inbound_window_manager for stream in connection.streams.values()]
        counts: list[Any] = [vars(window) for window in windows]
        counts += [stream._actual_content_length for stream in connection.streams.values()]
        counts += [connection.state_machine.state, *(s.state_machine.state for s in connection.streams.values())]
        told = [vars(event) if isinstance(event, DataReceived) else repr(event) for event in events]
        return refused, told, connection.data_to_send(), counts


# Beyond the connection's window, a stream's, and what gives back the one, or a stream's that is used up; after an end.
@settings(deadline=None)
@example(client=False, frames=[data(1, 16_000, set(), 0)] * 5, cuts=[100_000], window=200_000, taken=False)
@example(client=False, frames=[data(1, 15, set(), 0)] * 2, cuts=[100_000], window=20, taken=False)
@example(client=False, frames=[data(1, 12_000, set(), 0)] * 4, cuts=[100_000], window=200_000, taken=True)
@example(client=True, frames=[data(1, 15, set(), 0), data(1, 25, set(), 0)], cuts=[99], window=40, taken=True)
@example(
    client=False, frames=[data(1, 5, {"END_STREAM"}, 0), data(1, 5, set(), 0)], cuts=[14], window=65_535, taken=True
)
@example(client=True, frames=[RstStreamFrame(1, error_code=8), data(1, 5, set(), 0)], cuts=[13], window=99, taken=True)
@example(client=False, frames=[data(1, 16_385, set(), 0)], cuts=[100_000], window=65_535, taken=True)
@example(client=True, frames=[data(7, 5, set(), 0)], cuts=[3], window=65_535, taken=True)
@example(client=True, frames=[data(5, 20, set(), 0), data(5, 20, set(), 0)], cuts=[9], window=65_535, taken=True)
@example(client=True, frames=[HeadersFrame(1, b"\x00"), data(1, 3, set(), 0)], cuts=[99], window=65_535, taken=True)
@given(
    client=st.booleans(),
    frames=st.lists(FRAMES, max_size=30),
    cuts=CUTS,
    window=st.integers(0, 100) | st.just(65_535),
    taken=st.booleans(),
)
def test_what_it_hears_is_what_h2_hears(
    client: bool, frames: list[Frame], cuts: list[int], window: int, taken: bool
) -> None:
    """As it comes: the bytes are cut anywhere."""
    ours, theirs = (Hearer(kind, client=client, window=window) for kind in (Http2, H2Connection))
    raw = b"".join(frame.serialize() for frame in frames)
    at = turn = 0
    while at < len(raw):
        piece = raw[at : at + cuts[turn % len(cuts)]]
        at, turn = at + len(piece), turn + 1
        heard = ours.hear(piece, taken)
        assert heard == theirs.hear(piece, taken)
        if heard[0]:
            return
