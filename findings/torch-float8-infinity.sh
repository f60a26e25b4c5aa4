#!/bin/sh
# torch 2.13.0: infinity as float8_e4m3fn is 448, an ordinary number; and -1 as float8_e8m0fnu is 1.
#
# E4M3FN has no infinity, and its largest number is 448. All that is beyond becomes 448, infinity too: an overflow in the
# layer before is gone when its output is stored in eight bits, and `isfinite` finds nothing. ml_dtypes, the same formats
# for NumPy, makes NaN of all beyond 464; torch itself does so for E4M3FNUZ, and keeps infinity in E5M2. E8M0 has
# neither a sign nor a zero: torch drops the sign and makes 2^-127 of 0, ml_dtypes makes NaN of both. On all other numbers
# of float16 the two agree.
#
# Seen with: torch 2.13.0 and 2.15.0, ml_dtypes 0.6.0, numpy 2.4.6, Python 3.11, on a CPU. Prints the numbers, and fails
# when they change.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 ml_dtypes==0.6.0 numpy==2.4.6
"$folder/env/bin/python" - <<'PYTHON'
import ml_dtypes
import numpy
import torch

EVERY = numpy.arange(1 << 16, dtype=numpy.uint16).view(numpy.float16).astype(numpy.float32)  # all of float16


def both(kind, numbers):
    """The numbers through a type of eight bits, by torch and by ml_dtypes."""
    by_torch = torch.from_numpy(numbers).to(getattr(torch, kind)).float().numpy()
    return by_torch, numbers.astype(getattr(ml_dtypes, kind)).astype(numpy.float32)


for kind, few in (
    ("float8_e4m3fn", [464, 465, -1e9, numpy.inf, -numpy.inf]),
    ("float8_e4m3fnuz", [465, numpy.inf]),
    ("float8_e5m2", [1e9, numpy.inf]),
    ("float8_e8m0fnu", [1, -1, -3, 0]),
):
    by_torch, by_ml_dtypes = both(kind, numpy.array(few, numpy.float32))
    print(f"{kind:16} of {few}: torch {by_torch.tolist()}, ml_dtypes {by_ml_dtypes.tolist()}")

by_torch, by_ml_dtypes = both("float8_e4m3fn", EVERY)
beyond = numpy.abs(EVERY) > 464  # infinity is
assert (numpy.abs(by_torch[beyond]) == 448).all()
assert numpy.isnan(by_ml_dtypes[beyond]).all()
assert numpy.array_equal(by_torch[~beyond], by_ml_dtypes[~beyond], equal_nan=True)

for kind in ("float8_e4m3fnuz", "float8_e5m2"):
    by_torch, by_ml_dtypes = both(kind, EVERY)
    assert numpy.array_equal(by_torch, by_ml_dtypes, equal_nan=True)
    assert not numpy.isfinite(by_torch[numpy.isinf(EVERY)]).any()

by_torch, by_ml_dtypes = both("float8_e8m0fnu", EVERY)
assert numpy.array_equal(by_torch[EVERY > 0], by_ml_dtypes[EVERY > 0], equal_nan=True)
assert numpy.isnan(by_ml_dtypes[EVERY <= 0]).all()
assert (by_torch[EVERY == 0] == 2.0**-127).all()
assert numpy.array_equal(by_torch[EVERY < 0], both("float8_e8m0fnu", -EVERY[EVERY < 0])[0], equal_nan=True)
PYTHON
