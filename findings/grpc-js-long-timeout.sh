#!/bin/sh
# @grpc/grpc-js 1.14.7: a server ends a call at once as DEADLINE_EXCEEDED, if its client waits for 30 days.
#
# Guess before: a client that does not want to be cut off gives a large timeout, and a larger one is never the shorter
# one. The server counts the milliseconds of `grpc-timeout` in 32 bits with a sign: beyond 24.8 days the number turns
# negative, and the call is over at once; after 49.7 days it begins anew, so that 50 days are some hours. 10^6 seconds
# work, 10^7 are 16 days. The client reads the same error as where its own time is up. A server of Python takes all of
# them. Orca's servers are those of Python; a gateway of Node before them is a server of grpc-js to Orca's clients.
#
# Seen with: @grpc/grpc-js 1.14.7, Node 20.20, grpcio 1.85.1, Python 3.11, Linux x86-64. Prints the deadlines that both
# servers see, and fails when they are alike.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check grpcio==1.85.1
npm install --silent --no-audit --no-fund --ignore-scripts --prefix "$folder" @grpc/grpc-js@1.14.7
cat > "$folder/server.mjs" <<'NODE'
import grpc from "@grpc/grpc-js";
const same = (bytes) => bytes;
const codec = { requestSerialize: same, requestDeserialize: same, responseSerialize: same, responseDeserialize: same };
const ask = { path: "/test.Service/Ask", requestStream: false, responseStream: false, ...codec };
const server = new grpc.Server();
// The answer is the time that the call has left, in seconds. It comes in the next round of the loop.
server.addService({ ask }, {
  ask: (call, answer) => setTimeout(() => answer(null, Buffer.from(String((call.getDeadline() - Date.now()) / 1000))), 100),
});
server.bindAsync("127.0.0.1:0", grpc.ServerCredentials.createInsecure(), (_, port) => console.log(port));
NODE
cat > "$folder/both.py" <<'PYTHON'
import concurrent.futures
import subprocess
import sys

import grpc

DAY = 24 * 60 * 60


class Asked(grpc.GenericRpcHandler):
    def service(self, _):
        return grpc.unary_unary_rpc_method_handler(lambda _, context: str(context.time_remaining()).encode())


def left(port, seconds):
    """The days that the server says are left of this timeout, or the name of the error."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            return float(channel.unary_unary("/test.Service/Ask")(b"", timeout=seconds)) / DAY
        except grpc.RpcError as error:
            return error.code().name


server = grpc.server(concurrent.futures.ThreadPoolExecutor(1), handlers=[Asked()])
python = server.add_insecure_port("127.0.0.1:0")
server.start()
node = subprocess.Popen(["node", sys.argv[1]], stdout=subprocess.PIPE, text=True)
javascript = int(node.stdout.readline())
try:
    for days, expected in ((1, 1), (24, 24), (25, None), (30, None), (49, None), (50, 0.3), (60, 10.3), (75, None)):
        found = [left(port, days * DAY) for port in (python, javascript)]
        print(f"{days} days: Python {found[0]:.2f}; JavaScript {found[1]}")
        assert abs(found[0] - days) < 0.02 * days
        if expected is None:
            assert found[1] == "DEADLINE_EXCEEDED"
        else:
            assert abs(found[1] - expected) < 0.2
finally:
    node.terminate()
    node.wait()
    server.stop(None)
PYTHON
"$folder/env/bin/python" "$folder/both.py" "$folder/server.mjs"
