#!/bin/sh
# Helm 4.2.3: "cannot overwrite table with non table", it warns, and overwrites the table.
#
# The chart's values have a map where the user gives a number or a list. By its words the warning keeps the map; what is
# rendered has the number or the list, and the chart's map is gone. One level higher the map is overwritten too, and
# nothing is said.
#
# Seen with: helm-python-sdk 0.2.2, which holds Helm 4.2.3, and Python 3.11; helm 3.21.4 renders and warns alike. Prints the
# warnings and what is rendered, and fails when that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check helm-python-sdk==0.2.2
mkdir -p "$folder/chart/templates"
cat > "$folder/chart/Chart.yaml" <<'YAML'
apiVersion: v2
name: chart
version: 0.1.0
YAML
cat > "$folder/chart/values.yaml" <<'YAML'
outer:
  inner:
    depth: 3
YAML
cat > "$folder/chart/templates/map.yaml" <<'YAML'
outer: {{ toJson .Values.outer }}
YAML
cat > "$folder/render.py" <<'PYTHON'
import json
import sys

import helm_python

assert helm_python.helm_sdk_version().lstrip("v") == "4.2.3", helm_python.helm_sdk_version()
with helm_python.Chart.load(sys.argv[1]) as chart:
    print(*chart.render(json.loads(sys.argv[2]), name="release", namespace="default").values())
PYTHON

render() { # values, what is rendered, how many warnings there are at least
    "$folder/env/bin/python" "$folder/render.py" "$folder/chart" "$1" > "$folder/out" 2> "$folder/err"
    warnings=$(grep -cF 'cannot overwrite table with non table for chart.outer.inner (map[depth:3])' "$folder/err" || true)
    printf '%s: %s\n' "$1" "$(tr -d '\n' < "$folder/out")"
    sed 's/^/    /' "$folder/err"
    test "$(tr -d '\n ' < "$folder/out")" = "$2"
    test "$warnings" -ge "$3"
    test "$3" -gt 0 || test ! -s "$folder/err"
}
render '{}' 'outer:{"inner":{"depth":3}}' 0
render '{"outer": {"inner": 0}}' 'outer:{"inner":0}' 1
render '{"outer": {"inner": ["a"]}}' 'outer:{"inner":["a"]}' 1
render '{"outer": 0}' 'outer:0' 0
