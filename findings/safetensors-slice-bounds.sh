#!/bin/sh
# safetensors 0.8.0: a slice of a tensor in a file may not run past the end, nor be counted from it; a single row may.
#
# `get_slice` takes the same brackets as an array. NumPy cuts `[3:6]` of 4 rows down to one row, which is how the last of
# several workers gets its smaller share; safetensors raises. `[-1]` is the last row in both, but `[-2:]` raises too, and
# its message speaks of an integer. A step works.
#
# Seen with: safetensors 0.8.0, numpy 2.4.6, Python 3.11. Prints what each says, and fails when that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check safetensors==0.8.0 numpy==2.4.6
"$folder/env/bin/python" - "$folder/file.safetensors" <<'PYTHON'
import sys

import numpy
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

rows = numpy.arange(4, dtype=numpy.int32)
save_file({"rows": rows}, sys.argv[1])


def same(index):
    try:
        with safe_open(sys.argv[1], "numpy") as file:
            said = file.get_slice("rows")[index].tolist()
    except (SafetensorError, OverflowError) as error:
        said = f"{type(error).__name__}: {error}"
    print(f"{index!s:24} NumPy: {rows[index].tolist()!s:8} safetensors: {said}")
    return said == rows[index].tolist()


assert same(slice(2, 4))
assert same(slice(0, 4, 2))
assert same(-1)
assert not same(slice(3, 6))
assert not same(slice(-2, None))
assert not same(slice(0, -1))
PYTHON
