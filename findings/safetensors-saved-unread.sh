#!/bin/sh
# safetensors 0.8.0: `save` takes types that `load` of the same module does not read, and `load_file` reads other ones than
# `load`.
#
# `load` takes bytes and `load_file` a path, and each has its own list of types. With NumPy bfloat16 comes back from a file
# and not from bytes, and a float of eight bits from neither, though `save_file` takes ml_dtypes' arrays and writes them
# right: torch reads the file. With torch E8M0 (the scales of MXFP4 and MXFP8) and F4 come back from files only. The errors
# are a KeyError, or an AttributeError about NumPy.
#
# Seen with: safetensors 0.8.0, torch 2.13.0, numpy 2.4.6, ml_dtypes 0.6.0, Python 3.11. Prints what each reader says, and
# fails when that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check safetensors==0.8.0 torch==2.13.0 numpy==2.4.6 ml_dtypes==0.6.0
"$folder/env/bin/python" - "$folder/file.safetensors" <<'PYTHON'
import sys

import ml_dtypes
import numpy
import safetensors.numpy
import safetensors.torch
import torch


def read(call):
    try:
        return str(call()["x"].dtype)
    except (KeyError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"


def said(module, tensor):
    """What `load` and `load_file` say about a tensor that `save` and `save_file` of the module took."""
    saved = module.save({"x": tensor})
    module.save_file({"x": tensor}, sys.argv[1])
    found = read(lambda: module.load(saved)), read(lambda: module.load_file(sys.argv[1]))
    print(f"{module.__name__:18} {tensor.dtype!s:22} load: {found[0]:26} load_file: {found[1]}")
    return found


ones = numpy.ones(2, numpy.float32)
assert said(safetensors.numpy, ones) == ("float32", "float32")
assert said(safetensors.numpy, ones.astype(ml_dtypes.bfloat16)) == ("KeyError: 'BF16'", "bfloat16")
for name, kind in (("F8_E4M3", "float8_e4m3fn"), ("F8_E5M2", "float8_e5m2"), ("F8_E8M0", "float8_e8m0fnu")):
    missing = f"AttributeError: module 'numpy' has no attribute '{kind}'"
    assert said(safetensors.numpy, ones.astype(getattr(ml_dtypes, kind))) == (f"KeyError: '{name}'", missing)
    from_numpy = safetensors.torch.load_file(sys.argv[1])["x"]
    assert from_numpy.dtype == getattr(torch, kind)
    assert (from_numpy.float() == 1).all()  # the file is right

for kind in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
    assert said(safetensors.torch, torch.ones(2).to(kind)) == (str(kind), str(kind))
e8m0 = torch.ones(2).to(torch.float8_e8m0fnu)
assert said(safetensors.torch, e8m0) == ("KeyError: 'F8_E8M0'", "torch.float8_e8m0fnu")
f4 = torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
assert said(safetensors.torch, f4) == ("KeyError: 'F4'", "torch.float4_e2m1fn_x2")
PYTHON
