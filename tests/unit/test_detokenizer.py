"""Text comes out the same however its tokens arrive; stop strings are cut exactly."""

import pytest
import tiny_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from replicas.tokenizer import Detokenizer

TEXTS = st.text(st.sampled_from("helo wabim<|é漢😀\n"), max_size=30)
TOKEN_IDS = st.lists(st.integers(0, 280), max_size=40)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tiny_tokenizer.make(tmp_path_factory.mktemp("tiny"))


def ids_of(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


def cut(ids, data):
    """`ids` in pushes of any size."""
    while ids:
        size = data.draw(st.integers(1, len(ids)))
        yield ids[:size]
        ids = ids[size:]


def expected_cut(text, stops):
    """By characters: the stop string that ends first; of several, the longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest, end
    return text, None, len(text)


@settings(deadline=None)
@given(TOKEN_IDS, st.booleans(), st.data())
def test_the_pieces_are_the_decoded_text_for_any_tokens(tokenizer, ids, skip_special_tokens, data):
    """cases ST05: also for bytes that are no UTF-8, and ids the tokenizer doesn't know."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    pieces = [detokenizer.push(push) for push in cut(ids, data)]
    assert "".join([*pieces, detokenizer.flush()]) == tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
    assert detokenizer.num_tokens_used == len(ids)


@settings(deadline=None)
@given(
    TEXTS, st.lists(st.text(st.sampled_from("helo wabim<|é😀\n"), min_size=1, max_size=5), min_size=1, max_size=4), st.data()
)
def test_a_stop_string_is_cut_exactly_however_the_tokens_arrive(tokenizer, text, stops, data):
    """cases ST06"""
    ids = ids_of(tokenizer, text)
    expected, stop, end = expected_cut(text, stops)
    detokenizer = Detokenizer(tokenizer, stops)
    got = ""
    for push in cut(ids, data):
        got += detokenizer.push(push)
        assert expected.startswith(got), "nothing of a stop string may leak"
    assert got + detokenizer.flush() == expected
    assert detokenizer.stopped == stop
    counts = range(len(ids) + 1)
    needed = len(ids) if stop is None else next(n for n in counts if _num_characters(tokenizer, ids[:n]) >= end)
    assert detokenizer.num_tokens_used == needed


def _num_characters(tokenizer, ids):
    return len(b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8", "ignore"))


def test_an_emoji_waits_for_its_last_byte(tokenizer):
    """cases ST05"""
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push([i]) for i in ids_of(tokenizer, "😀")] == ["", "", "", "😀"]


def test_an_unfinished_character_at_the_end_is_flushed_as_a_replacement(tokenizer):
    """cases ST05"""
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(ids_of(tokenizer, "a😀")[:-1]) == "a"
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_text_is_held_only_while_it_could_begin_a_stop_string(tokenizer):
    """cases ST06"""
    detokenizer = Detokenizer(tokenizer, ["abc"])
    assert [detokenizer.push(ids_of(tokenizer, character)) for character in "xababd"] == ["x", "", "", "ab", "", "abd"]
    assert detokenizer.stopped is None


def test_what_is_held_is_released_at_the_end(tokenizer):
    detokenizer = Detokenizer(tokenizer, ["abc"])
    assert detokenizer.push(ids_of(tokenizer, "ab")) == ""
    assert detokenizer.flush() == "ab"


def test_the_stop_string_can_be_left_in_and_ends_everything(tokenizer):
    detokenizer = Detokenizer(tokenizer, ["w"], include_stop=True)
    assert detokenizer.push(ids_of(tokenizer, "a wb")) == "a w"
    assert detokenizer.num_tokens_used == 2
    assert detokenizer.push(ids_of(tokenizer, "more")) == ""
    assert detokenizer.flush() == ""
    assert detokenizer.num_tokens_used == 2
