"""What vllm_engine needs of vLLM and of its socket of KV events, so that both can be replaced in a test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Protocol

from replicas.contract import EngineInfo, GenerationRequest

OnStats = Callable[[Any, Any], None]
OnBatch = Callable[[Sequence[Any]], None]


class Llm(Protocol):
    """vllm_support.llm.Llm."""

    @property
    def is_dead(self) -> bool: ...

    def actual(self, info: EngineInfo) -> EngineInfo: ...

    def core_pids(self) -> tuple[int, ...]: ...

    def generate(self, request: GenerationRequest, sampling: Mapping[str, Any]) -> AsyncIterator[Any]: ...

    async def clear_cache(self) -> bool: ...

    async def ping(self) -> None: ...

    def shutdown(self) -> None: ...


class Feed(Protocol):
    """vllm_support.event_feed.EventFeed."""

    async def run(self, on_batch: OnBatch, on_lost: Callable[[], None]) -> None: ...
