# Two commands do everything on a fresh machine: `make train` and `make test`.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
JOB    ?= quickstart

.PHONY: help train verify test lint install clean

help:  ## list the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@

install: $(VENV)/installed  ## make the virtual environment and install the package

train: $(VENV)/installed  ## train the catalog job JOB (default quickstart) in 3-D parallel on this machine
	$(BIN)/shardwright train $(JOB)

verify: $(VENV)/installed  ## run five steps of JOB beside one rank and print the largest difference
	$(BIN)/shardwright verify $(JOB) --steps 5

lint: $(VENV)/installed-test  ## ruff, mypy and the import contract
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint  ## everything that must hold: lint, then all tests
	$(BIN)/python -m pytest -q --durations=15

clean:  ## remove the virtual environment, caches and runs
	rm -rf $(VENV) runs .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
