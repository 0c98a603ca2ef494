# `make` lists what there is. Everything happens in .venv, which is made on first use.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
STAMP := $(VENV)/.installed
PIP_INSTALL := $(PY) -m pip install --quiet --no-input --disable-pip-version-check -c constraints.txt
PARALLEL := --numprocesses 2
TORCH := $(shell sed -n 's/^\(torch==[^ ]*\).*/\1/p' constraints.txt)

.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint bench bench-full accuracy published faults fuzz exhaustive soak convergence clean $(VENV)

help: ## list the targets
	@awk -F ':.*## ' '/^[.a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "  (PYTHON=python3.12 make … picks the interpreter, ARGS='-k plan' make test goes to pytest)"

.venv: $(STAMP) ## set up .venv with the tested versions (PYTHON: 3.11 or newer)

$(STAMP): constraints.txt pyproject.toml
	@$(PY) -m pip --version >/dev/null 2>&1 || { \
		$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
			found=$$($(PYTHON) --version 2>/dev/null) || found=missing; \
			echo "hzplan needs Python 3.11 or newer; $(PYTHON) is: $$found. Try: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; \
			exit 1; }; \
		$(PYTHON) -m venv --clear $(VENV); }
	@echo "Installing $(TORCH) into $(VENV) (a large package, once) …"
	@$(PIP_INSTALL) $(TORCH)
	@echo "Installing hzplan and its tools into $(VENV) …"
	@$(PIP_INSTALL) -e '.[test,dev]'
	@touch $@

demo: $(STAMP) ## profile, plan and train a small GPT on this machine
	$(BIN)/hzplan demo

test: $(STAMP) ## run the tests that guard every claim, in 17 to 30 minutes on 2 cores (ARGS='…' goes to pytest)
	OMP_NUM_THREADS=1 $(PY) -m pytest $(or $(ARGS),-m "not long" $(PARALLEL))

test-all: $(STAMP) ## run all tests, and each kind of launch once without warm processes (half an hour)
	OMP_NUM_THREADS=1 $(PY) -m pytest $(PARALLEL)
	OMP_NUM_THREADS=1 HZPLAN_TESTS_COLD=1 $(PY) -m pytest $(PARALLEL) -m "launch and not long"

lint: $(STAMP) ## check style, types and the layers of the code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP) ## measure plans beside their peers, a quick part (about 15 minutes, nothing else running)
	$(PY) -m benchmarks

bench-full: $(STAMP) ## measure all regimes and write docs/benchmarks.md (over an hour)
	$(PY) -m benchmarks --full --docs docs/benchmarks.md

accuracy: $(STAMP) ## measure predictions on emulated clusters and publish the error (about half an hour)
	$(PIP_INSTALL) -e '.[bench]'
	$(PY) -m benchmarks.accuracy --docs docs/accuracy.md --publish cost_models/accuracy.json

published: $(STAMP) ## fit the model of modelled plans to published runs, write docs/published.md (about 5 minutes)
	$(PIP_INSTALL) -e '.[bench]'
	OMP_NUM_THREADS=1 $(PY) -m benchmarks.published --write .

faults: $(STAMP) ## kill, cut and damage runs and checkpoints, hundreds of times (about an hour)
	OMP_NUM_THREADS=1 $(PY) -m tests.faults --docs docs/reliability.md

fuzz: $(STAMP) ## throw guided nonsense at every reader of files, a minute each (FUZZ='plan 600': one, longer)
	$(PIP_INSTALL) -e '.[fuzz]'
	$(PY) -m tests.fuzz $(FUZZ)

exhaustive: $(STAMP) ## solver and runtime against trying everything, in more cases than the tests (some minutes)
	HZPLAN_INSTANCES=600 $(PY) -m pytest --numprocesses 2 tests/unit/test_solver.py -k equals_trying_everything
	HZPLAN_INSTANCES=600 $(PY) -m pytest tests/distributed/test_oracle.py

soak: $(STAMP) ## train 2,000 steps under random plans in turn, beside one process (several minutes)
	OMP_NUM_THREADS=1 $(PY) -m tests.distributed.soak

convergence: $(STAMP) ## train small models for 5,000 steps in bf16, under a plan and under FSDP2 (an hour)
	OMP_NUM_THREADS=1 $(PY) -m benchmarks.convergence --docs docs/convergence.md

.PHONY: cuda-api accelerator
accelerator: $(STAMP) ## run the runtime on a simulated accelerator in 100,000 interleavings (half an hour)
	OMP_NUM_THREADS=1 $(PY) -m tests.accelerator --interleavings 100000

cuda-api: ## look up every name of torch's CUDA build that is called, in an environment of its own (gigabytes)
	$(PYTHON) -m venv build/cuda-api
	PIP_CONFIG_FILE=/dev/null PIP_FIND_LINKS= build/cuda-api/bin/python -m pip install --quiet --no-input $(TORCH) numpy
	build/cuda-api/bin/python benchmarks/gpu/api.py --output benchmarks/results/cuda_api.json

.PHONY: kernels
kernels: ## check Triton's kernels in its interpreter, and compile them for GPUs, in an environment of its own
	$(PYTHON) -m venv build/kernels
	build/kernels/bin/python -m pip install --quiet --no-input -c constraints.txt $(TORCH)
	build/kernels/bin/python -m pip install --quiet --no-input -c constraints.txt -e . triton pytest pytest-timeout pytest-xdist hypothesis
	build/kernels/bin/python -m pytest -p no:cacheprovider tests/unit/test_kernels.py tests/unit/test_packing.py

.PHONY: mutants
mutants: $(STAMP) ## break the product line by line: which test sees it? (MUTANTS='--only NAME', '--all')
	$(PY) -m tests.mutants $(MUTANTS)

clean: ## remove .venv, caches and build outputs
	rm -rf $(VENV) build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name .git -prune -o -type d -name __pycache__ -exec rm -rf {} +
