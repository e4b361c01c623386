"""These suites need vLLM (`make test-vllm`); where it isn't installed there is nothing to collect."""

from __future__ import annotations

from replicas.vllm_support import installed

# By the installed distributions: this folder itself looks like a package `vllm` to Python.
collect_ignore_glob = [] if installed.find() is not None else ["test_*.py"]
