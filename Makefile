# Everything runs in .venv, which the first target that needs it creates.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: test lint types contracts unit format bench table clean

test: lint types contracts unit  ## all that must hold before a change lands

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/basedpyright

contracts: $(READY)
	$(BIN)/lint-imports

unit: $(READY)
	$(BIN)/python -m pytest

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

table: $(READY)  ## the error of every mechanism, as printed in the README
	$(BIN)/python benchmarks/rmse_table.py

bench: $(READY)  ## time and error beside jax-privacy, in an environment of its own under build/
	$(BIN)/python benchmarks/accountant.py
	$(BIN)/python benchmarks/run.py

clean:
	rm -rf $(VENV) build .pytest_cache .ruff_cache
