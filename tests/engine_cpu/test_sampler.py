"""The sampler against a plain twin in fp64, the law it draws from, and its independence of everything but the row itself."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor, TopKLogitsWarper, TopPLogitsWarper

from replicas.contract import SamplingParams
from replicas.engine.sampler import SampleOutcome, Sampler, uniform
from replicas.engine.step import SampleSpec

CPU = torch.device("cpu")


def spec(
    *, choice: int = 0, position: int = 0, prompt: tuple[int, ...] = (), output: tuple[int, ...] = (), **params: object
) -> SampleSpec:
    forbidden = params.pop("forbidden", ())
    sampling = SamplingParams(max_tokens=16, **params)
    return SampleSpec(sampling, choice, position, prompt, output, forbidden)


def sample(logits: torch.Tensor, specs: list[SampleSpec]) -> list[SampleOutcome]:
    return Sampler(logits.shape[1], CPU).sample(logits, specs)


def tokens(logits: torch.Tensor, specs: list[SampleSpec]) -> list[int | None]:
    return [outcome.token_id for outcome in sample(logits, specs)]


def plain_law(logits: np.ndarray, one: SampleSpec) -> np.ndarray:
    """The probabilities that `one` draws from, [vocab] in fp64, token by token as SamplingParams reads."""
    params, x = one.params, logits.astype(np.float64)
    for token in {*one.prompt_token_ids, *one.output_token_ids}:
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token in one.output_token_ids:
        x[token] -= params.frequency_penalty
    for token in set(one.output_token_ids):
        x[token] -= params.presence_penalty
    for token, bias in params.logit_bias:
        x[token] += bias
    x[list(one.forbidden_token_ids)] = -np.inf
    ranked = sorted(range(len(x)), key=lambda token: (-x[token], token))
    weights = np.exp((x - x.max()) / params.temperature)
    kept = [token for token in ranked if weights[token] >= params.min_p]
    kept = kept[: params.top_k] if params.top_k > 0 else kept
    mass, before, nucleus = sum(weights[token] for token in kept), 0.0, []
    for token in kept:
        if nucleus and before >= params.top_p * mass:
            break
        nucleus.append(token)
        before += weights[token]
    law = np.zeros(len(x))
    law[nucleus] = weights[nucleus]
    return law / law.sum()


def assert_drawn_by(law: np.ndarray, one: SampleSpec, token: int) -> None:
    """`token` has a probability and holds `one`'s random number in its part of the unit interval, to fp32 precision."""
    assert law[token] > 0
    u, upper = uniform(one.params.seed, one.choice, one.position), float(law[: token + 1].sum())
    assert upper - law[token] - 1e-5 <= u <= upper + 1e-5


def random_specs(rng: np.random.Generator, vocab: int, num: int) -> list[SampleSpec]:
    def pick(*values: float) -> float:
        return float(rng.choice(values))

    return [
        spec(
            temperature=pick(0.05, 0.6, 1.0, 1.7),
            top_k=int(rng.choice([0, 0, 1, 3, 17, 2 * vocab])),
            top_p=pick(1.0, 0.9137, 0.5271, 0.0313),
            min_p=pick(0.0, 0.0, 0.0571, 0.3313),
            presence_penalty=pick(0.0, 0.7),
            frequency_penalty=pick(0.0, 0.4),
            repetition_penalty=pick(1.0, 1.3),
            logit_bias=tuple((int(token), pick(-3, 2)) for token in rng.permutation(vocab)[: rng.integers(3)]),
            seed=int(rng.integers(-(2**63), 2**63)),
            choice=int(rng.integers(4)),
            position=int(rng.integers(1000)),
            prompt=tuple(rng.integers(vocab, size=5).tolist()),
            output=tuple(rng.integers(vocab, size=6).tolist()),
            forbidden=tuple(rng.integers(vocab, size=rng.integers(3)).tolist()),
        )
        for _ in range(num)
    ]


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([5, 40, 128, 300]), st.booleans())
def test_a_batch_of_any_mix_draws_what_the_plain_twin_draws(entropy: int, vocab: int, many_ties: bool) -> None:
    rng = np.random.default_rng(entropy)
    specs = random_specs(rng, vocab, 6)
    logits = rng.normal(size=(6, vocab)).astype(np.float32) * 3
    # Sixteenths are exact in fp32 and fp64 alike, penalties included, so the twins agree on what is equal.
    logits = np.round(logits * 2) / 2 if many_ties else logits
    for one, row, token in zip(specs, logits, tokens(torch.from_numpy(logits), specs), strict=True):
        assert_drawn_by(plain_law(row, one), one, token)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, -1.0, 5.0, -80.0, -300.0, -math.inf]), min_size=2, max_size=260),
    st.floats(1e-5, 1e30),
    st.sampled_from([{}, {"top_k": 2}, {"top_p": 0.999}, {"top_p": 1e-9}, {"min_p": 1.0}, {"top_k": 3, "top_p": 0.5}]),
    st.integers(0, 2**64 - 1),
)
def test_a_token_without_probability_is_never_drawn(
    row: list[float], temperature: float, filters: dict[str, float], seed: int
) -> None:
    outcome = sample(torch.tensor([row]), [spec(temperature=temperature, seed=seed, **filters)])[0]
    if max(row) == -math.inf:
        assert outcome.error is not None
    else:
        assert row[outcome.token_id] > -math.inf
        exponent = (row[outcome.token_id] - max(row)) / temperature
        assert exponent > -104.0  # e**-104 is 0 in fp32


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 4}, {"min_p": 0.1, "top_k": 6, "top_p": 0.95}])
def test_many_seeds_follow_the_law(filters: dict[str, float]) -> None:
    num, row = 6000, np.array([1.0, -2.0, 0.5, 0.5, 2.0, -1.0, 0.0, 1.5], dtype=np.float32)
    specs = [spec(temperature=1.3, seed=seed, **filters) for seed in range(num)]
    counts = np.bincount(tokens(torch.from_numpy(row).repeat(num, 1), specs), minlength=len(row))
    expected = plain_law(row, specs[0]) * num
    possible = expected > 0
    assert counts[~possible].sum() == 0
    chi_square = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    # The seeds are fixed, so this can't flake; 24.3 is the 99.9 % point at 7 degrees of freedom.
    assert chi_square < 24.3


def test_a_row_draws_the_same_token_alone_and_in_any_batch() -> None:
    rng = np.random.default_rng(3)
    vocab, num = 3000, 24
    logits = torch.from_numpy(rng.normal(size=(num, vocab)).astype(np.float32) * 2)
    specs = [spec(temperature=0.0), spec(temperature=0.8, seed=5), *random_specs(rng, vocab, num - 2)]
    specs = [spec(temperature=0.9, seed=9, num_logprobs=4) if row % 5 == 4 else one for row, one in enumerate(specs)]
    together = sample(logits, specs)
    alone = [sample(logits[row : row + 1], [one])[0] for row, one in enumerate(specs)]
    backwards = sample(logits.flip(0), specs[::-1])[::-1]
    assert together == alone == backwards


def test_seed_choice_and_position_each_change_the_draw_and_nothing_else_does() -> None:
    logits = torch.zeros(1, 5000)
    base = {"temperature": 1.0, "seed": 1, "choice": 0, "position": 0}
    variants = [base, base | {"seed": 2}, base | {"choice": 1}, base | {"position": 1}, base | {"seed": -1}]
    drawn = [tokens(logits, [spec(**one)])[0] for one in variants]
    assert len(set(drawn)) == len(variants)
    assert tokens(logits, [spec(**base, prompt=(1, 2), output=(3,))])[0] == drawn[0]


def test_the_random_numbers_are_uniform_and_never_one() -> None:
    numbers = np.array([uniform(seed, 0, position) for seed in range(50) for position in range(200)])
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    counts = np.histogram(numbers, bins=20, range=(0.0, 1.0))[0]
    assert ((counts - 500) ** 2 / 500).sum() < 43.8  # 99.9 % point at 19 degrees of freedom


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.0}, {"top_p": 0.5}, {"presence_penalty": 1.0}])
def test_a_row_that_is_not_finite_fails_alone(bad: float, params: dict[str, float]) -> None:
    """cases SP01"""
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    specs = [spec(**params, seed=row, num_logprobs=2, output=(7,)) for row in range(3)]
    healthy = sample(logits, specs)
    if bad == -math.inf:
        logits[1] = bad
    else:
        logits[1, 7] = bad
    outcomes = sample(logits, specs)
    assert outcomes[1].token_id is None
    assert outcomes[1].error is not None
    assert (outcomes[0], outcomes[2]) == (healthy[0], healthy[2])


def test_forbidding_every_token_is_an_error_of_that_row() -> None:
    outcomes = sample(torch.zeros(2, 4), [spec(forbidden=(0, 1, 2, 3)), spec(temperature=0.0)])
    assert outcomes[0].error is not None
    assert outcomes[1].token_id == 0


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 9e-6])
def test_a_temperature_near_zero_is_greedy(temperature: float) -> None:
    assert tokens(torch.tensor([[0.0, 3.0, 3.0, 1.0]]), [spec(temperature=temperature)]) == [1]


@pytest.mark.parametrize("temperature", [1e-5, 1e30, 1e308])
def test_extreme_temperatures_draw_from_a_law(temperature: float) -> None:
    """cases SP01"""
    logits = torch.tensor([[4.0, -math.inf, -20.0, 3.0]]).repeat(300, 1)
    drawn = tokens(logits, [spec(temperature=temperature, seed=seed) for seed in range(300)])
    assert set(drawn) == ({0} if temperature < 1 else {0, 2, 3})


def test_top_k_keeps_the_lower_ids_among_equal_logits() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 1.0]]).repeat(200, 1)
    assert set(tokens(logits, [spec(top_k=2, temperature=5.0, seed=seed) for seed in range(200)])) == {0, 1}


def test_entries_beyond_the_vocabulary_change_nothing() -> None:
    """cases SP07"""
    one = spec(temperature=0.0, logit_bias=((99, 50.0), (-1, 50.0)), forbidden=(4, 2**40), repetition_penalty=1.2, prompt=(77,))
    assert tokens(torch.tensor([[0.0, 3.0, 2.0, 1.0]]), [one]) == [1]


def test_the_caller_keeps_its_logits() -> None:
    logits = torch.randn(2, 30)
    before = logits.clone()
    sample(logits, [spec(presence_penalty=1.0, output=(1, 2), forbidden=(3,)), spec(temperature=0.3, top_p=0.4)])
    assert torch.equal(logits, before)


def test_logprobs_are_those_of_the_raw_logits_best_first_and_equal_ones_by_id() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 0.0]])
    one = spec(temperature=0.0, num_logprobs=3, logit_bias=((4, 100.0),), repetition_penalty=2.0, output=(1,))
    outcome = sample(logits, [one])[0]
    expected = torch.log_softmax(logits[0], dim=-1).tolist()
    assert outcome.token_id == outcome.logprob.token_id == 4
    assert outcome.logprob.logprob == pytest.approx(expected[4])
    assert outcome.logprob.top == tuple((token, pytest.approx(expected[token])) for token in (1, 3, 2))


def test_zero_logprobs_give_the_tokens_own_and_none_gives_nothing() -> None:
    outcomes = sample(torch.zeros(3, 8), [spec(num_logprobs=0), spec(), spec(num_logprobs=100)])
    assert outcomes[0].logprob.top == ()
    assert outcomes[0].logprob.logprob == pytest.approx(-math.log(8))
    assert outcomes[1].logprob is None
    assert [token for token, _ in outcomes[2].logprob.top] == list(range(8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_formats_sample_like_their_fp32_values(dtype: torch.dtype) -> None:
    logits = (torch.randn(8, 700, generator=torch.Generator().manual_seed(2)) * 3).to(dtype)
    specs = random_specs(np.random.default_rng(8), 700, 8)
    assert sample(logits, specs) == sample(logits.float(), specs)


@pytest.mark.parametrize(
    ("warper", "params"),
    [
        (TopKLogitsWarper(7), {"top_k": 7}),
        (TopPLogitsWarper(0.83), {"top_p": 0.83}),
        (MinPLogitsWarper(0.07), {"min_p": 0.07}),
    ],
)
def test_filters_keep_the_tokens_that_transformers_keeps(warper: object, params: dict[str, float]) -> None:
    temperature, row = 1.6, torch.randn(1, 60, generator=torch.Generator().manual_seed(4)) * 2
    reference = torch.softmax(warper(None, row / temperature), dim=-1)[0]
    specs = [spec(temperature=temperature, seed=seed, **params) for seed in range(4000)]
    np.testing.assert_allclose(plain_law(row[0].numpy(), specs[0]), reference.numpy(), atol=1e-6)
    drawn = tokens(row.repeat(len(specs), 1), specs)
    for one, token in zip(specs, drawn, strict=True):
        assert_drawn_by(reference.double().numpy(), one, token)
    assert set(drawn) == set(reference.nonzero().flatten().tolist())


def test_the_repetition_penalty_is_that_of_transformers() -> None:
    rng = np.random.default_rng(6)
    logits = torch.from_numpy(rng.normal(size=(40, 30)).astype(np.float32) * 2)
    for row in logits:
        prompt, output = rng.integers(30, size=8).tolist(), rng.integers(30, size=8).tolist()
        penalized = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([prompt + output]), row[None].clone())
        one = spec(temperature=0.0, repetition_penalty=1.7, prompt=tuple(prompt), output=tuple(output))
        assert tokens(row[None], [one]) == [penalized.argmax().item()]
