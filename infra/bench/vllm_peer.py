"""The same single stream through vLLM's CPU build, as a measure of what this machine can do.

vLLM can't read our GGUF file on a CPU, so transformers writes the dequantized weights to a temporary directory first.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import httpx
import torch
from one_replica import sequential_tokens_per_s, stream_prompts
from reference_model import reference_model, reference_tokenizer
from rich.progress import Progress
from serving_app import CONFIG, free_port, running
from sse_client import Client

from configs.load import load
from replicas.engine.device import choose_dtype

_SERVED_NAME = "peer"
_KV_CACHE_GIB = 1
_MAX_MODEL_LEN = 2048


async def single_stream_tokens_per_s(vllm_python: Path, progress: Progress) -> float:
    """Of vLLM's API server, run by the interpreter of an environment that has it, in the number format our engine chooses."""
    dtype = str(choose_dtype(load(CONFIG).model.dtype, torch.device("cpu"))).removeprefix("torch.")
    with tempfile.TemporaryDirectory(prefix="trieserve-peer-") as folder:
        _export(Path(folder), getattr(torch, dtype))
        url = f"http://127.0.0.1:{free_port()}"
        command = [str(vllm_python), "-m", "vllm.entrypoints.openai.api_server", "--model", folder]
        command += ["--served-model-name", _SERVED_NAME, "--dtype", dtype, "--enforce-eager"]
        command += ["--max-model-len", str(_MAX_MODEL_LEN), "--host", "127.0.0.1", "--port", url.rsplit(":", 1)[1]]
        environment = {
            **os.environ,
            "VLLM_CPU_KVCACHE_SPACE": str(_KV_CACHE_GIB),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        waiting = progress.add_task("serving: starting vLLM", total=None)
        with running(command, environment, ready=lambda _: _is_healthy(url)):
            progress.remove_task(waiting)
            async with Client(url, _SERVED_NAME) as client:
                return await sequential_tokens_per_s(client, stream_prompts()[0], progress, "vLLM")


def _export(folder: Path, dtype: torch.dtype) -> None:
    reference_model(dtype).save_pretrained(folder)
    reference_tokenizer().save_pretrained(folder)


def _is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False
