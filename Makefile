# Everything a developer or CI runs. A fresh machine needs Python 3.11, make and a C compiler.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup demo test distributed gpu lint protos bench
ROUNDS ?= 30
setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[all]'
	touch $@

demo: $(STAMP)
	$(BIN)/orca demo

test: $(STAMP)
	$(BIN)/pytest

# All of what `make test` samples: tokens of every tp x pp, and rounds of killed and frozen ranks.
distributed: $(STAMP)
	$(BIN)/python tests/e2e/token_grid.py
	$(BIN)/python tests/e2e/kill_rounds.py --rounds $(ROUNDS)
	$(BIN)/python tests/e2e/kill_rounds.py --rounds $(ROUNDS) --tp 1 --pp 3 --run-ahead 1

# On a machine with a GPU: the tests that need it, and the times of lab/benchmarks.md. A borrowed one has no network:
# tests/gpu/fetch.sh here, then tests/gpu/run.sh there.
gpu: $(STAMP)
	PYTHON=$(BIN)/python tests/gpu/run.sh

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

protos: $(STAMP)
	$(BIN)/python protos/generate.py

bench: $(STAMP)
	$(BIN)/python -m orca_bench.control_plane
