"""These suites need vLLM (`make test-vllm`); where it isn't installed there is nothing to collect."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("vllm") is not None else ["test_*.py"]
