"""The short way for DATA: beside h2's own connection, whatever it is asked for."""

from collections.abc import Callable
from typing import Any

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.exceptions import H2Error
from h2.settings import SettingCodes, Settings
from hypothesis import example, given
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


@example(
    steps=[lambda server, client: server.close_connection(), lambda server, client: server.send_data(1, b"late")],
    window=65_535,
)
@given(steps=st.lists(STEPS, max_size=30), window=SIZES)
def test_what_it_sends_and_refuses_is_what_h2_does(steps: list[Step], window: int) -> None:
    ours, theirs = Pair(Http2, window), Pair(H2Connection, window)
    for step in steps:
        assert ours.take(step) == theirs.take(step)
