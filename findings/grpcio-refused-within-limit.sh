#!/bin/sh
# grpcio 1.85.1: a server refuses calls of a client that keeps to the limit of calls which the server has announced.
#
# HTTP/2 counts a stream until both sides have ended it: then a client may begin another one. The server of `grpc.aio` ends
# an answer of several messages on the wire, but counts its call until its own side is through with it. A client that
# begins the next call when it has read the end of one gets RST_STREAM with REFUSED_STREAM instead of an answer. No call is
# lost to clients that ask again; those that do not see errors as soon as many answers end together.
#
# Seen with: grpcio 1.85.1, h2 4.4.1, Python 3.11, Linux x86-64: some hundred of 2,000 calls are refused, never more than
# 32 open. Prints both numbers, and fails when none is refused.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check grpcio==1.85.1 h2==4.4.1
"$folder/env/bin/python" - <<'PYTHON'
import asyncio
import socket

import grpc
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import DataReceived, RemoteSettingsChanged, StreamEnded, StreamReset

LIMIT, CALLS = 32, 2000


async def several(request, context):
    await asyncio.sleep(0.01)
    for _ in range(6):
        yield b""


class Handlers(grpc.GenericRpcHandler):
    def service(self, details):
        return grpc.unary_stream_rpc_method_handler(several)


def client(port):
    """Makes all calls, at most LIMIT at a time. The most that were open, and how many were refused."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as wire:
        h2 = H2Connection(H2Configuration())
        h2.initiate_connection()
        wire.sendall(h2.data_to_send())
        open_, begun, refused, most, greeted = set(), 0, 0, 0, False
        while begun < CALLS or open_:
            for event in h2.receive_data(wire.recv(1 << 16)):
                match event:
                    case RemoteSettingsChanged():
                        greeted = True
                        assert h2.remote_settings.max_concurrent_streams == LIMIT
                    case DataReceived():
                        h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                    case StreamReset():
                        refused += event.error_code == ErrorCodes.REFUSED_STREAM
                        open_.discard(event.stream_id)
                    case StreamEnded():
                        open_.discard(event.stream_id)
            while greeted and begun < CALLS and len(open_) < LIMIT:
                number = h2.get_next_available_stream_id()
                h2.send_headers(
                    number,
                    [
                        (":method", "POST"),
                        (":scheme", "http"),
                        (":path", "/any/Call"),
                        (":authority", "localhost"),
                        ("te", "trailers"),
                        ("content-type", "application/grpc"),
                    ],
                )
                h2.send_data(number, bytes(5), end_stream=True)
                open_.add(number)
                begun += 1
            most = max(most, len(open_))
            wire.sendall(h2.data_to_send())
    return most, refused


async def main():
    server = grpc.aio.server(options=[("grpc.max_concurrent_streams", LIMIT)])
    server.add_generic_rpc_handlers((Handlers(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    most, refused = await asyncio.to_thread(client, port)
    await server.stop(None)
    print(f"{most} calls were open at most, the server takes {LIMIT}; {refused} of {CALLS} were refused")
    assert most <= LIMIT
    assert refused > 0


asyncio.run(main())
PYTHON
