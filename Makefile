# Two commands matter: `make demo` (the main job) and `make test` (all tests).
# Both need Python 3.11+, pip and make, and set everything else up in .venv.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
  $$p -c 'import sys; raise SystemExit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
WORKERS ?= 2

.PHONY: demo test test-latest lint bench clean

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11 or newer found; set PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

# The stamps are remade when the dependency lists change.
$(VENV)/.demo-installed: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet -e '.[demo]'
	@touch $@

$(VENV)/.test-installed: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet -e '.[test]'
	@touch $@ $(VENV)/.demo-installed

demo: $(VENV)/.demo-installed
	$(BIN)/fadex demo --out out/demo

test: $(VENV)/.test-installed
	$(BIN)/ruff check .
	$(BIN)/python -m pytest -n $(WORKERS)

test-latest:
	bash scripts/test_latest.sh

lint: $(VENV)/.test-installed
	$(BIN)/ruff check .

bench: $(VENV)/.test-installed
	$(BIN)/python benchmarks/caching.py

clean:
	rm -rf $(VENV) out build dist *.egg-info
