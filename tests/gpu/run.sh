#!/usr/bin/env bash
# On a machine with a GPU: what only a GPU can show, the most important first. tests/gpu/run.py has the steps.
#
#   make gpu                     where `make setup` works; `make gpu-node` on a node of 2 to 8 GPUs
#   tests/gpu/run.sh             on a bare machine with Python 3.12, torch and transformers, and no network: it installs, into
#                                a folder of its own, the wheels that tests/gpu/fetch.sh left in .whl
#   tests/gpu/run.sh --node      the same, on a node of several GPUs
#   tests/gpu/run.sh --rehearse  without a GPU: each step with a small model
#
# Results go to $OUT (build/gpu): results.jsonl and log.
#
# **It has never run on a GPU.** docs/first-hour.md has the questions that it answers.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONUNBUFFERED=1
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile --no-cache-dir \
        --target "$site" .whl/*.whl
    # Our packages are where an editable install would find them.
    PYTHONPATH=$site:$("$PYTHON" -c '
import pathlib, tomllib
build = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["tool"]["hatch"]["build"]
print(":".join(str(pathlib.Path(folder).resolve()) for folder in build["dev-mode-dirs"]))')
    export PYTHONPATH
    export PYTEST_ADDOPTS="-W default" # the machine's versions are not ours
fi
"$PYTHON" tests/gpu/run.py "$@"
