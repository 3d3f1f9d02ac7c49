# Every target installs what it needs into .venv first. Python compiles what is imported: all of it takes a minute more.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --no-compile
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

.PHONY: help serve test test-all mutations test-cluster test-chaos soak fuzz fuzz-core lint check docs reference format \
	lock audit clean
help:
	@echo "make serve   start an OpenAI-compatible server with the built-in model on $(HOST):$(PORT)"
	@echo "make test    run all tests, with a pairwise set of parameters where these are many"
	@echo "make test-all   run the tests of all combinations of parameters, too"
	@echo "make mutations   break ten things on purpose, and check that tests notice each of them"
	@echo "make test-cluster   cut a machine off while requests stream (two minutes; Linux, needs root and iproute2)"
	@echo "make test-chaos     faults in the middle of loads, for ten minutes; SEED=7 repeats a run"
	@echo "make soak    the same load without faults, for an hour: memory has to stay flat"
	@echo "make fuzz    odd requests of any form to a real server, for five minutes; MINUTES=30 SEED=7 are its options"
	@echo "make fuzz-core   random worlds of the core for an hour; MINUTES=5 makes it shorter, SEED=7 repeats a run"
	@echo "make lint    format, lint, words and types"
	@echo "make check   the same, core tests and import rules, in two minutes"
	@echo "make docs    build the site of the documentation in build/docs"
	@echo "make format  format the code"
	@echo "make lock    write the locks and THIRD_PARTY.md after a change of pyproject.toml or constraints.txt (needs a network)"
	@echo "make reference   write the generated pages of docs/reference"
	@echo "make audit   look the locked versions up in a database of known vulnerabilities (needs a network)"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Skipjoin needs Python 3.11 or newer; name one with: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The locks are complete, so that pip resolves nothing, and installs nothing whose hash they do not have. torch is the
# exception: its wheels for CPUs have other hashes than those for GPUs, which bring CUDA's libraries along.
$(VENV)/.runtime: pyproject.toml constraints.txt requirements.lock | $(BIN)/python
	@echo "Installing Skipjoin into $(VENV) (torch is large: this takes a minute or more)"
	$(INSTALL) --no-deps --require-hashes --requirement requirements.lock
	$(INSTALL) --constraint constraints.txt torch
	$(INSTALL) --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime requirements-dev.lock
	$(INSTALL) --no-deps --require-hashes --requirement requirements-dev.lock
	@touch $@

serve: $(VENV)/.runtime
	$(BIN)/skipjoin serve $(MODEL) --recipe '$(RECIPE)' --host $(HOST) --port $(PORT)

test: $(VENV)/.dev
	$(PYTEST)

test-all: $(VENV)/.dev
	$(PYTEST) -m ""

mutations: $(VENV)/.dev
	$(BIN)/python tools/mutations.py

# The exit code of a test that cannot be made here is 77, which is no failure.
test-cluster: $(VENV)/.dev
	for case in '' forgets; do $(BIN)/python tests/cluster/cut_off.py $$case || [ $$? -eq 77 ] || exit 1; done

test-chaos: $(VENV)/.dev
	PYTHONPATH=tests $(BIN)/python -m chaos --minutes 10 $(if $(SEED),--seed $(SEED))

soak: $(VENV)/.dev
	PYTHONPATH=tests $(BIN)/python -m chaos.soak --minutes 60 $(if $(SEED),--seed $(SEED))

fuzz: $(VENV)/.dev
	PYTHONPATH=tests $(BIN)/python -m fuzz $(if $(MINUTES),--minutes $(MINUTES)) $(if $(SEED),--seed $(SEED))

fuzz-core: $(VENV)/.dev
	PYTHONPATH=tests $(BIN)/python -m core_fuzz --minutes $(or $(MINUTES),60) $(if $(SEED),--seed $(SEED))

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python tools/check_words.py
	$(BIN)/mypy -p skipjoin

check: lint
	$(PYTEST) -q --ignore tests/sim/experiments $(addprefix tests/,core core_fuzz policies recipes sim observe test_import_rules.py)

docs: $(VENV)/.dev
	$(BIN)/mkdocs build --strict --quiet

format: $(VENV)/.dev
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

lock: $(VENV)/.dev
	$(BIN)/python tools/lock.py
	$(INSTALL) --no-deps --require-hashes --requirement requirements-dev.lock
	$(BIN)/python tools/licenses.py > THIRD_PARTY.md

reference: $(VENV)/.dev
	$(BIN)/python tools/reference.py

# The tool has an environment of its own: what it needs is not what is examined.
audit:
	$(PYTHON) -m venv $(VENV)-audit
	$(VENV)-audit/bin/python -m pip install --quiet --constraint constraints.txt pip-audit
	$(VENV)-audit/bin/pip-audit --strict --disable-pip --require-hashes --requirement requirements-dev.lock

clean:
	rm -rf $(VENV) $(VENV)-audit build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
