"""vLLM's CPU build: compiled, or eager (the option `enforce_eager`); its engine in this process, or in one of its own."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import protocol
import vllm

_DEFAULTS = {
    "enforce_eager": False,
    "own_process": False,  # with as many cores as threads, the two processes are in each other's way
}
_KV_BLOCK_SIZE = 128  # vLLM's own choice on a CPU
_BYTES_OF_BF16 = 2


class VllmCpu:
    method = "timed between the outputs of LLMEngine.step"

    def __init__(self, job: protocol.Job) -> None:
        self.version = vllm.__version__
        self.options = _DEFAULTS | dict(job.options)
        arguments = dict(self.options)
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(arguments.pop("own_process"))),
            # vLLM's own binding takes as many threads as it finds cores; without it, OMP_NUM_THREADS holds.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "OMP_NUM_THREADS": str(job.threads),
        }
        self._engine = vllm.LLM(
            model=job.model,
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_model_len=job.max_context,
            max_num_seqs=job.max_sequences,
            max_num_batched_tokens=job.max_sequences * job.max_context,  # all prompts of a batch at once
            enable_prefix_caching=False,
            kv_cache_memory_bytes=_kv_cache_bytes(job),
            **arguments,
        ).llm_engine
        self._num_requests = 0

    def generate(self, prompts: protocol.Prompts, num_tokens: int, window: protocol.DecodeWindow) -> list[list[int]]:
        sampling = vllm.SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        answers: dict[str, list[int]] = {}
        for prompt in prompts:
            self._num_requests += 1
            name = str(self._num_requests)
            self._engine.add_request(name, {"prompt_token_ids": list(prompt)}, sampling)
            answers[name] = []
        while self._engine.has_unfinished_requests():
            outputs: list[Any] = self._engine.step()
            for output in outputs:
                answers[output.request_id] = output.outputs[0].token_ids
            window.note([len(answer) for answer in answers.values()])
        return [list(answer) for answer in answers.values()]


def _kv_cache_bytes(job: protocol.Job) -> int:
    """Room for the job's sequences, and one block that vLLM keeps for itself."""
    config = json.loads((Path(job.model) / "config.json").read_text())
    num_values = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    num_blocks = job.max_sequences * math.ceil(job.max_context / _KV_BLOCK_SIZE) + 1
    return num_blocks * _KV_BLOCK_SIZE * num_values * _BYTES_OF_BF16


if __name__ == "__main__":
    protocol.serve(VllmCpu)
