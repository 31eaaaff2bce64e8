# `make` or `make help` lists the targets. The first target that needs it installs .venv. Nothing is installed into a
# .venv that is a link, or into another environment: VENV=DIRECTORY.

VENV ?= .venv
CONFIG ?= recipes/quickstart.yaml
NPROC ?=
ARGS ?=
PYTHON ?= python3
COUNT ?= 500
WORKERS ?= 2
PORT ?= 6006

BIN := $(VENV)/bin
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# pip compiles on one core, compileall on all; it continues after files of other versions of Python.
define install
@$(PIP) --no-compile --requirement $(1)
@$(BIN)/python -m compileall -q -j 0 -x /tests/ .venv/lib > /dev/null 2>&1 || true
endef

# Tests start many interpreters; with this, each would compile the modules again.
unexport PYTHONDONTWRITEBYTECODE

ifeq ($(VENV) $(shell test -L .venv && echo link),.venv )
RUN := .venv/run
DEV := .venv/dev
endif

.DEFAULT_GOAL := help
.PHONY: help install dev train test test-all test-cluster check format soak fuzz sweep bench board docs clean

help: ## List the targets.
	@echo "usage: make TARGET [VARIABLE=VALUE ...]"
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

install: $(RUN) ## Install .venv, which train does, too: for a login node.

dev: $(DEV) ## Install what check and test need, too, which they do.

# The trap lets the shell wait for the run after Ctrl-C, and make print no error: its exit code is then 130.
train: $(RUN) ## Train. CONFIG=recipes/quickstart.yaml NPROC=processes ARGS="key=value ..."
	@trap code=0 INT; $(BIN)/python -m lm.launch $(if $(NPROC),--nproc $(NPROC)) fsdp.py --config $(CONFIG) $(ARGS); \
	exit $${code:-$$?}

test: $(DEV) ## Run the quick tests: a smoke test of every promise. WORKERS=2 ARGS="-k name"
	@$(PYTEST) -m "not slow" $(ARGS)

test-all: $(DEV) ## Run all tests; CONTRIBUTING.md says how long.
	@$(PYTEST) $(ARGS)

test-cluster: $(DEV) ## Run the Determined tests; with DET_MASTER, DET_USER and DET_PASS: try that cluster.
	@$(BIN)/python -m pytest tests/determined$(if $(DET_MASTER),/test_live.py) $(ARGS)

check: $(DEV) ## Check formatting, lint, docstrings, types and shell scripts.
	@$(BIN)/ruff format --check --diff .
	@$(BIN)/ruff check .
	@$(BIN)/basedpyright
	@$(BIN)/shellcheck .ci/run launch/*.sh launch/*.sbatch

format: $(DEV) ## Format the code, and fix what lint can fix.
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

soak: $(DEV) ## Kill runs COUNT=500 times and compare what they end with.
	@$(BIN)/python -m tests.soak $(COUNT) $(ARGS)

fuzz: $(DEV) ## Load COUNT=500 checkpoints changed at random, with matching checksums.
	@$(BIN)/python -m tests.fuzz $(COUNT) $(ARGS)

sweep: $(DEV) ## Fail up to COUNT=500 file operations of each command with each error, then rerun it.
	@$(BIN)/python -m tests.sweep --count $(COUNT) $(ARGS)

bench: $(DEV) ## Measure work next to what else does it. ARGS="--only generation"
	@$(BIN)/python -m benchmarks.table $(ARGS)

board: $(RUN) ## Serve TensorBoard over runs/ on 127.0.0.1. PORT=6006
	@$(BIN)/python -c 'import torch_tb_profiler' 2> /dev/null || $(if $(RUN),$(PIP) torch-tb-profiler,true)
	@PYTHONWARNINGS=ignore::FutureWarning $(BIN)/tensorboard --logdir runs --host 127.0.0.1 --port $(PORT)

docs: $(RUN) ## Write docs/hyperparameters.md, the JSON Schema and docs/rooms.svg.
	@$(BIN)/python -m docs.hyperparameters
	@$(BIN)/python -m docs.rooms

clean: ## Delete .venv.
	rm -rf .venv

.venv/run: requirements.txt constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(sys.version_info < (3, 11) and f"$(PYTHON) is {v}, but Python 3.11 or newer is needed: make PYTHON=python3.12")'
	@echo "setting up .venv (once; PyTorch is large)"
	@$(PYTHON) -m venv .venv
	$(call install,requirements.txt)
	@touch $@

.venv/dev: .venv/run requirements-dev.txt
	$(call install,requirements-dev.txt)
	@touch $@
