# The verbs of this house. `make setup` first; then `make demo` starts a service with a small real model.
PYTHON ?= python3
VENV ?= .venv
PORT ?= 8377
STATE ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check --no-input
HASHES := --require-hashes --only-binary :all:
# One thread for models in tests: two on a busy two-core machine are far slower than one.
TEST_ENV := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1
TESTS ?= tests/unit tests/integration tests/acceptance

.PHONY: help setup setup-dev fetch demo test lint bench proof golden-device lock clean
.DEFAULT_GOAL := help

help:
	@echo "make setup   what Relevo needs: a private Python environment, native libraries, the demo model"
	@echo "make demo    setup, then a service with the demo model (PORT=$(PORT), STATE=folder)"
	@echo "make test    unit, integration and acceptance tests"
	@echo "make lint    style, types and the borders between the rooms"
	@echo "make bench   measurements; they never fail a build"
	@echo "make proof   everything too long for every commit"
	@echo "make golden-device   plan the golden models on this machine's GPU, and keep the figures as a fixture (LIBRARIES=folder)"
	@echo "make lock    pin the newest versions of what requirements/*.in name"
	@echo "make clean   remove the environment and what tools left behind (fetched files stay in the user's cache)"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "error: Python 3.11 or newer is needed, but $(PYTHON) is $$($(PYTHON) --version 2>&1 || echo not there). Name another: make setup PYTHON=python3.12" >&2; exit 1; }
	@echo "Making a Python environment in $(VENV) ..."
	@$(PYTHON) -m venv $(VENV) || { echo "error: $(PYTHON) cannot make an environment. On Debian: apt install python3-venv" >&2; exit 1; }

# Dependencies are exactly the locked files, whatever index a machine's pip uses; the stamps make a second run quick.
$(VENV)/stamp-run: requirements/run.txt | $(BIN)/python
	@[ -e $(VENV)/stamp-dev ] || { echo "Installing dependencies ..." && $(PIP) install $(HASHES) -r requirements/run.txt; }
	@touch $@

$(VENV)/stamp-dev: requirements/dev.txt | $(BIN)/python
	@echo "Installing dependencies and the tools for tests ..."
	@$(PIP) install $(HASHES) -r requirements/dev.txt
	@touch $@

$(VENV)/stamp-relevo: pyproject.toml $(VENV)/stamp-run
	@echo "Installing Relevo from this folder ..."
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

fetch: $(VENV)/stamp-relevo
	@$(BIN)/python -m relevo.setup

setup: fetch
	@echo "Ready: $(BIN)/relevo"

setup-dev: $(VENV)/stamp-dev $(VENV)/stamp-relevo
	@$(BIN)/python -m relevo.setup --quiet

demo: fetch
	@exec $(BIN)/relevo serve --demo --port $(PORT) $(if $(STATE),--state "$(STATE)")

test: setup-dev
	@$(TEST_ENV) $(BIN)/python -m pytest $(TESTS)

lint: $(VENV)/stamp-dev $(VENV)/stamp-relevo
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check . || { echo "error: run $(BIN)/ruff format ." >&2; exit 1; }
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

$(VENV)/stamp-bench: requirements/bench.txt $(VENV)/stamp-dev
	@echo "Installing what the benchmarks compare with ..."
	@$(PIP) install $(HASHES) -r requirements/bench.txt
	@touch $@

# BENCH_ARGS="engine pause" names cases, --quick only shows that they run.
bench: setup-dev $(VENV)/stamp-bench
	@$(BIN)/python -m bench $(BENCH_ARGS)

proof: setup-dev
	@$(TEST_ENV) RELEVO_PROOF=1 $(BIN)/python -m pytest -m proof --timeout 3600 tests

# Nothing is loaded or computed: a software Vulkan device does (GGML_VK_VISIBLE_DEVICES=0 makes ggml take it).
golden-device: setup-dev
	@$(BIN)/python -m tests.golden.device_figures $(if $(LIBRARIES),--libraries "$(LIBRARIES)")

lock:
	@$(PYTHON) -m venv build/lock && build/lock/bin/python -m pip install --quiet --disable-pip-version-check pip-tools
	@cd requirements && for name in run dev bench; do \
	  echo "Pinning $$name.in ..." && CUSTOM_COMPILE_COMMAND="make lock" ../build/lock/bin/pip-compile --quiet --upgrade --generate-hashes \
	    --allow-unsafe --strip-extras --no-emit-index-url --no-emit-find-links --no-emit-trusted-host --output-file $$name.txt $$name.in || exit 1; done

clean:
	@rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@find src tests bench -name __pycache__ -type d -prune -exec rm -rf {} +
