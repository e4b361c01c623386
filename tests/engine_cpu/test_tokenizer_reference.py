"""The tokenizer against transformers and the tokenizers library, on the embedded model's vocabulary."""

import json
import random

import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from configs.schema import ModelConfig
from replicas.chat_template import ChatMessage
from replicas.model_source import gguf_header, resolve
from replicas.tokenizer import Detokenizer, Tokenizer, load_tokenizer
from replicas.tokenizer_files import from_directory

TEXTS = (
    "Hello, world! It's 12345 o'clock; we're done.",
    "  leading, trailing  \n\n 7\t\tx \r\n\r\n",
    "def f(x):\n    return {'a': x ** 2, \"b\": [1, 22, 333]}  # <b>&amp;</b> a < b\n",
    "Größe naïve café Ελληνικά русский العربية हिन्दी ไทย 한국어 日本語 中文",
    "😀👩‍👩‍👧‍👦🇩🇪 e\u0301 \u00a0\u2003\u3000 ½ ² Ⅷ ٣ ①",
    "\x00\x01\x7f\x85\u2028\ufffd\U000f0000",
    "x" * 500 + " " * 60 + "\n" * 20,
)
# The published pre-tokenizers of the three families.
_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def byte_level(use_regex):
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def split(pattern):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


PRE_TOKENIZERS = {
    "smollm": [{"type": "Digits", "individual_digits": True}, byte_level(True)],
    "llama-bpe": [split(_LLAMA3), byte_level(False)],
    "qwen2": [split(_QWEN2), byte_level(False)],
}


def published_json(metadata, pre):
    """tokenizer.json as the model's makers publish it: special tokens inside the vocabulary and the library in charge."""
    tokens = metadata["tokenizer.ggml.tokens"]
    control = [i for i, kind in enumerate(metadata["tokenizer.ggml.token_type"]) if kind == 3]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": tokens[i], **flags} for i in control],
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS[pre]},
        "post_processor": None,
        "decoder": byte_level(True),
        "model": {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": metadata["tokenizer.ggml.merges"],
            "ignore_merges": pre == "llama-bpe",
        },
    }


@pytest.fixture(scope="module")
def metadata():
    return gguf_header(resolve(ModelConfig()).path).metadata


@pytest.fixture(scope="module")
def ours():
    return load_tokenizer(ModelConfig())


@pytest.fixture(scope="module")
def library(metadata):
    return tokenizers.Tokenizer.from_str(json.dumps(published_json(metadata, "smollm")))


@pytest.fixture(scope="module")
def reference(metadata, library):
    return PreTrainedTokenizerFast(
        tokenizer_object=library,
        chat_template=metadata["tokenizer.chat_template"],
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
    )


def random_text(rng):
    alphabet = "aA eéß漢😀1٣ \n\t\r'.<|>_-\u00a0\u0301"
    return "".join(rng.choices([*alphabet, "the", "'ll", " 12", "\n\n", "  "], k=rng.randrange(60)))


def test_plain_text_is_tokenized_as_by_the_library(ours, library):
    rng = random.Random(1)
    for text in (*TEXTS, *(random_text(rng) for _ in range(1000))):
        assert ours.encode(text, add_special_tokens=True) == library.encode(text).ids, repr(text)


def test_marked_text_is_tokenized_as_by_the_library_where_markers_are_allowed(ours, library):
    text = "<|im_start|>user\n hello <|im_end|><|endoftext|>  <repo_name>x<|im_"
    assert ours.encode(text, add_special_tokens=False, allow_special=True) == library.encode(text).ids


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_each_family_cuts_words_as_published(metadata, pre, monkeypatch):
    """The embedded vocabulary with the three families' rules: the cut is compared, the vocabulary is the same."""
    from replicas import tokenizer_files

    renamed = {**metadata, "tokenizer.ggml.pre": pre}
    path = resolve(ModelConfig()).path
    monkeypatch.setattr(tokenizer_files, "gguf_header", lambda path: type("Header", (), {"metadata": renamed}))
    ours = Tokenizer(tokenizer_files.from_gguf(path))
    library = tokenizers.Tokenizer.from_str(json.dumps(published_json(metadata, pre)))
    rng = random.Random(2)
    for text in (*TEXTS, *(random_text(rng) for _ in range(300))):
        assert ours.encode(text, add_special_tokens=False) == library.encode(text).ids, repr(text)


@pytest.mark.parametrize("with_system", [False, True])
def test_conversations_are_tokenized_as_by_transformers(ours, reference, with_system):
    rng = random.Random(3)
    for _ in range(100):
        contents = [rng.choice([random_text(rng), rng.choice(TEXTS)]) for _ in range(rng.randrange(1, 5))]
        roles = ["system"] * with_system + ["user", "assistant"] * 3
        messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
        expected = reference.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        assert ours.render_chat([ChatMessage(**message) for message in messages]) == expected


@pytest.mark.parametrize("skip", [False, True])
def test_any_ids_are_decoded_as_by_the_library_and_in_pieces_too(ours, library, skip):
    """cases ST05: broken UTF-8 becomes U+FFFD by the same rule."""
    rng = random.Random(4)
    for _ in range(300):
        ids = [rng.randrange(rng.choice((20, 300, ours.vocab_size))) for _ in range(rng.randrange(1, 40))]
        expected = library.decode(ids, skip_special_tokens=skip)
        assert ours.decode(ids, skip_special_tokens=skip) == expected
        detokenizer = Detokenizer(ours, skip_special_tokens=skip)
        assert "".join([detokenizer.push([i]) for i in ids]) + detokenizer.flush() == expected


def test_a_directory_gives_the_same_tokens_as_the_gguf(ours, metadata, tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(published_json(metadata, "smollm")))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}}))
    (tmp_path / "chat_template.jinja").write_text(metadata["tokenizer.chat_template"])
    directory = Tokenizer(from_directory(tmp_path))
    messages = [ChatMessage("user", text) for text in TEXTS]
    assert directory.render_chat(messages) == ours.render_chat(messages)
    assert directory.special_ids == ours.special_ids
    assert directory.vocab_size == ours.vocab_size


def test_the_embedded_model_ends_turns_and_adds_no_begin_token(ours):
    assert ours.eos_token_ids == (0, 2)
    assert ours.encode("", add_special_tokens=True) == []
