"""The connections of one client to its endpoints."""

import json
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import grpc

from orca.v1.orca_pb2_grpc import OrcaStub

from .addresses import Addresses
from .errors import Cancelled, OrcaError, Unavailable, Unreachable, error_of
from .reach import NOBODY, cause_of
from .tracing import Metadata

Rpc = Literal["Generate", "Resume", "Cancel", "GetModel"]
Options = list[tuple[str, int | str]]

CONNECTIONS = 16  # to one address, when the first has as many calls as it may carry
SERVICE_CONFIG: dict[str, Any] = {
    "loadBalancingConfig": [{"round_robin": {}}],
    "connectionScaling": {"maxConnectionsPerSubchannel": CONNECTIONS},
}


class Channels:
    """Chooses an endpoint for each call, keeps one gRPC channel to each, and says what a failed call means."""

    def __init__(
        self,
        addresses: Addresses,
        metadata: Sequence[tuple[str, str]],
        new_channel: Callable[[str], Any],
        *,
        tls: bool = False,
    ) -> None:
        """metadata: goes with every call. new_channel: makes the gRPC channel to an address. tls: it speaks TLS."""
        self._addresses, self._metadata, self._new_channel = addresses, tuple(metadata), new_channel
        self._channels: list[Any] = []
        self._stubs: dict[str, Any] = {}  # an OrcaStub for each address; the generated class has no types
        self.closed = False
        self.answered = False  # whether any endpoint has answered anything
        self._tls = tls
        # Addresses whose last call could not even reach an endpoint, and whether the cause is sure.
        self._unreached: dict[str, bool] = {}

    def pick(self) -> str:
        """The address that the next call goes to."""
        return self._addresses.pick(time.monotonic())

    def call(self, target: str, rpc: Rpc, request: Any, timeout: float | None, metadata: Metadata = ()) -> Any:
        """Calls an endpoint. The channel is made at the first call. Raises Cancelled when the client is closed.

        metadata: goes with the call, beside the client's own.
        """
        if self.closed:
            raise Cancelled("the client was closed")
        if target not in self._stubs:
            self._channels.append(self._new_channel(target))
            self._stubs[target] = OrcaStub(self._channels[-1])
        return getattr(self._stubs[target], rpc)(request, timeout=timeout, metadata=self._metadata + metadata)

    def error(self, failure: grpc.RpcError, target: str) -> OrcaError:
        """The error of a call that an endpoint, or the way to it, ended with this failure."""
        if self.closed:
            return Cancelled("the client was closed")
        self._unreached.pop(target, None)
        error = error_of(failure.code(), failure.details(), cast(Any, failure.trailing_metadata()))
        if error.answered:
            self.answered = True
        elif isinstance(error, Unavailable):
            error = self._unavailable(error, target)
        if not error.answered:  # what an endpoint has said is all that there is to say
            error.__cause__ = failure
        if isinstance(error, Unavailable):
            self._addresses.failed(target, time.monotonic())
        return error

    def _unavailable(self, error: Unavailable, target: str) -> Unavailable:
        """The error with the endpoint's address, and with the likely cause where no endpoint has ever answered."""
        cause = cause_of(str(error), self._tls)
        if self.answered:
            gone = cause is not None and cause.sentence == NOBODY
            return Unavailable(f"{target}: {NOBODY} any more" if gone else f"{target}: {error}")
        if cause is None:
            return Unavailable(f"{target}: {error}")
        self._unreached[target] = cause.sure
        said = f"{target}: {cause.sentence}"
        if len(self._unreached) < len(set(self._addresses.targets)):
            return Unavailable(said)
        return Unreachable(said, sure=all(self._unreached.values()))

    def close(self) -> list[Any]:
        """Refuses all further calls. Returns the channels, which the caller closes."""
        self.closed = True
        return self._channels


def channel_options(keepalive: float) -> Options:
    """gRPC's options for a channel that spreads its calls over all addresses of a name, notices a frozen peer, and goes
    on when peers come and go. keepalive: seconds of silence before it asks a peer."""
    period = int(keepalive * 1000)
    return [
        # A name may have several addresses (a headless Service): connect to all of them, and call one after the other.
        # While one address answers, the others may be silent. An endpoint limits the calls of a connection to its
        # `max_streams`; beyond that gRPC would queue calls in silence, Cancel among them.
        ("grpc.service_config", json.dumps(SERVICE_CONFIG)),
        ("grpc.max_connections_per_subchannel_cap", CONNECTIONS),
        # Otherwise a new channel inherits the backoff and the last failure of a closed one.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.service_config_disable_resolution", 1),  # no look-up of TXT records for another one
        # A connection that ends has the name looked up again, at most so often. gRPC's 30 s are longer than a rollout.
        ("grpc.dns_min_time_between_resolutions_ms", 1000),
        ("grpc.max_receive_message_length", -1),  # the logprobs of a long prompt are one message
        ("grpc.keepalive_time_ms", period),
        ("grpc.keepalive_timeout_ms", period // 2),
        ("grpc.keepalive_permit_without_calls", 1),  # or the next call is the one that finds the connection dead
        # Keepalive needs these two on a stream that is silent both ways. Without the first, pings stop after two;
        # without the second, a frozen peer is noticed after a minute (grpcio 1.85, measured: 114 s instead of 1).
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.ping_timeout_ms", period // 2),
        ("grpc.min_reconnect_backoff_ms", 3000),  # also how long one connection attempt may take
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 300),  # an endpoint that starts again is found within this
        ("grpc.enable_retries", 0),  # Patience alone decides
    ]
