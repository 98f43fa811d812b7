# `make demo` and `make test` do all their own set-up in .venv; nothing outside this folder is touched.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# One process per core, with one thread each.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto
# Threads that spin while they wait stall each other on a busy machine.
export OMP_WAIT_POLICY := PASSIVE

.PHONY: demo test test-all lint docs package clean

demo: .venv/installed
	$(BIN)/stableair demo

# Everything but the slow tests: under five minutes.
test: .venv/installed-dev
	$(PYTEST) --dist loadfile -m "not slow"

# And the slow ones: figures at smoke size, statistics over many draws, deployments.
test-all: test
	$(PYTEST) --dist worksteal -m slow

docs: .venv/installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/mypy
	$(BIN)/lint-imports

# The wheel and the sdist; both are installed into an empty environment and tried there.
package: .venv/installed-dev
	rm -rf dist build/package
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m build --outdir dist .
	$(PYTHON) -m venv build/package
	for archive in dist/*.whl dist/*.tar.gz; do \
		PIP_CONSTRAINT=constraints.txt build/package/bin/python -m pip install --quiet --disable-pip-version-check $$archive && \
		build/package/bin/python -P .ci/try_package.py README.md "$$($(BIN)/stableair --version)" && \
		build/package/bin/python -m pip uninstall --quiet --yes stableair || exit 1; \
	done

clean:
	rm -rf .venv

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/installed: .venv/bin/python pyproject.toml constraints.txt
	$(PIP) -e .
	touch $@

.venv/installed-dev: .venv/bin/python pyproject.toml constraints.txt
	$(PIP) -e '.[dev]'
	touch $@ .venv/installed
