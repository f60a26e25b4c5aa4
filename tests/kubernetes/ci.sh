#!/usr/bin/env bash
# What CI runs of the Kubernetes tests, on a cluster of its own: tests/kubernetes/ci.sh FOLDER
# FOLDER has the commands up, images, push, run and down of a one-node cluster. It is left as it was found: down, or up.
set -euo pipefail
cluster=$1
if ! "$cluster/run" true 2>/dev/null; then
  trap '"$cluster/down"' EXIT
fi
"$cluster/up"      # ten minutes on a machine that has never had it
"$cluster/images"  # Python, Redis and Jaeger
make images push TAG=ci DEVICE=cpu BUILD="$cluster/build" PUSH="$cluster/push"
"$cluster/run" make test-kubernetes PART=ci TAG=ci
