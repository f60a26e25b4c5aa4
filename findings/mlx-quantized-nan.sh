#!/bin/sh
# mlx 0.32.4: a NaN among weights is gone when they are quantised; with mxfp4 and nvfp4 its whole block is zero.
#
# Guess before: a broken weight stays broken: its group has a NaN for a scale, and so has every product with it. With
# `affine`, the default, the NaN is the group's lowest or highest number afterwards, and the product is an ordinary
# one. With `mxfp4` and `nvfp4` a NaN or an infinity makes zeros of the 32 or 16 numbers beside it. Only infinity under
# `affine` shows, as a group of NaN. `to_fp8` makes 448 of NaN as of infinity. So a check of the quantised model for
# NaN passes; it has to be made before. 63 of 64 weights in these groups are 1 or 2.
#
# Seen with: mlx and mlx-cpu 0.32.4, Python 3.11, Linux x86-64, on a CPU. Prints what is read back, and fails when that
# changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check mlx==0.32.4 mlx-cpu==0.32.4
"$folder/env/bin/python" - <<'PYTHON'
import math

import mlx.core as mx


def quantised(broken, mode):
    """A row of ones and a two with a broken weight in place 3: as it is read back, and its product with ones."""
    row = mx.array([1.0] * 63 + [2.0])
    row[3] = broken
    codes = mx.quantize(row[None], mode=mode)
    product = mx.quantized_matmul(mx.ones((1, 64)), *codes, mode=mode).item()
    return mx.dequantize(*codes, mode=mode)[0], product


for mode, group in (("affine", 64), ("mxfp4", 32), ("nvfp4", 16)):
    for broken in (math.nan, math.inf):
        row, product = quantised(broken, mode)
        nans, zeros = mx.isnan(row).sum().item(), (row == 0).sum().item()
        print(f"{mode}, one weight {broken}: {nans} NaN and {zeros} zeros of 64, product with ones {product}")
        if mode == "affine" and broken == math.inf:
            assert (nans, zeros) == (64, 0) and math.isnan(product)
        elif mode == "affine":
            assert (nans, zeros) == (0, 0) and product in (65, 66)
        else:
            assert (nans, zeros) == (0, group) and math.isfinite(product)
eight = mx.from_fp8(mx.to_fp8(mx.array([math.nan, math.inf, 448.0])), mx.float32).tolist()
print("nan, inf and 448 through to_fp8 and from_fp8:", eight)
assert eight == [448, 448, 448]
PYTHON
