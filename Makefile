# make demo and make test set everything up themselves; see README.md. `make test` leaves out the tests marked `slow`.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: install demo test test-all lint format check bench pictures gpu docs clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $(STAMP)

demo: install
	$(BIN)/rlplace train inception_v3@small --host auto --budget 150s --seed 0 --run runs/demo --overwrite

TESTS = $(BIN)/python -m pytest -n 2 --dist loadfile

test: install
	$(TESTS) -m "not slow"

test-all: install
	$(TESTS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict rlplace

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

check: lint test-all

# About two hours on two idle cores; every line stands by itself.
bench: install
	$(BIN)/python benchmarks/simulator.py
	$(BIN)/python benchmarks/graphs.py benchmarks/results
	$(BIN)/python benchmarks/groupings.py
	$(BIN)/python benchmarks/evaluations.py
	$(BIN)/python benchmarks/core.py core-dev --seeds 3
	$(BIN)/python benchmarks/core.py core-dev --methods anneal,evolve --seeds 10 --name core-dev-seeds
	$(BIN)/python benchmarks/core.py core

# The pictures at the top of README.md, from the run of `make demo`; that of its report needs chromium.
pictures: install
	$(BIN)/python scripts/readme_pictures.py runs/demo

# At most eight minutes on GPUs; one line where PyTorch sees none.
gpu: install
	$(BIN)/python benchmarks/gpu.py

# The pages of docs/, the API from docstrings, and measured results: `python -m http.server -d site` shows them.
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) build dist site .mypy_cache .ruff_cache .pytest_cache
