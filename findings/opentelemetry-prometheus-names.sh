#!/bin/sh
# OpenTelemetry's Prometheus exporters: one instrument is `..._duration_seconds` in Python and `..._duration` in JavaScript.
#
# Guess before: both give `gen_ai.server.request.duration` in `s` the same name, as OpenTelemetry's rules for Prometheus
# have it: dots become underscores, and the unit is put behind. Python puts it there ("By" is `_bytes`, "By/s" is
# `_bytes_per_second`), before the `_total` of a counter. JavaScript leaves it out; its line `# UNIT` has the short form
# of OpenTelemetry, "s", which no name ends with. So a panel or an alert over a Python server and a JavaScript gateway finds
# one of them, and no error. Units in braces, such as {token}, are in neither name, nor is "1".
#
# Seen with: opentelemetry-exporter-prometheus 0.66b2, Python 3.11, @opentelemetry/exporter-prometheus 0.301.0, Node 20.20.
# Prints the names, and fails when they change.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check \
    opentelemetry-sdk==1.45.2 opentelemetry-exporter-prometheus==0.66b2 prometheus_client==0.26.0
npm install --silent --no-audit --no-fund --ignore-scripts --prefix "$folder" \
    @opentelemetry/exporter-prometheus@0.301.0 @opentelemetry/sdk-metrics@3.1.1 @opentelemetry/api@1.10.0
cat > "$folder/names.mjs" <<'NODE'
import { PrometheusExporter } from "@opentelemetry/exporter-prometheus";
import { MeterProvider } from "@opentelemetry/sdk-metrics";
const exporter = new PrometheusExporter({ preventServerStart: true });
const meter = new MeterProvider({ readers: [exporter] }).getMeter("any");
for (const [name, unit] of JSON.parse(process.argv[2])) meter.createCounter(name, { unit }).add(1);
exporter.getMetricsRequestHandler({}, { setHeader() {}, end: (page) => console.log(page) });
NODE
cat > "$folder/both.py" <<'PYTHON'
import json
import re
import subprocess
import sys

import prometheus_client
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider


def names(page):
    counters = re.findall(r"^# TYPE (\S+) counter$", page, re.MULTILINE)
    return [name for name in counters if not name.startswith(("python_", "process_"))]


instruments = [("request.duration", "s"), ("kv.sent", "By"), ("tokens", "{token}"), ("requests", "1")]
meter = MeterProvider(metric_readers=[PrometheusMetricReader()]).get_meter("any")
for name, unit in instruments:
    meter.create_counter(name, unit=unit).add(1)
python = names(prometheus_client.generate_latest().decode())
command = ["node", sys.argv[1], json.dumps(instruments)]
javascript = names(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
for (name, unit), *found in zip(instruments, python, javascript, strict=True):
    print(f"{name} in {unit}: Python {found[0]}; JavaScript {found[1]}")
assert python == ["request_duration_seconds_total", "kv_sent_bytes_total", "tokens_total", "requests_total"]
assert javascript == ["request_duration_total", "kv_sent_total", "tokens_total", "requests_total"]
PYTHON
"$folder/env/bin/python" "$folder/both.py" "$folder/names.mjs"
