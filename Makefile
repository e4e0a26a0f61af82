# Everything a contributor runs. Each target makes its own environment first, in .venv, and again when
# pyproject.toml or constraints.txt change. torch is whatever build pip finds for this machine, CPU or CUDA.

PYTHON ?= python3
PYTEST_ARGS ?= -n 2
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help demo test slow lint types clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-6s  %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "  PYTHON=python3.12 chooses the interpreter; PYTEST_ARGS='-n 2 -k snake' goes to pytest."

demo: $(STAMP) ## train a small GPT-2 from SSD, checked against plain PyTorch
	$(BIN)/python examples/train_gpt2.py --check

test: $(STAMP) ## run the tests
	$(BIN)/python -m pytest $(PYTEST_ARGS)

slow: $(STAMP) ## run the slow tests
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

lint: $(STAMP) ## check style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP) ## check types
	$(BIN)/mypy

clean: ## remove the environment and all caches
	rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "$(PYTHON) is older than Python 3.11: choose another with PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@
