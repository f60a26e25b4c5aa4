#!/bin/sh
# ml_dtypes 0.6.0: the mean of 7 and 7 is -1, if they are int4.
#
# NumPy sums its small integers in 64 bits and takes their mean as float64. It does not know those of ml_dtypes, and adds
# int4 in int4: 14 is -2, and half of it -1. `sum`, `prod`, `cumsum` and `mean` wrap so, without a warning; `@` gives
# int8, which wraps for uint4 already at two products. So codes and zero points of four bits need a wider type before
# anything is added up.
#
# Seen with: ml_dtypes 0.6.0, numpy 2.4.6, Python 3.11. Prints the results, and fails when they change.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check ml_dtypes==0.6.0 numpy==2.4.6
"$folder/env/bin/python" - <<'PYTHON'
import ml_dtypes
import numpy


def said(kind, number):
    """Sum, product, mean and scalar product of an array with itself: the number twice."""
    two = numpy.array([number, number], kind)
    found = [two.sum(), two.prod(), two.mean(), (two[None] @ two[:, None])[0, 0]]
    print(f"{numpy.dtype(kind)!s:6} {number} and {number}: sum {found[0]}, product {found[1]}, mean {found[2]}, @ {found[3]}")
    return [float(one) for one in found]


assert said(numpy.int8, 7) == [14, 49, 7, 98]
assert said(ml_dtypes.int4, 7) == [-2, 1, -1, 98]
assert said(ml_dtypes.uint4, 15) == [14, 1, 7, -62]
assert said(ml_dtypes.int2, 1) == [-2, 1, -1, 2]
PYTHON
