"""The conformance suite on vLLM, and what only vLLM can: answers within a grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
from vllm_rig import vllm_rig

from configs.schema import ModelConfig
from replicas.contract import FinishReason, GrammarKind, OutputGrammar
from replicas.tokenizer import Tokenizer, load_tokenizer
from tests.conformance.rig import Answer, Rig
from tests.conformance.suite import ModelConformance, prompt

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with vllm_rig() as made:
        yield made


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(ModelConfig())


class TestVllm(ModelConformance):
    pass


class TestGrammars:
    def answer(self, rig: Rig, tokenizer: Tokenizer, kind: GrammarKind, spec: str) -> tuple[Answer, str]:
        ids = tokenizer.encode("A person as JSON, in one line:", add_special_tokens=False)
        [answer] = rig.serve(rig.request(ids, 120, grammar=OutputGrammar(kind, spec), ignore_eos=False))
        end = answer.deltas[-1].stop_token_id
        return answer, tokenizer.decode([i for i in answer.token_ids if i != end])

    def test_an_answer_keeps_to_a_json_schema(self, rig: Rig, tokenizer: Tokenizer) -> None:
        answer, text = self.answer(rig, tokenizer, GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
        assert answer.finish_reason is FinishReason.STOP
        assert json.loads(text).keys() == {"name", "age"}

    def test_an_answer_is_one_of_the_choices(self, rig: Rig, tokenizer: Tokenizer) -> None:
        answer, text = self.answer(rig, tokenizer, GrammarKind.CHOICE, '["yes", "no", "perhaps"]')
        assert (text in ("yes", "no", "perhaps"), answer.finish_reason) == (True, FinishReason.STOP)

    def test_an_answer_matches_a_regex(self, rig: Rig, tokenizer: Tokenizer) -> None:
        _, text = self.answer(rig, tokenizer, GrammarKind.REGEX, r"[a-c]{3}-[0-9]{2}")
        assert re.fullmatch(r"[a-c]{3}-[0-9]{2}", text)

    def test_an_answer_keeps_to_a_grammar(self, rig: Rig, tokenizer: Tokenizer) -> None:
        _, text = self.answer(rig, tokenizer, GrammarKind.EBNF, 'root ::= "a" ("b" | "c") "d"')
        assert text in ("abd", "acd")

    @pytest.mark.parametrize(
        ("kind", "spec"),
        [
            (GrammarKind.REGEX, "(a"),
            (GrammarKind.EBNF, "root ::= nothing"),
            (GrammarKind.JSON_SCHEMA, '{"type": "nonsense"}'),
            (GrammarKind.JSON_SCHEMA, "{"),
        ],
    )
    def test_what_is_no_grammar_ends_only_its_own_request(self, rig: Rig, kind: GrammarKind, spec: str) -> None:
        """cases SO01, SO02"""
        bad = rig.request(prompt(20), 4, grammar=OutputGrammar(kind, spec))
        good = rig.request(prompt(20), 4)
        refused, served = rig.serve(bad, good)
        assert served.finish_reason is FinishReason.LENGTH
        error = refused.deltas[-1].error
        assert error is not None
        assert (refused.finish_reason, error.name, error.param) == (FinishReason.ERROR, "RequestError", "response_format")
        rig.until_idle()
        assert rig.engine.failure() is None
