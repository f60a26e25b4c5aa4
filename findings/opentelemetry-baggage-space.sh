#!/bin/sh
# opentelemetry-api 1.45.2 for Python: a space in baggage arrives as `+` in other languages, and their `+` as a space.
#
# Guess before: what one service puts into the baggage of a call another one reads, in whatever language: both follow
# the same W3C header, where a space is `%20` and a plus may stand as it is. Python writes and reads the header like a
# form of HTML, where a space is `+`. A tenant "blue team" that a Python gateway sets is "blue+team" in a service of
# JavaScript, and a header with "gemma+vision" is "gemma vision" in Python. From Python to Python it does not show;
# JavaScript escapes both characters, and what it writes arrives.
#
# Seen with: opentelemetry-api 1.45.2, Python 3.11, @opentelemetry/core 2.12.1, Node 20.20. Prints what arrives, and
# fails when that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check opentelemetry-api==1.45.2
npm install --silent --no-audit --no-fund --ignore-scripts --prefix "$folder" @opentelemetry/core@2.12.1 @opentelemetry/api@1.9.1
cat > "$folder/baggage.mjs" <<'NODE'
import { ROOT_CONTEXT, defaultTextMapGetter, defaultTextMapSetter, propagation } from "@opentelemetry/api";
import { W3CBaggagePropagator } from "@opentelemetry/core";
const [header, value] = process.argv.slice(2);
const propagator = new W3CBaggagePropagator();
const read = propagation.getBaggage(propagator.extract(ROOT_CONTEXT, { baggage: header }, defaultTextMapGetter));
const carrier = {};
const baggage = propagation.createBaggage({ key: { value } });
propagator.inject(propagation.setBaggage(ROOT_CONTEXT, baggage), carrier, defaultTextMapSetter);
console.log(JSON.stringify([read.getEntry("key").value, carrier.baggage]));
NODE
cat > "$folder/both.py" <<'PYTHON'
import json
import subprocess
import sys

from opentelemetry import baggage
from opentelemetry.baggage.propagation import W3CBaggagePropagator


def written(value):
    carrier = {}
    W3CBaggagePropagator().inject(carrier, baggage.set_baggage("key", value))
    return carrier["baggage"]


def read(header):
    return baggage.get_baggage("key", W3CBaggagePropagator().extract({"baggage": header}))


for value, there, back in (("blue", "blue", "blue"), ("blue team", "blue+team", "blue team"), ("a+b", "a+b", "a+b")):
    header = written(value)
    command = ["node", sys.argv[1], header, value]
    arrived, answer = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    print(f"{value!r}: Python writes {header}, JavaScript reads {arrived!r}")
    print(f"{value!r}: JavaScript writes {answer}, Python reads {read(answer)!r}")
    assert (arrived, read(answer), read(header)) == (there, back, value)
print(f"key=gemma+vision: Python reads {read('key=gemma+vision')!r}")
assert read("key=gemma+vision") == "gemma vision"
PYTHON
"$folder/env/bin/python" "$folder/both.py" "$folder/baggage.mjs"
