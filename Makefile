# Everything runs in .venv, which the first target creates. `make help` lists the targets.

PYTHON ?= python3
VENV ?= .venv
PORT ?= 8000
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
STAMP := $(VENV)/.installed

.PHONY: help install demo test slow-test lint check format bench clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP)  ## create .venv with everything the project needs

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH)
	$(PIP) -e '.[dev]'
	touch $(STAMP)

# The last line is one plain command, so that make runs it without a shell in between and passes signals on.
demo: install  ## serve the demo model on port 8000 until Ctrl-C
	$(BIN)/dspark-ray demo-model
	$(BIN)/dspark-ray serve --port $(PORT) --stop-with-parent

test: install  ## run the tests (without those marked slow)
	$(BIN)/python -m pytest

slow-test: install  ## run the tests marked slow
	$(BIN)/python -m pytest -m slow

lint: install  ## formatting, linting and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

check: lint test  ## what CI runs: lint, then test

format: install  ## format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: install  ## decoding speed: DSpark against plain decoding in the same engine
	$(BIN)/python benchmarks/decode.py

clean:  ## remove .venv and caches
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
