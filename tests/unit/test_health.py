"""When a replica is of no use, and how it leaves: after the last word of every stream, and without keeping anybody waiting."""

from __future__ import annotations

import asyncio

import pytest
from scripted_engine import ScriptedEngine, until
from token_rig import TokenRig, read

from replicas.contract import ErrorInfo, FinishReason
from replicas.errors import EngineError, ReplicaLostError
from replicas.health import complaint, leave_with_engine

NEVER_S = 3600.0


@pytest.mark.parametrize(
    ("failed", "silent_s", "reason"),
    [
        (None, 0.0, None),
        (None, 60.0, None),
        (None, 61.0, "the engine has work but made no step for 61 s"),
        ("its core process died", 0.0, "its core process died"),
        ("its core process died", 61.0, "its core process died"),
    ],
)
def test_a_replica_is_of_use_unless_its_engine_failed_or_stalled(failed, silent_s, reason):
    engine = ScriptedEngine()
    engine.failed, engine.silent_s = failed, silent_s
    assert complaint(engine, stalled_after_s=60.0) == reason


class Leaving:
    """leave_with_engine at `rig`; `left` says when."""

    def __init__(self, rig: TokenRig, last_words_s: float = NEVER_S) -> None:
        self.left = asyncio.Event()
        self.task = asyncio.create_task(
            leave_with_engine(rig.engine, rig.server, self.left.set, period_s=0.0, last_words_s=last_words_s)
        )


def fail(engine: ScriptedEngine, *names: str) -> None:
    """As engines do: it knows that it failed before it ends its requests, and refuses new ones."""
    engine.failed = "its books contradict each other"
    engine.refusal = EngineError("the engine has failed")
    for name in names:
        engine.emit(name, finish=FinishReason.ERROR, error=ErrorInfo("EngineError", "the engine failed"))


async def test_a_replica_leaves_once_its_streams_have_had_their_tokens_and_the_error():
    async with TokenRig() as rig:
        streams = await rig.open("a", "b")
        leaving = Leaving(rig)
        rig.engine.tokens("a", 1, 2)
        fail(rig.engine, "a", "b")
        await until(lambda: rig.server.is_draining)
        assert not leaving.left.is_set(), "their errors are not out yet"
        rig.engine.step()
        await leaving.left.wait()
        first = await streams[0].next()
        last = first if first.finish_reason else await streams[0].next()
        assert first.token_ids == (1, 2)
        assert last.error.name == (await streams[1].next()).error.name == "ReplicaLostError"
        assert rig.server.connections == set()


async def test_what_is_asked_between_failing_and_leaving_is_refused_as_lost():
    async with TokenRig() as rig:
        await rig.open("a")
        fail(rig.engine)
        with pytest.raises(ReplicaLostError):
            await rig.open("b")
        leaving = Leaving(rig)
        await until(lambda: rig.server.is_draining)
        with pytest.raises(ReplicaLostError):
            await rig.open("c")
        assert not leaving.left.is_set()
        leaving.task.cancel()
        await asyncio.gather(leaving.task, return_exceptions=True)
        assert leaving.left.is_set(), "nothing that goes wrong on the way keeps it"


async def test_a_reader_that_takes_nothing_delays_nobody_for_long():
    async with TokenRig(window_tokens=4) as rig:
        [stream] = await rig.open("a")
        leaving = Leaving(rig, last_words_s=0.0)
        rig.engine.tokens("a", *range(10))
        fail(rig.engine, "a")
        rig.engine.step()
        await leaving.left.wait()
        with pytest.raises(ReplicaLostError):
            await read(stream)


async def test_an_engine_that_works_keeps_its_replica():
    async with TokenRig() as rig:
        leaving = Leaving(rig)
        [stream] = await rig.open("a")
        rig.engine.tokens("a", 1, finish=FinishReason.STOP)
        assert await read(stream) == [1]
        assert not leaving.left.is_set()
        leaving.task.cancel()
        await asyncio.gather(leaving.task, return_exceptions=True)
        assert not leaving.left.is_set()
