# The commands of this repository; `make` alone lists them.
#
#   PYTHON       the interpreter that makes .venv, 3.11 to 3.13 (default: python3)
#   TORCH_INDEX  a package index that has the torch build you want, for example PyTorch's own CPU index
#                (default: empty, pip's own choice: on x86-64 Linux a CUDA build of several GB)
#   ARGS         passed on: to `ppo up`, the demo, or pytest

PYTHON ?= python3
TORCH_INDEX ?=
ARGS ?=
MAKEFLAGS += --no-print-directory

PY := .venv/bin/python
WEB_SOURCES := $(shell find web -type f -not -path 'web/node_modules/*' -not -path 'web/dist/*' -not -path '*/test-results/*' 2>/dev/null)
SETUP := PYTHON='$(PYTHON)' TORCH_INDEX='$(TORCH_INDEX)' bash requirements/setup.sh

.PHONY: help setup setup-engines setup-test demo up test test-all lint bench

help:
	@echo "make setup      .venv with everything pinned, and the built web pages"
	@echo "make setup-engines    vLLM and DeepSpeed beside it, for specs that ask for them"
	@echo "make demo       all of it: the platform, the reviews example, a training run to watch (EXIT=1: end with the run)"
	@echo "make up         the platform, nothing submitted"
	@echo "make test       the tests but the slow ones        make test-all   the slow ones too"
	@echo "make lint       style, types, import arrows        make bench      measurements"

# Set-up is stamped: with nothing changed it takes no time.
setup: .venv/.stamp-base .venv/.stamp-web
setup-engines: setup .venv/.stamp-engines
setup-test: setup .venv/.stamp-test

.venv/.stamp-base: requirements/base.txt pyproject.toml requirements/setup.sh
	@$(SETUP) base

.venv/.stamp-test: requirements/test.txt .venv/.stamp-base
	@$(SETUP) test

.venv/.stamp-engines: requirements/engines.txt .venv/.stamp-base
	@$(SETUP) engines

.venv/.stamp-web: $(WEB_SOURCES) | .venv/.stamp-base
	@$(SETUP) web

demo: setup
	@exec $(PY) -m ppo.local.demo $(ARGS)

up: setup
	@exec .venv/bin/ppo up $(ARGS)

# One pytest run, so that its closing line is the last word; tests/conftest.py says which tests two processes may share.
IN_TWO := -n 2 --dist loadscope
test: setup-test setup-engines
	@$(SETUP) browser
	@$(PY) -m pytest $(IN_TWO) -m "not slow and not gpu" --durations=15 $(ARGS)

test-all: setup-test setup-engines
	@$(SETUP) browser
	@$(PY) -m pytest $(IN_TWO) -m "not gpu" --durations=15 $(ARGS)

lint: setup-test
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy
	@.venv/bin/lint-imports
	@$(SETUP) web-check

bench: setup
	@$(PY) -m bench $(ARGS)
