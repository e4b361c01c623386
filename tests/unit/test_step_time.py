"""The step-time model recovers laws, survives bad samples, and its closed forms are sums of steps."""

import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicas.contract import StepTimeCoefficients
from replicas.step_time import PRIOR, StepTimeModel, predict, prefill_seconds

LAW = StepTimeCoefficients(base_s=0.004, per_token_s=2e-4, per_context_s=3e-8, per_sequence_s=3e-4)


def random_step(rng: np.random.Generator) -> tuple[int, int, int]:
    """(tokens, context_tokens, sequences): decoding mostly, with a prompt chunk beside it now and then."""
    decoding = int(rng.integers(0, 33))
    contexts = int(rng.integers(16, 4000)) * decoding
    chunk = int(rng.integers(16, 513)) if decoding == 0 or rng.random() < 0.2 else 0
    return decoding + chunk, contexts + chunk * int(rng.integers(1, 5)), decoding + (chunk > 0)


def fitted(
    law: StepTimeCoefficients, *, num_steps: int = 600, noise: float = 0.0, stalls: float = 0.0, seed: int = 0
) -> StepTimeModel:
    rng, model = np.random.default_rng(seed), StepTimeModel()
    for _ in range(num_steps):
        step = random_step(rng)
        seconds = predict(law, *step) * math.exp(noise * rng.normal())
        model.observe(*step, 20.0 if rng.random() < stalls else seconds)
    return model


def worst_error(model: StepTimeModel, law: StepTimeCoefficients) -> float:
    rng = np.random.default_rng(99)
    steps = [random_step(rng) for _ in range(200)]
    return max(abs(model.predict(*step) / predict(law, *step) - 1.0) for step in steps)


coefficient = st.one_of(st.just(0.0), st.floats(1e-8, 1.0))


@settings(max_examples=60, deadline=None)
@given(st.floats(1e-5, 0.1), coefficient, coefficient, coefficient, st.integers(0, 2**32 - 1))
def test_a_known_law_is_predicted_within_a_few_percent(
    base_s: float, per_token: float, per_context: float, per_sequence: float, seed: int
) -> None:
    law = StepTimeCoefficients(base_s, per_token * 0.01, per_context * 1e-5, per_sequence * 0.01)
    assert worst_error(fitted(law, seed=seed), law) < 0.05


def test_noise_and_stalled_steps_hardly_move_the_fit() -> None:
    model = fitted(LAW, noise=0.1, stalls=0.05, num_steps=1500)
    assert worst_error(model, LAW) < 0.15
    assert 0.03 < model.coefficients().relative_error < 0.2


def test_coefficients_themselves_are_recovered_when_steps_differ_enough() -> None:
    got = fitted(LAW, num_steps=2000).coefficients()
    assert got.base_s == pytest.approx(LAW.base_s, rel=0.05)
    assert got.per_token_s == pytest.approx(LAW.per_token_s, rel=0.02)
    assert got.per_context_s == pytest.approx(LAW.per_context_s, rel=0.1)
    assert got.per_sequence_s == pytest.approx(LAW.per_sequence_s, rel=0.05)
    assert got.relative_error < 0.02
    assert got.num_samples > 100


def test_thousands_of_decode_steps_do_not_wash_out_a_prompt() -> None:
    model = StepTimeModel()
    for chunk in (512, 400, 256):
        model.observe(chunk, chunk, 1, predict(LAW, chunk, chunk, 1))
    for step in range(5000):
        context = 500 + step % 300
        model.observe(1, context, 1, predict(LAW, 1, context, 1))
    assert model.predict(450, 450, 1) == pytest.approx(predict(LAW, 450, 450, 1), rel=0.05)


def test_a_machine_that_becomes_slower_is_noticed() -> None:
    rng, model = np.random.default_rng(1), fitted(LAW, num_steps=3000)
    slower = StepTimeCoefficients(*(2 * value for value in (0.004, 2e-4, 3e-8, 3e-4)))
    for _ in range(1500):
        step = random_step(rng)
        model.observe(*step, predict(slower, *step))
    assert worst_error(model, slower) < 0.1


def test_the_prior_answers_before_any_step_and_the_first_steps_replace_it() -> None:
    model = StepTimeModel()
    assert model.coefficients() == PRIOR
    assert model.predict(100, 100, 1) == predict(PRIOR, 100, 100, 1)
    for _ in range(3):
        model.observe(1, 50, 1, 3e-5)
    assert model.predict(1, 50, 1) == pytest.approx(3e-5, rel=0.2)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 2**17),
            st.integers(1, 2**30),
            st.integers(1, 4096),
            st.floats(1e-9, 1e5) | st.sampled_from([0.0, -1.0, math.nan, math.inf]),
        ),
        max_size=80,
    )
)
def test_no_samples_make_it_predict_a_negative_or_infinite_time(steps: list[tuple[int, int, int, float]]) -> None:
    model = StepTimeModel()
    for step in steps:
        model.observe(*step)
        assert 0.0 <= model.predict(1, 1, 1) < math.inf
    got = model.coefficients()
    assert min(got.base_s, got.per_token_s, got.per_context_s, got.per_sequence_s, got.relative_error) >= 0.0
    assert got.num_samples <= len(steps)


@given(
    st.integers(0, 5000),
    st.integers(0, 10000),
    st.integers(1, 700),
    st.integers(0, 64),
    st.integers(0, 100000),
)
def test_the_closed_form_of_a_prefill_is_the_sum_of_its_steps(
    tokens: int, context: int, chunk: int, running: int, running_context: int
) -> None:
    total, done = 0.0, 0
    while done < tokens:
        granted = min(chunk, tokens - done)
        done += granted
        total += predict(LAW, granted + running, context + done + running_context, 1 + running)
    closed = prefill_seconds(LAW, tokens, context, chunk, running, running_context_tokens=running_context)
    assert closed == pytest.approx(total)


def test_observing_costs_a_step_almost_nothing() -> None:
    rng, model = np.random.default_rng(2), StepTimeModel()
    steps = [random_step(rng) for _ in range(2000)]
    started = time.process_time()
    for step in steps:
        model.observe(*step, 0.01)
    assert (time.process_time() - started) / len(steps) < 200e-6  # about 20 on an idle machine
