"""The fake engine: its tokens are a pure function, its time a law, and it is the real scheduler that runs it."""

import subprocess
import sys
import threading
from dataclasses import replace

import pytest

from configs.schema import AppConfig, EngineConfig, ModelConfig
from replicas.blocks import BLOCK_SIZE
from replicas.build import build_engine
from replicas.contract import (
    Delta,
    EngineInfo,
    FinishReason,
    GenerationRequest,
    SamplingParams,
    StepOutput,
    StepTimeCoefficients,
)
from replicas.errors import ConfigError
from replicas.fake_engine import FakeEngine, FakeRunner, build, step_law
from replicas.step_time import StepTimeModel, predict

LAW = StepTimeCoefficients(base_s=0.01, per_token_s=1e-4, per_context_s=0.0, per_sequence_s=1e-3)
INFO = EngineInfo(
    model_name="fake",
    model_revision="1",
    vocab_size=1000,
    max_model_len=400,
    block_size=BLOCK_SIZE,
    num_blocks=100,
    eos_token_ids=(2,),
    max_num_batched_tokens=64,
    max_num_seqs=8,
)


class Simulation:
    """A virtual clock that moves by what each step takes."""

    def __init__(self, **runner_options: int) -> None:
        self.now = 0.0
        runner = FakeRunner(LAW, INFO.vocab_size, eos_token_id=2, sleep=lambda _: None, **runner_options)
        self.engine = FakeEngine(runner, INFO, StepTimeModel(), clock=lambda: self.now)

    def run(self, *requests: GenerationRequest) -> list[tuple[float, Delta]]:
        """Each Delta with the time at which its step is over."""
        for request in requests:
            self.engine.submit(request)
        timed: list[tuple[float, Delta]] = []
        while (output := self.engine.step_once()) is not None:
            self.now += self.engine.last_step_s
            timed += [(self.now, delta) for delta in output.deltas]
        return timed

    def answer(self, one: GenerationRequest) -> tuple[int, ...]:
        return tuple(token for _, delta in self.run(one) for token in delta.token_ids)


def request(
    request_id: str = "a", *, num_prompt: int = 40, first: int = 1, max_tokens: int = 12, **rest: object
) -> GenerationRequest:
    prior, choice = rest.pop("prior", ()), rest.pop("choice", 0)
    prompt = (*range(first, first + num_prompt), *prior)
    params = SamplingParams(max_tokens=max_tokens, **rest)
    return GenerationRequest(request_id, prompt, params, bytes(32), choice=choice, num_prior_output_tokens=len(prior))


def test_the_same_request_gets_the_same_answer_anywhere_and_in_any_company() -> None:
    alone = Simulation().answer(request(seed=3))
    crowd = Simulation().run(*(request(f"r{i}", first=i + 2) for i in range(6)), request(seed=3))
    assert tuple(token for _, delta in crowd if delta.request_id == "a" for token in delta.token_ids) == alone
    assert len(alone) == 12


def test_prompt_seed_and_choice_each_change_the_answer() -> None:
    variants = [request(seed=1), request(seed=2), request(seed=1, choice=1), request(seed=1, first=2), request(seed=-1)]
    assert len({Simulation().answer(one) for one in variants}) == len(variants)


def test_greedy_answers_ignore_the_seed() -> None:
    assert Simulation().answer(request(temperature=0.0, seed=1)) == Simulation().answer(request(temperature=0.0, seed=2))


def test_an_answer_that_continues_elsewhere_goes_on_with_the_same_tokens() -> None:
    """cases RF02"""
    whole = Simulation().answer(request(seed=5, max_tokens=12))
    assert Simulation().answer(request(seed=5, max_tokens=7, prior=whole[:5])) == whole[5:]


def test_an_id_used_again_for_another_prompt_gets_the_other_prompts_answer() -> None:
    simulation = Simulation()
    first, second = simulation.answer(request(max_tokens=1)), simulation.answer(request(first=9, max_tokens=1))
    assert first != second
    assert second == Simulation().answer(request(first=9, max_tokens=1))


def test_a_step_takes_what_the_law_says() -> None:
    times = [time for time, _ in Simulation().run(request(num_prompt=100, max_tokens=3))]
    prefill = predict(LAW, 64, 64, 1) + predict(LAW, 36, 100, 1)
    decode = predict(LAW, 1, 101, 1)
    assert times == pytest.approx([prefill, prefill + decode, prefill + 2 * decode])


def test_a_cached_prefix_costs_no_time() -> None:
    simulation = Simulation()
    simulation.run(request(num_prompt=100, max_tokens=1))
    before = simulation.now
    [(after, delta)] = simulation.run(request("b", num_prompt=100, max_tokens=1))
    assert delta.num_cached_tokens == 96
    assert after - before == pytest.approx(predict(LAW, 4, 100, 1))


def test_the_step_time_model_learns_the_law() -> None:
    simulation = Simulation()
    simulation.run(*(request(f"r{i}", first=i * 60, num_prompt=20 + 30 * i, max_tokens=60 + 7 * i) for i in range(9)))
    learned = simulation.engine.stats().step_time
    for step in ((64, 64, 1), (8, 2000, 8), (1, 100, 1)):
        assert predict(learned, *step) == pytest.approx(predict(LAW, *step), rel=0.05)


def test_more_tokens_per_step_come_in_bursts() -> None:
    times = [round(time, 9) for time, _ in Simulation(tokens_per_step=3).run(request(max_tokens=10))]
    assert [times.count(time) for time in sorted(set(times))] == [3, 3, 3, 1]


def test_an_answer_ends_with_eos_where_it_was_told_to_and_with_length_otherwise() -> None:
    [*_, (_, last)] = Simulation(num_answer_tokens=5).run(request())
    assert (last.finish_reason, last.stop_token_id) == (FinishReason.STOP, 2)
    assert len(Simulation(num_answer_tokens=5).answer(request())) == 5
    assert len(Simulation(num_answer_tokens=5).answer(request(min_tokens=8))) == 12
    [*_, (_, last)] = Simulation().run(request())
    assert last.finish_reason is FinishReason.LENGTH


def test_tokens_stay_inside_the_vocabulary_and_away_from_forbidden_ones() -> None:
    free = Simulation().answer(request(max_tokens=300))
    assert all(0 <= token < INFO.vocab_size and token != 2 for token in free)
    stops = tuple(sorted(set(free))[:100])
    bound = Simulation().answer(request(max_tokens=300, min_tokens=300, stop_token_ids=stops))
    assert len(bound) == 300
    assert not set(bound) & set(stops)


def test_logprobs_come_where_asked_for_best_first() -> None:
    [(_, delta)] = Simulation().run(request(max_tokens=1, num_logprobs=3))
    [logprob] = delta.logprobs
    assert logprob.token_id == delta.token_ids[0] == logprob.top[0][0]
    assert logprob.logprob == logprob.top[0][1] > logprob.top[1][1] > logprob.top[2][1]
    assert Simulation().run(request(max_tokens=1))[0][1].logprobs is None


def test_an_aborted_step_that_computes_nothing_takes_no_time() -> None:
    simulation = Simulation()
    simulation.engine.submit(request())
    simulation.engine.step_once()
    simulation.engine.abort("a")
    output = simulation.engine.step_once()
    assert output.deltas[0].finish_reason is FinishReason.ABORT
    assert simulation.engine.last_step_s == 0.0
    assert output.stats.num_blocks_used == 0


@pytest.fixture
def config(tmp_path) -> AppConfig:
    """An app with the fake engine, and a model directory with a description and no weights worth the name."""
    (tmp_path / "config.json").write_text(
        """{"architectures": ["LlamaForCausalLM"], "vocab_size": 500, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "eos_token_id": 7, "hidden_act": "silu", "tie_word_embeddings": true}"""
    )
    (tmp_path / "model.safetensors").write_bytes(b"none")
    engine = EngineConfig(kind="fake", fake_base_s=0.001, max_num_seqs=4)
    return AppConfig(model=ModelConfig(source=str(tmp_path), served_name="tiny", revision="r1"), engine=engine)


def test_a_configuration_builds_it_with_the_models_own_facts(config: AppConfig) -> None:
    info = build_engine(config).info
    assert (info.model_name, info.model_revision, info.vocab_size, info.eos_token_ids) == ("tiny", "r1", 500, (7,))
    assert (info.max_model_len, info.max_num_seqs, info.max_num_batched_tokens) == (256, 4, 512)
    # 2 layers, keys and values, 2 heads of 16 numbers of 2 bytes.
    cramped = build_engine(replace(config, engine=replace(config.engine, kv_cache_bytes=10 * 16 * 256))).info
    assert (cramped.num_blocks, cramped.max_model_len) == (10, 160)


def test_an_unknown_kind_of_engine_is_a_configuration_error(config: AppConfig) -> None:
    with pytest.raises(ConfigError, match="native, vllm, fake"):
        build_engine(replace(config, engine=replace(config.engine, kind="other")))


def test_a_started_engine_sleeps_by_the_law_on_its_own_thread(config: AppConfig) -> None:
    slept: list[float] = []
    engine, outputs, finished = build(config, sleep=slept.append), [], threading.Event()

    def sink(output: StepOutput) -> None:
        outputs.append(output)
        if any(delta.finish_reason for delta in output.deltas):
            finished.set()

    engine.start(sink)
    engine.submit(request(max_tokens=4))
    assert finished.wait(10)
    engine.shutdown()
    law = step_law(config.engine)
    assert slept == pytest.approx([predict(law, 40, 40, 1), *[predict(law, 1, 41, 1)] * 3])
    assert sum(len(delta.token_ids) for output in outputs for delta in output.deltas) == 4


def test_building_it_loads_neither_torch_nor_ray(config: AppConfig) -> None:
    code = f"""
import sys
from configs.schema import AppConfig, EngineConfig, ModelConfig
from replicas.build import build_engine
build_engine(AppConfig(model=ModelConfig(source={config.model.source!r}), engine=EngineConfig(kind="fake")))
print(sorted({{"torch", "ray", "vllm", "transformers"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
