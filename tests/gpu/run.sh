#!/usr/bin/env bash
# On a machine with a GPU: the tests that need one, the times of kernels and of shards. Results go to $OUT (build/gpu).
#
#   make gpu            where `make setup` works
#   tests/gpu/run.sh    on a bare machine with Python 3.12, torch and transformers, and no network: it installs, into a
#                       folder of its own, the wheels that tests/gpu/fetch.sh left in .whl
#
# Made for ten minutes: every step has its bound, which it should not need, and what is there counts when a later one
# fails.
set -uo pipefail
cd "$(dirname "$0")/../.."
OUT=${OUT:-build/gpu}
mkdir -p "$OUT"
export PYTHONUNBUFFERED=1 PYTHONPATH=
warnings=()
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    site=$(mktemp -d)
    "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile --no-cache-dir \
        --target "$site" .whl/*.whl || exit 1
    for folder in "$site" protos services/{common,pool,endpoint,scheduler,worker} kernels client lab local bench cli; do
        PYTHONPATH+=$(realpath "$folder"):
    done
    warnings=(-W default) # the machine's versions are not ours
fi

{
    nvidia-smi
    # A machine's own versions may be others than ours: whoever reads the results must know.
    "$PYTHON" -c 'import torch, triton; print("torch", torch.__version__, "triton", triton.__version__)
print(torch.cuda.get_device_name(), "NCCL", torch.cuda.nccl.version())'
} 2>&1 | tee "$OUT/device.txt" || exit 1

status=0
# The kernels first: without them no token is right. Neither they nor this part of the script have run on a GPU yet.
timeout 240 "$PYTHON" -m pytest tests/kernels/triton_kernels tests/gpu/test_triton.py tests/gpu/test_graphs.py -rs -n 12 -p no:cacheprovider \
    --durations=5 "${warnings[@]}" 2>&1 | tee "$OUT/kernels.log" || status=1
timeout 60 "$PYTHON" -m orca_lab.cuda_kernels --model gpt3-13b --dtype float16 2>&1 | tee "$OUT/kernels.jsonl" || status=1
# What graphs are worth: the iterations of a whole 13B, replayed and launched kernel by kernel.
for graphs in "" --no-graphs; do
    timeout 60 "$PYTHON" -m orca_lab.shards --model gpt3-13b --device cuda --dtype float16 --batch 1 8 32 --prompt 128 512 \
        $graphs --json "$OUT/graphs$graphs.json" 2>&1 | tee -a "$OUT/graphs.txt" || status=1
done
timeout 200 "$PYTHON" -m pytest tests/gpu/test_cuda.py -rs -p no:cacheprovider --durations=5 "${warnings[@]}" 2>&1 |
    tee "$OUT/tests.log" || status=1
for model in 175b 13b 101b 341b; do
    timeout 60 "$PYTHON" -m orca_lab.shards --model "gpt3-$model" --device cuda --batch 1 8 32 --prompt 32 128 \
        --json "$OUT/shards-$model.json" 2>&1 | tee -a "$OUT/shards.txt" || status=1
done
exit $status
