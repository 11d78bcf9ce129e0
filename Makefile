# Everything runs in a virtual environment of its own, which the first target that needs it sets up.
# Another interpreter: make PYTHON=python3.12 VENV=.venv312 test

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
MAPPED := adaattn_hf patches configs eval
CHECKED := $(MAPPED) tests
TORCH := $(shell sed -n 's/^torch==//p' constraints-dev.txt)
# Test processes; each computes with one thread.
WORKERS ?= 2
TESTS ?= tests
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

export HF_HUB_OFFLINE ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export TOKENIZERS_PARALLELISM := false
# `python -m` would put the checkout in front of the installed package, and its adaattn_hf/ lacks the mapped packages.
export PYTHONSAFEPATH := 1

.PHONY: help venv demo conformance matrix test cover lint fmt types bench bench-native sanitize fuzz-aarch64 build docs-check freeze clean

help: ## this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /\1|/' | column -t -s '|'

venv: $(READY) ## set up .venv with everything for development

# The CPU build comes from the configured index where that has one, else from the index of the PyTorch project.
# Elsewhere than on Linux the plain build is the CPU build.
$(READY): pyproject.toml constraints-dev.txt $(wildcard setup.py)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	if test "$$(uname -s)" = Linux; then \
	  $(BIN)/python -m pip install -q -c constraints-dev.txt "torch==$(TORCH)+cpu" \
	  || $(BIN)/python -m pip install -q -c constraints-dev.txt "torch==$(TORCH)+cpu" \
	       --extra-index-url https://download.pytorch.org/whl/cpu; \
	else \
	  $(BIN)/python -m pip install -q -c constraints-dev.txt "torch==$(TORCH)"; \
	fi
	$(BIN)/python -m pip install -q -c constraints-dev.txt setuptools wheel
	$(BIN)/python -m pip install -q -c constraints-dev.txt --no-build-isolation -e ".[dev]"
	touch $(READY)

demo: $(READY) ## stock against adaattn on the models in the package, offline
	$(BIN)/adaattn eval

test: $(READY) ## the whole test-suite; TESTS=tests/unit for a part of it
	$(PYTEST) $(TESTS)

cover: $(READY) ## the suite with branch coverage of the four mapped directories
	$(PYTEST) $(TESTS) $(addprefix --cov=,$(MAPPED)) --cov-branch --cov-report=term-missing:skip-covered --cov-fail-under=90

lint: $(READY) ## ruff, rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

fmt: $(READY) ## let ruff format and mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# In an editable install the mapped names are resolved by an import hook, which type checkers do not run: an installed
# copy resolves them, and errors are still reported at the real paths.
types: $(READY) ## mypy --strict
	rm -rf build/typed
	$(BIN)/python -m pip install -q --no-deps --no-build-isolation --target build/typed .
	MYPYPATH=build/typed $(BIN)/mypy $(CHECKED)  # strict, by pyproject.toml

# Their directory is made by tests/conformance/prepare.py; what ran already is not run again (results/conformance).
conformance: $(READY) ## Transformers' own model tests, sdpa beside adaattn; ADAATTN_CONFORMANCE names their directory
	$(BIN)/python -m pip install -q parameterized timeout_decorator
	$(BIN)/python tests/conformance/run.py --results results/conformance
	$(BIN)/python tests/conformance/table.py --results results/conformance docs/conformance.md

matrix: ## the suite under every Python and Transformers at hand; PAIRS=3.11:5.17.0 for a part
	$(PYTHON) tests/conformance/matrix.py $(if $(PAIRS),--pairs $(PAIRS)) --torch $(TORCH)

bench: $(READY) ## speed alone, against stock attention
	$(BIN)/adaattn bench

bench-native: $(READY) ## the native CPU kernels against torch, one and two threads; writes docs/results/native_cpu.*
	$(BIN)/python tests/native/bench_native.py --write docs/results

sanitize: ## build the native kernels with address and undefined-behaviour sanitizers and fuzz them; CASES=2000 SEED=0
	$(PYTHON) tests/native/sanitize.py --cases $(or $(CASES),2000) --seed $(or $(SEED),0)

# ziglang is a compiler for many machines that pip installs; qemu-user-static runs programs of other machines.
fuzz-aarch64: $(READY) ## the fuzzer's calls on NEON, without sanitizers; needs qemu-aarch64-static
	$(BIN)/python -m pip install -q ziglang
	CXX="$(BIN)/python -m ziglang c++ -target aarch64-linux-musl" $(PYTHON) tests/native/sanitize.py \
	  --machine aarch64 --emulator qemu-aarch64-static --cases $(or $(CASES),500) --seed $(or $(SEED),0)

build: $(READY) ## wheel and sdist in dist/
	rm -rf dist
	$(BIN)/python -m build --no-isolation

docs-check: $(READY) ## run the README's code blocks and the notebooks
	$(PYTEST) tests/docs

freeze: $(READY) ## rewrite the pins of constraints-dev.txt from the virtual environment
	{ sed -n '/^#/p' constraints-dev.txt; \
	  $(BIN)/python -m pip freeze --all --exclude-editable --exclude pip | sed 's/+cpu$$//'; } > constraints-dev.txt.new
	mv constraints-dev.txt.new constraints-dev.txt

clean: ## what was built; not the virtual environment
	rm -rf build dist .coverage .mypy_cache .pytest_cache .ruff_cache *.egg-info
