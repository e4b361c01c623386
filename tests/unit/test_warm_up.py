"""Steps for nobody (replicas.engine.warm_up)."""

from __future__ import annotations

import pytest
from scripted_runner import make_request

from replicas.contract import EngineInfo, StepTimeCoefficients
from replicas.engine.engine import NativeEngine
from replicas.engine.step import StepPlan, StepResult
from replicas.engine.warm_up import num_rounds, warm_up_plans
from replicas.fake_engine import FakeRunner
from replicas.step_time import StepTimeModel


def info(*, num_blocks: int = 1000, max_model_len: int = 4096, max_num_seqs: int = 64, budget: int = 512) -> EngineInfo:
    return EngineInfo("m", "r", 100, max_model_len, 16, num_blocks, (0,), budget, max_num_seqs)


@pytest.mark.parametrize("num_blocks", [1, 2, 5, 40, 1000])
@pytest.mark.parametrize("max_model_len", [16, 17, 600])
def test_every_plan_stays_within_its_blocks_and_the_cache(num_blocks: int, max_model_len: int) -> None:
    for plan in warm_up_plans(info(num_blocks=num_blocks, max_model_len=min(max_model_len, num_blocks * 16))):
        used: set[int] = set()
        for chunk in plan.chunks:
            assert len(chunk.token_ids) > 0
            assert (len(chunk.block_table) - 1) * 16 < chunk.start + len(chunk.token_ids) <= len(chunk.block_table) * 16
            assert used.isdisjoint(chunk.block_table)
            used.update(chunk.block_table)
        assert max(used) < num_blocks


def test_a_warmed_up_engine_has_a_step_time_model_and_has_served_nobody() -> None:

    seen: list[StepPlan] = []

    class Recording(FakeRunner):
        def run(self, plan: StepPlan) -> StepResult:
            seen.append(plan)
            return super().run(plan)

    law = StepTimeCoefficients(0.01, 0.0001, 0.0, 0.0)
    engine = NativeEngine(Recording(law, 100, sleep=lambda _: None), info(), StepTimeModel())
    engine.warm_up()
    stats = engine.stats()
    assert stats.step_time is not None
    assert stats.step_time.num_samples > 0
    assert stats.step_time.base_s == pytest.approx(0.01, rel=0.5)
    assert (stats.started_total, stats.num_blocks_used, stats.num_blocks_cached) == (0, 0, 0)
    engine.submit(make_request("a", (1, 2, 3)))
    assert engine.step_once() is not None


def test_a_slow_machine_repeats_its_warm_up_less():
    assert [num_rounds(seconds) for seconds in (0.0, 0.01, 0.12, 0.7, 20.0)] == [3, 3, 2, 1, 1]
