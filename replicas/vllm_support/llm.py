"""vLLM's AsyncLLM with the few calls that our engine makes: the one file that imports vLLM while requests are served.

Everything here belongs to one event loop. What of vLLM's surface is touched stands in replicas.vllm_support.installed, whose
test fails first when a new version moves it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from vllm.config.kv_events import KVEventsConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import StatLoggerBase

from replicas.contract import EngineInfo, GenerationRequest
from replicas.vllm_support.protocols import OnStats


class Llm:
    """A running vLLM. `on_stats` gets SchedulerStats and IterationStats (or None each) after each of its steps."""

    def __init__(self, arguments: Mapping[str, Any], adapters: Mapping[str, Path], on_stats: OnStats) -> None:
        """`arguments` are AsyncEngineArgs', with plain mappings for configurations within.

        Takes 20 s and more, and blocks the loop for that. Raises what vLLM raises where it can't start.
        """
        events = arguments.get("kv_events_config")
        config = AsyncEngineArgs(
            **{**arguments, "kv_events_config": None if events is None else KVEventsConfig(**events)}
        ).create_engine_config()
        self._llm = AsyncLLM.from_vllm_config(config, stat_loggers=[partial(_StepLogger, on_stats)], disable_log_stats=True)
        self._adapters = {
            name: LoRARequest(name, number, str(path)) for number, (name, path) in enumerate(adapters.items(), start=1)
        }

    def actual(self, info: EngineInfo) -> EngineInfo:
        """`info` with what vLLM made of it. Its block 0 holds nothing, ever."""
        config = self._llm.vllm_config
        num_blocks, speculative = config.cache_config.num_gpu_blocks, config.speculative_config
        assert num_blocks is not None
        return replace(
            info,
            vocab_size=config.model_config.get_vocab_size(),
            max_model_len=config.model_config.max_model_len,
            block_size=config.cache_config.block_size,
            num_blocks=num_blocks - 1,
            max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
            max_num_seqs=config.scheduler_config.max_num_seqs,
            num_recomputed_blocks=int(speculative is not None and speculative.use_eagle_block_drop()),
        )

    def core_pids(self) -> tuple[int, ...]:
        manager = self._llm.engine_core.resources.engine_manager
        return tuple(process.pid for process in getattr(manager, "processes", ()) if process.pid is not None)

    @property
    def is_dead(self) -> bool:
        dead: bool = self._llm.errored
        return dead

    def generate(self, request: GenerationRequest, sampling: Mapping[str, Any]) -> AsyncIterator[Any]:
        """vllm.RequestOutputs with what is new in each. `sampling` is what vllm_support.sampling makes of the request.

        Closing the iterator aborts. The salt puts the root of our block names in place of vLLM's.
        """
        grammar = sampling["structured_outputs"]
        params = SamplingParams(
            **{**sampling, "structured_outputs": None if grammar is None else StructuredOutputsParams(**grammar)},
            output_kind=RequestOutputKind.DELTA,
        )
        prompt = {"prompt_token_ids": list(request.prompt_token_ids), "cache_salt": request.hash_root.hex()}
        adapter = self._adapters.get(request.adapter)
        outputs: AsyncIterator[Any] = self._llm.generate(prompt, params, request.request_id, lora_request=adapter)
        return outputs

    async def clear_cache(self) -> bool:
        """False, and nothing happened, while anything runs."""
        done: bool = await self._llm.reset_prefix_cache()
        return done

    async def ping(self) -> None:
        """Returns when the core has answered, which it does between two steps."""
        await self._llm.is_paused()

    def shutdown(self) -> None:
        """Blocks for some seconds. Idempotent."""
        self._llm.shutdown()


class _StepLogger(StatLoggerBase):
    def __init__(self, on_stats: OnStats, vllm_config: Any, engine_index: int = 0) -> None:
        self._on_stats = on_stats

    def record(self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0) -> None:
        self._on_stats(scheduler_stats, iteration_stats)

    def log_engine_initialized(self) -> None:
        """Nothing to say: whoever starts the engine says it."""
