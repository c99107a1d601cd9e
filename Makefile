# `make demo` and `make test` need nothing but Python >= 3.10: they create .venv and install into it.
#
#   PYTHON=...    use this interpreter as it is: create and install nothing
#   OFFLINE=1     the same with the ambient python3, for a machine without a network
#   TORCH=...     pip requirement for torch, and BASE_PYTHON=... the interpreter to make .venv from,
#                 in place of what .ci/setup chooses
#   BENCH=...     which benchmark `make bench` runs, and BENCH_ARGS its options
#   CLIENTS=      which servers `make test-clients` runs, and CLIENTS_ARGS its options for pytest:
#                 --record-clients writes the outcomes to tests/clients/results.json
#   REPOSITORY=   https:// address that the pages of `make docs` link to

SHELL := bash
.NOTPARALLEL:
.DEFAULT_GOAL := help
export NO_MKDOCS_2_WARNING := 1
export DISABLE_MKDOCS_2_WARNING := true
export REPOSITORY

VENV ?= .venv
BENCH ?= lightning-decode
CLIENTS ?= fla gpu kernels sglang torch transformers vllm
OLDEST := build/oldest
PYTEST_ARGS ?= -n auto --maxprocesses 8 --dist worksteal

IMPORTABLE := import sys, importlib.util as u; \
  sys.exit(not all(map(u.find_spec, ("cutlass", "torch", "tvm_ffi", "pytest", "cute_attn.cache"))))

# On a GPU machine the check often runs in an image that already holds everything.
ifeq ($(MAKECMDGOALS)$(PYTHON)$(wildcard $(VENV)),gpu-check)
  ifeq ($(shell python3 -c '$(IMPORTABLE)' 2>/dev/null && echo yes),yes)
    PYTHON := python3
  endif
endif

ifdef OFFLINE
  PYTHON ?= python3
  installed = register
else ifdef PYTHON
  installed =
else
  PYTHON := $(VENV)/bin/python
  installed = $(VENV)/.installed-$(1)
endif

.PHONY: help demo test test-full test-oldest test-beside test-clients lint typecheck format docs bench gpu-check clean register

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 20

demo: $(call installed,base) ## set up, then run and check every operator (without a GPU: emulated)
	$(PYTHON) examples/quickstart.py

test: $(call installed,test) ## set up, then run the tests, without a GPU if need be: 6 minutes on 2 cores
	$(PYTHON) -m pytest $(PYTEST_ARGS) -m "not slow"

test-full: $(call installed,test) ## also the full sweeps, with more random examples: HOURS
	HYPOTHESIS_PROFILE=full $(PYTHON) -m pytest $(PYTEST_ARGS)

# The old platformdirs lacks the plugin for pytest that the new one has registered. Some tests run
# pytest themselves.
test-oldest: $(call installed,test) $(OLDEST)/.installed ## the tests at the oldest versions that pyproject.toml allows
	PYTEST_ADDOPTS="-p no:platformdirs $$PYTEST_ADDOPTS" \
	  $(OLDEST)/bin/python -m pytest $(PYTEST_ARGS) -m "not slow"

test-beside: $(call installed,test) ## does pip find versions for us beside vLLM and SGLang? (needs a network)
	$(PYTHON) -m pytest -n 2 tests/test_installed.py -k beside

# Each client in an interpreter of its own, since their packages differ. The packages go before those
# of the environment on Python's path.
test-clients: $(call installed,test) ## our backends in servers, emulated (needs a network at first)
	for client in $(CLIENTS); do \
	  test ! -f tests/clients/$$client.txt || $(PYTHON) -m tests.clients.unpack $$client || exit; \
	  CUTE_ATTN_CLIENT=$$client PYTHONPATH=build/clients/$$client \
	    $(PYTHON) -m pytest -m clients --keep-kernels $(CLIENTS_ARGS) tests/clients/test_$$client*.py || exit; \
	done

lint: $(call installed,lint) ## ruff, mypy, and the docs with their links
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(MAKE) --no-print-directory typecheck
	$(PYTHON) -m mkdocs build --strict  # with --quiet, no warning would count

# mypy resolves modules by directory, and cache/ is cute_attn.cache only once installed: give it a
# tree of links in which it is.
typecheck: $(call installed,lint) ## mypy on cute_attn and cache
	@rm -rf build/mypy && mkdir -p build/mypy/cute_attn
	@ln -s $(addprefix ../../../,$(wildcard cute_attn/*)) ../../../cache build/mypy/cute_attn
	MYPYPATH=build/mypy $(PYTHON) -m mypy --package cute_attn

format: $(call installed,lint) ## rewrite the sources as ruff wants them
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

docs: $(call installed,lint) ## build the documentation into site/
	$(PYTHON) -m mkdocs build --strict

bench: $(call installed,bench) ## run one benchmark: make bench BENCH=lightning-decode
	$(PYTHON) -m cute_attn.bench $(BENCH) $(BENCH_ARGS)

gpu-check: $(call installed,test) ## everything that needs a GPU: its tests, then short benchmarks
	$(PYTHON) -m cute_attn.bench gpu-check

clean: ## remove what the targets above made, .venv included
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find cute_attn cache tests examples -name __pycache__ -type d -prune -exec rm -rf {} +

# cute_attn.cache lies in cache/, so that even an offline checkout has to be made known to python.
register:
	@$(PYTHON) -c 'import cute_attn.cache' 2>/dev/null || \
	  $(PYTHON) -m pip install --quiet --no-index --no-deps --no-build-isolation --editable .

$(VENV)/.installed-base: extras =
$(VENV)/.installed-test: extras = test
$(VENV)/.installed-lint: extras = test lint docs
$(VENV)/.installed-bench: extras = bench
$(VENV)/.installed-%: pyproject.toml .ci/setup
	.ci/setup $(VENV) $(extras)
	@touch $@

$(OLDEST)/.installed: pyproject.toml .ci/oldest.py
	$(PYTHON) .ci/oldest.py $(OLDEST)
	@touch $@
