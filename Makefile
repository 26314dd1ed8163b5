# Everything runs in .venv, which the first target that needs it creates.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: test lint types contracts unit format demo docs docs-plots bench table clean

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

demo: $(READY)  ## train on handwritten digits, with BISR and with DP-SGD: build/demo/report.html
	$(BIN)/corrnoise train --data digits --mechanism bisr --sampling fixed --compare --out build/demo

docs: $(READY)  ## the documentation, in build/site; the tests build it too
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

docs-plots: $(READY)  ## the plots of the documentation, in docs/assets
	$(BIN)/python docs/plots.py

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
