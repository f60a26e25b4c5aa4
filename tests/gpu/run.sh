#!/usr/bin/env bash
# On a machine with a GPU: the tests that need one, the times of kernels and of shards. Results go to $OUT (build/gpu):
# a log of each step, and a line of steps.jsonl, which names torch, Triton, the driver and the GPU.
#
#   make gpu                     where `make setup` works
#   tests/gpu/run.sh             on a bare machine with Python 3.12, torch and transformers, and no network: it installs, into
#                                a folder of its own, the wheels that tests/gpu/fetch.sh left in .whl
#   DEVICE=cpu tests/gpu/run.sh  a rehearsal without a GPU
#
# Ten minutes: every step has its bound, which it should not need, and these add up to 600 s. What is there counts when a
# later step fails. Other models: python -m orca_lab.shards --model gpt3-341b --device cuda.
#
# **It has never run on a GPU.** docs/first-hour.md has the questions that it answers.
set -uo pipefail
cd "$(dirname "$0")/../.."
source tests/gpu/prepare.sh

half=float16 model=gpt3-13b wide=(--batch 1 8 32 --prompt 128 512)
kernels=(--model gpt3-13b --dtype float16) big=175b
if [ "$DEVICE" = cpu ]; then
    half=float32 model=gpt2-124m wide=(--batch 1 --prompt 8 --repetitions 1)
    kernels=(--device cpu --model gpt2-124m --dtype float32 --batch 2 --context 20 --prompt 8) big=
    export TRITON_INTERPRET=1 # of the kernels' times; the other steps launch none
fi
shards() {
    step "$1" 45 "$PYTHON" -m orca_lab.shards --device "$DEVICE" --json "$OUT/$1.json" "${@:2}"
}

# 0 to 1 minute: imports, the kernels' own test, one small model captured in graphs, one token.
shards first --model gpt2-124m --dtype float32 --batch 1 --prompt 8 --repetitions 2
# 1 to 4: kernels, the loop, graphs. Without them no token is right. Hundreds of kernels compile, so by twelve.
tests kernels 200 tests/kernels/triton_kernels tests/gpu/test_triton.py tests/gpu/test_graphs.py -n 12
# 4 to 6: what graphs are worth: a whole 13B, replayed and launched kernel by kernel. "host": until an iteration is launched.
for graphs in "" --no-graphs; do
    shards "graphs$graphs" --model $model --dtype $half "${wide[@]}" $graphs
done
# 6 to 7: kernels and matrix products against their floors.
step times 45 "$PYTHON" -m orca_lab.cuda_kernels "${kernels[@]}"
# 7 to 9: whole stacks, also one iteration ahead.
tests stacks 130 tests/gpu/test_cuda.py
[ -z "$big" ] || shards "shards-$big" --model "gpt3-$big" --batch 1 8 32 --prompt 32 128
# 9 to 10: a sample under the memory checker, which is a hundred times slower.
if [ "$DEVICE" = cpu ] || command -v compute-sanitizer > /dev/null; then
    checker=(compute-sanitizer --tool memcheck --error-exitcode 9)
    [ "$DEVICE" = cuda ] || checker=()
    step memcheck 45 "${checker[@]}" "$PYTHON" -m orca_lab.shards --device "$DEVICE" --model gpt2-124m --dtype float32 \
        --batch 2 --prompt 8 --repetitions 1
fi
exit $status
