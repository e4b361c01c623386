"""Chooses the next token of every sequence of a step from the model's logits.

    logits --edit--> edited --temperature--> scaled --softmax--> probs --min_p, top_k, top_p--> kept --inverse CDF--> token
       |                |
       +-> logprobs     +-> argmax, where the temperature is 0

Whole-vocabulary work is batched on the device; what is left of a row after its filters is a few hundred candidates, which
are ranked and drawn from on the CPU in fp64. A row's token depends on that row's logits and spec alone, never on who else
is in the batch: each operation is elementwise or reduces one row, and the random number comes from `uniform`.

Candidates are drawn in the order of their ids and not of their probabilities: two near-equal logits that change places,
because another replica rounds differently, then leave the draw as it was.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from replicas.contract import SamplingParams, TokenLogprob
from replicas.engine.step import SampleSpec

GREEDY_BELOW = 1e-5  # a smaller temperature leaves nothing but the best token in fp32
_MAX_TEMPERATURE = 1e30  # the law is uniform long before, and larger ones overflow fp32
_CDF_BLOCK = 128

_Floats = npt.NDArray[np.float64]
_Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SampleOutcome:
    """Exactly one of `token_id` and `error` is set; `logprob` with the token where the spec asks for it."""

    token_id: int | None
    logprob: TokenLogprob | None
    error: str | None


_NO_TOKEN = SampleOutcome(None, None, "the model's logits leave no token to sample (not finite, or all forbidden)")


@dataclass(frozen=True, slots=True)
class _Filters:
    """What narrows a row's law before the draw: min_p (0: off), top_k (0: off), top_p (1: off)."""

    min_p: float
    top_k: int
    top_p: float

    @classmethod
    def of(cls, params: SamplingParams, vocab_size: int) -> _Filters:
        top_k = params.top_k if 0 < params.top_k < vocab_size else 0
        return cls(min(max(params.min_p, 0.0), 1.0), top_k, min(params.top_p, 1.0))

    @property
    def is_on(self) -> bool:
        return self.min_p > 0.0 or self.top_k > 0 or self.top_p < 1.0

    @property
    def is_top_p_only(self) -> bool:
        return self.top_p < 1.0 and self.top_k == 0 and self.min_p == 0.0


def uniform(seed: int, choice: int, position: int) -> float:
    """A number of [0, 1) with 53 random bits, a pure function of its arguments.

    The first 8 bytes of BLAKE2b over the three as little-endian uint64 (negative ones wrap). A hash is a counter-based
    generator without state: a sequence that continues elsewhere, or is computed twice, meets the same numbers.
    """
    wrap = 2**64 - 1
    key = struct.pack("<QQQ", seed & wrap, choice & wrap, position & wrap)
    bits = int.from_bytes(blake2b(key, digest_size=8).digest(), "little")
    return (bits >> 11) * 2.0**-53


class Sampler:
    """Stateless but for the shape: `vocab_size` is the width of the logits, `device` where they are."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device

    def sample(self, logits: Tensor, specs: Sequence[SampleSpec], best: Sequence[int] | None = None) -> list[SampleOutcome]:
        """`logits` is [len(specs), vocab_size] in any float format, and not modified. `best`: StepLogits.

        A row whose largest logit is not a finite number gets an error; the others are not touched by it.
        """
        assert logits.shape == (len(specs), self._vocab_size), (tuple(logits.shape), len(specs), self._vocab_size)
        if not specs:
            return []
        if best is not None and all(_is_plain_greedy(spec) for spec in specs):
            return [_NO_TOKEN if token < 0 else SampleOutcome(token, None, None) for token in best]
        raw = logits.float()
        edited = self._edit(raw, specs)
        best_logit, best_id = edited.max(dim=-1)  # of equal ones, the first; NaN beats all
        usable = best_logit.isfinite()
        if edited is not raw:
            usable &= raw.amax(dim=-1).isfinite()
        usable_rows: list[bool] = usable.tolist()
        tokens: list[int | None] = [token if ok else None for token, ok in zip(best_id.tolist(), usable_rows, strict=True)]
        random_rows = [row for row, spec in enumerate(specs) if usable_rows[row] and spec.params.temperature >= GREEDY_BELOW]
        if random_rows:
            drawn = self._draw(_take(edited, random_rows), _take(best_logit, random_rows), [specs[row] for row in random_rows])
            for row, token in zip(random_rows, drawn, strict=True):
                tokens[row] = token
        logprobs = self._logprobs(raw, tokens, specs)
        return [
            _NO_TOKEN if token is None else SampleOutcome(token, logprobs.get(row), None) for row, token in enumerate(tokens)
        ]

    def _edit(self, raw: Tensor, specs: Sequence[SampleSpec]) -> Tensor:
        """Penalties, bias and forbidden tokens; `raw` itself where no row wants any."""
        edits = [(row, spec) for row, spec in enumerate(specs) if _has_edits(spec)]
        if not edits:
            return raw
        edited = raw.clone()
        self._scatter(edited, edits, _repeated, _penalize_repetition)
        self._scatter(edited, edits, _output_penalties, torch.sub)
        self._scatter(edited, edits, _bias, torch.add)
        self._scatter(edited, edits, _forbidden, lambda old, _: torch.full_like(old, -torch.inf))
        return edited

    def _scatter(
        self,
        edited: Tensor,
        edits: Sequence[tuple[int, SampleSpec]],
        entries: Callable[[SampleSpec], tuple[_Ids, _Floats]],
        change: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        """edited[row, ids] = change(edited[row, ids], values) for the (distinct ids, values) of each row's `entries`.

        Ids beyond the vocabulary are dropped: no such token can be drawn, so nothing about it needs changing.
        """
        flat_ids, values = [], []
        for row, spec in edits:
            ids, row_values = entries(spec)
            inside = (ids >= 0) & (ids < self._vocab_size)
            flat_ids.append(ids[inside] + row * self._vocab_size)
            values.append(row_values[inside])
        index = torch.from_numpy(np.concatenate(flat_ids)).to(self._device)
        if index.numel() > 0:
            operand = torch.from_numpy(np.concatenate(values)).to(self._device, torch.float32)
            flat = edited.view(-1)
            flat[index] = change(flat[index], operand)

    def _draw(self, logits: Tensor, best_logit: Tensor, specs: Sequence[SampleSpec]) -> list[int | None]:
        """One token a row of `logits` [rows, vocab], whose largest is `best_logit` [rows]."""
        temperature = self._column([min(spec.params.temperature, _MAX_TEMPERATURE) for spec in specs])
        scaled = (logits - best_logit[:, None]).div_(temperature)
        probs = torch.softmax(scaled, dim=-1)
        uniforms = np.array([uniform(spec.params.seed, spec.choice, spec.position) for spec in specs])
        tokens: list[int | None] = [None] * len(specs)
        filters = [_Filters.of(spec.params, self._vocab_size) for spec in specs]
        whole = [row for row, one in enumerate(filters) if not one.is_on]
        if whole:
            for row, token in zip(whole, _draw_whole(_take(probs, whole), uniforms[whole]), strict=True):
                tokens[row] = token
        narrowed = [row for row, one in enumerate(filters) if one.is_on]
        if narrowed:
            on = [filters[row] for row in narrowed]
            candidates = self._candidates(_take(scaled, narrowed), _take(probs, narrowed), on)
            for row, one, (ids, logit, prob) in zip(narrowed, on, candidates, strict=True):
                kept = _kept(logit, prob, one)
                tokens[row] = int(ids[kept[_inverse_cdf(prob[kept], uniforms[row])]])
        return tokens

    def _candidates(
        self, scaled: Tensor, probs: Tensor, filters: Sequence[_Filters]
    ) -> Iterator[tuple[_Ids, _Floats, _Floats]]:
        """(ids ascending, scaled logits, probabilities) of a row's tokens that can pass its filters, and few others.

        A row with top_k or min_p is cut there, ties included, so that nothing of its filtered law is lost. With top_p
        alone, tokens under (1 - top_p) / vocab weigh less than 1 - top_p all together, so the nucleus never reaches
        them; half of that leaves room for fp32, whose probabilities don't add up to 1 exactly.
        """
        best_prob: list[float] = probs.amax(dim=-1).tolist()
        least_prob = [
            (1.0 - one.top_p) / (2 * self._vocab_size) if one.is_top_p_only else one.min_p * best
            for one, best in zip(filters, best_prob, strict=True)
        ]
        keep = probs >= self._column(least_prob)
        ranked = [row for row, one in enumerate(filters) if one.top_k > 0]
        if ranked:
            least_logit = torch.full((len(filters), 1), -torch.inf, device=self._device)
            least_logit[ranked] = self._kth_largest(_take(scaled, ranked), [filters[row].top_k for row in ranked])
            keep &= scaled >= least_logit
        return _nonzero(keep, scaled, probs)

    def _kth_largest(self, values: Tensor, ranks: Sequence[int]) -> Tensor:
        """[rows, 1]: the ranks[row]-th largest value of each row, from 1."""
        top = values.topk(max(ranks), dim=-1).values
        return top.gather(1, torch.tensor(ranks, device=self._device)[:, None] - 1)

    def _logprobs(self, raw: Tensor, tokens: Sequence[int | None], specs: Sequence[SampleSpec]) -> dict[int, TokenLogprob]:
        """By row, where asked for and there is a token. Equal logits rank by id."""
        wanted: list[tuple[int, int, int]] = []
        for row, (token, spec) in enumerate(zip(tokens, specs, strict=True)):
            if token is not None and spec.params.num_logprobs is not None:
                wanted.append((row, token, min(spec.params.num_logprobs, self._vocab_size)))
        if not wanted:
            return {}
        logits = _take(raw, [row for row, _, _ in wanted])
        logprobs = torch.log_softmax(logits, dim=-1)
        chosen = logprobs.gather(1, torch.tensor([[token] for _, token, _ in wanted], device=self._device))
        tops: list[tuple[tuple[int, float], ...]] = [()] * len(wanted)
        with_top = [index for index, (_, _, count) in enumerate(wanted) if count > 0]
        if with_top:
            counts = [wanted[index][2] for index in with_top]
            top_logits = _take(logits, with_top)
            keep = top_logits >= self._kth_largest(top_logits, counts)
            rows = _nonzero(keep, top_logits, _take(logprobs, with_top))
            for index, count, (ids, logit, logprob) in zip(with_top, counts, rows, strict=True):
                order = np.argsort(-logit, kind="stable")[:count]
                tops[index] = tuple(zip(ids[order].tolist(), logprob[order].tolist(), strict=True))
        return {
            row: TokenLogprob(token, logprob, top)
            for (row, token, _), logprob, top in zip(wanted, chosen[:, 0].tolist(), tops, strict=True)
        }

    def _column(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self._device)[:, None]


def _take(values: Tensor, rows: Sequence[int]) -> Tensor:
    """`values[rows]` for ascending distinct rows, without a copy where that is all of them."""
    return values if len(rows) == len(values) else values[list(rows)]


def _nonzero(keep: Tensor, *values: Tensor) -> Iterator[tuple[_Ids, _Floats, _Floats]]:
    """For each row of `keep` [rows, vocab]: the ids that are kept, ascending, and both `values` there, on the CPU."""
    row_index, ids = keep.nonzero(as_tuple=True)
    ends = np.cumsum(np.bincount(row_index.cpu().numpy(), minlength=len(keep)))[:-1]
    first, second = (np.split(value[row_index, ids].double().cpu().numpy(), ends) for value in values)
    return zip(np.split(ids.cpu().numpy(), ends), first, second, strict=True)


def _kept(logit: _Floats, prob: _Floats, filters: _Filters) -> _Ids:
    """Indices, ascending, of the candidates that pass top_k, then top_p of what is left. Equal ones rank by index."""
    kept = np.arange(len(prob))
    if filters.top_k > 0:
        kept = _largest(logit, filters.top_k)
    if filters.top_p < 1.0:
        prob = prob[kept]
        cumulative = np.cumsum(np.sort(prob)[::-1])
        # With top_p alone the candidates lack a tail, and the law that top_p speaks of is the whole one.
        mass = 1.0 if filters.is_top_p_only else cumulative[-1]
        kept = kept[_largest(prob, int(np.searchsorted(cumulative, filters.top_p * mass)) + 1)]
    return kept


def _largest(values: _Floats, count: int) -> _Ids:
    """Indices, ascending, of the `count` largest; of equal ones the first. A selection: a sort would be much slower."""
    if count >= len(values):
        return np.arange(len(values))
    least = np.partition(values, -count)[-count]
    above = values > least
    above[np.flatnonzero(values == least)[: count - int(above.sum())]] = True
    return np.flatnonzero(above)


def _inverse_cdf(weights: _Floats, u: float) -> int:
    """The first index at which the cumulative weight exceeds u * total; its weight is never 0.

    u <= 1 - 2**-53 makes u * total < total even after rounding, so there is such an index.
    """
    cumulative = np.cumsum(weights)
    return int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))


def _draw_whole(probs: Tensor, uniforms: _Floats) -> list[int]:
    """Inverse CDF over all of `probs` [rows, vocab] in two levels: a block of ids by the blocks' sums, an id within it."""
    padding = -probs.shape[1] % _CDF_BLOCK
    if padding:
        probs = torch.nn.functional.pad(probs, (0, padding))
    blocks = probs.view(len(probs), -1, _CDF_BLOCK)
    outer = np.cumsum(blocks.sum(dim=-1, dtype=torch.float64).cpu().numpy(), axis=1)
    target = uniforms * outer[:, -1]
    chosen = (outer <= target[:, None]).sum(axis=1)
    rows = np.arange(len(chosen))
    rest = target - np.where(chosen > 0, outer[rows, chosen - 1], 0.0)
    block = blocks[torch.from_numpy(rows), torch.from_numpy(chosen)].double().cpu().numpy()
    inner = np.cumsum(block, axis=1)
    # The two levels add in different orders: `rest` may come out a rounding error over the block's own sum.
    last = _CDF_BLOCK - 1 - np.argmax(block[:, ::-1] > 0.0, axis=1)
    index: list[int] = (chosen * _CDF_BLOCK + np.minimum((inner <= rest[:, None]).sum(axis=1), last)).tolist()
    return index


def _is_plain_greedy(spec: SampleSpec) -> bool:
    return spec.params.temperature < GREEDY_BELOW and spec.params.num_logprobs is None and not _has_edits(spec)


def _has_edits(spec: SampleSpec) -> bool:
    params = spec.params
    return bool(
        params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
        or params.logit_bias
        or spec.forbidden_token_ids
    )


_NOTHING: tuple[_Ids, _Floats] = (np.empty(0, dtype=np.int64), np.empty(0))


def _array(token_ids: Sequence[int]) -> _Ids:
    return np.fromiter(token_ids, dtype=np.int64, count=len(token_ids))


def _repeated(spec: SampleSpec) -> tuple[_Ids, _Floats]:
    penalty = spec.params.repetition_penalty
    if penalty == 1.0:
        return _NOTHING
    ids = np.unique(np.concatenate([_array(spec.prompt_token_ids), _array(spec.output_token_ids)]))
    return ids, np.full(len(ids), penalty)


def _penalize_repetition(old: Tensor, penalty: Tensor) -> Tensor:
    """CTRL's rule (Keskar et al., 2019), which takes the logits' sign into account so that a penalty > 1 always lowers."""
    return torch.where(old > 0, old / penalty, old * penalty)


def _output_penalties(spec: SampleSpec) -> tuple[_Ids, _Floats]:
    """OpenAI's rule: frequency_penalty * count + presence_penalty for each token of the output."""
    params = spec.params
    if not (params.presence_penalty or params.frequency_penalty):
        return _NOTHING
    ids, counts = np.unique(_array(spec.output_token_ids), return_counts=True)
    return ids, params.frequency_penalty * counts.astype(np.float64) + params.presence_penalty


def _bias(spec: SampleSpec) -> tuple[_Ids, _Floats]:
    bias = dict(spec.params.logit_bias)
    return _array(tuple(bias)), np.array(list(bias.values()), dtype=np.float64)


def _forbidden(spec: SampleSpec) -> tuple[_Ids, _Floats]:
    ids = _array(spec.forbidden_token_ids)
    return ids, np.zeros(len(ids))
