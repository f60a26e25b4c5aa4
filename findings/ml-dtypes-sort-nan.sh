#!/bin/sh
# ml_dtypes 0.6.0: one NaN in a bfloat16 array, and `numpy.sort` does not sort it.
#
# NumPy puts NaN behind all numbers of its own floats, so the rest is in order. The types of ml_dtypes say that NaN is
# neither before nor behind anything, and a sort leaves numbers where they are: [3, NaN, 1, 2] comes back as it was.
# `argsort` and `unique` are wrong with it, so the k largest logits by `argsort` are others. `argmax` is right.
#
# Seen with: ml_dtypes 0.6.0, numpy 2.4.6, Python 3.11. Prints what is sorted, and fails when that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check ml_dtypes==0.6.0 numpy==2.4.6
"$folder/env/bin/python" - <<'PYTHON'
import ml_dtypes
import numpy

for kind in (numpy.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2):
    given = numpy.array([3, numpy.nan, 1, 2], kind)
    said = numpy.sort(given).astype(numpy.float32), numpy.argsort(given), numpy.unique(given).astype(numpy.float32)
    print(f"{numpy.dtype(kind)!s:14} sort {said[0]}, argsort {said[1]}, unique {said[2]}")
    numpys_own = kind is numpy.float16
    assert numpy.array_equal(said[0], [1, 2, 3, numpy.nan], equal_nan=True) == numpys_own
    assert numpy.array_equal(said[1], [2, 3, 0, 1]) == numpys_own
    assert numpy.array_equal(said[2], [1, 2, 3, numpy.nan], equal_nan=True) == numpys_own
    assert numpy.argmax(given) == 1
    assert numpy.array_equal(numpy.sort(given[[0, 2, 3]]).astype(numpy.float32), [1, 2, 3])
PYTHON
