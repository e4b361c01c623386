"""The conformance suite on our own engine with the embedded model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from configs.schema import AppConfig, EngineConfig, ModelConfig
from replicas.build import build_engine
from tests.conformance.rig import Abilities, Rig
from tests.conformance.suite import ModelConformance

_NUM_TOKENS = 2048
_KV_BYTES_PER_TOKEN = 2 * 30 * 3 * 64 * 4


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    config = AppConfig(
        model=ModelConfig(dtype="fp32", max_model_len=512),
        engine=EngineConfig(
            device="cpu",
            kv_cache_bytes=_NUM_TOKENS * _KV_BYTES_PER_TOKEN,
            max_num_seqs=8,
            max_num_batched_tokens=128,
            max_queued_requests=16,
            num_threads=1,
        ),
    )
    engine = build_engine(config)
    yield Rig(engine, Abilities())
    engine.shutdown()


class TestNative(ModelConformance):
    pass
