# Two commands are all a newcomer needs: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup demo test lint types layers check test-gpu bench-gpu clean

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

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
