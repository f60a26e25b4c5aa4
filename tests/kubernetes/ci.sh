#!/usr/bin/env bash
# What CI runs of the Kubernetes tests, on a cluster of its own: tests/kubernetes/ci.sh FOLDER
# FOLDER has the commands up, images, push, run and down of a one-node cluster. It is left as it was found: down, or up.
# Each step is bounded, so that a step that hangs is named before CI's own limit ends everything.
set -euo pipefail
cluster=$1
if ! "$cluster/run" true 2>/dev/null; then
  trap '"$cluster/down"' EXIT
fi
timeout 1800 "$cluster/up"  # ten minutes on a machine that has never had it
timeout 600 "$cluster/images"  # Python, Redis and Jaeger
timeout 1200 make images push TAG=ci DEVICE=cpu BUILD="$cluster/build" PUSH="$cluster/push"
timeout 1200 "$cluster/run" make test-kubernetes PART=ci TAG=ci
