"""vLLM's CPU build: compiled, or eager (the option `enforce_eager`); its engine in this process, or in one of its own."""

from __future__ import annotations

import os
from typing import Any

import protocol
import vllm

_DEFAULTS = {
    "enforce_eager": False,
    "own_process": False,
    # Of the whole batch's prompts at once, where they fit.
    "max_num_batched_tokens": 1 << 15,
}
_KV_CACHE_BYTES = 2 << 30


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
            enable_prefix_caching=False,
            kv_cache_memory_bytes=_KV_CACHE_BYTES,
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


if __name__ == "__main__":
    protocol.serve(VllmCpu)
