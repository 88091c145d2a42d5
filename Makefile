# Everything a person needs: `make demo` and `make test`. Both make their own environment in .venv.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INPUTS := pyproject.toml constraints.txt Makefile

.DEFAULT_GOAL := help
.PHONY: help demo test test-all check bench clean

help:
	@echo "make demo      install into $(VENV) and convert a real EXL3 checkpoint there and back"
	@echo "make test      install with test tools, then lint, type-check and run the tests"
	@echo "make test-all  the same, with the slow tests"
	@echo "make bench     measure decode, convert and inspect on this machine (needs 13 GB of disk)"
	@echo "make clean     remove $(VENV) and caches"

demo: $(VENV)/.installed
	$(BIN)/espalier-format demo

check: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: check
	$(BIN)/python -m pytest -m "not slow"

test-all: check
	$(BIN)/python -m pytest

bench: $(VENV)/.installed-test
	$(BIN)/python benchmarks/decode.py --write
	$(BIN)/python benchmarks/inspection.py --write
	$(BIN)/python benchmarks/convert.py --write

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; name one with: make PYTHON=python3.12 …" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(BIN)/python $(INPUTS)
	$(PIP) install --quiet --constraint constraints.txt --editable .
	@touch $@

$(VENV)/.installed-test: $(BIN)/python $(INPUTS)
	$(PIP) install --quiet --constraint constraints.txt --editable '.[test]'
	@touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
