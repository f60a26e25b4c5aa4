#!/bin/sh
# OpenTelemetry's exporters: one timeout in the environment is ten seconds in Python and ten milliseconds in JavaScript.
#
# Guess before: `OTEL_EXPORTER_OTLP_TIMEOUT`, which all services of a cluster have from one ConfigMap, is the same time
# in all of them; the specification says milliseconds, and 10000 where nothing is set. JavaScript reads it so. Python
# reads seconds, and says so in its own documentation. With `10` no trace of a JavaScript service reaches a collector that
# needs 20 ms; with `10000` an exporter in Python waits for a silent collector for hours. The variables of the batch
# processor (`OTEL_BSP_EXPORT_TIMEOUT` and others) are milliseconds in both.
#
# Seen with: opentelemetry-exporter-otlp-proto-http 1.45.2, Python 3.11, @opentelemetry/exporter-trace-otlp-http
# 0.223.1, Node 20.20. Prints whether a span reaches a collector that answers after a second; fails when both read alike.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check \
    opentelemetry-sdk==1.45.2 opentelemetry-exporter-otlp-proto-http==1.45.2
npm install --silent --no-audit --no-fund --ignore-scripts --prefix "$folder" \
    @opentelemetry/exporter-trace-otlp-http@0.223.1 @opentelemetry/api@1.10.0
cat > "$folder/export.mjs" <<'NODE'
import { OTLPTraceExporter } from "@opentelemetry/exporter-trace-otlp-http";
new OTLPTraceExporter().export([], ({ error }) => {
  console.log(error?.message ?? "sent");
  process.exit(); // a retry may still wait
});
NODE
cat > "$folder/both.py" <<'PYTHON'
import http.server
import os
import subprocess
import sys
import threading
import time

PYTHON = """
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
print("sent" if OTLPSpanExporter().export([]).name == "SUCCESS" else "not sent")
"""


class Collector(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        time.sleep(1)  # a collector with much to do
        try:
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", "0")
            self.end_headers()
        except OSError:  # the exporter has left
            pass
        self.close_connection = True

    def log_message(self, *_):
        pass


collector = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
threading.Thread(target=collector.serve_forever, daemon=True).start()
for value, expected in (("20", ("sent", "Request timed out")), ("20000", ("sent", "sent"))):
    address = f"http://127.0.0.1:{collector.server_port}"
    environment = os.environ | {"OTEL_EXPORTER_OTLP_ENDPOINT": address, "OTEL_EXPORTER_OTLP_TIMEOUT": value}
    both = [
        subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
        for command in ([sys.executable, "-c", PYTHON], ["node", sys.argv[1]])
    ]
    print(f"OTEL_EXPORTER_OTLP_TIMEOUT={value}: Python: {both[0]}; JavaScript: {both[1]}")
    assert tuple(both) == expected
collector.shutdown()
PYTHON
"$folder/env/bin/python" "$folder/both.py" "$folder/export.mjs"
