# Everything a contributor runs. Each target makes its own environment first, in .venv, and again when
# pyproject.toml or constraints.txt change. torch is whatever build pip finds for this machine, CPU or CUDA.

PYTHON ?= python3
# 3 workers for 2 cores, as tests wait for processes and drives; reordering would leave files of few, long tests
# to the end.
PYTEST_ARGS ?= -n 3 --dist loadfile --no-loadscope-reorder
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest # threads of torch would be in the workers' way
PEERS := .venv-peers
DOCS := .venv-docs
OLDEST := .venv-oldest
NEWEST := .venv-newest
ZOO := .venv-zoo
ACCELERATOR := $(if $(shell command -v nvidia-smi),cuda,cpu)
GPU_ARGS ?= --minutes 60
RACE_ARGS ?= --preset 25m --minutes 15 --output benchmarks/results/race-25m.json

.DEFAULT_GOAL := help
.PHONY: help demo test slow oldest newest lint types dist plug race tables zoo gpu site release clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-7s  %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "  PYTHON=python3.12 chooses the interpreter; PYTEST_ARGS='-n 2 -k snake' goes to pytest, PLUG_ARGS to plug, RACE_ARGS to the race, ZOO_ARGS to the zoo, GPU_ARGS to gpu."

demo: $(STAMP) ## train a small GPT-2 from SSD, checked against plain PyTorch
	$(BIN)/python examples/train_gpt2.py --check

test: $(STAMP) ## run the tests
	$(PYTEST) $(PYTEST_ARGS)

slow: $(STAMP) ## run the slow tests, and laws on more examples
	$(PYTEST) -m "slow or hypothesis" --hypothesis-profile=many $(PYTEST_ARGS)

oldest: $(OLDEST)/.installed ## run the tests of HuggingFace's tools with their oldest versions
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest $(PYTEST_ARGS) tests/hf

newest: $(NEWEST)/.installed ## run the tests with the newest torch and packages that there are
	OMP_NUM_THREADS=1 $(NEWEST)/bin/python -m pytest $(PYTEST_ARGS)

lint: $(STAMP) ## check style and format, and the Dockerfile
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/hadolint Dockerfile

types: $(STAMP) ## check types
	$(BIN)/mypy

dist: $(STAMP) ## build sdist and wheel, and try the wheel in an environment of its own
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT \
		&& $(PYTHON) -m venv "$$folder/env" \
		&& "$$folder/env/bin/pip" install --quiet --constraint constraints.txt dist/*.whl \
		&& cp tests/installed.py "$$folder" && cd "$$folder" && env/bin/python installed.py

plug: $(STAMP) ## kill a run at random moments, go on, and compare it bit for bit with one that was left alone
	$(BIN)/python -m benchmarks.plug $(PLUG_ARGS)

race: $(STAMP) $(PEERS)/.installed ## race other systems on the same model; a quarter of an hour, docs/race.md
	$(BIN)/python -m benchmarks.race.race --peers-python $(PEERS)/bin/python $(RACE_ARGS)

tables: $(STAMP) $(PEERS)/.installed ## measure again what the pages show, a day; TABLES="tiers ssd" some of it
	$(BIN)/python -m benchmarks.again $(TABLES)

zoo: $(ZOO)/.installed ## try architectures of other packages; half an hour, docs/models.md
	$(ZOO)/bin/python -m benchmarks.zoo $(ZOO_ARGS)

gpu: $(STAMP) ## on a CUDA device: two minutes of smoke, its tests, rates of lanes, step times and the race
	$(BIN)/python -m benchmarks.gpu --peers-python $(PEERS)/bin/python $(GPU_ARGS)

site: $(DOCS)/.installed ## build the documentation into site/, and fail at a broken link or an undocumented name
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build

release: $(STAMP) ## all checks, the slow ones too; wheel and site; a commit and a tag; VERSION=1.0.0
	$(BIN)/python .ci/release.py $(VERSION)

clean: ## remove the environment and all caches
	rm -rf $(VENV) $(PEERS) $(OLDEST) $(NEWEST) $(ZOO) $(DOCS) site build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "$(PYTHON) is older than Python 3.11: choose another with PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

$(OLDEST)/.installed: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --constraint constraints-oldest.txt --editable '.[test]'
	@touch $@

$(NEWEST)/.installed: pyproject.toml # remove $(NEWEST) for versions that came later
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --upgrade --editable '.[test]'
	@touch $@

$(ZOO)/.installed: pyproject.toml constraints.txt benchmarks/zoo/requirements.txt
	$(PYTHON) -m venv $(ZOO)
	$(ZOO)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[hf]' \
		$$(grep -v -e '^#' -e '^litgpt' benchmarks/zoo/requirements.txt)
	$(ZOO)/bin/python -m pip install --quiet --no-deps $$(grep '^litgpt' benchmarks/zoo/requirements.txt)
	@touch $@

$(DOCS)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	@touch $@

# The peers' environment: their versions, and DeepSpeed with its C++ operators, which take minutes to build, once.
# Without libaio or a compiler the race goes on without ZeRO-Infinity, and says so.
$(PEERS)/.installed: benchmarks/race/requirements-peers.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet $$(grep -v -e '^#' -e '^deepspeed' $<)
	@echo "building DeepSpeed's operators: a quarter of an hour"
	DS_ACCELERATOR=$(ACCELERATOR) DS_BUILD_AIO=1 DS_BUILD_CPU_ADAM=1 DS_BUILD_PIN_MEMORY=1 \
		$(PEERS)/bin/python -m pip install --quiet --no-build-isolation --requirement $< \
		|| echo "DeepSpeed could not be built, so ZeRO-Infinity will not race. It needs libaio-dev and g++:" \
			"apt-get install libaio-dev g++, then rm -r $(PEERS) and make race again"
	@touch $@
