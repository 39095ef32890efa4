# One command each. `make` alone lists them.
SHELL := /bin/bash
PYTHON_VENV := .venv/bin/python
CXX_FILES = $(shell git ls-files -co --exclude-standard 'csrc/*.cpp' 'csrc/*.h' 'csrc/*.hpp' 'csrc/*.cu' 'csrc/*.cuh' 2>/dev/null)
# Tests on one process more than there are cores, since some wait for a disk or a deadline; a file of tests on one, in the order of
# tests/conftest.py; on one process where pytest-xdist could not be installed.
PARALLEL = $(shell $(PYTHON_VENV) -c 'import os, xdist; print("-n", min(os.cpu_count() + 1, 5), "--dist loadfile --no-loadscope-reorder")' 2>/dev/null)
# Bytecode is kept whatever the environment says: without it collecting takes twice as long, and so do processes that tests start.
PYTEST = PYTHONDONTWRITEBYTECODE= $(PYTHON_VENV) -m pytest
.DEFAULT_GOAL := help
.PHONY: help setup build wheel release-check demo check test sweep models lint format docs bench gpu-check clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' Makefile

setup: ## .venv with pinned packages and the compiled extension (a second run takes seconds)
	@bash scripts/setup.sh

demo: ## index the installed libraries' documentation on SSD, search it, let a model answer from it and go on in a new process
	@bash scripts/setup.sh demo
	@$(PYTHON_VENV) scripts/demo.py --setup .cache/setup/seconds

check: lint ## before a commit: the linters, the rules of the tree, and the tests that can see what has changed, the nearest first; a minute
	@tests=$$($(PYTHON_VENV) -m tests.reach $(CHECK_ARGS)) && $(PYTEST) -q $(PARALLEL) --durations=0 --durations-min=5 $$tests

test: setup ## the test suite; what needs a GPU is skipped and counted
	@$(PYTEST) $(PARALLEL) $(PYTEST_ARGS)

sweep: setup ## what the test suite takes samples of: every combination, long stress, every example twice, packages from the network
	@$(PYTEST) $(PARALLEL) -m sweep $(PYTEST_ARGS)

models: setup ## every causal model of transformers with a KV cache on SSD (half an hour; goes on where it was interrupted)
	@$(PYTHON_VENV) -m espnx bench models --json benchmarks/results/kv-models.json --render $(MODELS_ARGS)

lint: setup ## ruff, mypy, clang-format, without changing a file
	@$(PYTHON_VENV) -m ruff check .
	@$(PYTHON_VENV) -m ruff format --check .
	@$(PYTHON_VENV) -m mypy
	@if [ -n "$(CXX_FILES)" ]; then .venv/bin/clang-format --dry-run --Werror $(CXX_FILES); fi

format: setup ## let ruff and clang-format rewrite the files
	@$(PYTHON_VENV) -m ruff check --fix .
	@$(PYTHON_VENV) -m ruff format .
	@if [ -n "$(CXX_FILES)" ]; then .venv/bin/clang-format -i $(CXX_FILES); fi

build: ## compile the extension again after a change in csrc/ (only what changed)
	@MAX_JOBS="$${MAX_JOBS:-2}" $(PYTHON_VENV) setup.py -q build_ext --inplace

wheel: setup ## wheels in dist/ for each Python from 3.11 to 3.13 that is here, each tried in a fresh environment (PYTHONS="3.11")
	@$(PYTHON_VENV) scripts/wheels.py $(PYTHONS)

release-check: wheel ## before a release: those, and README's page as it is read, in a fresh clone and environment (10 minutes)
	@$(PYTHON_VENV) scripts/release_check.py $(RELEASE_ARGS)

bench: setup ## the disk benchmark beside fio and mmap, on this folder's disk
	@$(PYTHON_VENV) -m espnx bench io --baseline fio,mmap $(BENCH_ARGS)

# Once it is installed nothing is asked of the network. Versions are named: a site without warnings is one of these.
DOCS_PACKAGES = mkdocs-material==9.8.1 mkdocs==1.6.1 mkdocstrings==1.0.8 mkdocstrings-python==2.0.11
docs: setup ## the documentation as a site, in build/site; warnings are errors, dead links among them
	@$(PYTHON_VENV) -c 'import material, mkdocstrings' 2>/dev/null || $(PYTHON_VENV) -m pip install --progress-bar off -q $(DOCS_PACKAGES)
	@NO_MKDOCS_2_WARNING=1 $(PYTHON_VENV) -m mkdocs build --strict
	@echo "open build/site/index.html (search works there too, without a server)"

gpu-check: setup ## everything that needs a CUDA machine, in one command, as JSON
	@bash scripts/gpu_check.sh

clean: ## remove what was built and installed here
	rm -rf .venv build dist .cache *.egg-info espnx/_C*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
