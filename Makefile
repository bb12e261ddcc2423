# Two commands for a newcomer: `make demo` and `make test`. Both share one .venv, made on first use.
PYTHON  ?= python3
VENV    := .venv
BIN     := $(VENV)/bin
SERVERS := .venv-servers
OLDEST  := .venv-oldest
FRAMEWORKS ?= $(notdir $(patsubst %/requirements.txt,%,$(wildcard tests/frameworks/*/requirements.txt)))

.PHONY: check test test-slow test-oldest test-frameworks test-gpu soak demo demo-s3 bench docs clean
.DEFAULT_GOAL := test
unexport PYTHONDONTWRITEBYTECODE  # without bytecode, imports and assert rewriting take a third of the time
test test-slow: export OMP_NUM_THREADS = 1  # all cores are in use already; more threads of torch would spin

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "torch==2.13.0"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --editable ".[dev]"
	touch $@

$(SERVERS)/.ready: tests/servers/requirements.txt tests/servers/constraints.txt  ## stores for the tests
	$(PYTHON) -m venv $(SERVERS)
	$(SERVERS)/bin/python -m pip install --quiet --disable-pip-version-check \
	    -c tests/servers/constraints.txt -r tests/servers/requirements.txt
	touch $@

$(VENV)/.docs: $(VENV)/.ready docs/requirements.txt  ## mkdocs, which nothing else needs
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r docs/requirements.txt
	touch $@

check: $(VENV)/.ready  ## ruff, mypy strict, import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: $(VENV)/.ready $(SERVERS)/.ready  ## under 8 minutes on 2 cores; nothing runs beside a simulated cluster
	$(BIN)/python -m pytest -m "cluster and not slow" tests/cluster
	$(BIN)/python -m pytest -m "not cluster and not slow" --ignore tests/cluster --ignore tests/fault \
	    --numprocesses 3 --dist loadfile --no-loadscope-reorder

test-slow: $(VENV)/.ready $(SERVERS)/.ready  ## faults on real Ray that take minutes, a minute of random schedules
	sh tests/servers/debian.sh $(SERVERS)/debian
	$(BIN)/python -m pytest -m slow
	RAY_CKPT_ALL_EXAMPLES=1 $(BIN)/python -m pytest -m "hypothesis and not slow"

$(OLDEST)/.ready: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-oldest.txt torch
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-oldest.txt \
	    --editable ".[all]" duckdb hypothesis megatron-core pytest pytest-timeout pytest-xdist safetensors torchdata
	touch $@

test-oldest: $(OLDEST)/.ready $(SERVERS)/.ready  ## quick tests of the rooms that call other packages, with the oldest allowed
	$(OLDEST)/bin/python -m pytest -m "not cluster and not slow" --numprocesses auto --maxprocesses 4 --dist loadfile \
	    tests/analysis tests/capture tests/catalog tests/cli tests/format tests/restore tests/storage tests/train \
	    tests/trainer tests/transport tests/verify

# Each framework pins packages that clash with those of the others. Torch comes first, so that no package takes another.
.venv-frameworks/%/.ready: tests/frameworks/%/requirements.txt pyproject.toml
	$(PYTHON) -m venv .venv-frameworks/$*
	.venv-frameworks/$*/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "torch==2.13.0"
	.venv-frameworks/$*/bin/python -m pip install --quiet --disable-pip-version-check \
	    -r tests/frameworks/$*/requirements.txt --editable . hypothesis pytest pytest-timeout pytest-xdist
	test ! -f tests/frameworks/$*/no-deps.txt || .venv-frameworks/$*/bin/python -m pip install --quiet \
	    --disable-pip-version-check --no-deps --no-build-isolation -r tests/frameworks/$*/no-deps.txt
	touch $@
# The Python part of vLLM: no compiled code, nor the optional one in Rust. pip refuses the version "0.30.0+empty".
.venv-frameworks/vllm/.ready: export VLLM_TARGET_DEVICE := empty
.venv-frameworks/vllm/.ready: export VLLM_VERSION_OVERRIDE := 0.30.0
.venv-frameworks/vllm/.ready: export CARGO := false

.PHONY: $(FRAMEWORKS:%=test-framework-%)
$(FRAMEWORKS:%=test-framework-%): test-framework-%: .venv-frameworks/%/.ready
	RAY_CKPT_FRAMEWORK=$* .venv-frameworks/$*/bin/python -m pytest tests/frameworks/$*

test-frameworks: $(FRAMEWORKS:%=test-framework-%)  ## trainers with packages that clash, one environment each; FRAMEWORKS=deepspeed for one

test-gpu: $(VENV)/.ready  ## with a CUDA device, in an environment whose torch has CUDA: VENV names it
	RAY_CKPT_GPU=1 $(BIN)/python -m pytest tests/gpu

SECONDS ?= 600
SEED    ?=
soak: $(VENV)/.ready  ## real processes and nodes killed one after another, for SECONDS; SEED replays the order
	$(BIN)/python -m tests.fault.soak --seconds $(SECONDS) $(if $(SEED),--seed $(SEED))

demo: $(VENV)/.ready  ## train, kill a node, resume, compare bit for bit
	$(BIN)/python -m jobs.demo

demo-s3: $(VENV)/.ready  ## train with S3, lose the whole cluster, go on from the bucket, compare bit for bit
	$(BIN)/python -m jobs.demo.s3

docs: $(VENV)/.docs  ## the documentation, as a site in site/; nothing is downloaded
	$(BIN)/python -m mkdocs build --strict

SIZE  ?= 2GiB
PEERS ?= --peers
bench: $(VENV)/.ready $(SERVERS)/.ready  ## speed in numbers, each beside its limit and beside peers; half an hour, PEERS= leaves them out
	$(BIN)/python -m jobs.bench.peers.environments
	mkdir -p bench-out
	$(BIN)/python -m jobs.bench --size $(SIZE) $(PEERS) \
	    --json bench-out/results.json --plot bench-out/results.png --results bench-out/RESULTS.md

clean:
	rm -rf $(VENV) $(SERVERS) $(OLDEST) .venv-peers .venv-frameworks .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis build *.egg-info demo-out bench-out site
