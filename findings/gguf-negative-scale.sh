#!/bin/sh
# gguf 0.19.0: the scale of a Q4_0 block is negative where its largest magnitude is positive, and zeros read back as -0.0.
#
# Four bits have one level more below zero than above. Q4_0 gives that level to the value of the largest magnitude, so its
# sign goes into the scale: of 8 and -8 in one block the first comes back exact, the other as 7 of 8. A reader that takes
# scales for magnitudes (to find the largest weight, or to pack them without a sign) is wrong for about half of all blocks.
# Q5_0 does the same with five bits; Q8_0 has levels alike on both sides, and its scale is never negative.
#
# Seen with: gguf 0.19.0, numpy 2.2.6, Python 3.11. Prints what is read, and fails when that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check gguf==0.19.0 numpy==2.2.6
"$folder/env/bin/python" - <<'PYTHON'
import numpy as np
from gguf import GGMLQuantizationType, quants

block = np.zeros((1, 32), np.float32)
block[0, :2] = 8, -8
for name, wanted in (("Q4_0", [8, -7]), ("Q5_0", [8, -7.5]), ("Q8_0", [8, -8])):
    kind = GGMLQuantizationType[name]
    stored = quants.quantize(block, kind)
    scale = float(stored[0, :2].view(np.float16)[0])
    back = quants.dequantize(stored, kind)[0]
    print(name, "scale", scale, "reads", back[:3])
    assert (scale < 0) == (name != "Q8_0")
    assert np.allclose(back[:2], wanted, atol=0.01)
    assert np.signbit(back[2]) == (name != "Q8_0")

# As many blocks have a negative scale as have a positive largest value.
many = np.random.default_rng(0).standard_normal((1, 32 * 1000)).astype(np.float32)
scales = quants.quantize(many, GGMLQuantizationType.Q4_0).reshape(1000, 18)[:, :2].copy().view(np.float16)
largest = np.take_along_axis(rows := many.reshape(1000, 32), np.abs(rows).argmax(1, keepdims=True), 1)
print("negative scales:", int((scales < 0).sum()), "of 1000")
assert ((scales < 0) == (largest > 0)).all()
PYTHON
