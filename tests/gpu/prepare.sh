# For run.sh and node.sh, which source it: where results go, Python and its path, and the device.
#
#   DEVICE=cuda   the GPUs of this machine
#   DEVICE=cpu    a rehearsal without one: each step runs with a small model, plain torch and gloo, and tests are collected
OUT=$(realpath -m "${OUT:-build/gpu}")
DEVICE=${DEVICE:-cuda}
export OUT PYTHONUNBUFFERED=1 PYTHONPATH=
mkdir -p "$OUT"
rm -f "$OUT/steps.jsonl"
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

status=0
# step NAME SECONDS COMMAND..
step() {
    local name=$1 seconds=$2
    shift 2
    [ "$DEVICE" = cuda ] || seconds=$((10 * seconds)) # a bound of a GPU says nothing here
    "$PYTHON" tests/gpu/step.py "$name" "$seconds" "$@" || status=1
}

# tests NAME SECONDS ARGUMENTS..: of pytest
tests() {
    local name=$1 seconds=$2
    shift 2
    [ "$DEVICE" = cuda ] || set -- "$@" --collect-only -q
    step "$name" "$seconds" "$PYTHON" -m pytest "$@" -rs -p no:cacheprovider --durations=5 "${warnings[@]}"
}
