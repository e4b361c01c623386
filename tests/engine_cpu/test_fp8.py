"""fp8 linear maps: the kernel call is proven by its plain twin, the rounding by what fp8 promises. CPUs run the call too."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replicas.engine.models.fp8 import FP8, fp8_linear, plain_fp8_linear, quantize_rows, supports_fp8

# A number keeps 3 bits behind its leading one.
HALF_STEP = 2.0**-4


def make_case(num_rows, in_size, out_size, *, bias=True, seed=0):
    torch.manual_seed(seed)
    x = torch.randn(num_rows, in_size).bfloat16()
    weight = (torch.randn(out_size, in_size) * torch.rand(out_size, 1) * in_size**-0.5).bfloat16()
    return x, weight, torch.randn(out_size).bfloat16() if bias else None


@pytest.mark.parametrize("num_rows", [1, 2, 7, 16, 33])
@pytest.mark.parametrize(("in_size", "out_size"), [(16, 16), (64, 48), (576, 320)])
@pytest.mark.parametrize("bias", [False, True])
def test_the_kernel_gives_what_its_twin_gives_to_the_last_bit_of_bf16_or_the_one_before(num_rows, in_size, out_size, bias):
    x, weight, bias = make_case(num_rows, in_size, out_size, bias=bias)
    expected = plain_fp8_linear(weight, bias)(x)
    actual = fp8_linear(weight, bias)(x)
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual, expected, rtol=2**-7, atol=1e-5)


def test_the_result_is_as_near_to_that_of_bf16_as_two_roundings_allow():
    x, weight, bias = make_case(64, 512, 256)
    exact = torch.nn.functional.linear(x.float(), weight.float(), bias.float())
    error = (fp8_linear(weight, bias)(x).float() - exact).norm() / exact.norm()
    assert error < HALF_STEP


@settings(max_examples=60, deadline=None)
@given(magnitudes=st.lists(st.floats(-30, 30), min_size=1, max_size=8), seed=st.integers(0, 100))
def test_each_row_is_rounded_by_its_own_scale_whatever_the_others_hold(magnitudes, seed):
    torch.manual_seed(seed)
    x = torch.randn(len(magnitudes), 32) * torch.tensor(magnitudes).exp2().unsqueeze(1)
    quantized, scales = quantize_rows(x)
    assert (quantized.dtype, scales.dtype, scales.shape) == (FP8, torch.float32, (len(magnitudes), 1))
    error = (quantized.float() * scales - x).abs()
    # Relative to each number, or for small ones to the least step that the row's scale allows.
    assert (error <= torch.maximum(x.abs() * HALF_STEP, scales * 2.0**-10) * 1.001).all()
    for row in range(len(x)):
        alone, scale = quantize_rows(x[row : row + 1])
        assert torch.equal(alone.float(), quantized[row : row + 1].float())
        assert torch.equal(scale, scales[row : row + 1])


def test_an_outlier_in_one_token_costs_the_others_nothing():
    x, weight, _ = make_case(4, 64, 32)
    linear = fp8_linear(weight)
    before = linear(x)
    x[2, 5] = 30000.0
    after = linear(x)
    assert torch.equal(after[[0, 1, 3]], before[[0, 1, 3]])


@pytest.mark.parametrize("number", [torch.inf, -torch.inf, torch.nan])
def test_a_row_that_is_not_finite_is_not_finite_alone(number):
    x, weight, bias = make_case(3, 64, 32)
    before = fp8_linear(weight, bias)(x)
    x[1, 7] = number
    for make in (fp8_linear, plain_fp8_linear):
        after = make(weight, bias)(x)
        assert after[1].isnan().all()
        torch.testing.assert_close(after[[0, 2]], before[[0, 2]], rtol=2**-7, atol=1e-5)


def test_rows_of_zeros_and_of_the_largest_numbers_stay_what_they_are():
    x = torch.stack((torch.zeros(16), torch.full((16,), torch.finfo(torch.bfloat16).max), torch.full((16,), 1e-38))).bfloat16()
    quantized, scales = quantize_rows(x)
    assert not quantized.float().isnan().any()
    assert (quantized[0].float() * scales[0] == 0).all()
    torch.testing.assert_close(quantized[1].float() * scales[1], x[1].float())


def test_a_weight_whose_sizes_no_kernel_takes_stays_in_bf16():
    x, weight, bias = make_case(3, 40, 24)
    torch.testing.assert_close(fp8_linear(weight, bias)(x), torch.nn.functional.linear(x, weight, bias), rtol=2**-7, atol=1e-2)


def test_a_cpu_does_not_multiply_fp8():
    assert not supports_fp8(torch.device("cpu"))


@pytest.mark.parametrize(("capability", "supported"), [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True)])
def test_cuda_devices_do_from_ada_on(monkeypatch, capability, supported):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert supports_fp8(torch.device("cuda")) == supported
