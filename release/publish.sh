#!/usr/bin/env bash
# Publishes what package.sh has packed: `make publish REGISTRY=HOST/PATH`. Images keep their digests.
#   publish.sh REGISTRY      needs skopeo and helm, which are logged in there; PLAIN_HTTP=yes: a registry without TLS;
#   IMAGES_ONLY=yes: not the chart, which is the same for every DEVICE
# published.txt has a line for each: its reference by digest, and of an image its SBOM.
set -euo pipefail
registry=$1
cd "$(dirname "$0")/../build/release"
sha256sum --quiet --check SHA256SUMS
if [ -n "${PLAIN_HTTP:-}" ]; then
  skopeo=(--dest-tls-verify=false) helm=(--plain-http)
else
  skopeo=() helm=()
fi
: > published.txt
for archive in orca-*.tar; do
  name=${archive%.tar}
  service=$(cut -d- -f2 <<< "$name")
  reference=$registry/orca-$service:${name#"orca-$service-"}
  skopeo copy --quiet --preserve-digests --digestfile digest "${skopeo[@]}" "oci-archive:$archive" "docker://$reference"
  echo "${reference%:*}@$(cat digest) $name.spdx.json" >> published.txt
done
if [ -z "${IMAGES_ONLY:-}" ]; then
  "${HELM:-helm}" push "${helm[@]}" orca-*.tgz "oci://$registry" > digest 2>&1 || { cat digest; exit 1; }
  echo "$registry/orca@$(sed -n 's/^Digest: //p' digest)" >> published.txt
fi
rm digest
cat published.txt
