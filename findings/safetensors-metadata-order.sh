#!/bin/sh
# safetensors 0.8.0: the same tensors and metadata, saved twice, are two different files.
#
# The tensors are laid out in a fixed order, but the pairs of `metadata` are written in that of a hash map, which each call
# draws anew. So the digest of a checkpoint with several pairs changes when nothing in it has, and a build that writes
# one cannot be reproduced.
#
# Seen with: safetensors 0.8.0, numpy 2.4.6, Python 3.11, Linux x86-64: 64 files with 8 pairs, all different. Prints how
# many differ, and fails when all are one.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check safetensors==0.8.0 numpy==2.4.6
"$folder/env/bin/python" - <<'PYTHON'
import json

import numpy
from safetensors.numpy import load, save

tensors = {name: numpy.arange(3.0) for name in ("b", "a", "c")}
pairs = {f"key{n}": f"value {n}" for n in range(8)}


def files(metadata):
    """The different files of 64 calls."""
    return {save(tensors, metadata) for _ in range(64)}


for metadata in (None, {"format": "pt"}, pairs):
    print(f"{len(metadata or {})} pairs of metadata: {len(files(metadata))} different files of 64")
assert len(files(None)) == 1
assert len(files({"format": "pt"})) == 1
different = files(pairs)
assert len(different) > 1, "the same input gives the same file"
for file in different:  # they are all the same but for the order
    header = json.loads(file[8 : 8 + int.from_bytes(file[:8], "little")])
    assert header.pop("__metadata__") == pairs
    assert list(header) == ["a", "b", "c"]
    assert all((load(file)[name] == tensor).all() for name, tensor in tensors.items())
PYTHON
