"""OpenVINO GenAI, through the pipeline that the option `pipeline` names: "paged" (continuous batching) or "stateful"."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import openvino
import openvino_genai
import protocol

_DEFAULTS = {"pipeline": "paged"}
# Of the device, by precision; the option `properties` replaces them. Activations in groups of 192, which divide this model's
# widths, were seen to be up to a quarter faster than the default's 32 with int8 weights, and slower with int4's groups.
_PROPERTIES = {"int8": {"DYNAMIC_QUANTIZATION_GROUP_SIZE": 192}}
_REPORTED = ("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION", "DYNAMIC_QUANTIZATION_GROUP_SIZE")
_KV_BLOCK_SIZE = 32  # what OpenVINO has on a CPU


def open_engine(job: protocol.Job) -> protocol.Engine:
    chosen = _DEFAULTS | dict(job.options)
    properties = {"INFERENCE_NUM_THREADS": job.threads, **chosen.pop("properties", _PROPERTIES.get(job.precision, {}))}
    return _ENGINES[chosen["pipeline"]](job, chosen, properties)


class Paged:
    """ContinuousBatchingPipeline, driven step by step."""

    method = "timed between calls of ContinuousBatchingPipeline.step"

    def __init__(self, job: protocol.Job, chosen: dict[str, Any], properties: dict[str, Any]) -> None:
        scheduling = openvino_genai.SchedulerConfig()
        # All prompts of a batch at once: with the default of 256 tokens long ones would begin one by one.
        scheduling.max_num_batched_tokens = job.max_sequences * job.max_context
        scheduling.max_num_seqs = job.max_sequences
        scheduling.num_kv_blocks = job.max_sequences * math.ceil(job.max_context / _KV_BLOCK_SIZE)
        scheduling.enable_prefix_caching = False
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(job.model, scheduling, "CPU", properties)
        self.version, self.options = openvino_genai.__version__, _options(chosen, properties)
        self._num_requests = 0

    def generate(self, prompts: protocol.Prompts, num_tokens: int, window: protocol.DecodeWindow) -> list[list[int]]:
        config = _greedy(num_tokens)
        handles = []
        for prompt in prompts:
            self._num_requests += 1
            ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
            handles.append(self._pipeline.add_request(self._num_requests, ids, config))
        answers: list[list[int]] = [[] for _ in prompts]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            for handle, answer in zip(handles, answers, strict=True):
                while handle.can_read():
                    for output in handle.read().values():
                        answer.extend(output.generated_ids)
            window.note([len(answer) for answer in answers])
        return answers


class Stateful:
    """LLMPipeline with the SDPA backend: one padded batch."""

    method = "the pipeline's own times of new tokens (m_new_token_times, which are in ms whatever its documentation says)"

    def __init__(self, job: protocol.Job, chosen: dict[str, Any], properties: dict[str, Any]) -> None:
        self._pipeline = openvino_genai.LLMPipeline(job.model, "CPU", ATTENTION_BACKEND="SDPA", **properties)
        self.version, self.options = openvino_genai.__version__, _options(chosen, properties)

    def generate(self, prompts: protocol.Prompts, num_tokens: int, window: protocol.DecodeWindow) -> list[list[int]]:
        width = max(map(len, prompts))
        ids = np.zeros((len(prompts), width), dtype=np.int64)
        mask = np.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = prompt
            mask[row, width - len(prompt) :] = 1
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(mask))
        results = self._pipeline.generate(inputs, _greedy(num_tokens))
        for step, milliseconds in enumerate(results.perf_metrics.raw_metrics.m_new_token_times, start=1):
            window.note([step] * len(prompts), at_s=milliseconds / 1e3)
        return [list(tokens) for tokens in results.tokens]


_ENGINES = {"paged": Paged, "stateful": Stateful}


def _greedy(num_tokens: int) -> Any:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = num_tokens
    config.ignore_eos = True
    config.do_sample = False
    return config


def _options(chosen: dict[str, Any], properties: dict[str, Any]) -> dict[str, Any]:
    core = openvino.Core()
    defaults = {name: _plain(core.get_property("CPU", name)) for name in _REPORTED}
    return {**chosen, "properties": defaults | properties}


def _plain(value: Any) -> Any:
    return value if isinstance(value, int) else value.get_type_name()


if __name__ == "__main__":
    protocol.serve(open_engine)
