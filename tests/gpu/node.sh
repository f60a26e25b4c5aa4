#!/usr/bin/env bash
# On a node of 2 to 8 GPUs: all-reduces by size, 20 re-formations, killed ranks, tokens of tp x pp. Results as run.sh's.
#
#   make gpu-node                 where `make setup` works
#   tests/gpu/node.sh             on a bare machine, as run.sh
#   DEVICE=cpu tests/gpu/node.sh  a rehearsal without a GPU, over gloo: RANKS=4 of them
#
# **It has never run on a GPU.** docs/first-hour.md has the questions that it answers.
set -uo pipefail
cd "$(dirname "$0")/../.."
source tests/gpu/prepare.sh

rounds=20 all=(--epochs 20) grid=(--model odd) how=(--device cuda)
if [ "$DEVICE" = cpu ]; then
    RANKS=${RANKS:-4} rounds=2 all=(--epochs 2 --bytes 4096 65536) grid=(--model odd --kernels device-loop --sample 2)
    how=(--device cpu --kernels device-loop)
fi
RANKS=${RANKS:-$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')}
[ "$RANKS" -ge 2 ] || { echo "a node of at least two GPUs is needed: there are $RANKS"; exit 1; }
export NVIDIA_TF32_OVERRIDE=0 # float32 tokens are compared with transformers'

# First two ranks: where they do not meet, nothing else can. Then all, whose all-reduce is what tp costs.
step groups-2 180 "$PYTHON" -m orca_lab.groups --ranks 2 --device "$DEVICE" "${all[@]}"
[ "$RANKS" -le 2 ] || step "groups-$RANKS" 240 "$PYTHON" -m orca_lab.groups --ranks "$RANKS" --device "$DEVICE" "${all[@]}"
step tokens 600 "$PYTHON" tests/e2e/token_grid.py --device "$DEVICE" --ranks "$RANKS" "${grid[@]}"
step tokens-graphs 600 "$PYTHON" tests/e2e/token_grid.py --device "$DEVICE" --ranks "$RANKS" "${grid[@]}" --graphs-tp
step kills-tp 300 "$PYTHON" tests/e2e/kill_rounds.py --rounds "$rounds" --tp 2 --pp 1 --run-ahead 1 "${how[@]}"
step kills-graphs 300 "$PYTHON" tests/e2e/kill_rounds.py --rounds "$rounds" --tp 2 --pp 1 --run-ahead 1 --graphs-tp "${how[@]}"
step kills-pp 300 "$PYTHON" tests/e2e/kill_rounds.py --rounds "$rounds" --tp 1 --pp 2 --run-ahead 1 "${how[@]}"
[ "$RANKS" -lt 4 ] ||
    step kills-both 300 "$PYTHON" tests/e2e/kill_rounds.py --rounds "$rounds" --tp 2 --pp 2 --run-ahead 1 "${how[@]}"
exit $status
