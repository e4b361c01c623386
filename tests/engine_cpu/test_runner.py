"""The runner computes a plan: whatever shares a step, each sequence gets what it would get alone."""

from __future__ import annotations

import pytest
import tiny_models
import torch
from paged_model import GREEDY, PagedModel, chunk, load_model

from configs.schema import EngineConfig, ModelConfig
from replicas.blocks import BLOCK_SIZE
from replicas.contract import SamplingParams
from replicas.engine import device
from replicas.engine.batch import build_batch
from replicas.engine.capacity import Capacity, plan_capacity
from replicas.engine.runner import load_runner
from replicas.engine.step import SampleSpec, StepPlan
from replicas.errors import CapacityError, ConfigError

NUM_BLOCKS = 64
KV_BYTES = NUM_BLOCKS * BLOCK_SIZE * 2 * 2 * 2 * 16 * 4  # k and v, 2 layers, 2 heads of 16 numbers in fp32
PROMPTS = {name: [(7 * i + shift) % 150 + 5 for i in range(length)] for name, length, shift in (("a", 50, 0), ("b", 17, 3))}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    tiny_models.make("llama", path)
    return path


def make_runner(directory, attention="auto", **model):
    """`attention` "torch" is torch's fast path, where "auto" would be the native kernels."""
    kernels, attention = ("torch", "auto") if attention == "torch" else ("auto", attention)
    engine = EngineConfig(kv_cache_bytes=KV_BYTES, attention=attention, kernels=kernels, num_threads=1, device="cpu")
    config = ModelConfig(source=str(directory), served_name="tiny", dtype="fp32", **model)
    return load_runner(config, engine, num_cpus=1, replicas_on_node=1)


@pytest.fixture
def runner(directory):
    return make_runner(directory)


def run(runner, *chunks):
    return runner.run(StepPlan(chunks)).chunks


def alone(directory, prompt, num_tokens):
    return PagedModel(load_model(directory), len(prompt) + num_tokens).greedy(prompt, num_tokens)


@pytest.mark.parametrize("attention", ["auto", "torch", "reference"])
def test_prompt_chunks_and_decode_tokens_share_a_step_without_touching_each_other(directory, attention):
    runner = make_runner(directory, attention)
    expected = {name: alone(directory, prompt, 4) for name, prompt in PROMPTS.items()}
    tables = {"a": [9, 3, 20, 7], "b": [40, 2]}
    a, b = PROMPTS["a"], PROMPTS["b"]
    [first] = run(runner, chunk("b", b, 0, tables["b"]))
    got = {"a": [], "b": [first.token_id]}
    # The long prompt arrives in three odd chunks while b decodes.
    for start, end in ((0, 19), (19, 32), (32, 50)):
        last = end == len(a)
        decode = chunk("b", got["b"][-1:], len(b) + len(got["b"]) - 1, tables["b"])
        results = run(runner, chunk("a", a[start:end], start, tables["a"], GREEDY if last else None), decode)
        assert [result.request_id for result in results] == ["a", "b"]
        assert (results[0].token_id is not None) == last
        got["b"].append(results[1].token_id)
    got["a"].append(results[0].token_id)
    while len(got["a"]) < 4:
        decode = chunk("a", got["a"][-1:], len(a) + len(got["a"]) - 1, tables["a"])
        [result] = run(runner, decode)
        got["a"].append(result.token_id)
    assert got == expected


def test_a_decode_batch_gives_each_sequence_its_own_tokens_in_the_order_of_the_plan(directory, runner):
    prompts = {f"s{i}": [(11 * i + 3 * j) % 150 + 5 for j in range(3 + 9 * i)] for i in range(5)}
    tables = {name: list(range(6 * i, 6 * i + 6)) for i, name in enumerate(prompts)}
    got = {name: [run(runner, chunk(name, prompt, 0, tables[name]))[0].token_id] for name, prompt in prompts.items()}
    for _ in range(5):
        chunks = [chunk(n, got[n][-1:], len(prompts[n]) + len(got[n]) - 1, tables[n]) for n in ("s3", "s0", "s4", "s1", "s2")]
        for result in run(runner, *chunks):
            got[result.request_id].append(result.token_id)
    assert got == {name: alone(directory, prompt, 6) for name, prompt in prompts.items()}


def test_a_prefix_that_another_sequence_computed_serves_as_if_computed_again(directory, runner):
    prompt = PROMPTS["a"]
    run(runner, chunk("first", prompt, 0, [1, 2, 3, 4]))
    [result] = run(runner, chunk("second", prompt[32:], 32, [1, 2, 30, 31]))
    assert result.token_id == alone(directory, prompt, 1)[0]


def test_logprobs_come_with_the_token_where_asked_for(runner):
    spec = SampleSpec(SamplingParams(max_tokens=1, temperature=0, num_logprobs=2), 0, 0, (), ())
    with_logprob, without = run(runner, chunk("a", PROMPTS["a"], 0, [0, 1, 2, 3], spec), chunk("b", PROMPTS["b"], 0, [4, 5]))
    assert with_logprob.logprob.token_id == with_logprob.token_id
    assert len(with_logprob.logprob.top) == 2
    assert without.logprob is None


def test_an_empty_plan_and_a_plan_that_samples_nothing_are_steps_too(runner):
    assert run(runner) == ()
    [result] = run(runner, chunk("a", PROMPTS["a"][:20], 0, [0, 1], None))
    assert (result.token_id, result.error) == (None, None)


@pytest.mark.parametrize("attention", ["auto", "torch", "reference"])
def test_non_finite_numbers_end_their_sequence_alone_and_poison_no_block(directory, tmp_path, attention):
    bad_token = 4  # not in the prompts
    tiny_models.make("llama", tmp_path)
    tiny_models.poison(tmp_path, bad_token)
    runner = make_runner(tmp_path, attention)
    expected = alone(directory, PROMPTS["b"], 3)
    good = [run(runner, chunk("good", PROMPTS["b"], 0, [0, 1]))[0].token_id]
    for step in range(2):
        start = len(PROMPTS["b"]) + step
        bad, fine = run(runner, chunk("bad", [bad_token] * 20, 0, [5, 6]), chunk("good", good[-1:], start, [0, 1]))
        assert bad.token_id is None
        assert "not finite" in bad.error
        good.append(fine.token_id)
    assert good == expected
    # The next owner of the poisoned blocks fills them only in part.
    heir = [run(runner, chunk("heir", PROMPTS["b"][:10], 0, [5]), chunk("other", [9, 8], 0, [7]))[0].token_id]
    assert heir == alone(directory, PROMPTS["b"][:10], 1)
    decode = chunk("heir", heir, 10, [5])
    follow = run(runner, decode, chunk("bad", [bad_token], 20, [8, 6]), chunk("other", [7], 2, [7]))
    assert follow[0].token_id == alone(directory, PROMPTS["b"][:10], 2)[1]
    assert (follow[1].error is None, follow[2].error is None) == (False, True)


def test_a_runner_tells_what_it_loaded(directory, runner):
    assert (runner.num_blocks, runner.block_size, runner.vocab_size) == (NUM_BLOCKS, BLOCK_SIZE, tiny_models.VOCAB_SIZE)
    assert (runner.max_model_len, runner.eos_token_ids, runner.model_name) == (256, (2,), "tiny")
    assert len(runner.model_revision) == 16
    assert make_runner(directory, max_model_len=100, revision="v1").max_model_len == 100
    assert make_runner(directory, revision="v1").model_revision == "v1"


def test_the_batch_puts_decode_tokens_first_and_longest_first():
    plan = StepPlan(
        (
            chunk("prompt", [1, 2, 3], 30, [8, 9, 4], None),
            chunk("short", [4], 5, [7]),
            chunk("long", [5], 40, [3, 2, 1]),
        )
    )
    batch = build_batch(plan, BLOCK_SIZE)
    assert batch.token_ids == [5, 4, 1, 2, 3]
    assert batch.positions == [40, 5, 30, 31, 32]
    assert batch.slots == [1 * 16 + 8, 7 * 16 + 5, 9 * 16 + 14, 9 * 16 + 15, 4 * 16 + 0]
    assert [(span.first_row, span.num_rows, span.context_len) for span in batch.spans] == [(0, 1, 41), (1, 1, 6), (2, 3, 33)]
    assert (batch.sample_rows, batch.sample_chunks) == ([0, 1], [2, 1])
    assert batch.fresh_blocks == [4]


@pytest.mark.parametrize(("start", "num_rows", "fresh"), [(0, 16, []), (0, 15, [0]), (16, 1, [1]), (17, 3, []), (10, 40, [3])])
def test_fresh_blocks_are_those_begun_and_not_filled(start, num_rows, fresh):
    plan = StepPlan((chunk("a", [1] * num_rows, start, [0, 1, 2, 3]),))
    assert build_batch(plan, BLOCK_SIZE).fresh_blocks == fresh


def capacity(**changes):
    arguments = {"kv_bytes": 1000 * 160, "bytes_per_token": 10, "block_size": 16, "max_model_len": 0, "max_context_len": 4096}
    return plan_capacity(**{**arguments, **changes})


def test_the_budget_buys_whole_blocks_and_bounds_the_longest_sequence():
    assert capacity() == Capacity(num_blocks=1000, max_model_len=4096)
    assert capacity(kv_bytes=100 * 160 + 159) == Capacity(num_blocks=100, max_model_len=1600)
    assert capacity(max_model_len=300) == Capacity(num_blocks=1000, max_model_len=300)


def test_what_does_not_fit_says_how_much_is_missing_and_what_would_fit():
    with pytest.raises(CapacityError) as caught:
        capacity(kv_bytes=3 * 2**20, bytes_per_token=2**16, max_model_len=100)
    assert "needs 4 MiB more" in caught.value.message  # 112 tokens of 64 KiB are 7 MiB
    assert f"engine.kv_cache_bytes={112 * 2**16}" in caught.value.message
    assert "a max_model_len of 48 would fit" in caught.value.message
    with pytest.raises(CapacityError, match="nothing would fit"):
        capacity(kv_bytes=-5)
    with pytest.raises(CapacityError, match="more than this model can use"):
        capacity(max_model_len=5000)


def test_what_is_said_to_fit_does_fit():
    for kv_bytes in range(160, 3200, 7):
        fits = kv_bytes // 160 * 16
        assert capacity(kv_bytes=kv_bytes, max_model_len=fits).max_model_len == fits
        with pytest.raises(CapacityError):
            capacity(kv_bytes=kv_bytes, max_model_len=fits + 1)


def test_free_memory_is_the_machines_or_the_containers_if_that_is_less(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 800 kB\n")
    assert device.free_memory_bytes(tmp_path, tmp_path) == 800 * 1024
    (tmp_path / "memory.max").write_text("500000\n")
    (tmp_path / "memory.current").write_text("200000\n")
    assert device.free_memory_bytes(tmp_path, tmp_path) == 300000
    (tmp_path / "memory.max").write_text("max\n")
    assert device.free_memory_bytes(tmp_path, tmp_path) == 800 * 1024


def test_the_replicas_of_a_node_share_its_memory():
    one = device.kv_cache_budget_bytes(torch.device("cpu"), 0.9, replicas_on_node=1)
    four = device.kv_cache_budget_bytes(torch.device("cpu"), 0.9, replicas_on_node=4)
    assert four == pytest.approx(one / 4, rel=0.2)


def test_the_number_format_follows_what_the_cpu_multiplies(monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    assert device.choose_dtype("auto", cpu) == torch.bfloat16
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True})
    assert device.choose_dtype("auto", cpu) == torch.float32
    assert device.choose_dtype("fp16", cpu) == torch.float16


def test_a_cuda_device_that_is_not_there_is_a_configuration_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device.choose_device("auto") == torch.device("cpu")
    with pytest.raises(ConfigError, match="no CUDA device"):
        device.choose_device("cuda")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"quantization": "fp8"}, "engine.quantization=fp8"),
        ({"quantization": "fp8", "kernels": "torch"}, "engine.quantization=fp8"),
        ({"kv_cache_dtype": "int8", "kernels": "torch"}, "engine.kv_cache_dtype=int8"),
        ({"kv_cache_dtype": "fp16", "kernels": "torch"}, "engine.kv_cache_dtype=fp16"),
        ({"kernels": "native", "attention": "reference"}, "engine.kernels=native"),
    ],
)
def test_formats_and_kernels_that_are_not_possible_here_are_named(directory, options, named):
    engine = EngineConfig(kv_cache_bytes=KV_BYTES, num_threads=1, device="cpu", **options)
    model = ModelConfig(source=str(directory), dtype="fp32")
    with pytest.raises(ConfigError, match=named):
        load_runner(model, engine, num_cpus=1, replicas_on_node=1)


def test_a_shape_that_the_kernels_do_not_know_is_computed_by_torch(tmp_path):
    tiny_models.make("llama", tmp_path, hidden_size=90)
    engine = EngineConfig(kv_cache_bytes=KV_BYTES, num_threads=1, device="cpu")
    model = ModelConfig(source=str(tmp_path), dtype="fp32")
    runner = load_runner(model, engine, num_cpus=1, replicas_on_node=1)
    [result] = run(runner, chunk("a", PROMPTS["a"], 0, [0, 1, 2, 3]))
    assert result.token_id == alone(tmp_path, PROMPTS["a"], 1)[0]
    with pytest.raises(ConfigError, match="hidden_size 90"):
        load_runner(model, EngineConfig(kernels="native", device="cpu"), num_cpus=1, replicas_on_node=1)
