# The two commands to start with are `make train` and `make test`; each sets up .venv first.
#
#   make train [CONFIG=recipes/quickstart.yaml] [NPROC=...] [ARGS="max_steps=600 ..."]
#   make test  [ARGS="-k name"]
#   make check     formatting, lint, types
#   make soak [COUNT=500]   kill runs again and again, and compare what they end with
#   make board     TensorBoard over runs/, on this machine only
#   make docs      write the hyperparameters' table and schema anew

CONFIG ?= recipes/quickstart.yaml
NPROC ?=
ARGS ?=
PYTHON ?= python3
COUNT ?= 500
PORT ?= 6006

BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: train test check soak board docs clean

train: .venv/run
	@$(BIN)/python -m lm.launch $(if $(NPROC),--nproc $(NPROC)) fsdp.py --config $(CONFIG) $(ARGS)

test: .venv/dev
	@$(BIN)/python -m pytest $(ARGS)

check: .venv/dev
	@$(BIN)/ruff format --check --diff .
	@$(BIN)/ruff check .
	@$(BIN)/basedpyright

soak: .venv/dev
	@$(BIN)/python -m tests.soak $(COUNT) $(ARGS)

board: .venv/run
	@$(BIN)/tensorboard --logdir runs --host 127.0.0.1 --port $(PORT)

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
