# Every target installs what it needs into .venv first. Python compiles what is imported: all of it takes a minute more.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL ?= tally
RECIPE ?= fastserve
HOST ?= 127.0.0.1
PORT ?= 8000
JOBS ?= 2
# Tests start hundreds of programs. Without bytecode each of them compiles torch anew, which takes three times as long as
# importing it.
unexport PYTHONDONTWRITEBYTECODE
# Which tests may run beside each other is said in tests/support/groups.py.
PYTEST := $(BIN)/python -m pytest -n $(JOBS)

.PHONY: help serve test test-cluster test-chaos soak fuzz lint check format clean
help:
	@echo "make serve   start an OpenAI-compatible server with the built-in model on $(HOST):$(PORT)"
	@echo "make test    run all tests"
	@echo "make test-cluster   cut a machine off while requests stream (two minutes; Linux, needs root and iproute2)"
	@echo "make test-chaos     faults in the middle of loads, for ten minutes; SEED=7 repeats a run"
	@echo "make soak    the same load without faults, for an hour: memory has to stay flat"
	@echo "make fuzz    odd requests of any form to a real server, for five minutes; MINUTES=30 SEED=7 are its options"
	@echo "make lint    format, lint, words and types"
	@echo "make check   the same, core tests and import rules, in two minutes"
	@echo "make format  format the code"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Skipjoin needs Python 3.11 or newer; name one with: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing Skipjoin into $(VENV) (torch is large: this takes a minute or more)"
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt torch numpy
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev,distributed]'
	@touch $@

serve: $(VENV)/.runtime
	$(BIN)/skipjoin serve $(MODEL) --recipe $(RECIPE) --host $(HOST) --port $(PORT)

test: $(VENV)/.dev
	$(PYTEST)

# The exit code of a test that cannot be made here is 77, which is no failure.
test-cluster: $(VENV)/.dev
	for case in '' forgets; do $(BIN)/python tests/cluster/cut_off.py $$case || [ $$? -eq 77 ] || exit 1; done

test-chaos: $(VENV)/.dev
	PYTHONPATH=tests $(BIN)/python -m chaos --minutes 10 $(if $(SEED),--seed $(SEED))

soak: $(VENV)/.dev
	PYTHONPATH=tests $(BIN)/python -m chaos.soak --minutes 60 $(if $(SEED),--seed $(SEED))

fuzz: $(VENV)/.dev
	PYTHONPATH=tests $(BIN)/python -m fuzz $(if $(MINUTES),--minutes $(MINUTES)) $(if $(SEED),--seed $(SEED))

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python tools/check_words.py
	$(BIN)/mypy -p skipjoin.core -p skipjoin.policies -p skipjoin.sim -p skipjoin.observe -p skipjoin.bench -p skipjoin.forecast \
		-p skipjoin.recipes -m skipjoin.access -m skipjoin.key_files -m skipjoin.knobs -m skipjoin.profile -p skipjoin.config -m skipjoin.sampling -m skipjoin.exec.base \
		-m skipjoin.exec.simulated

check: lint
	$(PYTEST) -q $(addprefix tests/,core policies recipes sim observe test_import_rules.py)

format: $(VENV)/.dev
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
