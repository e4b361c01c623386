"""vLLM's requests, outputs, statistics and errors, and ours: without vLLM, by the names of its attributes."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicas.contract import FinishReason, GenerationRequest, GrammarKind, OutputGrammar, SamplingParams, TokenLogprob
from replicas.errors import EngineError, ReplicaLostError, RequestError, UnsupportedError
from replicas.step_time import StepTimeModel
from replicas.vllm_support.outputs import error_info, step_report, to_delta
from replicas.vllm_support.sampling import GRAMMARS, sampling_arguments
from replicas.vllm_support.telemetry import StepReport, Telemetry

EOS = (0, 2)


def request(**sampling: Any) -> GenerationRequest:
    return GenerationRequest("r", (5, 6, 7), SamplingParams(**{"max_tokens": 8, **sampling}), b"root")


def output(token_ids: list[int], finish_reason: str | None = None, **others: Any) -> SimpleNamespace:
    choice = SimpleNamespace(token_ids=token_ids, finish_reason=finish_reason, logprobs=others.pop("logprobs", None))
    return SimpleNamespace(
        request_id="r",
        outputs=[choice],
        num_cached_tokens=others.pop("num_cached_tokens", 32),
        metrics=SimpleNamespace(queued_ts=1.0, scheduled_ts=1.25),
    )


class TestSampling:
    def test_every_end_of_sequence_id_is_a_stop_unless_they_are_ignored(self):
        assert sampling_arguments(request(stop_token_ids=(9,)), EOS)["stop_token_ids"] == [9, 0, 2]
        ignoring = sampling_arguments(request(stop_token_ids=(9,), ignore_eos=True), EOS)
        assert (ignoring["stop_token_ids"], ignoring["ignore_eos"]) == ([9], True)

    def test_choices_and_continued_answers_have_seeds_of_their_own(self):
        first = request(seed=7)
        variants = [first, replace(first, choice=1), replace(first, choice=2), replace(first, num_prior_output_tokens=2)]
        seeds = [sampling_arguments(each, EOS)["seed"] for each in variants]
        assert seeds[0] == 7
        assert len(set(seeds)) == 4
        assert all(-(2**63) <= seed < 2**63 for seed in seeds)

    def test_a_seed_that_nobody_asked_for_is_left_out(self):
        assert sampling_arguments(request(temperature=0.0, seed=7), EOS)["seed"] is None
        assert sampling_arguments(request(seed=7, is_seeded=False), EOS)["seed"] is None

    def test_where_a_seed_would_kill_vllm_it_is_refused(self):
        with pytest.raises(UnsupportedError) as caught:
            sampling_arguments(request(seed=7), EOS, can_seed=False)
        assert caught.value.param == "seed"
        for harmless in ({"temperature": 0.0}, {"is_seeded": False}):
            assert sampling_arguments(request(**harmless), EOS, can_seed=False)["seed"] is None

    def test_text_is_none_of_vllms_business(self):
        assert sampling_arguments(request(), EOS)["detokenize"] is False

    def test_tokens_that_were_generated_elsewhere_count_for_min_tokens(self):
        resumed = replace(request(min_tokens=3), num_prior_output_tokens=2)
        assert sampling_arguments(resumed, EOS)["min_tokens"] == 1

    @pytest.mark.parametrize("penalty", [{"presence_penalty": 1.0}, {"repetition_penalty": 1.1}, {"frequency_penalty": 0.5}])
    def test_an_answer_begun_elsewhere_under_penalties_is_refused(self, penalty):
        with pytest.raises(UnsupportedError):
            sampling_arguments(replace(request(**penalty), num_prior_output_tokens=1), EOS)

    @pytest.mark.parametrize(
        ("kind", "spec", "expected"),
        [
            (GrammarKind.JSON_OBJECT, "", {"json_object": True}),
            (GrammarKind.JSON_SCHEMA, "{}", {"json": "{}"}),
            (GrammarKind.REGEX, "a+", {"regex": "a+"}),
            (GrammarKind.CHOICE, '["yes", "no"]', {"choice": ["yes", "no"]}),
            (GrammarKind.EBNF, 'root ::= "a"', {"grammar": 'root ::= "a"'}),
        ],
    )
    def test_each_kind_of_grammar_has_its_word(self, kind, spec, expected):
        arguments = sampling_arguments(request(grammar=OutputGrammar(kind, spec)), EOS)
        assert arguments["structured_outputs"] == expected
        assert kind in GRAMMARS

    @pytest.mark.parametrize("spec", ["", "{}", "[]", "[1]", "yes"])
    def test_choices_that_are_no_list_of_strings_are_refused(self, spec):
        with pytest.raises(RequestError):
            sampling_arguments(request(grammar=OutputGrammar(GrammarKind.CHOICE, spec)), EOS)


class TestDeltas:
    def test_what_was_cached_and_how_long_it_queued_is_told_once(self):
        first = to_delta(output([5]), request(), EOS, is_first=True)
        assert (first.num_cached_tokens, first.queue_s) == (32, 0.25)
        later = to_delta(output([6]), request(), EOS, is_first=False)
        assert (later.num_cached_tokens, later.queue_s) == (None, None)

    def test_a_stop_names_the_token_that_stopped(self):
        assert to_delta(output([5, 2], "stop"), request(), EOS, is_first=False).stop_token_id == 2
        assert to_delta(output([5, 9], "stop"), request(stop_token_ids=(9,)), EOS, is_first=False).stop_token_id == 9

    def test_a_grammar_may_end_an_answer_without_a_stop_token(self):
        delta = to_delta(output([5], "stop"), request(), EOS, is_first=False)
        assert (delta.finish_reason, delta.stop_token_id) == (FinishReason.STOP, None)

    def test_an_end_that_is_nobodys_wish_is_an_error(self):
        delta = to_delta(output([5], "error"), request(), EOS, is_first=False)
        assert delta.finish_reason is FinishReason.ERROR
        assert delta.error is not None

    def test_the_sampled_token_is_not_among_the_best_unless_it_is_one_of_them(self):
        found = {
            7: SimpleNamespace(logprob=-4.0, rank=9),
            5: SimpleNamespace(logprob=-0.5, rank=1),
            6: SimpleNamespace(logprob=-1.5, rank=2),
        }
        delta = to_delta(output([7], logprobs=[found]), request(num_logprobs=2), EOS, is_first=False)
        assert delta.logprobs == (TokenLogprob(7, -4.0, ((5, -0.5), (6, -1.5))),)


class TestErrors:
    @pytest.mark.parametrize(
        ("names", "expected"),
        [
            (("EngineDeadError",), ReplicaLostError),
            (("VLLMValidationError", "VLLMClientError"), RequestError),
            (("EngineGenerateError",), EngineError),
        ],
    )
    def test_whose_fault_it_is_decides(self, names, expected):
        kind: type[Exception] = Exception
        for name in reversed(names):
            kind = type(name, (kind,), {})
        assert error_info(kind("no"), request()).name == expected.__name__

    def test_a_refusal_names_the_parameter_and_keeps_the_value_to_itself(self):
        kind = type("VLLMClientError", (Exception,), {"__str__": lambda _: "no (value=secret)"})
        error = kind("no")
        error.parameter, error.value = "structured_outputs", "secret"
        info = error_info(error, request())
        assert (info.message, info.param) == ("no", "response_format")

    def test_a_refusal_that_names_no_parameter_is_about_one_that_was_set(self):
        error = type("VLLMClientError", (Exception,), {})("The min_p and logit_bias sampling parameters are not yet supported")
        assert error_info(error, request(min_p=0.1)).param == "min_p"
        assert error_info(error, request(logit_bias=((5, 1.0),))).param == "logit_bias"
        assert error_info(error, request()).param is None
        grammar = OutputGrammar(GrammarKind.JSON_SCHEMA, "{")
        error = type("VLLMClientError", (Exception,), {})("Invalid JSON grammar specification.")
        assert error_info(error, request(grammar=grammar)).param == "response_format"


class TestReports:
    def test_silence_of_the_scheduler_is_no_report(self):
        assert step_report(None, None) is None

    def test_a_report_without_a_step_counts_no_tokens(self):
        scheduler = SimpleNamespace(
            num_running_reqs=1,
            kv_cache_usage=0.5,
            iteration_details=None,
            spec_decoding_stats=None,
            prefix_cache_stats=SimpleNamespace(queries=3, hits=2),
        )
        assert step_report(scheduler, None) == StepReport(1, 0.5, prefix_queries=3, prefix_hits=2)


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, Any]]:
    """Things that happen to an engine, in any order in which they may."""
    live: list[str] = []
    history: list[tuple[str, Any]] = []
    for number in range(draw(st.integers(1, 30))):
        what = draw(st.sampled_from(["submit", "tokens", "finish", "step"]))
        if what == "submit" or not live:
            live.append(f"r{number}")
            history.append(("submit", (live[-1], draw(st.integers(1, 300)), draw(st.integers(0, 400)))))
        elif what == "tokens":
            history.append(("tokens", (draw(st.sampled_from(live)), draw(st.integers(1, 4)))))
        elif what == "finish":
            history.append(("finish", (live.pop(draw(st.integers(0, len(live) - 1))), draw(st.sampled_from(FinishReason)))))
        else:
            report = StepReport(
                draw(st.integers(0, 40)), draw(st.floats(0, 1)), prefill_tokens=draw(st.integers(0, 600)), duration_s=0.01
            )
            history.append(("step", (report,)))
    return history


class TestTelemetry:
    @given(histories(), st.integers(0, 200))
    def test_whatever_vllm_reports_the_counts_add_up(self, history, num_cached_blocks):
        telemetry = Telemetry(100, StepTimeModel())
        for what, arguments in history:
            getattr(telemetry, f"on_{what}")(*arguments)
            stats = telemetry.stats(num_cached_blocks)
            assert stats.started_total == stats.num_running + stats.num_waiting + sum(stats.finished_total.values())
            assert stats.num_blocks_free + stats.num_blocks_cached + stats.num_blocks_used == stats.num_blocks_total
            assert min(stats.num_running, stats.num_waiting, stats.num_blocks_free, stats.num_blocks_cached) >= 0
            assert min(stats.num_pending_tokens, stats.num_context_tokens, stats.num_blocks_used) >= 0

    def test_prompt_tokens_that_a_step_computed_are_pending_no_more(self):
        telemetry = Telemetry(100, StepTimeModel())
        telemetry.on_submit("a", 100, 0)
        telemetry.on_submit("b", 50, 32)
        assert telemetry.stats(0).num_pending_tokens == 118
        telemetry.on_step(StepReport(2, 0.1, prefill_tokens=64, prefill_sequences=1, duration_s=0.1))
        assert telemetry.stats(0).num_pending_tokens == 54
        telemetry.on_tokens("a", 1)
        telemetry.on_tokens("b", 1)
        assert telemetry.stats(0).num_pending_tokens == 2  # each computes its last token next
        assert telemetry.stats(0).num_context_tokens == 152

    def test_an_idle_engine_holds_no_blocks_whatever_was_reported_last(self):
        telemetry = Telemetry(100, StepTimeModel())
        telemetry.on_submit("a", 100, 0)
        telemetry.on_step(StepReport(1, 0.5))
        assert telemetry.stats(50).num_blocks_used == 50
        telemetry.on_finish("a", FinishReason.ABORT)
        assert (telemetry.stats(50).num_blocks_used, telemetry.stats(50).num_blocks_cached) == (0, 50)

    def test_accepted_draft_tokens_are_counted_by_position(self):
        telemetry = Telemetry(100, StepTimeModel())
        for accepted in ((2, 1, 0), (1, 1, 1)):
            report = StepReport(1, 0.1, drafts=2, draft_tokens=6, accepted_tokens=sum(accepted), accepted_per_position=accepted)
            telemetry.on_step(report)
        stats = telemetry.stats(0)
        assert (stats.drafts_total, stats.draft_tokens_total, stats.accepted_tokens_total) == (4, 12, 6)
        assert stats.accepted_per_position_total == (3, 2, 1)


def test_the_choices_survive_their_way_through_json():
    spec = json.dumps(["ja", "nein, nie"])
    arguments = sampling_arguments(request(grammar=OutputGrammar(GrammarKind.CHOICE, spec)), EOS)
    assert arguments["structured_outputs"]["choice"] == ["ja", "nein, nie"]
