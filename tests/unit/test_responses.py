"""Answers as OpenAI's own client library reads them, and streams byte for byte."""

import json

import pytest
import tiny_tokenizer
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from cluster.generate import Piece, Usage
from cluster.openai_api import Conversation, GenerateCall, Kind
from cluster.responses import ChunkWriter, collect
from replicas.chat_template import ChatMessage
from replicas.contract import TokenLogprob
from replicas.errors import EngineError, ReplicaLostError

USAGE = Usage(prompt_tokens=7, completion_tokens=3, cached_tokens=4)
USAGE_JSON = {
    "prompt_tokens": 7,
    "completion_tokens": 3,
    "total_tokens": 10,
    "prompt_tokens_details": {"cached_tokens": 4},
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tiny_tokenizer.make(tmp_path_factory.mktemp("tiny"))


def call(kind=Kind.CHAT, **fields):
    prompt = Conversation((ChatMessage("user", "x"),)) if kind is Kind.CHAT else "x"
    return GenerateCall(kind=kind, model="m", prompts=(prompt,), **fields)


def writer(tokenizer, kind=Kind.CHAT, **fields):
    return ChunkWriter(call(kind, stream=True, **fields), tokenizer, "id-1", 123)


def whole(tokenizer, pieces, kind=Kind.CHAT, **fields):
    return collect(call(kind, **fields), tokenizer, "id-1", 123, pieces, USAGE)


def events(data):
    """The JSON of each event, read as strictly as the strictest client: split at two line feeds."""
    assert data.endswith(b"\n\n")
    assert b"\r" not in data
    parts = data.removesuffix(b"\n\n").split(b"\n\n")
    assert all(part.startswith(b"data: ") and b"\n" not in part for part in parts)
    return [json.loads(part.removeprefix(b"data: ")) for part in parts]


def logprob_pieces(tokenizer, text):
    """One piece a token, each with the log-probabilities of itself and one other."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    return [
        Piece(0, "", n, (i,), (TokenLogprob(i, -0.5 * n, ((i, -0.5 * n), (10, float("-inf")))),))
        for n, i in enumerate(ids, start=1)
    ]


def test_a_chat_answer_is_what_the_openai_library_expects(tokenizer):
    body = whole(tokenizer, [Piece(0, "hel", 1), Piece(0, "lo", 2), Piece(0, "", 3, finish_reason="stop")])
    parsed = ChatCompletion.model_validate(body, strict=True)
    assert parsed.choices[0].message.content == "hello"
    assert parsed.choices[0].finish_reason == "stop"
    assert body["usage"] == USAGE_JSON
    assert (parsed.id, parsed.created, parsed.model) == ("id-1", 123, "m")


def test_a_completion_has_its_choices_in_order(tokenizer):
    pieces = [Piece(1, "b", 1, finish_reason="length"), Piece(0, "a", 1, finish_reason="stop")]
    parsed = Completion.model_validate(whole(tokenizer, pieces, Kind.COMPLETION, n=2), strict=True)
    assert [(c.index, c.text, c.finish_reason) for c in parsed.choices] == [(0, "a", "stop"), (1, "b", "length")]


@pytest.mark.parametrize("pieces", [[], [Piece(0, "a", 1)], [Piece(0, "a", 1, finish_reason="abort")]])
def test_an_answer_without_clean_end_is_an_error(tokenizer, pieces):
    """cases ST02"""
    with pytest.raises(EngineError):
        whole(tokenizer, pieces)


def test_a_chat_stream_byte_for_byte(tokenizer):
    """cases ST07, ST08"""
    stream = writer(tokenizer)
    head = b'data: {"id":"id-1","object":"chat.completion.chunk","created":123,"model":"m","choices":[{"index":0,"delta":'
    rest = b',"logprobs":null,"finish_reason":null}]}\n\n'
    assert stream.start(0) == head + b'{"role":"assistant","content":""}' + rest
    assert stream.piece(Piece(0, 'a"\n', 1), USAGE) == head + b'{"content":"a\\"\\n"}' + rest
    assert stream.piece(Piece(0, "", 2), USAGE) == b"", "no empty content chunks"
    assert (
        stream.piece(Piece(0, "", 3, finish_reason="stop"), USAGE) == head + b'{},"logprobs":null,"finish_reason":"stop"}]}\n\n'
    )
    assert stream.end(USAGE) == b"", "no usage unless asked for (cases ST04)"


def test_a_completion_stream_byte_for_byte(tokenizer):
    stream = writer(tokenizer, Kind.COMPLETION)
    head = b'data: {"id":"id-1","object":"text_completion","created":123,"model":"m","choices":[{"index":0,"text":'
    assert stream.start(0) == b""
    assert stream.piece(Piece(0, "é", 1), USAGE) == head + '"é"'.encode() + b',"logprobs":null,"finish_reason":null}]}\n\n'
    last = stream.piece(Piece(0, "b", 2, finish_reason="length"), USAGE)
    assert [event["choices"][0]["text"] for event in events(last)] == ["b", ""]
    assert [event["choices"][0]["finish_reason"] for event in events(last)] == [None, "length"]


@pytest.mark.parametrize("kind", Kind)
def test_chunks_are_what_the_openai_library_expects(tokenizer, kind):
    stream = writer(tokenizer, kind, include_usage=True, num_logprobs=1)
    data = stream.start(0)
    for piece in logprob_pieces(tokenizer, "hello é"):
        data += stream.piece(Piece(0, "t", piece.num_tokens, piece.token_ids, piece.logprobs), USAGE)
    data += stream.piece(Piece(0, "", 9, finish_reason="stop"), USAGE) + stream.end(USAGE)
    model = ChatCompletionChunk if kind is Kind.CHAT else Completion
    for event in events(data)[:-1]:
        if kind is Kind.COMPLETION and event["choices"][0]["finish_reason"] is None:
            event["choices"][0]["finish_reason"] = "stop"  # the library's type leaves out the null that OpenAI sends
        model.model_validate(event, strict=True)


def test_usage_comes_once_at_the_end_with_no_choices(tokenizer):
    """cases ST04"""
    stream = writer(tokenizer, include_usage=True)
    data = stream.start(0) + stream.piece(Piece(0, "a", 1), USAGE) + stream.piece(Piece(0, "", 1, finish_reason="stop"), USAGE)
    assert [event["usage"] for event in events(data)] == [None, None, None]
    (last,) = events(stream.end(USAGE))
    assert (last["choices"], last["usage"]) == ([], USAGE_JSON)


def test_continuous_usage_counts_up_on_every_chunk_with_text(tokenizer):
    """cases ST04"""
    stream = writer(tokenizer, continuous_usage=True)
    data = b"".join(stream.piece(Piece(0, "a", n, finish_reason="stop" if n == 3 else None), USAGE) for n in (1, 2, 3))
    assert [event["usage"]["completion_tokens"] for event in events(data)] == [1, 2, 3, 3]
    assert stream.end(USAGE) == b""


def test_choices_interleave_and_each_ends_once(tokenizer):
    """cases ST10"""
    stream = writer(tokenizer, n=2)
    data = stream.start(0) + stream.start(1) + stream.piece(Piece(1, "b", 1), USAGE) + stream.piece(Piece(0, "a", 1), USAGE)
    assert [event["choices"][0]["index"] for event in events(data)] == [0, 1, 1, 0]
    stream.piece(Piece(1, "", 1, finish_reason="stop"), USAGE)
    with pytest.raises(AssertionError):
        stream.piece(Piece(1, "", 1, finish_reason="stop"), USAGE)
    with pytest.raises(AssertionError):
        stream.end(USAGE)


def test_text_that_some_clients_take_for_line_ends_is_escaped(tokenizer):
    """cases ST08"""
    text = "a\x85b\u2028c\u2029d\re\nf\x0bg"
    data = writer(tokenizer).piece(Piece(0, text, 1), USAGE)
    assert len(data.decode().splitlines()) == 2
    assert events(data)[0]["choices"][0]["delta"]["content"] == text


def test_an_error_in_a_stream_is_an_error_object(tokenizer):
    """cases ST02, ST03"""
    (event,) = events(writer(tokenizer).error(ReplicaLostError("the replica died")))
    assert event["error"] == {"message": "the replica died", "type": "server_error", "param": None, "code": "replica_lost"}


def test_chat_logprobs_carry_true_bytes(tokenizer):
    """cases ST05"""
    pieces = logprob_pieces(tokenizer, "h😀")
    body = whole(tokenizer, [*pieces, Piece(0, "h😀", 5, finish_reason="stop")], num_logprobs=2)
    content = ChatCompletion.model_validate(body).choices[0].logprobs.content
    assert bytes(byte for token in content for byte in token.bytes) == "h😀".encode()
    assert [token.token for token in content] == ["h", *["\ufffd"] * 4]
    assert [top.logprob for top in content[0].top_logprobs] == [-0.5, -9999.0]


def test_completion_logprobs_have_offsets_into_the_text(tokenizer):
    text = "hello w😀!"
    pieces = [*logprob_pieces(tokenizer, text), Piece(0, text, 9, finish_reason="stop")]
    logprobs = Completion.model_validate(whole(tokenizer, pieces, Kind.COMPLETION, num_logprobs=1)).choices[0].logprobs
    assert logprobs.tokens == ["hello", " w", *["\ufffd"] * 4, "!"]
    assert logprobs.text_offset == [0, 5, 7, 7, 7, 7, 8]
    assert logprobs.top_logprobs[0] == {"hello": -0.5}


def test_logprobs_wait_for_text_and_none_is_lost(tokenizer):
    stream = writer(tokenizer, num_logprobs=0)
    first, second, third = logprob_pieces(tokenizer, "abc")
    assert stream.piece(first, USAGE) == b""
    (event,) = events(stream.piece(Piece(0, "ab", 2, second.token_ids, second.logprobs), USAGE))
    assert [token["token"] for token in event["choices"][0]["logprobs"]["content"]] == ["a", "b"]
    (event,) = events(stream.piece(Piece(0, "", 3, third.token_ids, third.logprobs, "stop"), USAGE))
    assert [token["token"] for token in event["choices"][0]["logprobs"]["content"]] == ["c"]
