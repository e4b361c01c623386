"""vLLM with the block size that is its default on a CPU, and with an adapter; and at last how it dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace

import lora_adapter
import pytest
from vllm_rig import vllm_rig

from configs.schema import AdapterConfig
from replicas.blocks import chain_root
from replicas.contract import FinishReason
from replicas.errors import ReplicaLostError
from tests.conformance.rig import Rig
from tests.conformance.suite import Cache, prompt
from tests.serve.processes import until

TUNED_ROOT = chain_root(b"of the conformance suite", adapter="tuned")


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    adapter = lora_adapter.make(tmp_path_factory.mktemp("adapters") / "tuned")
    with vllm_rig(block_size=128, model={"adapters": (AdapterConfig("tuned", str(adapter)),)}) as made:
        yield made


class TestLargeBlocks(Cache):
    pass


class TestAdapters:
    def test_an_adapter_says_something_else_and_shares_no_cache(self, rig: Rig) -> None:
        assert rig.engine.info.adapters == ("tuned",)
        base = rig.request(prompt(300, seed=80), 8)
        [plain] = rig.serve(base)
        rig.until_held(base)
        tuned = replace(base, request_id="tuned", adapter="tuned", hash_root=TUNED_ROOT)
        [first] = rig.serve(tuned)
        assert first.num_cached_tokens == 0
        assert first.token_ids != plain.token_ids
        rig.until_held(tuned)
        again = replace(tuned, request_id="tuned-again")
        assert rig.predicted_cached_tokens(again) == 256
        [second] = rig.serve(again)
        assert (second.num_cached_tokens, second.token_ids) == (256, first.token_ids)


class TestDeath:
    def test_a_core_that_hangs_is_late_busy_or_idle(self, rig: Rig) -> None:
        rig.until_idle()
        [pid] = rig.engine.core_pids()
        for asked in ([], [rig.request(prompt(40, seed=95), 400)]):
            for request in asked:
                rig.submit(request)
                rig.until(lambda request=request: rig.answers[request.request_id].token_ids, "no first token")
            os.kill(pid, signal.SIGSTOP)
            until(lambda: rig.engine.heartbeat_age_s() > 1.0, 10, "nobody notices")
            os.kill(pid, signal.SIGCONT)
            until(lambda: rig.engine.heartbeat_age_s() < 0.5, 10, "it does not recover")
            for request in asked:
                rig.engine.abort(request.request_id)
                rig.ended(request)

    def test_a_dead_core_ends_every_answer_with_an_error_and_is_told(self, rig: Rig) -> None:
        rig.until_idle()
        running = [rig.request(prompt(40, seed=90 + i), 400) for i in range(3)]
        for request in running:
            rig.submit(request)
        rig.until(lambda: all(rig.answers[request.request_id].token_ids for request in running), "no first tokens")
        [pid] = rig.engine.core_pids()
        os.kill(pid, signal.SIGKILL)
        for request in running:
            answer = rig.ended(request)
            error = answer.deltas[-1].error
            assert error is not None
            assert (answer.finish_reason, error.name) == (FinishReason.ERROR, "ReplicaLostError")
        assert rig.engine.failure() is not None
        with pytest.raises(ReplicaLostError):
            rig.engine.submit(rig.request(prompt(10), 2))
        assert rig.faults == []
