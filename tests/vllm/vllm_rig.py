"""vLLM with the embedded model, as the conformance suite wants it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from configs.schema import AppConfig, EngineConfig, ModelConfig, VllmConfig
from replicas.build import build_engine
from replicas.vllm_engine import VllmEngine
from tests.conformance.rig import Abilities, Rig

ABILITIES = Abilities(grammars=True, continues_penalized=False, max_penalty=2.0, seeds=False)
_NUM_TOKENS = 2048
# 32 bits: in 16, sums in another order change greedy tokens.
_KV_BYTES_PER_TOKEN = 2 * 30 * 3 * 64 * 4


@contextmanager
def vllm_rig(*, model: dict[str, Any] | None = None, **options: Any) -> Iterator[Rig]:
    """`options` are VllmConfig's, `model` ModelConfig's. A whole block more: vLLM leaves its first one empty."""
    block_size = options.setdefault("block_size", 32)
    config = AppConfig(
        model=ModelConfig(dtype="fp32", max_model_len=512, **(model or {})),
        engine=EngineConfig(
            kind="vllm",
            device="cpu",
            kv_cache_bytes=(_NUM_TOKENS + block_size) * _KV_BYTES_PER_TOKEN,
            max_num_seqs=8,
            max_num_batched_tokens=128,
            max_queued_requests=16,
            num_threads=2,
            vllm=VllmConfig(enforce_eager=True, **options),
        ),
    )
    engine = build_engine(config)
    assert isinstance(engine, VllmEngine)
    try:
        yield Rig(engine, ABILITIES)
    finally:
        engine.shutdown()
        engine.shutdown()
