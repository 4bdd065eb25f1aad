# Everything a user or a contributor runs. Each target sets up what it needs, once, in .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SITE_STAMP := $(VENV)/.site-installed
# More options for pip, for example an index that holds the CPU build of torch.
PIP_ARGS ?=
# With a working NVIDIA driver torch comes with CUDA; without one a pinned torch is used (CPU build).
GPU := $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU')
CONSTRAINTS := $(if $(filter-out 0,$(GPU)),constraints.txt,constraints-cpu.txt)
# One thread for each test process: several torch threads on busy cores are many times slower than one.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q
WORKERS ?= -n auto --maxprocesses 8

.PHONY: help setup demo test test-slow test-integrations test-gpu lint format types docs site wheel check clean
.DEFAULT_GOAL := help

help: ## this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1|/' | awk -F'|' '{printf "make %-10s %s\n", $$1, $$2}'

$(STAMP): pyproject.toml constraints.txt constraints-cpu.txt
	@command -v $(PYTHON) >/dev/null || { echo "Python is missing: sudo apt install python3 python3-venv python3-dev g++" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Shoal needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) -V): sudo apt install python3.11 python3.11-venv, then make PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "Python's venv module is missing: sudo apt install python3-venv" >&2; exit 1; }
	@command -v c++ >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null || \
	  echo "note: no C++ compiler, so torch.compile cannot be used on the CPU: sudo apt install g++" >&2
	@$(PYTHON) -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' || \
	  echo "note: no Python headers, so torch.compile cannot be used on the CPU: sudo apt install python3-dev" >&2
	@echo "Setting up $(VENV) with $(CONSTRAINTS) (once) ..."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c $(CONSTRAINTS) -e '.[dev]'
	@touch $@

setup: $(STAMP) ## make the virtual environment .venv and install everything (the others do it too)

demo: $(STAMP) ## train 64 small networks alone and packed, and compare
	$(BIN)/shoal demo

test: $(STAMP) ## the fast tests (those of the documentation are in make check)
	$(PYTEST) $(WORKERS) -m "not slow and not gpu and not docs and not integrations"

test-slow: $(STAMP) ## the long tests and those that measure time
	$(PYTEST) -m "slow and not gpu"

test-integrations: $(STAMP) ## the tests against other libraries: loggers, metrics, transformers, Optuna's storages
	$(PYTEST) tests/integrations

test-gpu: $(STAMP) ## the tests that need a CUDA device
	$(PYTEST) -m gpu

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP) ## let ruff fix and format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP)
	$(BIN)/mypy

docs: $(STAMP) ## run the Python blocks of the documentation and the examples
	$(PYTEST) $(WORKERS) -m docs

$(SITE_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c $(CONSTRAINTS) -e '.[site]'
	@touch $@

site: $(SITE_STAMP) ## build the documentation site into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "built site/index.html; to read it: $(BIN)/python -m http.server --directory site"

wheel: $(STAMP) ## build dist/shoal-*.whl
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check $(PIP_ARGS) --no-deps --wheel-dir dist .

check: lint types docs ## everything a contributor runs before a commit, the tests aside

clean: ## remove the virtual environment and all caches
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
