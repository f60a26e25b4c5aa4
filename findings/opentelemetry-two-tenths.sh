#!/bin/sh
# OpenTelemetry's SDKs: a sampler of one tenth in Python and one in JavaScript keep a hundredth of the traces whole.
#
# Guess before: `TraceIdRatioBased` decides by the trace's id, which is the same in all services, so that those with
# the same ratio keep the same traces. Python compares the last 64 bits of the id with the ratio; JavaScript folds all
# 128 bits to 32 by exclusive or, and compares that. Each keeps a tenth, by the same name and setting, and which tenth
# has nothing to do with the other: nine of ten kept traces lack the spans of the other language. It counts where each
# service decides for itself (`OTEL_TRACES_SAMPLER=traceidratio`); with `parentbased_traceidratio` the first decides.
#
# Seen with: opentelemetry-sdk 1.45.2, Python 3.11, @opentelemetry/sdk-trace-base 2.12.1, Node 20.20. Prints how many
# of 3,000 traces are kept, and fails when both keep the same.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check opentelemetry-sdk==1.45.2
npm install --silent --no-audit --no-fund --ignore-scripts --prefix "$folder" \
    @opentelemetry/sdk-trace-base@2.12.1 @opentelemetry/api@1.9.1
cat > "$folder/sampler.mjs" <<'NODE'
import { readFileSync } from "node:fs";
import { ROOT_CONTEXT } from "@opentelemetry/api";
import { SamplingDecision, TraceIdRatioBasedSampler } from "@opentelemetry/sdk-trace-base";
const sampler = new TraceIdRatioBasedSampler(0.1);
const kept = (id) => sampler.shouldSample(ROOT_CONTEXT, id).decision === SamplingDecision.RECORD_AND_SAMPLED;
console.log(JSON.stringify(JSON.parse(readFileSync(0, "utf8")).filter(kept)));
NODE
cat > "$folder/both.py" <<'PYTHON'
import json
import random
import subprocess
import sys

from opentelemetry.sdk.trace.sampling import TraceIdRatioBased

source = random.Random(3)
ids = [f"{source.getrandbits(128):032x}" for _ in range(3000)]
sampler = TraceIdRatioBased(0.1)
python = {id for id in ids if sampler.should_sample(None, int(id, 16), "call").decision.is_sampled()}
node = subprocess.run(["node", sys.argv[1]], input=json.dumps(ids), check=True, capture_output=True, text=True)
javascript = set(json.loads(node.stdout))
both = python & javascript
print(f"of {len(ids)} traces Python keeps {len(python)}, JavaScript {len(javascript)}, both {len(both)}")
assert all(250 < len(kept) < 350 for kept in (python, javascript))
assert len(both) < 60
PYTHON
"$folder/env/bin/python" "$folder/both.py" "$folder/sampler.mjs"
