#!/bin/sh
# lightkube 1.0.1 cannot read the CPU time that metrics-server reports; @kubernetes/client-node 2.0.1 cannot read 1.5Gi.
#
# Guess before: a client of Kubernetes reads the quantities of its API, which are a number and a suffix. metrics-server
# reports a pod's use of CPU as "18473926n": lightkube knows neither `n` nor `u`, and takes 1E3 for a thousand with the
# suffix E3. The client of JavaScript makes a BigInt of each number before k, M, Ki or Mi, and raises SyntaxError for a
# fraction. The API writes 1536Mi in its own types, but texts of custom resources and files stay 1.5Gi. Kubernetes' client
# for Python reads all of these, and some that the API refuses: 5K and 1_000.
#
# Seen with: lightkube 1.0.1, kubernetes 37.0.2, Python 3.11, @kubernetes/client-node 2.0.1, Node 20.20. Prints what each
# reads, and fails when that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check kubernetes==37.0.2 lightkube==1.0.1
npm install --silent --no-audit --no-fund --ignore-scripts --prefix "$folder" @kubernetes/client-node@2.0.1
cat > "$folder/read.mjs" <<'NODE'
import { quantityToScalar } from "./node_modules/@kubernetes/client-node/dist/util.js";
const read = (text) => {
  try {
    const value = quantityToScalar(text);
    return `${typeof value} ${value}`;
  } catch (error) {
    return error.name;
  }
};
console.log(JSON.stringify(process.argv.slice(2).map(read)));
NODE
cat > "$folder/all.py" <<'PYTHON'
import json
import subprocess
import sys

import kubernetes.utils.quantity
import lightkube.utils.quantity


def read(parse, text):
    try:
        return f"{parse(text).normalize():f}"
    except ValueError as error:
        return type(error).__name__


expected = {  # of Python's client, of lightkube, and of JavaScript's client
    "250m": ("0.25", "0.25", "number 0.25"),
    "2": ("2", "2", "number 2"),
    "2k": ("2000", "2000", "bigint 2000"),
    "18473926n": ("0.018473926", "ValueError", "number 0.018473926"),
    "300u": ("0.0003", "ValueError", "number 0.0003"),
    "1E3": ("1000", "ValueError", "number 1000"),
    "1.5Gi": ("1610612736", "1610612736", "SyntaxError"),
    "0.5k": ("500", "500", "SyntaxError"),
    "5K": ("5000", "ValueError", None),
    "1_000": ("1000", "ValueError", None),
}
command = ["node", sys.argv[1], *expected]
javascript = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
for (text, parts), third in zip(expected.items(), javascript, strict=True):
    modules = (kubernetes.utils.quantity, lightkube.utils.quantity)
    found = *(read(module.parse_quantity, text) for module in modules), third
    print(f"{text}: kubernetes {found[0]}; lightkube {found[1]}; client-node {found[2]}")
    assert found[:2] == parts[:2]
    assert parts[2] in (None, third)
PYTHON
"$folder/env/bin/python" "$folder/all.py" "$folder/read.mjs"
