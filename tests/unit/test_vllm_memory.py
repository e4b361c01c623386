"""Whether weights and cache fit vLLM's share of the devices, and what would."""

from __future__ import annotations

from dataclasses import replace

from replicas.vllm_support.memory import Demand, misfit, share_misfit

GIB = 2**30
FITS = Demand(weight_bytes=10 * GIB, kv_bytes_per_token=2**17, num_tokens=8192)


def test_what_fits_is_not_remarked_upon():
    assert misfit(FITS, 12 * GIB) is None


def test_weights_that_leave_no_room_say_how_many_devices_would():
    words = misfit(replace(FITS, weight_bytes=140 * GIB), 72 * GIB)
    assert words is not None
    assert "on 4 such devices they would fit (engine.vllm.tensor_parallel_size)" in words


def test_a_context_that_is_too_long_says_which_length_would_fit():
    words = misfit(replace(FITS, num_tokens=131072), 12 * GIB)
    assert words is not None
    assert "model.max_model_len=16384" in words


def test_a_cache_that_is_too_large_says_how_large_one_would_fit():
    words = misfit(replace(FITS, kv_bytes=4 * GIB), 12 * GIB)
    assert words is not None
    assert f"engine.kv_cache_bytes={2 * GIB}" in words


def test_a_cache_that_one_sequence_does_not_fit_into_is_refused_with_both_ways_out():
    words = misfit(replace(FITS, kv_bytes=GIB // 2), 12 * GIB)
    assert words is not None
    assert f"set it to {GIB} or more, or model.max_model_len to 4096" in words


def test_devices_share_weights_and_cache():
    demand = Demand(weight_bytes=140 * GIB, kv_bytes_per_token=2**18, num_tokens=32768, num_devices=4)
    assert misfit(demand, 72 * GIB) is None


def test_a_share_that_others_use_already_says_which_share_is_left():
    assert share_misfit(0.9, 75 * GIB, 80 * GIB) is None
    words = share_misfit(0.9, 50 * GIB, 80 * GIB)
    assert words is not None
    assert words.endswith("engine.gpu_memory_share=0.62 would fit")
