# Everything runs in .venv, which the first target that needs it creates.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO := $(VENV)/.demo

.PHONY: demo test lint types contracts unit format docs docs-plots bench table digits storm audit audit-gpu dist pythons opacus-suite clean

# Plan, train on handwritten digits by the plan, with DP-SGD on Poisson batches and with fixed batches at
# the same budget, and report.
demo: $(DEMO)
	$(BIN)/corrnoise train --data digits --epsilon 8 --delta 1e-4 --epochs 10 --batch-size 64 \
	  --compare --out demo
	@echo "open demo/report.html"

test: lint types contracts unit  ## all that must hold before a change lands

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

# Less than the tests need; an environment that is ready for them will do.
$(DEMO): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[demo]'
	touch $@

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Without JAX, which needs Python 3.11, everything but what is for JAX.
TYPED = from importlib.util import find_spec as f; from pathlib import Path as P; \
  print(*(() if f("jax") else (p for p in P("src/corrnoise").glob("[!_]*") if p.name not in ("jax", "py.typed"))))
types: $(READY)
	$(BIN)/basedpyright $$($(BIN)/python -c '$(TYPED)')

contracts: $(READY)
	$(BIN)/lint-imports

unit: $(READY)
	$(BIN)/python -m pytest

docs: $(READY)  ## the documentation, in build/site; the tests build it too
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

docs-plots: $(READY)  ## the plots of the documentation, in docs/assets
	$(BIN)/python docs/plots.py

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

table: $(READY)  ## the error of every mechanism, as printed in docs/choosing.md
	$(BIN)/python benchmarks/rmse_table.py

digits: $(READY)  ## accuracy at one budget, as printed in the README; about 10 minutes
	$(BIN)/python benchmarks/digits.py --json benchmarks/digits.json

bench: $(READY)  ## time and error beside jax-privacy, in an environment of its own under build/
	$(BIN)/python benchmarks/accountant.py
	$(BIN)/python benchmarks/run.py

storm: $(READY)  ## kills, full disks, damage: the counts in docs/guarantee.md; 20 minutes
	$(BIN)/python benchmarks/storm.py --minutes 20 --seed 2026 --json benchmarks/storm.json

audit: $(READY)  ## lower bounds on ε in 200 runs of the engine: the table in docs/audit.md; 20 minutes
	$(BIN)/python benchmarks/audit.py --json benchmarks/audit.json
	$(BIN)/python benchmarks/audit.py --json benchmarks/audit-large.json --canaries 5000000 --runs 3 \
	  --claims 8 --samplings fixed --seed 2000

audit-gpu: $(READY)  ## lower bounds on ε for every sampling on a GPU; 2 minutes
	$(BIN)/python benchmarks/audit.py --json benchmarks/audit-cuda.json --device cuda --every-sampling \
	  --claims 1 4 --runs 18 --seed 3000

dist:  ## the source archive and the wheel, in dist/, with the wheel checked in a fresh environment
	$(PYTHON) tools/dist.py

pythons:  ## the tests on every supported Python that is installed, under build/pythons
	$(PYTHON) tools/pythons.py

opacus-suite: $(READY)  ## Opacus's own tests against our engine; needs the network, about 10 minutes each
	$(BIN)/python tools/opacus_suite.py --mechanism dp_sgd
	$(BIN)/python tools/opacus_suite.py

clean:
	rm -rf $(VENV) build dist demo demo-*.key .pytest_cache .ruff_cache
