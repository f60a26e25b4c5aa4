#!/usr/bin/env bash
# Packs a release into build/release: `make package`, which builds the images before.
#   package.sh VERSION TAG      needs buildah, helm and syft; TAG is that of the images
# The wheel, an OCI archive and an SBOM (SPDX) of each image, the chart, the digests as values of the chart, SHA256SUMS.
set -euo pipefail
version=$1 tag=$2
cd "$(dirname "$0")/.."
out=build/release
rm -rf "$out"
mkdir -p "$out"
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH # the same commit makes the same wheel

# hatch_build.py compiles the kernels into it
HATCH_BUILD_HOOK_ENABLE_CUSTOM=true "${PYTHON:-python3}" -m hatchling build --target wheel --directory "$PWD/$out"
"${HELM:-helm}" package helm --destination "$out"

# What `helm install -f` takes to install these very images.
digests=$out/orca-$tag-digests.yaml
printf 'image:\n  tag: "%s"\n  digests:\n' "$tag" > "$digests"
for name in endpoint scheduler worker; do
  archive=$out/orca-$name-$tag.tar
  buildah push --quiet --format oci --digestfile "$out/digest" "localhost/orca-$name:$tag" "oci-archive:$archive:orca-$name:$tag"
  printf '    %s: %s\n' "$name" "$(cat "$out/digest")" >> "$digests"
  "${SYFT:-syft}" scan --quiet "oci-archive:$archive" --source-name "orca-$name" --source-version "$tag" \
    --output "spdx-json=$out/orca-$name-$tag.spdx.json"
done
rm "$out/digest"
(cd "$out" && sha256sum -- * > SHA256SUMS)
cat "$digests"
echo "packed version $version in $out:"
ls -lh "$out"
