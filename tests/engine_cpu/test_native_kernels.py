"""The native kernels compute what their plain twins compute, and each row what it would get alone, bit for bit."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import tiny_models
import torch
from engine_rig import step_model
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_model import GREEDY, PagedModel, chunk, load_model, load_native

from replicas.blocks import BLOCK_SIZE
from replicas.engine.batch import build_batch
from replicas.engine.native import library as library_module
from replicas.engine.native.cache import NativeKVCache
from replicas.engine.native.library import NUM_VARIANTS, load
from replicas.engine.native.packing import Packer, multiply, unpacked_row
from replicas.engine.quantize.formats import quantize
from replicas.engine.step import StepPlan

LIBRARY = load()
FORMATS = ("fp32", "bf16", "int8", "int8_g32", "int4")
# Relative to the norm of the result. The integer formats' inputs are rounded to 8 bits in groups of 32.
TOLERANCE = {"fp32": 1e-6, "bf16": 4e-3, "int8": 1.5e-2, "int8_g32": 1.5e-2, "int4": 1.5e-2}


def cpu_flags():
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return set(next((line for line in lines if line.startswith("flags")), "").split())


@pytest.fixture(autouse=True)
def _only_where_they_run():
    if not {"avx2", "fma", "f16c"} <= cpu_flags():
        pytest.skip("this CPU lacks the instructions")


def test_the_installation_has_built_the_kernels_that_this_cpu_can_run():
    wide = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "avx512_bf16"} <= cpu_flags()
    assert LIBRARY is not None
    assert LIBRARY.instructions == ("AVX-512" if wide else "AVX2")


def test_a_build_for_other_instructions_is_not_loaded(monkeypatch, caplog):
    monkeypatch.setattr(library_module, "_BUILDS", (("_kernels_avx512", 1 << 30, "what no CPU has"),))
    library_module.load.cache_clear()
    try:
        with caplog.at_level("INFO"):
            assert library_module.load() is None
        assert "AVX2" in caplog.text
    finally:
        library_module.load.cache_clear()


def matrix_of(format, rows, columns, seed=0):
    """(what is packed, its exact numbers)"""
    numbers = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    if format in ("fp32", "bf16"):
        numbers = numbers.to(torch.bfloat16 if format == "bf16" else torch.float32)
        return numbers, numbers.float()
    quantized = quantize(numbers, format)
    return quantized, quantized.dequantize()


def pack(format, rows, columns, bias=None):
    matrix, numbers = matrix_of(format, rows, columns)
    packer = Packer(LIBRARY, "bf16" if format == "bf16" else "fp32")
    return packer, packer.pack(matrix, bias), numbers


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("rows", "columns"), [(64, 32), (1, 64), (130, 96), (63, 576), (192, 1536)])
def test_a_packed_matrix_gives_the_products_and_the_rows_of_its_numbers(format, rows, columns):
    bias = torch.randn(rows)
    _, linear, numbers = pack(format, rows, columns, bias)
    for num_inputs in (1, 2, 3, 7, 8, 13, 40):
        inputs = torch.randn(num_inputs, columns, generator=torch.Generator().manual_seed(num_inputs))
        expected = inputs @ numbers.T + bias
        outputs = multiply(LIBRARY, linear, inputs)
        # What the products' norm would be of numbers drawn at random: one product alone may be near 0.
        scale = torch.outer(inputs.norm(dim=1), numbers.norm(dim=1)).norm() / columns**0.5
        assert (outputs - expected).norm() <= TOLERANCE[format] * scale
    for row in {0, rows // 2, rows - 1}:
        assert torch.allclose(unpacked_row(LIBRARY, linear, row), numbers[row], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("format", FORMATS)
@settings(max_examples=20, deadline=None)
@given(num_inputs=st.integers(1, 50), seed=st.integers(0, 2**32 - 1))
def test_a_row_of_a_product_is_the_same_bit_for_bit_alone_among_others_and_in_every_variant(format, num_inputs, seed):
    packer, linear, _ = pack(format, 96, 160)
    inputs = torch.randn(num_inputs, 160, generator=torch.Generator().manual_seed(seed)) * 10
    together = multiply(LIBRARY, linear, inputs)
    row = seed % num_inputs
    for variant in range(NUM_VARIANTS):
        assert torch.equal(multiply(LIBRARY, linear, inputs[row : row + 1], variant)[0], together[row])
        assert torch.equal(multiply(LIBRARY, linear, inputs, variant), together)
    del packer


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_shows_in_its_row_and_in_no_other(format, bad):
    packer, linear, _ = pack(format, 64, 96)
    inputs = torch.randn(9, 96)
    clean = multiply(LIBRARY, linear, inputs)
    inputs[4, 50] = bad
    outputs = multiply(LIBRARY, linear, inputs)
    assert not outputs[4].isfinite().any()
    others = [row for row in range(9) if row != 4]
    assert torch.equal(outputs[others], clean[others])
    del packer


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    made = {}
    for name in ("llama", "llama-tied", "qwen2", "qwen3"):
        made[name] = tmp_path_factory.mktemp(name)
        tiny_models.make(name, made[name], initializer_range=0.05)
    return made


def tokens_of(length, shift=0):
    return [(13 * i + shift) % tiny_models.VOCAB_SIZE for i in range(length)]


class Sequence:
    """One sequence in a native model's cache, fed in pieces; its blocks lie scattered."""

    def __init__(self, model, token_ids, first_block):
        self.model, self.token_ids, self.done = model, token_ids, 0
        self.table = [first_block + 2 * i for i in range(-(-len(token_ids) // BLOCK_SIZE))]

    def next(self, count):
        taken = self.token_ids[self.done : self.done + count]
        self.done += len(taken)
        return chunk("any", taken, self.done - len(taken), self.table, GREEDY)


def feed(model, *chunks):
    """[chunks, vocab]: logits of the last row of each, in their order."""
    batch = build_batch(StepPlan(chunks), BLOCK_SIZE)
    logits = model.forward(batch).logits
    return logits[[batch.sample_chunks.index(index) for index in range(len(chunks))]].clone()


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen2", "qwen3"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-5), ("bf16", 2e-2)])
def test_logits_equal_those_of_the_plain_twin_however_a_prompt_is_cut(directories, name, dtype, tolerance):
    prompt = tokens_of(150)
    expected = PagedModel(load_model(directories[name]), len(prompt)).feed(prompt)
    native = load_native(directories[name], dtype)
    for sizes in ([150], [1, 149], [16, 17, 31, 86], [149, 1], [15, 1, 1, 133]):
        with_cache(native, dtype)
        sequence = Sequence(native, prompt, 1)
        for size in sizes:
            logits = feed(native, sequence.next(size))
            reference = expected[sequence.done - 1]
            assert (logits[0] - reference).norm() <= tolerance * reference.norm()


def with_cache(model, format, num_blocks=64):
    config = model.architecture
    sizes = {"num_layers": config.num_layers, "num_kv_heads": config.num_kv_heads, "head_dim": config.head_dim}
    cache = NativeKVCache(LIBRARY, format=format, num_blocks=num_blocks, **sizes)
    model.use_cache(cache)
    return cache


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_models_stay_near_their_plain_twin(directories, quantization):
    prompt = tokens_of(60)
    twin = load_model(directories["llama"], quantization=quantization)
    expected = PagedModel(twin, len(prompt)).feed(prompt)[-1]
    native = load_native(directories["llama"], "fp32", quantization)
    with_cache(native, "fp32")
    logits = feed(native, Sequence(native, prompt, 0).next(60))[0]
    assert (logits - expected).norm() <= 0.05 * expected.norm()


@pytest.mark.parametrize(("dtype", "quantization", "kv"), [
    ("fp32", "none", "fp32"), ("bf16", "none", "bf16"), ("bf16", "int8", "bf16"), ("bf16", "int4", "bf16"),
])  # fmt: skip
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_sequence_gets_the_same_logits_bit_for_bit_in_any_company_and_chunks(native_models, dtype, quantization, kv, seed):
    model = native_models(dtype, quantization)
    rng = random.Random(seed)
    prompts = [tokens_of(rng.choice((1, 5, 16, 40, 200)), shift) for shift in range(rng.randint(1, 9))]
    alone = []
    for prompt in prompts:
        with_cache(model, kv)
        alone.append(feed(model, Sequence(model, prompt, 0).next(len(prompt)))[0])
    with_cache(model, kv, num_blocks=64 * len(prompts))
    sequences = [Sequence(model, prompt, 64 * index + index % 2) for index, prompt in enumerate(prompts)]
    last = [None] * len(prompts)
    while unfinished := [i for i, one in enumerate(sequences) if one.done < len(one.token_ids)]:
        chosen = rng.sample(unfinished, rng.randint(1, len(unfinished)))
        logits = feed(model, *(sequences[i].next(rng.choice((1, 1, 3, 16, 90))) for i in chosen))
        for i, row in zip(chosen, logits, strict=True):
            last[i] = row
    assert all(torch.equal(a, b) for a, b in zip(alone, last, strict=True))


@pytest.fixture(scope="module")
def native_models(directories):
    """One of each kind, for the length of the module."""
    made = {}

    def get(dtype, quantization="none", num_threads=2):
        key = dtype, quantization, num_threads
        if key not in made:
            made[key] = load_native(directories["llama"], dtype, quantization, num_threads)
        return made[key]

    return get


def test_the_number_of_threads_changes_no_bit_even_where_they_share_a_context(directories, tmp_path):
    tiny_models.make("llama", tmp_path, max_position_embeddings=1024)
    prompt = tokens_of(700)
    got = []
    for num_threads in (1, 2, 3):
        model = load_native(tmp_path, "fp32", num_threads=num_threads)
        with_cache(model, "fp32", num_blocks=128)
        sequence = Sequence(model, prompt, 0)
        got += [torch.stack([feed(model, sequence.next(count))[0] for count in (512, 187, 1)])]
    assert torch.equal(got[0], got[1])
    assert torch.equal(got[0], got[2])


@pytest.mark.parametrize("format", ["fp32", "bf16", "int8"])
def test_the_cache_holds_the_keys_and_values_of_the_plain_twin(directories, format):
    prompt = tokens_of(53)
    plain = PagedModel(load_model(directories["llama"]), len(prompt))
    plain.feed(prompt)
    native = load_native(directories["llama"], "fp32")
    cache = with_cache(native, format)
    sequence = Sequence(native, prompt, 3)
    for size in (20, 1, 1, 31):
        feed(native, sequence.next(size))
    config = native.architecture
    relative = {"fp32": 1e-5, "bf16": 2**-8, "int8": 2.5 / 127}[format]
    for layer in range(config.num_layers):
        table = torch.tensor(plain.block_table)
        theirs = plain.cache.gather(layer, plain.cache.gather_index([table.tolist()]))
        theirs = theirs.view(2, config.num_kv_heads, -1, config.head_dim)[:, :, : len(prompt)]
        for head in range(config.num_kv_heads):
            pairs = [cache.read(layer, sequence.table[i // BLOCK_SIZE], head, i % BLOCK_SIZE) for i in range(len(prompt))]
            for side in (0, 1):
                ours = torch.stack([pair[side] for pair in pairs])
                # int8 rounds in steps of a block's largest number, and again where a later token is larger.
                assert (ours - theirs[side, head]).abs().max() <= relative * theirs[side, head].abs().max() + 1e-6


def test_int8_keys_and_values_change_the_answer_only_a_little(directories):
    prompt = tokens_of(200)
    logits = {}
    for format in ("fp32", "int8"):
        native = load_native(directories["llama"], "fp32")
        with_cache(native, format)
        sequence = Sequence(native, prompt, 0)
        feed(native, sequence.next(150))
        logits[format] = torch.stack([feed(native, sequence.next(1))[0] for _ in range(50)])
    assert (logits["int8"] - logits["fp32"]).norm() <= 0.05 * logits["fp32"].norm()


def test_the_best_token_is_the_first_of_the_largest_logits(directories):
    native = load_native(directories["llama"], "fp32")
    step_model(native, 64, "auto")
    sequences = [Sequence(native, tokens_of(20 + i, i), 8 * i) for i in range(5)]
    batch = build_batch(StepPlan(tuple(one.next(30) for one in sequences)), BLOCK_SIZE)
    result = native.forward(batch)
    assert list(result.best) == result.logits.argmax(dim=-1).tolist()
