"""Our engine's greedy answers against transformers' own `generate`, on the weights of the embedded GGUF file.

Both get the same token ids and generate the same number of tokens. Ours computes many sequences at once, in chunks, with the
prefix cache; transformers one prompt at a time with its dense cache. In 32 bits the answers must be the same. In bf16 they
part where two tokens are nearly equally likely, as transformers' own bf16 parts from its fp32: a difference where fp32 prefers
its token clearly would be an error of ours.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from reference_model import reference_model
from rich.progress import Progress
from serving_app import CONFIG

from configs.load import load
from configs.schema import AppConfig
from replicas.blocks import chain_root, hash_blocks
from replicas.build import build_engine
from replicas.chat_template import ChatMessage
from replicas.contract import GenerationRequest, SamplingParams, StepOutput
from replicas.tokenizer import load_tokenizer

NUM_NEW_TOKENS = 64
EQUAL_GAP = 1e-4  # logits closer than this are equal in fp32
CLEAR_GAP = 0.25  # bf16 has 8 bits: it can't turn round what fp32 prefers by this much

Tokens = tuple[int, ...]


@dataclass(slots=True)
class OurAnswer:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ReferenceAnswer:
    """Of transformers. `logits` is [NUM_NEW_TOKENS, vocab_size] in fp32, or None where nobody asked."""

    token_ids: Tokens
    logits: torch.Tensor | None

    def gap(self, position: int) -> float:
        """By how much the best logit leads the second."""
        assert self.logits is not None, "logits weren't kept"
        best, second = self.logits[position].topk(2).values.tolist()
        return float(best - second)


def measure(prompts: Sequence[str], progress: Progress) -> dict[str, Any]:
    """The figures `greedy_*` and `logprob_max_abs_error_fp32`, counted over `prompts`."""
    config = load(CONFIG)
    tokenizer = load_tokenizer(config.model)
    prompt_ids = [tuple(tokenizer.render_chat([ChatMessage("user", prompt)])) for prompt in prompts]
    ours_fp32 = our_answers("fp32", prompt_ids, progress)
    ours_bf16 = our_answers("bf16", prompt_ids, progress)

    theirs_fp32: list[Tokens] = []
    num_equal, gaps_bf16, error = 0, [], 0.0
    for ids, fp32, bf16, reference in zip(
        prompt_ids, ours_fp32, ours_bf16, reference_answers("fp32", prompt_ids, progress), strict=True
    ):
        theirs_fp32.append(reference.token_ids)
        parted = first_difference(fp32.token_ids, reference.token_ids)
        if parted is None or reference.gap(parted) < EQUAL_GAP:
            num_equal += 1
        else:
            gap = reference.gap(parted)
            progress.console.log(f"fp32 parts from transformers after {len(ids)} + {parted} tokens, gap {gap:.5f}")
        error = max(error, logprob_error(fp32, reference, parted))
        parted = first_difference(bf16.token_ids, reference.token_ids)
        if parted is not None:
            gaps_bf16.append(reference.gap(parted))
            progress.console.log(f"bf16 parts after {len(ids)} + {parted} tokens, fp32 gap {gaps_bf16[-1]:.4f}")
    theirs_bf16 = [reference.token_ids for reference in reference_answers("bf16", prompt_ids, progress)]
    return {
        "greedy_prompts": len(prompts),
        "greedy_fp32_equal": num_equal,
        "greedy_bf16_differ": len(gaps_bf16),
        "greedy_bf16_differ_transformers": sum(a != b for a, b in zip(theirs_bf16, theirs_fp32, strict=True)),
        "greedy_bf16_unexplained": sum(gap > CLEAR_GAP for gap in gaps_bf16),
        "greedy_bf16_largest_gap": max(gaps_bf16, default=0.0),
        "logprob_max_abs_error_fp32": error,
    }


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)


def logprob_error(ours: OurAnswer, reference: ReferenceAnswer, parted: int | None) -> float:
    """Largest difference of log-probabilities of our tokens, up to the first that differs: its context is still the same."""
    assert reference.logits is not None, "logits weren't kept"
    num_common = len(ours.token_ids) if parted is None else parted + 1
    rows = reference.logits[:num_common].log_softmax(-1)
    theirs = rows.gather(1, torch.tensor(ours.token_ids[:num_common]).unsqueeze(1)).squeeze(1)
    return float((theirs - torch.tensor(ours.logprobs[:num_common])).abs().max())


def our_answers(dtype: str, prompt_ids: Sequence[Tokens], progress: Progress, path: Path = CONFIG) -> list[OurAnswer]:
    """All prompts at once through the engine that `path` describes (16 sequences a step), on all cores."""
    config = load(path, [f"model.dtype={dtype}", f"engine.num_threads={os.cpu_count()}", "replicas.num=1"])
    task = progress.add_task(f"greedy: {config.engine.kind}, {dtype}", total=len(prompt_ids) * NUM_NEW_TOKENS)
    return run_engine(config, prompt_ids, lambda num_tokens: progress.advance(task, num_tokens))


def run_engine(config: AppConfig, prompt_ids: Sequence[Tokens], advance: Callable[[int], None]) -> list[OurAnswer]:
    engine = build_engine(config, replicas_on_node=1)
    answers = {str(index): OurAnswer() for index in range(len(prompt_ids))}
    unfinished = set(answers)
    failures: list[str] = []
    finished = threading.Event()

    def sink(output: StepOutput) -> None:
        for delta in output.deltas:
            answer = answers[delta.request_id]
            answer.token_ids += delta.token_ids
            answer.logprobs += [entry.logprob for entry in delta.logprobs or ()]
            if delta.error is not None:
                failures.append(delta.error.message)
            if delta.finish_reason is not None:
                unfinished.discard(delta.request_id)
        advance(sum(len(delta.token_ids) for delta in output.deltas))
        if not unfinished:
            finished.set()

    root = chain_root(b"bench", model_revision=engine.info.model_revision)
    sampling = SamplingParams(max_tokens=NUM_NEW_TOKENS, temperature=0.0, ignore_eos=True, num_logprobs=0)
    engine.start(sink)
    try:
        for index, ids in enumerate(prompt_ids):
            engine.submit(GenerationRequest(str(index), ids, sampling, root, hash_blocks(root, ids, engine.info.block_size)))
        finished.wait()
    finally:
        engine.shutdown()
    if failures:
        raise RuntimeError(f"{len(failures)} requests failed in the engine: {failures[0]}")
    return list(answers.values())


def reference_answers(dtype: str, prompt_ids: Sequence[Tokens], progress: Progress) -> Iterator[ReferenceAnswer]:
    """Yields a ReferenceAnswer a prompt; with logits in fp32 only, each gone when the next is made (13 MB each)."""
    torch_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    torch.set_num_threads(os.cpu_count() or 1)
    model = reference_model(torch_dtype)
    model.generation_config.eos_token_id = None  # exactly NUM_NEW_TOKENS, as ours with ignore_eos
    for ids in progress.track(prompt_ids, description=f"greedy: transformers, {dtype}"):
        tokens = torch.tensor([ids])
        output = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=False,
            max_new_tokens=NUM_NEW_TOKENS,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=dtype == "fp32",
        )
        logits = torch.cat(output.logits) if output.logits else None
        yield ReferenceAnswer(tuple(output.sequences[0, len(ids) :].tolist()), logits)
