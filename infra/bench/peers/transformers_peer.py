"""Transformers' generate on one static batch, in bf16 with PyTorch's scaled_dot_product_attention."""

from __future__ import annotations

from typing import Any

import protocol
import torch
import transformers

_DEFAULTS = {"attn_implementation": "sdpa"}
# For `generate`, such as cache_implementation="static", which has it compile the step.
_GENERATE_OPTIONS = ("cache_implementation",)


class Transformers:
    method = "timed at each call of a stopping criterion, which generate makes once a step"

    def __init__(self, job: protocol.Job) -> None:
        self.version = f"transformers {transformers.__version__}, torch {torch.__version__}"
        self.options = _DEFAULTS | dict(job.options)
        torch.set_num_threads(job.threads)
        loading = {name: value for name, value in self.options.items() if name not in _GENERATE_OPTIONS}
        self._generating = {name: self.options[name] for name in _GENERATE_OPTIONS if name in self.options}
        self._model = transformers.AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.bfloat16, **loading)
        self._model.eval()

    def generate(self, prompts: protocol.Prompts, num_tokens: int, window: protocol.DecodeWindow) -> list[list[int]]:
        width = max(map(len, prompts))
        ids = torch.zeros((len(prompts), width), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1

        def note(input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            window.note([input_ids.shape[1] - width] * len(prompts))
            return torch.zeros(len(prompts), dtype=torch.bool)

        with torch.inference_mode():
            output = self._model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                pad_token_id=0,
                stopping_criteria=[note],
                **self._generating,
            )
        return output[:, width:].tolist()


if __name__ == "__main__":
    protocol.serve(Transformers)
