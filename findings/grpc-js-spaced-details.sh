#!/bin/sh
# @grpc/grpc-js 1.14.7: an error whose text ends with a space has no text at all.
#
# Guess before: a client of JavaScript reads the details that a server of Python sends. gRPC escapes what is not
# printable, and a space is printable: grpcio writes it as it is, first and last in `grpc-message` too. HTTP/2 says that
# no header's value may begin or end with one, and Node leaves such a header out. So "no memory left: " plus an empty
# reason arrives as INTERNAL and "", and a trailer with such a space does not arrive either. A line break at the end is
# escaped, and arrives. grpcio's own client reads all of them.
#
# Seen with: grpcio 1.85.1, Python 3.11, @grpc/grpc-js 1.14.7, Node 20.20. Prints what both clients read, and fails
# when that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check grpcio==1.85.1
npm install --silent --no-audit --no-fund --ignore-scripts --prefix "$folder" @grpc/grpc-js@1.14.7
cat > "$folder/client.mjs" <<'NODE'
import grpc from "@grpc/grpc-js";
const [port, ...texts] = process.argv.slice(2);
const client = new grpc.Client(`127.0.0.1:${port}`, grpc.credentials.createInsecure());
const same = (bytes) => bytes;
const ask = (text) =>
  new Promise((resolve) => {
    const answered = ({ details, metadata }) => resolve([details, metadata.get("note")]);
    client.makeUnaryRequest("/test.Service/Fail", same, same, Buffer.from(text), answered);
  });
console.log(JSON.stringify(await Promise.all(texts.map(ask))));
client.close();
NODE
cat > "$folder/both.py" <<'PYTHON'
import concurrent.futures
import json
import subprocess
import sys

import grpc


class Failing(grpc.GenericRpcHandler):
    def service(self, handler_call_details):
        def fail(request, context):
            context.set_trailing_metadata((("note", request.decode().replace("\n", "")),))
            context.abort(grpc.StatusCode.INTERNAL, request.decode())

        return grpc.unary_unary_rpc_method_handler(fail)


server = grpc.server(concurrent.futures.ThreadPoolExecutor(4))
server.add_generic_rpc_handlers((Failing(),))
port = server.add_insecure_port("127.0.0.1:0")
server.start()
TEXTS = {"no memory": ("no memory", ["no memory"]), "no memory: ": ("", []), " no memory": ("", []),
         "no memory\n": ("no memory\n", ["no memory"])}
command = ["node", sys.argv[1], str(port), *TEXTS]
javascript = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
    for (text, expected), found in zip(TEXTS.items(), javascript, strict=True):
        try:
            channel.unary_unary("/test.Service/Fail")(text.encode())
        except grpc.RpcError as error:
            python = error.details()
        print(f"{text!r}: grpcio reads {python!r}, @grpc/grpc-js {found[0]!r} and the trailer {found[1]}")
        assert python == text
        assert tuple(found) == expected
server.stop(None)
PYTHON
"$folder/env/bin/python" "$folder/both.py" "$folder/client.mjs"
