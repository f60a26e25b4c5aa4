#!/bin/sh
# Generates the package orcav1 from the contract, under FOLDER (default: here). Needs Go 1.24 and this checkout's .venv.
set -eu
cd "$(dirname "$0")"
../../.venv/bin/python -m grpc_tools.protoc -I../../protos \
  --plugin=protoc-gen-go="$(go tool -n protoc-gen-go)" \
  --plugin=protoc-gen-go-grpc="$(go tool -n protoc-gen-go-grpc)" \
  --go_out="${1:-.}" --go_opt=Morca/v1/orca.proto=orca.serving/examples/go/orcav1,module=orca.serving/examples/go \
  --go-grpc_out="${1:-.}" --go-grpc_opt=Morca/v1/orca.proto=orca.serving/examples/go/orcav1,module=orca.serving/examples/go \
  orca/v1/orca.proto
