# The two commands to start with are `make train` and `make test`; each sets up .venv first.
#
#   make train [CONFIG=recipes/quickstart.yaml] [NPROC=...] [ARGS="max_steps=600 ..."]
#   make test  [ARGS="-k name"]
#   make test-cluster   what a trial does on a cluster; with DET_MASTER, DET_USER and DET_PASS also on that one
#   make check     formatting, lint, types, shell scripts
#   make soak [COUNT=500]   kill runs again and again, and compare what they end with
#   make bench     speed and memory beside reference loops, ours compiled (ARGS="--sweep ... key=value ...")
#   make board     TensorBoard over runs/, curves and traces, on this machine only
#   make docs      write the hyperparameters' table and schema anew

CONFIG ?= recipes/quickstart.yaml
NPROC ?=
ARGS ?=
PYTHON ?= python3
COUNT ?= 500
PORT ?= 6006

BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: train test test-cluster check soak bench board docs clean

train: .venv/run
	@$(BIN)/python -m lm.launch $(if $(NPROC),--nproc $(NPROC)) fsdp.py --config $(CONFIG) $(ARGS)

test: .venv/dev
	@$(BIN)/python -m pytest $(ARGS)

test-cluster: .venv/dev
	@$(BIN)/python -m pytest tests/cluster $(ARGS)

check: .venv/dev
	@$(BIN)/ruff format --check --diff .
	@$(BIN)/ruff check .
	@$(BIN)/basedpyright
	@$(BIN)/shellcheck .ci/run launch/*

soak: .venv/dev
	@$(BIN)/python -m tests.soak $(COUNT) $(ARGS)

bench: .venv/dev
	@$(BIN)/python -m benchmarks.throughput $(ARGS)

board: .venv/run
	@$(BIN)/python -c 'import torch_tb_profiler' 2> /dev/null || $(PIP) torch-tb-profiler
	@PYTHONWARNINGS=ignore::FutureWarning $(BIN)/tensorboard --logdir runs --host 127.0.0.1 --port $(PORT)

docs: .venv/run
	@$(BIN)/python -m lm.config --write

clean:
	rm -rf .venv

.venv/run: requirements.txt constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	@echo "setting up .venv (once; PyTorch is large)"
	@$(PYTHON) -m venv .venv
	@$(PIP) --requirement requirements.txt
	@touch $@

.venv/dev: .venv/run requirements-dev.txt
	@$(PIP) --requirement requirements-dev.txt
	@touch $@
