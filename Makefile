# Every target sets up .venv itself on first use, from the pins in constraints/$(PLATFORM).txt. `make help` lists them.

PLATFORM ?= cpu
CONFIG ?= configs/quickstart.yaml
ARGS ?=
PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)

BIN := .venv/bin
STAMP := .venv/.installed-$(PLATFORM)
PINS := constraints/$(PLATFORM).txt
# Packages of which only the files inside are used, so their own dependencies stay out.
FILES := $(wildcard constraints/$(PLATFORM)-files.txt)
SOURCES := archon areal kernels/archon_kernels
BENCHMARKS := $(filter-out benchmarks/report.py,$(wildcard benchmarks/*.py))

# Small tensors: one thread is fastest in unit tests, and a few are in training runs. OMP_NUM_THREADS=N overrides both.
FEW_THREADS = $(shell $(BIN)/python -c 'import os; print(min(4, os.cpu_count() or 1))')

.PHONY: help run test test-slow lint format bench install
.DEFAULT_GOAL := help

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile
	@echo "Variables: PLATFORM=cpu|cuda|sglang|npu  CONFIG=recipe.yaml  ARGS='key=value ...'  PYTHON=python3.11"

run: $(STAMP)  ## train the quickstart recipe, or CONFIG
	$(BIN)/archon-run $(CONFIG) $(ARGS)

test: export OMP_NUM_THREADS ?= 1
test: $(STAMP)  ## the quick tests; ARGS is passed to pytest
	$(BIN)/python -m pytest -m "not slow and not gpu" $(ARGS)

test-slow: export OMP_NUM_THREADS ?= $(FEW_THREADS)
test-slow: $(STAMP)  ## the tests that train for minutes
	$(BIN)/python -m pytest -m "slow and not gpu" $(ARGS)

lint: $(STAMP)  ## formatting, lint and types, changing nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy $(SOURCES)

format: $(STAMP)  ## format, and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP)  ## every benchmark, into benchmarks/results/
	@mkdir -p benchmarks/results
	@failed=; for script in $(BENCHMARKS); do \
		echo "== $$script"; \
		$(BIN)/python $$script --json benchmarks/results/$$(basename $$script .py).json || failed="$$failed $$script"; \
	done; test -z "$$failed" || { echo "make: failed:$$failed" >&2; exit 1; }

install: $(STAMP)  ## only set up .venv

$(STAMP): pyproject.toml $(PINS) $(FILES)
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11 or newer found; install one, or say PYTHON=/path/to/python3" >&2; exit 2; }
	@echo "Setting up .venv for $(PLATFORM) with $(PYTHON); a few minutes on first use"
	@rm -f .venv/.installed-*
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint $(PINS) --editable '.[$(PLATFORM),dev]' \
		|| { echo "make: installation failed; the comments in $(PINS) say what this set needs" >&2; exit 1; }
	$(if $(FILES),$(BIN)/python -m pip install --quiet --no-deps --requirement $(FILES))
	@touch $@

$(PINS):
	@echo "make: PLATFORM=$(PLATFORM) has no $@; choose one of: $(patsubst constraints/%.txt,%,$(filter-out %-files.txt,$(wildcard constraints/*.txt)))" >&2; exit 2
