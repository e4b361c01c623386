"""How long a step takes: the one model that routing, admission, scaling and simulation share.

`predict` and `prefill_seconds` ask a StepTimeCoefficients, which crosses processes. `StepTimeModel` fits one, live, from an
engine's own steps. Pure: no clock; who measures passes seconds.
"""

from __future__ import annotations

import math
from itertools import product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from replicas.contract import StepTimeCoefficients

# A small model on a CPU. It only has to be of some plausible shape: the first steps' times replace it.
PRIOR = StepTimeCoefficients(base_s=5e-3, per_token_s=2e-4, per_context_s=1e-8, per_sequence_s=1e-4)

_Array = npt.NDArray[np.float64]


def predict(coefficients: StepTimeCoefficients, tokens: int, context_tokens: int, sequences: int) -> float:
    """Seconds of one step; the arguments as StepTimeCoefficients defines them."""
    return (
        coefficients.base_s
        + coefficients.per_token_s * tokens
        + coefficients.per_context_s * context_tokens
        + coefficients.per_sequence_s * sequences
    )


class PrefillLaw(NamedTuple):
    """How long prompts take on a replica as it is, in one multiplication each; see `prefill_law`. A tuple for its speed."""

    chunk: int
    step_s: float
    token_s: float
    context_s: float

    def seconds(self, tokens: int, context_tokens: int) -> float:
        """Until `tokens` tokens are computed after `context_tokens` that are there.

        |-- context_tokens --|-- chunk --|-- chunk --|- rest -|         one step each; each reads all that is left of its end
        """
        chunk, step_s, token_s, context_s = self
        num_steps = -(-tokens // chunk)
        read = num_steps * (context_tokens + (num_steps - 1) * chunk / 2)
        return num_steps * step_s + tokens * token_s + read * context_s


def prefill_law(coefficients: StepTimeCoefficients, chunk: int, running: int, *, running_context_tokens: int = 0) -> PrefillLaw:
    """For prompts that get `chunk` tokens a step, usually the step's budget less `running`.

    In each step `running` other sequences decode one token each over `running_context_tokens` in total; that these grow
    meanwhile is left out.
    """
    assert chunk > 0, chunk
    step_s = (
        coefficients.base_s
        + coefficients.per_token_s * running
        + coefficients.per_context_s * running_context_tokens
        + coefficients.per_sequence_s * (1 + running)
    )
    # Each token is computed once, and read once more than those before it: by its own step.
    return PrefillLaw(chunk, step_s, coefficients.per_token_s + coefficients.per_context_s, coefficients.per_context_s)


def prefill_seconds(
    coefficients: StepTimeCoefficients,
    tokens: int,
    context_tokens: int,
    chunk: int,
    running: int,
    *,
    running_context_tokens: int = 0,
) -> float:
    """Seconds until `tokens` tokens of one prompt are computed: `prefill_law` and its `seconds` in one. O(1)."""
    assert tokens >= 0, tokens
    law = prefill_law(coefficients, chunk, running, running_context_tokens=running_context_tokens)
    return law.seconds(tokens, context_tokens)


# Samples are kept by the magnitudes of (tokens, context_tokens), the latest few of each, so that a thousand decode steps
# don't wash out the one prompt that came before them.
_MAX_TOKENS_BITS = 17
_MAX_CONTEXT_BITS = 24
_SAMPLES_PER_BUCKET = 16
_NUM_BUCKETS = (_MAX_TOKENS_BITS + 1) * (_MAX_CONTEXT_BITS + 1)

_REFIT_EVERY = 32  # steps; sooner while there are few
_HALF_LIFE = 256  # steps after which a sample weighs half: machines and neighbours change
_LEAST_AGE_WEIGHT = 0.02  # ... but the only samples of their kind still decide about their kind
_NUM_RECENT_ERRORS = 64
_PULL = 1e-3  # towards the last fit: decides what the samples leave open (in decode steps tokens == sequences)
_REWEIGHTINGS = 3
_OUTLIER_SIGMAS = 2.0
_LEAST_SIGMA = 0.01

# All sets of coefficients that may be positive while the others are 0.
_SUPPORTS = np.array(list(product((False, True), repeat=4)))


class StepTimeModel:
    """Fits StepTimeCoefficients by non-negative least squares of the *relative* error, robust to stalled steps.

    `observe` costs some microseconds and refits every few steps; `coefficients` is a value that other threads may read.
    """

    def __init__(self, prior: StepTimeCoefficients = PRIOR) -> None:
        self._coefficients = prior
        self._features = np.empty((_NUM_BUCKETS * _SAMPLES_PER_BUCKET, 4))  # 1, tokens, context_tokens, sequences
        self._seconds = np.zeros(len(self._features))  # 0: no sample there
        self._observed_at = np.zeros(len(self._features))  # number of the observation
        self._bucket_sizes = [0] * _NUM_BUCKETS  # ever put in
        self._num_observed = 0
        self._next_refit = 1
        self._errors = np.zeros(_NUM_RECENT_ERRORS)  # relative, of predictions made before their step was known

    def coefficients(self) -> StepTimeCoefficients:
        return self._coefficients

    def predict(self, tokens: int, context_tokens: int, sequences: int) -> float:
        return predict(self._coefficients, tokens, context_tokens, sequences)

    def observe(self, tokens: int, context_tokens: int, sequences: int, seconds: float) -> None:
        """Take in one step. A time of 0, which a coarse clock may report, says nothing and is left out."""
        if not (0.0 < seconds < math.inf):
            return
        error = abs(self.predict(tokens, context_tokens, sequences) - seconds) / seconds
        self._errors[self._num_observed % _NUM_RECENT_ERRORS] = error
        bits = min(tokens.bit_length(), _MAX_TOKENS_BITS), min(context_tokens.bit_length(), _MAX_CONTEXT_BITS)
        bucket = bits[0] * (_MAX_CONTEXT_BITS + 1) + bits[1]
        slot = bucket * _SAMPLES_PER_BUCKET + self._bucket_sizes[bucket] % _SAMPLES_PER_BUCKET
        self._bucket_sizes[bucket] += 1
        self._features[slot] = (1.0, tokens, context_tokens, sequences)
        self._seconds[slot] = seconds
        self._observed_at[slot] = self._num_observed
        self._num_observed += 1
        if self._num_observed >= self._next_refit:
            self._refit()
            self._next_refit = self._num_observed + min(_REFIT_EVERY, 1 + self._num_observed // 4)

    def _refit(self) -> None:
        there = np.flatnonzero(self._seconds)
        age = self._num_observed - self._observed_at[there]
        weights = np.maximum(np.exp2(-age / _HALF_LIFE), _LEAST_AGE_WEIGHT)
        relative = self._features[there] / self._seconds[there, None]  # @ coefficients = 1 where the model is right
        last = self._coefficients
        fit = _fit(relative, weights, np.array([last.base_s, last.per_token_s, last.per_context_s, last.per_sequence_s]))
        base_s, per_token_s, per_context_s, per_sequence_s = fit.tolist()
        self._coefficients = StepTimeCoefficients(
            base_s=base_s,
            per_token_s=per_token_s,
            per_context_s=per_context_s,
            per_sequence_s=per_sequence_s,
            relative_error=float(np.median(self._errors[: self._num_observed])),
            num_samples=len(there),
        )


def _fit(relative: _Array, weights: _Array, last: _Array) -> _Array:
    """Non-negative x, [4], that brings `relative` @ x, [samples], near 1; weighted, and outliers weighing less (Huber)."""
    scale = relative.mean(axis=0)
    scale[scale == 0.0] = 1.0
    rows = relative / scale  # in these units a coefficient is the share of the time that it explains
    pull_to = np.minimum(last * scale, 1.0)
    shares, huber = pull_to, np.ones(len(rows))
    for _ in range(_REWEIGHTINGS):
        weighted = rows * (weights * huber / (weights * huber).sum())[:, None]
        shares = _least_squares(weighted.T @ rows + _PULL * np.eye(4), weighted.sum(axis=0) + _PULL * pull_to)
        residuals = np.abs(rows @ shares - 1.0)
        sigma = max(1.4826 * float(np.median(residuals)), _LEAST_SIGMA)
        huber = np.minimum(1.0, _OUTLIER_SIGMAS * sigma / np.maximum(residuals, 1e-12))
    coefficients: _Array = shares / scale
    return coefficients


def _least_squares(gram: _Array, moment: _Array) -> _Array:
    """argmin over x >= 0 of x.gram.x / 2 - moment.x, for a positive definite gram [4, 4].

    Solved exactly, for all 16 sets of coordinates that may be positive at once: the best solution without a negative
    coordinate is the minimum.
    """
    both = _SUPPORTS[:, :, None] & _SUPPORTS[:, None, :]
    systems = np.where(both, gram, np.eye(4))
    solutions: _Array = np.linalg.solve(systems, np.where(_SUPPORTS, moment, 0.0)[:, :, None])[:, :, 0]
    costs = 0.5 * np.einsum("si,ij,sj->s", solutions, gram, solutions) - solutions @ moment
    costs[(solutions < 0.0).any(axis=1)] = np.inf
    best: _Array = solutions[np.argmin(costs)]
    return best
