# make train: an environment, and a small Llama trained on real text. make test: the test suite.
# make test TORCH=2.14.1 TESTS="tests/compiler tests/sharding": tests with another torch, in an environment of its own.
PYTHON ?= python3
TORCH ?=
TESTS ?=
VENV := .venv$(if $(TORCH),-torch-$(TORCH))
BIN := $(VENV)/bin
# torch of the version asked for, everything else as the project is tested with.
CONSTRAINTS := $(if $(TORCH),$(VENV)/constraints.txt,constraints.txt)

.PHONY: train test clean

train: $(VENV)/.installed
	$(BIN)/functitan train llama3-debug

test: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 $(TESTS)

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("functitan needs Python 3.11 or newer; choose one with PYTHON=...") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)

# The stamps are newer than what decides the environment, so that a second run installs nothing.
$(VENV)/.installed: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	$(BIN)/python -m pip install -c $(CONSTRAINTS) -e .
	touch $@

$(VENV)/.installed-test: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	$(BIN)/python -m pip install -c $(CONSTRAINTS) -e '.[test]'
	touch $@ $(VENV)/.installed

$(VENV)/constraints.txt: constraints.txt | $(BIN)/python
	sed 's/^torch==.*/torch==$(TORCH)/' $< > $@

clean:
	rm -rf .venv .venv-torch-* build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
