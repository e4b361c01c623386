"""Which engine a configuration asks for: a table from `engine.kind` to what makes one.

Each maker imports its engine itself, so that a process with the fake never loads torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from configs.schema import AppConfig
from replicas.contract import Engine
from replicas.engine.compute_thread import ComputeThread
from replicas.errors import ConfigError


def build_engine(config: AppConfig, *, replicas_on_node: int = 1) -> Engine:
    """An engine that is loaded but not started. `replicas_on_node` of them share the node's memory.

    Takes seconds to minutes. Raises ConfigError for a model or an engine that we don't have, CapacityError if it doesn't fit.
    """
    maker = _MAKERS.get(config.engine.kind)
    if maker is None:
        raise ConfigError(f"engine.kind={config.engine.kind!r} is not one of {', '.join(_MAKERS)}")
    return maker(config, replicas_on_node)


def _native(config: AppConfig, replicas_on_node: int) -> Engine:
    thread = ComputeThread()
    return thread.submit(lambda: _load_native(config, replicas_on_node, thread)).result()


def _load_native(config: AppConfig, replicas_on_node: int, thread: ComputeThread) -> Engine:
    from replicas.engine.engine import NativeEngine
    from replicas.engine.runner import load_runner

    runner = load_runner(config.model, config.engine, num_cpus=config.replicas.num_cpus, replicas_on_node=replicas_on_node)
    engine = NativeEngine.from_runner(config, runner, runner.info(config.engine), thread)
    engine.warm_up()
    return engine


def _fake(config: AppConfig, _: int) -> Engine:
    from replicas.fake_engine import build

    return build(config)


def _vllm(config: AppConfig, replicas_on_node: int) -> Engine:
    from replicas.vllm_support.start import build

    return build(config, replicas_on_node)


_MAKERS: Mapping[str, Callable[[AppConfig, int], Engine]] = {"native": _native, "vllm": _vllm, "fake": _fake}
