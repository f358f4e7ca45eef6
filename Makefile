# `make demo` and `make test` start from nothing: they need python3 >= 3.11, its venv module, and g++.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
MODEL ?= qwen3_8

.PHONY: demo test lint check-tools clean

demo: $(VENV)/.ready
	@$(RUN) -m jasperk_inductor.cli demo --model $(MODEL) --cache-dir .demo/cache --out .demo

test: $(VENV)/.ready
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check jasperk_inductor models bench_e2e tests setup.py
	$(RUN) -m mypy
	OMP_NUM_THREADS=1 $(RUN) -m pytest -m "not gpu" -n 2 --dist loadfile

lint: $(VENV)/.ready
	$(RUN) -m ruff format jasperk_inductor models bench_e2e tests setup.py
	$(RUN) -m ruff check --fix .
	$(RUN) -m mypy

check-tools:
	@command -v $(PYTHON) >/dev/null || { echo "jasperk needs python3 >= 3.11: install it, or run make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "jasperk needs python3 >= 3.11; $(PYTHON) is $$($(PYTHON) -V). Run make PYTHON=/path/to/newer"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "python3's venv module is missing (Debian and Ubuntu: apt-get install python3-venv)"; exit 1; }
	@command -v g++ >/dev/null || { echo "jasperk needs g++ to build its CPU kernels (Debian and Ubuntu: apt-get install g++)"; exit 1; }

$(VENV)/.ready: pyproject.toml setup.py constraints-dev.txt | check-tools
	@echo "setting up $(VENV) (once) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints-dev.txt torch
	@$(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints-dev.txt triton setuptools wheel -e ".[dev]"
	@touch $@

clean:
	rm -rf $(VENV) build .demo *.egg-info
