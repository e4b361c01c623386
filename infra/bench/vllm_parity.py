"""Greedy answers of vLLM's CPU build, ours and transformers', on the same token ids and weights.

Where two part, what decides is how sure the model was: the lead of the best logit over the second, computed by transformers in
fp32 on the tokens that both had in common. The least rounding can part two answers, so that they part says little about who is
wrong: each one's log-probabilities are held against fp32's too, for as long as the contexts are the same.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from greedy_parity import CLEAR_GAP, EQUAL_GAP, Tokens, first_difference, our_answers, reference_answers
from reference_model import reference_model
from rich.progress import Progress
from serving_app import CONFIG, ROOT

from configs.load import load
from replicas.chat_template import ChatMessage
from replicas.tokenizer import load_tokenizer

VLLM_CONFIG = ROOT / "configs" / "vllm-cpu.yaml"


def measure(prompts: Sequence[str], progress: Progress) -> dict[str, Any]:
    """The figures `greedy_*` and `logprob_rms_error_*`."""
    tokenizer = load_tokenizer(load(CONFIG).model)
    prompt_ids = [tuple(tokenizer.render_chat([ChatMessage("user", prompt)])) for prompt in prompts]
    ours = {
        (name, dtype): our_answers(dtype, prompt_ids, progress, path)
        for name, path in (("native", CONFIG), ("vllm", VLLM_CONFIG))
        for dtype in ("fp32", "bf16")
    }
    answers = {key: [tuple(answer.token_ids) for answer in found] for key, found in ours.items()}
    for dtype in ("fp32", "bf16"):
        answers["transformers", dtype] = [each.token_ids for each in reference_answers(dtype, prompt_ids, progress)]
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
    logprobs = {key: [answer.logprobs for answer in found] for key, found in ours.items()}
    for dtype in ("fp32", "bf16"):
        logprobs["transformers", dtype] = logprobs_of(answers["transformers", dtype], prompt_ids, dtype, progress)
    for name, dtype in (("native", "fp32"), ("vllm", "fp32"), ("native", "bf16"), ("vllm", "bf16"), ("transformers", "bf16")):
        error = rms_error(answers[name, dtype], logprobs[name, dtype], exact, logprobs["transformers", "fp32"])
        figures[f"logprob_rms_error_{name}_{dtype}"] = error
    return figures


@torch.inference_mode()
def logprobs_of(answers: Sequence[Tokens], prompt_ids: Sequence[Tokens], dtype: str, progress: Progress) -> list[list[float]]:
    """Of each token of each answer, by transformers in one pass over prompt and answer."""
    model = reference_model({"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
    found = []
    pairs = list(zip(prompt_ids, answers, strict=True))
    for prompt, answer in progress.track(pairs, description=f"greedy: log-probabilities by transformers, {dtype}"):
        logits = model(torch.tensor([(*prompt, *answer)]), logits_to_keep=len(answer) + 1).logits[0, :-1]
        rows = logits.float().log_softmax(-1)
        found.append(rows.gather(1, torch.tensor(answer).unsqueeze(1)).squeeze(1).tolist())
    return found


def rms_error(
    ones: Sequence[Tokens],
    logprobs: Sequence[Sequence[float]],
    exact: Sequence[Tokens],
    exact_logprobs: Sequence[Sequence[float]],
) -> float:
    """Over all tokens before an answer parts from the exact one."""
    errors = []
    for one, own, other, others in zip(ones, logprobs, exact, exact_logprobs, strict=True):
        common = first_difference(one, other)
        errors += [a - b for a, b in zip(own[:common], others[:common], strict=True)]
    return math.sqrt(statistics.fmean(error * error for error in errors))


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
