#!/bin/sh
# onnxruntime 1.32.0: ArgMax passes over a NaN, unless it comes first. onnx's own evaluator and NumPy find it
# anywhere.
#
# Guess before: the largest of some numbers and a NaN is the NaN, as NumPy, torch and ONNX's evaluator of reference
# have it, and an ArgMax of logits that went wrong points at the one that did. onnxruntime keeps the largest so far
# and asks of each number whether it is larger. No NaN is; but nothing is larger than a NaN either, so in the first
# place it stays. Greedy decoding of broken logits has a token that looks right, or token 0. TopK puts the NaN first
# in both. ReduceMax passes over it like ArgMax, and may lose more: of 1,000 numbers it gave 2.76 where the largest
# was 3.07.
#
# Seen with: onnxruntime 1.32.0, onnx 1.23.2, numpy 2.4.6, Python 3.11, on a CPU. Prints what both say, and fails when
# that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check onnxruntime==1.32.0 onnx==1.23.2 numpy==2.4.6
"$folder/env/bin/python" - <<'PYTHON'
import numpy
import onnx
import onnxruntime
from onnx.reference import ReferenceEvaluator

model = onnx.parser.parse_model("""
    <ir_version: 10, opset_import: ["" : 21]>
    greedy (float[N] logits) => (int64 index, float largest, float[K] values, int64[K] order) <int64[1] one = {1}> {
        index = ArgMax <axis = 0, keepdims = 0> (logits)
        largest = ReduceMax <keepdims = 0> (logits)
        values, order = TopK (logits, one)
    }
""")
onnx.checker.check_model(model, full_check=True)
session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
logits = numpy.random.default_rng(0).standard_normal(1000).astype(numpy.float32)
right = int(logits.argmax())
for place in (0, 1, 7, 999):
    broken = logits.copy()
    broken[place] = numpy.nan
    for name, run in (("onnxruntime", session.run), ("onnx", ReferenceEvaluator(model).run)):
        index, largest, _, order = run(None, {"logits": broken})
        print(f"NaN at {place}: {name} ArgMax {index}, ReduceMax {largest:.2f}, TopK {order[0]}")
        found = name == "onnx" or place == 0
        assert index == (place if found else right)
        assert numpy.isnan(largest) == found
        assert order[0] == place
    assert broken.argmax() == place
PYTHON
