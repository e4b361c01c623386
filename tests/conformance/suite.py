"""What every Engine does, whichever it is. A place that runs it makes a class of these and a fixture `rig`, and adds nothing:

    class TestNative(ModelConformance): ...

The engine is to have blocks for about 2,048 tokens, sequences of at most 512, at most 8 of them in a step of 128 tokens, and
room for 16 waiting requests; a vocabulary of at least 2,000, in which 3 to 1,999 are no ends of sequence.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from replicas.blocks import chain_root
from replicas.contract import FinishReason, GenerationRequest, GrammarKind, OutputGrammar
from replicas.errors import ContextLengthError, OverloadedError, RequestError, UnsupportedError
from tests.conformance.rig import Rig, resumed

SECOND_ROOT = chain_root(b"of somebody else")
# Shares of exactly predicted prefix hits, by the kind of engine: for whoever reports them.
MATCH_EXACT_SHARES: dict[str, float] = {}


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{seed}").choices(range(3, 2000), k=length)


class Streams:
    def test_an_answer_has_as_many_tokens_as_it_may_and_one_end(self, rig: Rig) -> None:
        [answer] = rig.serve(rig.request(prompt(20), 5))
        assert (len(answer.token_ids), answer.finish_reason) == (5, FinishReason.LENGTH)
        assert [delta.finish_reason for delta in answer.deltas[:-1]] == [None] * (len(answer.deltas) - 1)

    def test_the_first_delta_tells_what_was_cached_and_how_long_it_queued(self, rig: Rig) -> None:
        [answer] = rig.serve(rig.request(prompt(20, seed=1001), 3))
        first = answer.deltas[0]
        assert first.num_cached_tokens == 0
        assert first.queue_s is not None
        assert first.queue_s >= 0.0

    def test_several_answers_grow_at_once(self, rig: Rig) -> None:
        answers = rig.serve(*(rig.request(prompt(10 + 7 * i, seed=i), 6) for i in range(8)))
        assert [len(answer.token_ids) for answer in answers] == [6] * 8

    def test_greedy_is_the_same_again_and_in_company(self, rig: Rig) -> None:
        asked = [rig.request(prompt(40, seed=i), 6) for i in range(4)]
        alone = [rig.serve(request)[0].token_ids for request in asked]
        again = [replace(request, request_id=f"{request.request_id}-again") for request in asked]
        assert [rig.serve(request)[0].token_ids for request in again] == alone
        together = [replace(request, request_id=f"{request.request_id}-together") for request in asked]
        if rig.abilities.exact_in_batch:
            assert [answer.token_ids for answer in rig.serve(*together)] == alone

    def test_a_stop_token_ends_the_answer_is_counted_and_named(self, rig: Rig) -> None:
        [free] = rig.serve(rig.request(prompt(20, seed=3), 6))
        third = free.token_ids[2]
        first_at = free.token_ids.index(third)
        [stopped] = rig.serve(rig.request(prompt(20, seed=3), 6, stop_token_ids=(third,)))
        assert stopped.token_ids == free.token_ids[: first_at + 1]
        assert (stopped.finish_reason, stopped.deltas[-1].stop_token_id) == (FinishReason.STOP, third)

    def test_no_stop_token_comes_before_min_tokens(self, rig: Rig) -> None:
        [free] = rig.serve(rig.request(prompt(20, seed=4), 6))
        stop = free.token_ids[0]
        [answer] = rig.serve(rig.request(prompt(20, seed=4), 6, stop_token_ids=(stop,), min_tokens=4))
        assert len(answer.token_ids) >= 4
        assert stop not in answer.token_ids[:3]

    def test_the_same_seed_draws_the_same_and_choices_differ(self, rig: Rig) -> None:
        def drawn(**fields: Any) -> list[int]:
            return rig.serve(rig.request(prompt(20, seed=5), 12, temperature=2.0, **fields))[0].token_ids

        if not rig.abilities.seeds:
            with pytest.raises(UnsupportedError) as caught:
                drawn(seed=7)
            assert caught.value.param == "seed"
            return
        first = drawn(seed=7)
        assert drawn(seed=7) == first
        assert drawn(seed=8) != first
        assert drawn(seed=7, choice=1) != first

    def test_a_drawn_answer_to_a_prompt_of_several_steps_harms_nobody(self, rig: Rig) -> None:
        """vLLM's CPU build dies of one with a seed."""
        asked = [rig.request(prompt(300, seed=1100 + i), 6, temperature=1.0) for i in range(3)]
        assert [len(answer.token_ids) for answer in rig.serve(*asked)] == [6] * 3

    def test_an_answer_goes_on_where_another_replica_left_it(self, rig: Rig) -> None:
        request = rig.request(prompt(20, seed=6), 6)
        [whole] = rig.serve(request)
        [rest] = rig.serve(resumed(request, whole.token_ids, 2))
        assert rest.token_ids == whole.token_ids[2:]

    def test_under_penalties_it_goes_on_or_is_refused(self, rig: Rig) -> None:
        request = rig.request(prompt(20, seed=6), 6, presence_penalty=1.5)
        [whole] = rig.serve(request)
        if rig.abilities.continues_penalized:
            assert rig.serve(resumed(request, whole.token_ids, 2))[0].token_ids == whole.token_ids[2:]
        else:
            with pytest.raises(UnsupportedError):
                rig.engine.submit(resumed(request, whole.token_ids, 2))


class Aborts:
    @pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.STOP])
    def test_an_abort_ends_a_running_answer_with_its_reason(self, rig: Rig, reason: FinishReason) -> None:
        request = rig.request(prompt(20), 400)
        rig.submit(request)
        rig.until(lambda: rig.answers[request.request_id].token_ids, "no first token")
        rig.engine.abort(request.request_id, reason)
        assert rig.ended(request).finish_reason is reason
        rig.until_idle()

    def test_an_abort_before_the_first_token_frees_what_it_held(self, rig: Rig) -> None:
        request = rig.request(prompt(500, seed=11), 4)
        rig.submit(request)
        rig.engine.abort(request.request_id)
        assert rig.ended(request).finish_reason is FinishReason.ABORT
        rig.until_idle()

    def test_a_waiting_request_is_aborted_without_ever_running(self, rig: Rig) -> None:
        running = [rig.request(prompt(10, seed=i), 400) for i in range(8)]
        waiting = rig.request(prompt(10, seed=99), 4)
        for request in (*running, waiting):
            rig.submit(request)
        for request in (waiting, *running):
            rig.engine.abort(request.request_id)
        assert {rig.ended(request).finish_reason for request in (waiting, *running)} == {FinishReason.ABORT}
        rig.until_idle()

    def test_an_unknown_an_ended_and_a_twice_aborted_request_are_ignored(self, rig: Rig) -> None:
        request = rig.request(prompt(10), 2)
        rig.engine.abort("never heard of")
        rig.serve(request)
        rig.engine.abort(request.request_id)
        long = rig.request(prompt(10), 400)
        rig.submit(long)
        rig.engine.abort(long.request_id)
        rig.engine.abort(long.request_id, FinishReason.STOP)
        assert rig.ended(long).finish_reason is FinishReason.ABORT
        [after] = rig.serve(rig.request(prompt(10), 2))
        assert after.finish_reason is FinishReason.LENGTH


class Limits:
    def refused(self, rig: Rig, request: GenerationRequest) -> RequestError:
        with pytest.raises(RequestError) as caught:
            rig.engine.submit(request)
        return caught.value

    @pytest.mark.parametrize("ids", [[], [-1], [2**31], [1.5]])
    def test_a_prompt_that_is_none_is_refused(self, rig: Rig, ids: list[Any]) -> None:
        """cases SP09, SP10"""
        assert self.refused(rig, rig.request(ids)).param == "prompt"

    def test_what_does_not_fit_is_refused_and_what_just_fits_is_served(self, rig: Rig) -> None:
        """cases SP02, KV01"""
        longest = rig.engine.info.max_model_len
        error = self.refused(rig, rig.request(prompt(longest), 1))
        assert (type(error), error.param) == (ContextLengthError, "prompt")
        assert self.refused(rig, rig.request(prompt(longest - 4), 5)).param == "max_tokens"
        [answer] = rig.serve(rig.request(prompt(longest - 4), 4))
        assert len(answer.token_ids) == 4

    @pytest.mark.parametrize(
        ("name", "value", "param"),
        [
            ("temperature", math.nan, "temperature"),
            ("temperature", -1.0, "temperature"),
            ("top_p", 0.0, "top_p"),
            ("top_k", -1, "top_k"),
            ("min_p", 2.0, "min_p"),
            ("repetition_penalty", 0.0, "repetition_penalty"),
            ("max_tokens", 0, "max_tokens"),
            ("min_tokens", 5, "min_tokens"),
            ("seed", 2**63, "seed"),
            ("num_logprobs", -1, "logprobs"),
            ("stop_token_ids", (2**31,), "stop_token_ids"),
            ("logit_bias", ((2**31, 1.0),), "logit_bias"),
            ("logit_bias", ((5, math.inf),), "logit_bias"),
        ],
    )
    def test_a_value_out_of_range_is_refused_by_its_name(self, rig: Rig, name: str, value: Any, param: str) -> None:
        """cases SP01, SP05, SP07, SP08, SP13"""
        request = rig.request(prompt(5))
        assert self.refused(rig, replace(request, sampling=replace(request.sampling, **{name: value}))).param == param

    def test_an_id_is_used_once_at_a_time(self, rig: Rig) -> None:
        """cases RQ06"""
        request = rig.request(prompt(10), 400)
        rig.submit(request)
        assert self.refused(rig, request).param == "request_id"
        rig.engine.abort(request.request_id)
        rig.ended(request)

    def test_a_full_queue_refuses_and_the_others_are_served(self, rig: Rig) -> None:
        """cases KV05"""
        taken, refusal = [], None
        for seed in range(100):
            request = rig.request(prompt(20, seed=seed), 40)
            try:
                rig.submit(request)
            except OverloadedError as error:
                refusal = error
                break
            taken.append(request)
        assert refusal is not None
        assert refusal.retry_after_s >= 1.0
        assert {rig.ended(request).finish_reason for request in taken} == {FinishReason.LENGTH}

    def test_names_of_another_prompts_blocks_are_refused(self, rig: Rig) -> None:
        request = rig.request(prompt(200, seed=12))
        foreign = rig.names(rig.request(prompt(200, seed=13)))
        assert self.refused(rig, replace(request, block_hashes=foreign)).param == "block_hashes"

    def test_an_adapter_that_it_does_not_have_is_refused(self, rig: Rig) -> None:
        error = self.refused(rig, replace(rig.request(prompt(5)), adapter="nobody's"))
        assert (type(error), error.param) == (UnsupportedError, "model")

    @pytest.mark.parametrize("kind", list(GrammarKind))
    def test_a_grammar_is_refused_unless_the_engine_says_it_has_the_kind(self, rig: Rig, kind: GrammarKind) -> None:
        assert (kind.value in rig.engine.info.grammars) == rig.abilities.grammars
        if not rig.abilities.grammars:
            error = self.refused(rig, rig.request(prompt(5), grammar=OutputGrammar(kind, "x")))
            assert (type(error), error.param) == (UnsupportedError, "response_format")


class Sampling:
    """Of engines that compute; of one that invents tokens there is nothing to see."""

    @pytest.mark.parametrize("alike", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
    def test_what_leaves_one_token_is_greedy(self, rig: Rig, alike: dict[str, Any]) -> None:
        [greedy] = rig.serve(rig.request(prompt(30, seed=20), 5))
        [drawn] = rig.serve(rig.request(prompt(30, seed=20), 5, temperature=1.5, **alike))
        assert drawn.token_ids == greedy.token_ids

    def test_a_bias_forces_and_forbids(self, rig: Rig) -> None:
        [greedy] = rig.serve(rig.request(prompt(30, seed=21), 3))
        [forced] = rig.serve(rig.request(prompt(30, seed=21), 3, logit_bias=((777, 100.0),)))
        assert forced.token_ids == [777] * 3
        [without] = rig.serve(rig.request(prompt(30, seed=21), 3, logit_bias=((greedy.token_ids[0], -100.0),)))
        assert greedy.token_ids[0] not in without.token_ids

    def test_penalties_make_repetition_rarer(self, rig: Rig) -> None:
        # With this bias one token wins at every place, and only a penalty can unseat it.
        asked = {"logit_bias": ((777, 20.0),)}
        [repeating] = rig.serve(rig.request(prompt(30, seed=22), 6, **asked))
        assert repeating.token_ids == [777] * 6
        [other] = rig.serve(rig.request(prompt(30, seed=22), 6, repetition_penalty=10.0, **asked))
        assert other.token_ids.count(777) < 6
        if rig.abilities.max_penalty >= 20.0:
            [other] = rig.serve(rig.request(prompt(30, seed=22), 6, presence_penalty=100.0, **asked))
            assert other.token_ids.count(777) == 1

    @pytest.mark.parametrize("num_top", [0, 1, 5])
    def test_logprobs_are_those_of_the_model_for_each_token(self, rig: Rig, num_top: int) -> None:
        [answer] = rig.serve(rig.request(prompt(30, seed=23), 4, num_logprobs=num_top))
        assert [each.token_id for each in answer.logprobs] == answer.token_ids
        for each in answer.logprobs:
            values = [value for _, value in each.top]
            assert len(values) == num_top
            assert values == sorted(values, reverse=True)
            assert each.logprob <= 0.0
            assert sum(map(math.exp, values)) <= 1.0 + 1e-3
            if num_top:  # greedy
                assert each.logprob == pytest.approx(values[0], abs=1e-4)

    def test_without_asking_there_are_no_logprobs(self, rig: Rig) -> None:
        [answer] = rig.serve(rig.request(prompt(30, seed=23), 2))
        assert answer.logprobs == []

    def test_logprobs_don_t_depend_on_how_tokens_are_chosen(self, rig: Rig) -> None:
        asked = {"num_logprobs": 3, "logit_bias": ((777, 100.0),)}
        [plain] = rig.serve(rig.request(prompt(30, seed=24), 1, num_logprobs=3))
        [biased] = rig.serve(rig.request(prompt(30, seed=24), 1, temperature=0.5, **asked))
        assert [i for i, _ in biased.logprobs[0].top] == [i for i, _ in plain.logprobs[0].top]
        assert biased.logprobs[0].logprob < plain.logprobs[0].logprob


class Cache:
    def test_what_the_events_say_is_what_the_next_request_finds(self, rig: Rig) -> None:
        request = rig.request(prompt(200, seed=30), 2)
        rig.serve(request)
        rig.until_held(request)
        again = rig.request(prompt(200, seed=30)[:150] + prompt(50, seed=31), 2)
        predicted = rig.predicted_cached_tokens(again)
        assert predicted >= 100
        assert rig.serve(again)[0].num_cached_tokens == predicted

    def test_a_prompt_that_is_cached_whole_still_computes_its_last_token(self, rig: Rig) -> None:
        size = rig.engine.info.block_size
        num_blocks = min(4, (rig.engine.info.max_model_len - 2) // size)
        request = rig.request(prompt(num_blocks * size, seed=32), 2)
        rig.serve(request)
        rig.until_held(request)
        [answer] = rig.serve(replace(request, request_id=f"{request.request_id}-again"))
        assert answer.num_cached_tokens == (num_blocks - 1) * size

    def test_another_root_shares_nothing(self, rig: Rig) -> None:
        """cases NS06"""
        request = rig.request(prompt(150, seed=33), 2)
        rig.serve(request)
        rig.until_held(request)
        [answer] = rig.serve(rig.request(prompt(150, seed=33), 2, root=SECOND_ROOT))
        assert answer.num_cached_tokens == 0
        assert answer.token_ids == rig.answers[request.request_id].token_ids

    def test_predictions_are_exact_while_blocks_are_evicted(
        self, rig: Rig, record_property: Callable[[str, Any], None]
    ) -> None:
        """A tree of prefixes, several times what the cache holds."""
        chance, num_exact, num_hits = random.Random("tree"), 0, 0
        trunks = [prompt(170, seed=40 + i) for i in range(6)]
        num_rounds = 50
        for turn in range(num_rounds):
            trunk = chance.choice(trunks)[: chance.choice((70, 140, 170))]
            request = rig.request(trunk + prompt(chance.randint(10, 90), seed=100 + turn), 2)
            before = rig.predicted_cached_tokens(request)
            [answer] = rig.serve(request)
            num_exact += answer.num_cached_tokens == before
            num_hits += bool(answer.num_cached_tokens)
            rig.until_idle()
            rig.until_held(request)
        share = num_exact / num_rounds
        MATCH_EXACT_SHARES[type(rig.engine).__name__] = share
        record_property("match_exact_share", share)
        assert share == 1.0
        assert num_hits >= num_rounds // 5
        assert len(rig.held) <= rig.engine.stats().num_blocks_total

    def test_a_cleared_cache_is_empty_and_fills_again(self, rig: Rig) -> None:
        request = rig.request(prompt(150, seed=34), 2)
        rig.serve(request)
        rig.until_held(request)
        rig.until_idle()
        rig.engine.clear_cache()
        rig.until(lambda: not rig.held, "the cache does not get empty")
        assert rig.serve(replace(request, request_id=f"{request.request_id}-again"))[0].num_cached_tokens == 0
        rig.until_held(request)


class Telemetry:
    def test_counters_are_what_was_delivered(self, rig: Rig) -> None:
        before = rig.until_idle()
        requests = [rig.request(prompt(50 + i, seed=50 + i), 5) for i in range(4)]
        answers = rig.serve(*requests)
        after = rig.until_idle()
        assert after.started_total - before.started_total == 4
        assert after.generation_tokens_total - before.generation_tokens_total == 20
        assert after.prompt_tokens_total - before.prompt_tokens_total == sum(len(r.prompt_token_ids) for r in requests)
        assert after.finished_total["length"] - before.finished_total["length"] == 4
        assert after.steps_total > before.steps_total
        num_hits = after.prefix_hits_total - before.prefix_hits_total
        assert num_hits == sum(answer.num_cached_tokens or 0 for answer in answers)

    def test_steps_teach_a_law_of_their_time(self, rig: Rig) -> None:
        rig.serve(*(rig.request(prompt(60, seed=60 + i), 8) for i in range(3)))
        law = rig.until_idle().step_time
        assert law is not None
        parts = (law.base_s, law.per_token_s, law.per_context_s, law.per_sequence_s)
        assert all(math.isfinite(part) and part >= 0.0 for part in parts)
        assert law.num_samples > 0

    def test_an_idle_engine_is_neither_late_nor_failed(self, rig: Rig) -> None:
        rig.serve(rig.request(prompt(10), 2))
        rig.until_idle()
        assert rig.engine.heartbeat_age_s() < 2.0
        assert rig.engine.failure() is None

    def test_a_failing_sink_stops_nobody(self, rig: Rig) -> None:
        rig.sink_error = RuntimeError("the sink's own")
        [answer] = rig.serve(rig.request(prompt(10), 3))
        rig.sink_error = None
        assert len(answer.token_ids) == 3


class EngineConformance(Streams, Aborts, Limits, Cache, Telemetry):
    @pytest.fixture(autouse=True)
    def _adds_up(self, rig: Rig) -> Any:
        """After each test: every number that the engine told was consistent, and nothing is held any more."""
        yield
        rig.until_idle()
        assert rig.faults == []


class ModelConformance(EngineConformance, Sampling):
    """Of engines whose tokens follow from a model."""
