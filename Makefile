# Every target builds its own environment in .venv from requirements.lock; nothing else is needed.
PYTHON ?= python3
ARGS ?=
BIN := .venv/bin
# Two processes suit two cores; a module's tests stay in one, and TensorFlow starts once in each.
PYTEST := $(BIN)/python -m pytest --backends keras,torch -n 2 --dist loadfile
# Pyright would ask the network for a newer version of itself at every run.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.DEFAULT_GOAL := help
.PHONY: help parity test test-fast check bench bench-full bench-report build clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

parity: .venv/.stamp ## Show that the two frameworks agree; ARGS="..." goes to `isobatch parity`
	@$(BIN)/isobatch parity $(ARGS)

test: .venv/.stamp ## Run all tests and docstring examples; ARGS="..." goes to pytest
	$(PYTEST) $(ARGS)

test-fast: .venv/.stamp ## Leave out the slow tests
	$(PYTEST) -m "not slow" $(ARGS)

check: .venv/.stamp ## Lint, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pyright

bench: .venv/.stamp ## Measure the short comparisons, in under ten minutes, each ratio beside its goal; writes bench.json
	$(BIN)/python -m pytest bench -p no:xdist -q -m "not full" --benchmark-json=bench.json --benchmark-columns=rounds $(ARGS)

bench-full: .venv/.stamp ## Measure all comparisons; writes bench.json
	$(BIN)/python -m pytest bench -p no:xdist -q --benchmark-json=bench.json --benchmark-columns=rounds $(ARGS)

bench-report: .venv/.stamp ## Write docs/performance.md from bench.json
	$(BIN)/python bench/report.py bench.json

build: .venv/.stamp ## Make the wheel and the sdist in dist/
	$(BIN)/python -m build --no-isolation

clean: ## Remove the environment, caches and builds
	rm -rf .venv dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.stamp: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("isobatch needs Python 3.11 or newer, but $(PYTHON) is %d.%d. Try: make PYTHON=python3.12 ..." % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	@echo "Installing requirements.lock into .venv (some minutes the first time)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -qq -r requirements.lock
	@$(BIN)/python -m pip install -qq --no-build-isolation --no-deps -e .
	@touch $@
