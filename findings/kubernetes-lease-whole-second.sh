#!/bin/sh
# kubernetes 37.0.2 and lightkube 1.0.1 for Python: a Lease whose time is a whole second is refused by Kubernetes.
#
# Guess before: a client writes a `datetime` so that the API reads it. Kubernetes has two types of times: `Time` takes a
# fraction of any length, or none, `MicroTime` exactly six digits. A Lease's `renewTime` and `acquireTime` are of the
# second type, and so is an Event's `eventTime`. Both clients write what `isoformat` gives, which has six digits or, at
# microsecond 0, none, and Kubernetes' own package does not parse it. A holder that renews its Lease loses one renewal in
# a million; one that sets its times with `replace(microsecond=0)`, as for all other objects, loses each.
#
# Seen with: kubernetes 37.0.2, lightkube 1.0.1, Python 3.11, k8s.io/apimachinery 0.37.0, Go 1.26. Prints what is written
# and read, and fails when that changes. Go builds for some minutes on a slow machine.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check kubernetes==37.0.2 lightkube==1.0.1
mkdir "$folder/read"
cd "$folder/read"
export GOPATH="$folder/go" GOCACHE="$folder/cache" GOFLAGS="-modcacherw -mod=mod"
cat > read.go <<'GO'
// Reads each argument as a MicroTime and as a Time, and prints "true" where it may be read.
package main

import (
	"encoding/json"
	"fmt"
	"os"

	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func main() {
	for _, text := range os.Args[1:] {
		quoted, _ := json.Marshal(text)
		micro := json.Unmarshal(quoted, new(meta.MicroTime))
		second := json.Unmarshal(quoted, new(meta.Time))
		fmt.Println(micro == nil, second == nil)
	}
}
GO
go mod init read 2> "$folder/log"
go get k8s.io/apimachinery/pkg/apis/meta/v1@v0.37.0 2> "$folder/log" || { cat "$folder/log"; exit 1; }
go build -o read . 2> "$folder/log" || { cat "$folder/log"; exit 1; }
cat > write.py <<'PYTHON'
import datetime
import subprocess

import kubernetes
from lightkube.models.coordination_v1 import LeaseSpec

for microsecond, reads in ((0, "false true"), (1, "true true"), (500000, "true true")):
    time = datetime.datetime(2026, 1, 1, 12, 0, 0, microsecond, datetime.timezone.utc)
    spec = kubernetes.client.V1LeaseSpec(renew_time=time)
    written = [
        kubernetes.client.ApiClient().sanitize_for_serialization(spec)["renewTime"],
        LeaseSpec(renewTime=time).to_dict()["renewTime"],
    ]
    output = subprocess.run(["./read", *written], check=True, stdout=subprocess.PIPE, text=True).stdout
    for client, text, found in zip(("kubernetes", "lightkube"), written, output.splitlines(), strict=True):
        micro, second = found.split()
        print(f"{client} writes {text}: as a MicroTime {micro}, as a Time {second}")
        assert found == reads
PYTHON
"$folder/env/bin/python" write.py
