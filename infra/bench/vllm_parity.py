"""Greedy answers of vLLM's CPU build, ours and transformers', on the same token ids and weights.

Where two part, what decides is how sure the model was: the lead of the best logit over the second, computed by transformers in
fp32 on the tokens that both had in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from greedy_parity import CLEAR_GAP, EQUAL_GAP, OurAnswer, Tokens, first_difference, our_answers, reference_answers
from reference_model import reference_model
from rich.progress import Progress
from serving_app import CONFIG, ROOT

from configs.load import load
from replicas.chat_template import ChatMessage
from replicas.tokenizer import load_tokenizer

VLLM_CONFIG = ROOT / "configs" / "vllm-cpu.yaml"


def measure(prompts: Sequence[str], progress: Progress) -> dict[str, Any]:
    """The figures `greedy_*`."""
    tokenizer = load_tokenizer(load(CONFIG).model)
    prompt_ids = [tuple(tokenizer.render_chat([ChatMessage("user", prompt)])) for prompt in prompts]
    answers = {
        (name, dtype): _tokens(our_answers(dtype, prompt_ids, progress, path))
        for name, path in (("native", CONFIG), ("vllm", VLLM_CONFIG))
        for dtype in ("fp32", "bf16")
    }
    answers["transformers", "fp32"] = [each.token_ids for each in reference_answers("fp32", prompt_ids, progress)]
    answers["transformers", "bf16"] = [each.token_ids for each in reference_answers("bf16", prompt_ids, progress)]
    gaps = Gaps(prompt_ids, progress)
    exact = answers["transformers", "fp32"]
    between = {
        "vllm_fp32_transformers_fp32": (answers["vllm", "fp32"], exact),
        "vllm_bf16_transformers_fp32": (answers["vllm", "bf16"], exact),
        "native_bf16_transformers_fp32": (answers["native", "bf16"], exact),
        "transformers_bf16_transformers_fp32": (answers["transformers", "bf16"], exact),
        "native_fp32_vllm_fp32": (answers["native", "fp32"], answers["vllm", "fp32"]),
        "native_bf16_vllm_bf16": (answers["native", "bf16"], answers["vllm", "bf16"]),
    }
    figures: dict[str, Any] = {"greedy_prompts": len(prompts)}
    for name, (ones, others) in between.items():
        found = gaps.where_they_part(name, ones, others)
        figures[f"greedy_differ_{name}"] = sum(gap >= EQUAL_GAP for gap in found)
        figures[f"greedy_unexplained_{name}"] = sum(gap >= CLEAR_GAP for gap in found)
        figures[f"greedy_largest_gap_{name}"] = max(found, default=0.0)
    return figures


class Gaps:
    """transformers in fp32, asked how sure it is at a place."""

    def __init__(self, prompt_ids: Sequence[Tokens], progress: Progress) -> None:
        self._prompt_ids = prompt_ids
        self._progress = progress
        self._model = reference_model(torch.float32)

    def where_they_part(self, name: str, ones: Sequence[Tokens], others: Sequence[Tokens]) -> list[float]:
        """The lead of the best token at the first difference of each pair that has one."""
        found = []
        for index, (one, other) in enumerate(zip(ones, others, strict=True)):
            position = first_difference(one, other)
            if position is not None:
                gap = self._at((*self._prompt_ids[index], *one[:position]))
                self._progress.console.log(f"{name}: prompt {index} parts at token {position}, fp32 gap {gap:.4f}")
                found.append(gap)
        return found

    @torch.inference_mode()
    def _at(self, token_ids: Tokens) -> float:
        logits = self._model(torch.tensor([token_ids]), logits_to_keep=1).logits[0, -1]
        best, second = logits.topk(2).values.tolist()
        return float(best - second)


def _tokens(answers: Sequence[OurAnswer]) -> list[Tokens]:
    return [tuple(answer.token_ids) for answer in answers]
