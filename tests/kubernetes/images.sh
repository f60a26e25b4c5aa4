#!/usr/bin/env bash
# Makes the images that the tests of updates need, from those of TAG, and pushes them:
#   orca-endpoint, orca-scheduler, orca-worker with the tag `next`: the same code with the next protocol number
#   orca-endpoint, orca-worker with the tag `other`: with /opt/orca/other_model, a fine-tune of the demo model
#   valkey:8: Debian's, for redis.mode sentinel; redis-exporter:1: Debian's redis_exporter
#   orca-worker:broken: a supervisor that answers, and ranks that end as they start
#
#   BUILD="buildah build" PUSH=PROGRAM TAG=dev tests/kubernetes/images.sh       PUSH is called with each image's name
set -euo pipefail
build=${BUILD:-buildah build} push=${PUSH:?a program that pushes the image that it is given} tag=${TAG:-dev}
compile='python -m compileall -q -f --invalidation-mode unchecked-hash /opt/orca/lib'

# variant NAME TAG COMMAND: the image NAME, with a command run as root in it
variant() {
  $build -t "$1:$2" -f - . <<DOCKERFILE
FROM localhost/$1:$tag
USER 0
${4:-}
RUN $3 && $compile
USER 10001:10001
DOCKERFILE
  $push "localhost/$1:$2"
}

here=$(cd "$(dirname "$0")/../.." && pwd)
cd "$(mktemp -d)" # a context with the fine-tune alone
trap 'rm -r "$PWD"' EXIT
"${PYTHON:-$here/.venv/bin/python}" "$here/tests/retrained.py" "$here/local/orca_local/demo_model" other_model
chmod --recursive a+rX other_model
for name in endpoint scheduler worker; do
  variant "orca-$name" next "echo 'PROTOCOL += 1' >> /opt/orca/lib/orca_common/protocol.py"
done
for name in endpoint worker; do
  variant "orca-$name" other true 'COPY other_model other_model'
done
variant orca-worker broken \
  "echo 'raise SystemExit(\"orca-rank: this image never forms; it is for tests of updates\")' > /opt/orca/lib/orca_worker/rank/app.py"

$build -t valkey:8 -f - . <<'DOCKERFILE'
FROM python:3.11-slim
RUN . /etc/os-release && cd /etc/apt/sources.list.d && \
    awk 'BEGIN {RS = ""} NR == 1' *debian.sources | sed "s/^Suites:.*/Suites: $VERSION_CODENAME-backports/" > backports.sources && \
    apt-get update -qq && apt-get install -y -qq --no-install-recommends valkey-server && mkdir -p /data
USER 999
DOCKERFILE
$push localhost/valkey:8

$build -t redis-exporter:1 -f - . <<'DOCKERFILE'
FROM python:3.11-slim
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends prometheus-redis-exporter
USER 10001
ENTRYPOINT ["prometheus-redis-exporter"]
DOCKERFILE
$push localhost/redis-exporter:1
