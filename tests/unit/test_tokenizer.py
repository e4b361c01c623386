"""Special tokens come from the server's template and from nowhere else."""

from datetime import datetime

import pytest
import tiny_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from replicas.chat_template import ChatMessage, ChatTemplate, MarkerSplitter
from replicas.errors import ConfigError, RequestError, UnsupportedError
from replicas.tokenizer_files import SpecialToken, from_directory

END, START, STOP = 0, 1, 2


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tiny_tokenizer.make(tmp_path_factory.mktemp("tiny"))


def with_template(tmp_path, template):
    return tiny_tokenizer.make(tmp_path, chat_template=template)


def conversation(*contents):
    return [ChatMessage("user", content) for content in contents]


marked_text = st.lists(
    st.sampled_from(
        [*tiny_tokenizer.SPECIAL, "<|", "|>", "im_start", "<", "x", " ", "\n", "hello", "é", "\U000f0000", "</think>"]
    )
).map("".join)


@settings(deadline=None)
@given(marked_text)
def test_text_never_becomes_a_special_token_and_comes_back_unchanged(tokenizer, text):
    """cases SP12"""
    ids = tokenizer.encode(text, add_special_tokens=True)
    assert not tokenizer.special_ids.intersection(ids)
    assert tokenizer.decode(ids) == text


@settings(deadline=None)
@given(st.lists(marked_text, min_size=1, max_size=3))
def test_a_conversation_has_the_special_tokens_of_its_template_only(tokenizer, contents):
    """cases SP12"""
    ids = tokenizer.render_chat(conversation(*contents))
    assert [i for i in ids if tokenizer.is_special(i)] == [START, STOP] * len(contents) + [START]
    expected = "".join(f"<|im_start|>user\n{content}<|im_end|>\n" for content in contents) + "<|im_start|>assistant\n"
    assert tokenizer.decode(ids, skip_special_tokens=False) == expected


def test_an_ordinary_conversation_is_tokenized_as_its_rendered_text(tokenizer):
    text = "<|im_start|>user\nhello <b> w\n\n<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.render_chat(conversation("hello <b> w\n\n")) == tokenizer.encode(
        text, add_special_tokens=False, allow_special=True
    )


@pytest.mark.parametrize(
    ("template", "content", "rendered"),
    [
        ("<|im_start|>{{ messages[0].content | trim }}", "  <|im_end|> \n", "<|im_end|>"),
        ("<|im_start|>{{ messages[0].content.split('</think>')[-1] }}", "a</think>b<|im_end|>", "b<|im_end|>"),
        ("<|im_start|>{{ messages[0].content | upper }}", "<|im_end|>", "<|IM_END|>"),
        ("<|im_start|>{{ messages[0].content | tojson }}", "<|im_end|>", '"<|im_end|>"'),
        ("<|im_start|>{{ messages[0].content[::-1] }}", ">|dne_mi|<", "<|im_end|>"),
        ("<|im_start|>{{ messages[0].content | replace('x', '') }}", "<|im_xend|>", "<|im_end|>"),
        ("<|im_start|>{{ messages | map(attribute='content') | join }}", "<|im_end|>", "<|im_end|>"),
    ],
)
def test_filters_work_and_forge_nothing(tmp_path, template, content, rendered):
    """cases SP12"""
    tokenizer = with_template(tmp_path, template)
    ids = tokenizer.render_chat(conversation(content))
    assert tokenizer.special_ids.intersection(ids) == {START}
    assert tokenizer.decode(ids) == rendered


def test_two_messages_cannot_form_a_special_token_together(tmp_path):
    tokenizer = with_template(tmp_path, "{{ messages[0].content + messages[1].content }}")
    ids = tokenizer.render_chat(conversation("<|im_", "end|>"))
    assert not tokenizer.special_ids.intersection(ids)


def test_a_message_that_uses_every_private_use_character_is_refused(tokenizer):
    content = "<" + "".join(map(chr, range(0xF0000, 0xFFFFE)))
    with pytest.raises(RequestError) as caught:
        tokenizer.render_chat(conversation(content))
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "template",
    ["{{ raise_exception('roles must alternate') }}", "{{ 1 / 0 }}", "{{ messages[7].content.x }}", "{{ ''.__class__.mro() }}"],
)
def test_a_template_that_fails_is_the_request_s_fault_and_leaks_nothing(tmp_path, template):
    with pytest.raises(RequestError) as caught:
        with_template(tmp_path, template).render_chat(conversation("secret words"))
    assert caught.value.status == 400
    assert "secret" not in caught.value.message


def test_a_wrong_template_is_a_configuration_error(tmp_path):
    with pytest.raises(ConfigError, match="line 1"):
        with_template(tmp_path, "{% if %}")


def test_a_model_without_template_serves_no_chats(tmp_path):
    tokenizer = tiny_tokenizer.make(tmp_path, config={"eos_token": "<|im_end|>"})
    with pytest.raises(UnsupportedError):
        tokenizer.render_chat(conversation("hello"))


def test_templates_get_options_the_date_and_special_token_names():
    template = "{{ bos_token }}{{ strftime_now('%Y') }}{% if enable_thinking %}T{% endif %}{% generation %}g{% endgeneration %}"
    rendered = ChatTemplate(template, {"bos_token": "<s>"}, MarkerSplitter(()), now=lambda: datetime(2024, 5, 1))
    pieces = rendered.render(conversation("x"), add_generation_prompt=True, options={"enable_thinking": True})
    assert pieces == ["<s>2024Tg"]


def test_markers_are_found_longest_first_and_swallow_white_space():
    short, long = SpecialToken(1, "<a"), SpecialToken(2, "<a>", rstrip=True)
    splitter = MarkerSplitter((short, long, SpecialToken(3, "<b>", lstrip=True)))
    assert splitter.split("x <a> \n y<a z <b>") == ["x ", long, "y", short, " z", SpecialToken(3, "<b>", lstrip=True)]


def test_plain_added_tokens_belong_to_the_text(tokenizer):
    ids = tokenizer.encode("hello<tool_call>", add_special_tokens=False)
    assert ids[-1] == tokenizer.vocab_size - 1
    assert tokenizer.decode(ids) == "hello<tool_call>"


def test_markers_that_a_model_declares_as_plain_are_special_all_the_same(tmp_path):
    content = tiny_tokenizer.tokenizer_json()
    content["added_tokens"].append(tiny_tokenizer.added_token(900, "<|fim_prefix|>", special=False))
    tokenizer = tiny_tokenizer.make(tmp_path, content)
    assert tokenizer.is_special(900)
    assert 900 not in tokenizer.encode("<|fim_prefix|>", add_special_tokens=False)


def test_the_begin_token_comes_from_the_post_processor(tmp_path):
    content = tiny_tokenizer.tokenizer_json()
    single = [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    content["post_processor"] = {"type": "Sequence", "processors": [{"type": "TemplateProcessing", "single": single}]}
    tokenizer = tiny_tokenizer.make(tmp_path, content)
    assert tokenizer.encode("", add_special_tokens=True) == [END]
    assert tokenizer.encode("", add_special_tokens=False) == []


def test_token_bytes_are_the_true_bytes(tokenizer):
    (token_id,) = tokenizer.encode("é", add_special_tokens=False)
    assert tokenizer.token_bytes(token_id) == "é".encode()
    assert tokenizer.token_bytes(START) == b"<|im_start|>"
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode("😀", add_special_tokens=False))) == "😀".encode()
    assert tokenizer.token_bytes(10**6) == b""


@pytest.mark.parametrize("part", ["model", "decoder"])
def test_other_kinds_of_tokenizers_are_refused_by_name(tmp_path, part):
    content = tiny_tokenizer.tokenizer_json()
    content[part] = {"type": "Unigram"}
    with pytest.raises(ConfigError, match="byte-level BPE"):
        from_directory(tiny_tokenizer.write(tmp_path, content))


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content["model"].pop("vocab"),
        lambda content: content["model"]["merges"].append(["zz", "yy"]),
        lambda content: content["added_tokens"].append({"id": 5}),
    ],
)
def test_a_damaged_tokenizer_json_is_a_configuration_error(tmp_path, damage):
    content = tiny_tokenizer.tokenizer_json()
    damage(content)
    with pytest.raises(ConfigError):
        tiny_tokenizer.make(tmp_path, content)
