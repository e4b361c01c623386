"""llama.cpp through llama-cpp-python's low-level API: a step is one llama_decode for all sequences, as in its batched-bench."""

from __future__ import annotations

import ctypes
from typing import Any

import llama_cpp
import numpy as np
import protocol

_NUM_BATCH_TOKENS = 2048

_DEFAULTS = {
    "n_ubatch": 512,
    "flash_attn_type": llama_cpp.LLAMA_FLASH_ATTN_TYPE_AUTO,
    "kv_unified": False,
}


class LlamaCpp:
    method = "timed between calls of llama_decode; greedy choice by numpy over the step's logits"

    def __init__(self, job: protocol.Job) -> None:
        self.version = f"llama-cpp-python {llama_cpp.__version__}, {llama_cpp.llama_version().decode()}"
        self._keep_log = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._keep_log, ctypes.c_void_p())
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(job.model.encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise ValueError(f"llama.cpp can't load {job.model}")
        chosen = _DEFAULTS | dict(job.options)
        self._context = llama_cpp.llama_init_from_model(self._model, _context_params(job, chosen))
        if not self._context:
            raise ValueError(f"llama.cpp can't make a context with {chosen}")
        self._num_words = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = _Batch(_NUM_BATCH_TOKENS)
        self.options = chosen | {"system": llama_cpp.llama_print_system_info().decode().strip()}

    def generate(self, prompts: protocol.Prompts, num_tokens: int, window: protocol.DecodeWindow) -> list[list[int]]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), False)
        answers: list[list[int]] = [[] for _ in prompts]
        self._read(prompts, answers, window)
        batch, sequences = self._batch, range(len(prompts))
        positions = np.array([len(prompt) for prompt in prompts])
        batch.clear()
        for sequence in sequences:
            batch.add(0, 0, sequence, wanted=True)
        for step in range(num_tokens - 1):
            batch.tokens[: len(prompts)] = [answer[-1] for answer in answers]
            batch.positions[: len(prompts)] = positions + step
            self._compute(sequences, answers)
            window.note([len(answer) for answer in answers])
        return answers

    def _read(self, prompts: protocol.Prompts, answers: list[list[int]], window: protocol.DecodeWindow) -> None:
        """The prompts, as many tokens a call as a batch holds. Gives each sequence its first token."""
        self._batch.clear()
        ends: list[int] = []
        for sequence, prompt in enumerate(prompts):
            for position, token in enumerate(prompt):
                is_last = position == len(prompt) - 1
                self._batch.add(token, position, sequence, wanted=is_last)
                if is_last:
                    ends.append(sequence)
                if self._batch.is_full or (is_last and sequence == len(prompts) - 1):
                    self._compute(ends, answers)
                    window.note([len(answer) for answer in answers])
                    self._batch.clear()
                    ends = []

    def _compute(self, ends: Any, answers: list[list[int]]) -> None:
        status = llama_cpp.llama_decode(self._context, self._batch.struct)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")
        if not ends:
            return
        # One row for each token whose logits were wanted, in the batch's order.
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(self._context), shape=(len(ends), self._num_words))
        for sequence, token in zip(ends, logits.argmax(axis=1).tolist(), strict=True):
            answers[sequence].append(token)


class _Batch:
    """A llama_batch whose arrays can be written through numpy."""

    def __init__(self, size: int) -> None:
        self.struct = llama_cpp.llama_batch_init(size, 0, 1)
        self.tokens = np.ctypeslib.as_array(self.struct.token, shape=(size,))
        self.positions = np.ctypeslib.as_array(self.struct.pos, shape=(size,))
        self._size = size

    @property
    def is_full(self) -> bool:
        return self.struct.n_tokens == self._size

    def clear(self) -> None:
        self.struct.n_tokens = 0

    def add(self, token: int, position: int, sequence: int, *, wanted: bool) -> None:
        row = self.struct.n_tokens
        self.tokens[row], self.positions[row] = token, position
        self.struct.n_seq_id[row] = 1
        self.struct.seq_id[row][0] = sequence
        self.struct.logits[row] = wanted
        self.struct.n_tokens = row + 1


def _context_params(job: protocol.Job, chosen: dict[str, Any]) -> Any:
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = job.max_sequences * job.max_context
    params.n_seq_max = job.max_sequences
    params.n_batch = _NUM_BATCH_TOKENS
    params.n_threads = params.n_threads_batch = job.threads
    for name, value in chosen.items():
        setattr(params, name, value)
    return params


if __name__ == "__main__":
    protocol.serve(LlamaCpp)
