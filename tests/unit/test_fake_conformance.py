"""The conformance suite on the fake engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from replicas.blocks import BLOCK_SIZE
from replicas.contract import EngineInfo, StepTimeCoefficients
from replicas.fake_engine import FakeEngine, FakeRunner
from replicas.step_time import StepTimeModel
from tests.conformance.rig import Abilities, Rig
from tests.conformance.suite import EngineConformance


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    law = StepTimeCoefficients(base_s=1e-5, per_token_s=1e-7, per_context_s=0.0, per_sequence_s=0.0)
    info = EngineInfo("fake", "1", 4000, 512, BLOCK_SIZE, 128, (0, 2), 128, 8)
    engine = FakeEngine(FakeRunner(law, 4000, eos_token_id=2), info, StepTimeModel(), max_queued_requests=16)
    yield Rig(engine, Abilities())
    engine.shutdown()
    engine.shutdown()


class TestFake(EngineConformance):
    pass
