#!/bin/sh
# torch 2.13.0: a number divided by a tensor is no division. A quarter of the results differ from the nearest float.
#
# IEEE 754 asks a division for the float that is nearest to the quotient, and numpy and `torch.div` of two tensors give it.
# `127 / x` with a Python number on the left is `127 * (1 / x)`: two roundings. So codes with a scale of 127 / max, the way in
# which weights and activations become eight bits, are not those of a kernel that divides: the same formula, written the
# same, gives other bits.
#
# Seen with: torch 2.13.0, numpy 2.4.6, Python 3.11, on a CPU: some 250,000 of 1,000,000 float32 differ, each from its
# division and none from the two operations. Prints the numbers, and fails when `127 / x` divides.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
"$folder/env/bin/python" - <<'PYTHON'
import numpy
import torch

x = torch.rand(1_000_000, generator=torch.Generator().manual_seed(1)) * 100 + 0.01
written = 127 / x
divided = torch.full_like(x, 127.0) / x
assert (numpy.float32(127) / x.numpy() == divided.numpy()).all(), "numpy does not divide as torch.div does"
assert torch.equal(torch.div(torch.tensor(127.0), x), divided), "a tensor without dimensions on the left is divided otherwise"
other = int((written != divided).sum())
print(f"{other} of {len(x)} are not the quotient; as reciprocal and product: {torch.equal(written, x.reciprocal() * 127)}")
assert other > 0, "a number over a tensor is a division"
assert torch.equal(written, x.reciprocal() * 127)
PYTHON
