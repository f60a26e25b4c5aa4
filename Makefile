# Everything a developer or CI runs. A fresh machine needs Python 3.11, make and a C++ compiler (g++).
# The system's own Python first: distributions and the images' base build theirs with profile-guided optimization, and it runs
# the services in three quarters of a plain build's time.
PYTHON ?= $(or $(shell for one in /usr/bin/python3 python3; do \
	$$one -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null && echo $$one && break; done),python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ROUNDS ?= 30
FUZZ ?= 600
INPUTS ?= 1000000
SEEDS ?= 300
SECONDS ?= 60
TREE ?= .
PART ?= kubernetes
# What judges the libraries that we keep, from outside: it changes with their versions.
TOOLS ?= tests/interop tests/endpoint/test_tools.py
# Seconds between two lines about the installation.
TELL ?= 10
# Tests wait for processes half of their time: five at a time on two cores took 7:06 on a quiet machine, four 7:31, six
# 7:46. A process takes a whole file, so that what a file's tests share is started once, and files in the order of
# tests/conftest.py.
WORKERS ?= 5
PYTEST = $(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -o tmp_path_retention_policy=failed
# All tests of these folders have targets of their own, and importing them takes its time, too.
ELSEWHERE = $(addprefix --ignore=tests/,hostile interop kubernetes)

# Where a process of the tests crashes, as in a thread of a library, pytest-xdist waits for ever for what it had left.
BOUNDED = timeout --foreground --signal=INT --kill-after=60 40m

# Bytecode is kept, whatever the shell says: hundreds of processes of the tests import the same modules.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo check kernels test again examples page alerts hostile test-kubernetes distributed stacks fuzz matrix takeovers long-run links sentinel restart overload soak lint audit docs
.PHONY: simulate mutations figures clients some-clients schemas load-tools bench bench-pool gpu gpu-node rehearse protos locks images push release package publish

help: ## Show this help.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { \
		line = sprintf("make %-16s", $$1); count = split($$2, words, " "); \
		for (n = 1; n <= count; n++) { \
			if (length(line " " words[n]) > 80) { print line; line = sprintf("%21s", "") } \
			line = line " " words[n] } \
		print line }' $(MAKEFILE_LIST)

setup: $(STAMP) ## Install everything into .venv; most other targets do this first.

# Installs locks/LIST.txt into the environment. BEFORE and AFTER pip come what a light installation needs.
LOCKED = locks/$(LIST).txt
define INSTALL
	@test ! -L $(VENV) || { echo "$(VENV) is a link: this would put this checkout into another one's environment. Remove it"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BEFORE)
	@echo "Installing into $(VENV), once: $(WHAT). This takes some minutes."
	@$(BIN)/pip install --disable-pip-version-check --progress-bar off --require-hashes $(DEPS) -r $(LOCKED) > $(VENV)/install.log 2>&1 & \
	pip=$$!; \
	while sleep $(TELL); kill -0 $$pip 2> /dev/null; do \
		printf '%s so far: %.60s\n' "$$(du -sh $(VENV) | cut -f1)" "$$(tail -n 1 $(VENV)/install.log)"; \
	done; \
	wait $$pip || { tail -n 20 $(VENV)/install.log; echo "All that pip said: $(VENV)/install.log"; exit 1; }
	$(AFTER)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@
endef

$(STAMP): LIST := all
$(STAMP): WHAT := torch and all that the tests need, about 6 GB
$(VENV)/.serves: LIST := serve
$(VENV)/.serves: WHAT := torch and all that serving needs, about 6 GB
# Without an NVIDIA GPU torch does without CUDA's big libraries.
LIGHT := services/worker/light_torch.py
$(VENV)/.serves-on-cpus: WHAT := torch and all that serving needs, about 1.7 GB
$(VENV)/.serves-on-cpus: LOCKED = $(VENV)/serve.txt
$(VENV)/.serves-on-cpus: DEPS := --no-deps
$(VENV)/.serves-on-cpus: BEFORE = $(BIN)/python $(LIGHT) lock locks/serve.txt > $(LOCKED)
$(VENV)/.serves-on-cpus: AFTER = $(BIN)/python $(LIGHT) link $(VENV)/lib/python3*/site-packages
$(VENV)/.documents: LIST := docs
$(VENV)/.documents: WHAT := what the documentation needs, without torch

$(STAMP): pyproject.toml locks/all.txt
	$(INSTALL)

$(VENV)/.serves $(VENV)/.serves-on-cpus: pyproject.toml locks/serve.txt
	$(INSTALL)

$(VENV)/.documents: pyproject.toml locks/docs.txt
	$(INSTALL)

# Who has installed everything needs no part of it.
part = $(if $(wildcard $(STAMP)),$(STAMP),$(VENV)/$(1))

demo: $(call part,$(if $(shell command -v nvidia-smi),.serves,.serves-on-cpus)) ## Serve the demo model, and show four requests that share iterations.
	$(BIN)/orca demo

check: lint kernels ## Lint, and run the tests of about a minute: all but those marked slow.
	$(PYTEST) -m 'not slow and not long and not kubernetes'

# A target whose failed tests, up to three, are run once more.
try-%:
	$(MAKE) $* || $(MAKE) again

# Tests run all instruction sets of the machine. On a fresh one each process would compile the kernels for itself.
kernels: $(STAMP) ## Compile the kernels of all instruction sets of this machine, where they are not yet.
	$(BIN)/python -c 'from orca_kernels.cpu.build import all_built; all_built(print)'

test: kernels ## Run all tests but those that need a cluster, and the long ones of the other targets.
	$(BOUNDED) $(PYTEST) -m 'not long and not kubernetes' $(ELSEWHERE)

again: $(STAMP) ## Run the tests that have just failed once more, alone, where they are three at most.
	$(BIN)/python tests/again.py

examples: $(STAMP) ## Run the examples, the pages' long blocks, their site, and TOOLS: h2spec, grpcurl, gRPC's interop cases. Node, Go, Java where they are.
	$(PYTEST) -m long tests/docs tests/e2e/test_several_models.py $(TOOLS)

# Debian's Chromium must be installed: apt-get install chromium. The rest is not kept in the repository.
page: $(STAMP) ## Look at the live page in Chromium: what moves, a killed rank, a chat, axe; pictures in build/page/shots.
	$(BIN)/python -m uv pip install --quiet --target build/page/python playwright==1.65.2
	npm pack --silent --pack-destination build/page axe-core@4.14.1 && tar -xzf build/page/axe-core-4.14.1.tgz -C build/page
	PYTHONPATH=build/page/python $(BIN)/pytest -m long tests/e2e/test_live_page.py

alerts: $(STAMP) ## See each alert of the chart fire and clear on a stack, where Debian's package prometheus is installed.
	$(BIN)/pytest -m 'long or not long' tests/e2e/test_alerts.py

hostile: $(STAMP) ## Attack an endpoint from one host, at its door and through nginx and HAProxy where they are installed.
	$(BIN)/pytest tests/hostile

# Run it where the cluster's Services can be reached, as on a node. PART=ci is a part of some minutes, PART=pauses the table at two engines.
test-kubernetes: $(STAMP) ## Run the tests on KUBECONFIG's cluster, with the images REGISTRY/orca-*:TAG.
	IMAGE_REGISTRY=$(REGISTRY) IMAGE_TAG=$(TAG) $(BIN)/pytest -m '$(PART)'

distributed: stacks ## Run all of what `make test` samples: those of `make stacks`, tokens of 400 checkpoints, and larger numbers of other tests; SCHEMAS=5000.
	$(BIN)/pytest -n 3 --dist worksteal -m long tests/worker tests/kernels tests/helm tests/lab tests/bench \
		tests/e2e/test_sweep.py tests/e2e/test_roles.py tests/endpoint/test_schemas.py tests/gpu/test_scripts.py::test_groups_are_timed

stacks: $(STAMP) ## Run whole stacks: tokens of every tp x pp, SAMPLE=48 of them; ROUNDS=30 of killed and frozen ranks in each of six layouts, and of engines with roles in two.
	$(BIN)/python tests/e2e/token_grid.py $(if $(SAMPLE),--sample $(SAMPLE))
	$(BIN)/python tests/e2e/kill_rounds.py --rounds $(ROUNDS)
	$(BIN)/python tests/e2e/kill_rounds.py --rounds $(ROUNDS) --tp 1 --pp 3 --run-ahead 1 --policy balanced,positions=9,prefix=tenant --slots 112
	$(BIN)/python tests/e2e/kill_rounds.py --rounds $(ROUNDS) --tp 1 --pp 2 --dtype bfloat16 --policy paper
	$(BIN)/python tests/e2e/kill_rounds.py --rounds $(ROUNDS) --run-ahead 1 --kernels device-loop
	$(BIN)/python tests/e2e/kill_rounds.py --rounds $(ROUNDS) --forms --policy drafts=ngram
	$(BIN)/python tests/e2e/kill_rounds.py --rounds $(ROUNDS) --pp 1 --family llama --kv-dtype int8 --policy balanced,positions=9,prefix=tenant --slots 112
	$(BIN)/python tests/e2e/role_rounds.py --rounds $(ROUNDS) --tp 2
	$(BIN)/python tests/e2e/role_rounds.py --rounds $(ROUNDS) --pp 2 --skip $(ROUNDS)

simulate: $(STAMP) ## Simulate endpoints, schedulers and clients on a pool with faults: SEEDS=300, FIRST=0.
	$(BIN)/python tests/simulator/simulate.py --seeds $(SEEDS) --first $(or $(FIRST),0)

mutations: $(STAMP) ## Break rules one line at a time, and see that the tests find it: ONLY=words, SAMPLE=20 by chance, BY=tests; an hour for all.
	$(BIN)/python tests/mutations/run.py --only "$(ONLY)" --sample $(or $(SAMPLE),0) --by "$(BY)"

fuzz: $(STAMP) ## Fuzz each parser that takes bytes from outside: INPUTS=1000000, FUZZ=600 seconds at most; draw all examples of property tests. `make test` has a part.
	$(BIN)/python tests/fuzz/run.py --seconds $(FUZZ) --count $(INPUTS)
	EXAMPLES=all $(PYTEST) -m 'not long' $(shell grep -rlE --include='test_*.py' 'properties import|[^_]ways\(\)' tests)

matrix: $(STAMP) ## Kill every process at every moment of a request's life, ROUNDS=30 times each.
	$(BIN)/python tests/e2e/kill_matrix.py --rounds $(ROUNDS)

takeovers: $(STAMP) ## Stop and kill schedulers and stop Redis under load, ROUNDS=30 times each.
	$(BIN)/python tests/e2e/takeovers.py --rounds $(ROUNDS)

# It goes on where an earlier run with this FILE has ended.
long-run: $(STAMP) ## Streams over all features while every role is killed and frozen: 10,000 and 1,000, MINUTES=60 at most for each of two models; FILE=build/long-run.jsonl.
	for phase in decoder encoder; do $(BIN)/python tests/e2e/long_run.py $(or $(FILE),build/long-run.jsonl) \
		--phase $$phase --seconds $$(($(or $(MINUTES),60) * 60)) || exit 1; done

sentinel: $(STAMP) ## Kill the primary of a Redis with a replica and Sentinels under load, ROUNDS=30 times, without WAITAOF and with it.
	$(BIN)/python tests/e2e/failovers.py --rounds $(ROUNDS)

links: $(STAMP) ## As root: cut each link between machines for 1, 5 and 30 s in each direction, ROUNDS=30 times.
	$(BIN)/python tests/e2e/link_cuts.py --rounds $(ROUNDS)

restart: $(STAMP) ## Restart every process of a stack under 40 streams: no client sees an error.
	$(BIN)/python tests/e2e/rolling_restart.py

overload: $(STAMP) ## Five times the load that a stack can serve, SECONDS=60, with deadlines and without: goodput, RetryInfo, recovery, memory.
	$(BIN)/python tests/e2e/overload.py --seconds $(SECONDS)

soak: $(STAMP) ## 20 minutes at 80 % of what a stack can serve: does memory grow once the bounded stores are full?
	$(BIN)/python tests/e2e/soak.py

lint: $(STAMP) ## Check format, style, spelling, the English of changed lines, and types.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell
	$(BIN)/python tests/english.py
	$(BIN)/pyright

audit: $(STAMP) ## Ask for known weaknesses of all that is installed. Needs the service that pip-audit asks.
	$(BIN)/python -m uv tool run pip-audit --strict --require-hashes --disable-pip -r locks/all.txt

docs: $(call part,.documents) ## Build the documentation; a broken link is an error.
	$(BIN)/mkdocs build --strict

# The benchmark comes from this checkout, the code that it measures from TREE.
figures: $(STAMP) ## Simulate the paper's figures again, into docs/pictures/lab: ten minutes.
	for figure in 9 10 11; do $(BIN)/orca lab figure $$figure --simulated --full --out docs/pictures/lab || exit 1; done
	$(BIN)/orca lab claims --out docs/pictures/lab > docs/pictures/lab/claims.md

bench: $(STAMP) ## Measure the control plane's CPU time; TREE=FOLDER measures the code of another checkout.
	PYTHONPATH=$(shell printf '%s:' $(wildcard $(addprefix $(realpath $(TREE))/,protos services/* kernels client lab local))) \
		$(BIN)/python -m orca_bench.control_plane

# With the package indexes, and Node.js. uv gives each script in Python the packages that it names, in an environment of its own.
CLIENTS = build/clients
clients: $(STAMP) ## Run clients of others, unmodified, against an endpoint, and make docs/clients.md of what they send: ONLY=NAMES.
	mkdir -p $(CLIENTS) && cp tests/clients/package.json $(CLIENTS)
	cd $(CLIENTS) && npm install --silent --no-package-lock --no-fund --no-audit
	cd $(CLIENTS) && ../../$(BIN)/python ../../tests/clients/served.py . ../../docs/clients.md $(ONLY)

SOME := ollama llm instructor pydantic_ai
some-clients: $(STAMP) ## Run four of them, of different kinds, which install fast, where they can be installed.
	mkdir -p $(CLIENTS)
	@for one in $(SOME); do \
		$(BIN)/python -m uv sync --quiet --script tests/clients/$${one}_client.py || \
			{ echo "skipped: clients of others, because uv cannot install $$one"; exit 0; }; \
	done; \
	cd $(CLIENTS) && ../../$(BIN)/python ../../tests/clients/served.py . ../../docs/clients.md $(SOME:=.py)

schemas: $(STAMP) ## Try the schemas of MCP servers' tools and of types of zod and pydantic, and make their table in docs/clients.md: ONLY=NAMES.
	mkdir -p $(CLIENTS) && cp tests/clients/package.json $(CLIENTS)
	cd $(CLIENTS) && npm install --silent --no-package-lock --no-fund --no-audit
	cd $(CLIENTS) && ../../$(BIN)/python ../../tests/clients/other_schemas.py . ../../docs/clients.md $(ONLY)

# URL: a server of the demo model on a quiet machine, as of `orca serve`.
load-tools: $(STAMP) ## Load tools of others beside `orca bench serve`, on the same load: URL=http://127.0.0.1:8000, VLLM=PYTHON with vLLM's bench.
	$(BIN)/python tests/clients/load_tools.py $(or $(URL),http://127.0.0.1:8000) local/orca_local/demo_model $(VLLM)

bench-pool: $(STAMP) ## Measure Redis under 1 to 1,000 engines that compute nothing.
	$(BIN)/python -m orca_bench.pool

# A borrowed machine with a GPU has no network: run tests/gpu/fetch.sh here, then tests/gpu/run.sh there.
gpu: $(STAMP) ## On a machine with a GPU: run its tests, and measure the times of lab/benchmarks.md.
	PYTHON=$(BIN)/python tests/gpu/run.sh

rehearse: $(STAMP) ## Run the steps for GPUs on a CPU, each with a small model, and once as on a bare machine; ten minutes.
	$(BIN)/pytest -m long tests/gpu

gpu-node: $(STAMP) ## On a node of 2 to 8 GPUs: all-reduces, 20 re-formations, killed ranks, tokens of tp x pp.
	PYTHON=$(BIN)/python tests/gpu/run.sh --node

protos: $(STAMP) ## Generate the Python of protos/ again.
	$(BIN)/python protos/generate.py

# What is installed, by hashes of its files, for each image and for a developer. Versions are those of constraints.txt.
LOCK = $(BIN)/python -m uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
	--no-emit-index-url --custom-compile-command 'make locks' -c constraints.txt pyproject.toml

locks: ## Make locks/*.txt again, after a change of pyproject.toml or constraints.txt.
	$(foreach extra,endpoint scheduler worker all,$(LOCK) --extra $(extra) -o locks/$(extra).txt &&) true
	$(foreach extra,serve docs,$(LOCK) --extra $(extra) --extra editable -o locks/$(extra).txt &&) true

IMAGES := endpoint scheduler worker
RELEASED = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
BUILDER ?= $(shell for name in docker buildah; do command -v $$name && break; done)
BUILD ?= $(BUILDER) build
TAG ?= dev
DEVICE ?= cuda

images: $(IMAGES:%=image-%) ## Build the images: TAG=dev, DEVICE=cuda or cpu, BUILDER=docker or buildah, BASE=IMAGE, TORCH_INDEX=URL.

image-worker: ARGUMENTS = --build-arg DEVICE=$(DEVICE) $(if $(TORCH_INDEX),--build-arg TORCH_INDEX=$(TORCH_INDEX) \
	--build-arg TORCH_SHA256=$(TORCH_SHA256))
image-%:
	$(BUILD) -f services/$*/Dockerfile -t orca-$*:$(TAG) $(if $(BASE),--build-arg BASE=$(BASE)) $(ARGUMENTS) \
		--label org.opencontainers.image.version=$(RELEASED) \
		--label org.opencontainers.image.revision=$(shell git describe --always --abbrev=40 --exclude '*' --dirty) .

push: $(IMAGES:%=push-%) ## Push the images of TAG: make push REGISTRY=HOST/PATH. PUSH=PROGRAM is called with each image instead.

push-%:
	$(if $(REGISTRY)$(PUSH),,$(error say where to: make push REGISTRY=HOST/PATH))
	$(if $(PUSH),$(PUSH) localhost/orca-$*:$(TAG),\
		$(BUILDER) tag orca-$*:$(TAG) $(REGISTRY)/orca-$*:$(TAG) && $(BUILDER) push $(REGISTRY)/orca-$*:$(TAG))

release: $(STAMP) ## Move every version to VERSION=0.2.0, commit, and tag. The tree must be clean.
	$(BIN)/python release/version.py $(VERSION)

package: TAG = $(RELEASED)$(if $(filter cpu,$(DEVICE)),-cpu)
package: $(STAMP) images ## Pack the wheel, the images with their SBOMs, and the chart into build/release: DEVICE=cuda or cpu.
	PYTHON=$(BIN)/python release/package.sh $(RELEASED) $(TAG)

publish: ## Push what `make package` has packed: make publish REGISTRY=HOST/PATH, PLAIN_HTTP=yes for one without TLS, IMAGES_ONLY=yes.
	$(if $(REGISTRY),,$(error say where to: make publish REGISTRY=HOST/PATH))
	release/publish.sh $(REGISTRY)
