#!/bin/sh
# h2 4.4.1 as the client of grpcio 1.85.1: a server that only asks for another connection ends the streams of this one.
#
# Guess before: when a gRPC server's `grpc.max_connection_age_ms` has passed, an h2 client gets ConnectionTerminated, and the
# data of its open stream as before. The server sends GOAWAY with NO_ERROR and the last stream 2^31-1, which ends no stream
# (RFC 9113, 6.8), and a PING behind it. h2 takes no frame after a GOAWAY: the PING raises ProtocolError, the events of the
# same read are lost with it, ConnectionTerminated among them, and the rest of the stream cannot be read. grpcio's own
# client reads the same stream to its end.
#
# Seen with: h2 4.4.1, grpcio 1.85.1, Python 3.11: 4 of 8 messages, then "Invalid input ConnectionInputs.RECV_PING in state
# ConnectionState.CLOSED"; grpcio 8 of 8, OK. Prints both, and fails when h2 reads the stream to its end.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check h2==4.4.1 grpcio==1.85.1
"$folder/env/bin/python" - <<'PYTHON'
import asyncio
import socket

import grpc
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import ConnectionTerminated, DataReceived, StreamEnded
from h2.exceptions import ProtocolError

MESSAGES = 8


class Stream(grpc.GenericRpcHandler):
    """Sends MESSAGES messages in twice the age that the server gives a connection."""

    def service(self, details):
        async def messages(request, context):
            for _ in range(MESSAGES):
                yield b"x"
                await asyncio.sleep(0.1)

        return grpc.unary_stream_rpc_method_handler(messages)


def by_h2(port):
    """How many messages came, whether GOAWAY was seen, and how the stream ended."""
    headers = [(":method", "POST"), (":scheme", "http"), (":path", "/t.T/S"), (":authority", "t")]
    client, got, told = H2Connection(H2Configuration()), 0, False
    with socket.create_connection(("127.0.0.1", port), 10) as connection:
        client.initiate_connection()
        client.send_headers(1, [*headers, ("te", "trailers"), ("content-type", "application/grpc")])
        client.send_data(1, bytes(5), end_stream=True)
        while True:
            connection.sendall(client.data_to_send())
            try:
                events = client.receive_data(connection.recv(1 << 16))
            except ProtocolError as error:
                return got, told, str(error)
            for event in events:
                told = told or isinstance(event, ConnectionTerminated)
                if isinstance(event, DataReceived):
                    got += 1
                    client.acknowledge_received_data(event.flow_controlled_length, 1)
                if isinstance(event, StreamEnded):
                    return got, told, ""


async def main():
    server = grpc.aio.server(options=[("grpc.max_connection_age_ms", 400)])
    server.add_generic_rpc_handlers((Stream(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    got, told, error = await asyncio.to_thread(by_h2, port)
    print(f"h2: {got} of {MESSAGES} messages, ConnectionTerminated: {told}, {error}")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_stream("/t.T/S")(b"")
        whole = len([message async for message in call])
        print(f"grpcio: {whole} of {MESSAGES} messages, {await call.code()}")
    await server.stop(None)
    assert whole == MESSAGES, "grpcio's client lost messages"
    assert got < MESSAGES and not told and "RECV_PING" in error, "h2 goes on after GOAWAY"


asyncio.run(main())
PYTHON
