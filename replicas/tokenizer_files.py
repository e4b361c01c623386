"""What a tokenizer is made of, read from a GGUF file's metadata or a directory's tokenizer.json.

Both become one TokenizerSpec, in which special tokens (those that end turns, name roles, mark images) are *not* part of
the vocabulary that text is encoded with. So no text, whatever it says, can be encoded as one of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replicas.errors import ConfigError
from replicas.model_source import gguf_header, read_json

# GGUF's token types; 5, unused, is padding of the vocabulary.
_GGUF_NORMAL, _GGUF_UNKNOWN, _GGUF_CONTROL, _GGUF_USER_DEFINED, _GGUF_BYTE = 1, 2, 3, 4, 6
_GGUF_TEXT_TYPES = frozenset({_GGUF_NORMAL, _GGUF_USER_DEFINED, _GGUF_BYTE})
_GGUF_SPECIAL_TYPES = frozenset({_GGUF_UNKNOWN, _GGUF_CONTROL})
_FULL_WIDTH_BAR = "\uff5c"  # DeepSeek's markers


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """`lstrip`, `rstrip`: the token swallows white space before, after it in a template."""

    token_id: int
    text: str
    lstrip: bool = False
    rstrip: bool = False


@dataclass(frozen=True, slots=True)
class TokenizerSpec:
    """`core_json` is a tokenizer.json of text tokens only; `text_tokens` are id -> token in GPT-2's byte alphabet."""

    core_json: str
    text_tokens: Mapping[int, str]
    special_tokens: tuple[SpecialToken, ...]
    bos_ids: tuple[int, ...]  # put before a text that is not a chat
    template_variables: Mapping[str, str]  # bos_token, eos_token, ...: what chat templates refer to
    chat_template: str | None


@dataclass(frozen=True, slots=True)
class _PreTokenizer:
    """How a byte-level BPE cuts text into words. `regex` None: GPT-2's own."""

    regex: str | None = None
    split_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False  # a word that is a token needs no merges
    add_bos: bool = False


_LLAMA3_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_REGEX = _LLAMA3_REGEX.replace(r"\p{N}{1,3}", r"\p{N}")

_PRE_TOKENIZERS = {
    "smollm": _PreTokenizer(split_digits=True),
    "llama-bpe": _PreTokenizer(regex=_LLAMA3_REGEX, ignore_merges=True, add_bos=True),
    "qwen2": _PreTokenizer(regex=_QWEN2_REGEX, nfc=True),
}


def _pre_tokenizer_json(pre: _PreTokenizer) -> dict[str, Any]:
    steps: list[dict[str, Any]] = []
    if pre.split_digits:
        steps.append({"type": "Digits", "individual_digits": True})
    if pre.regex is not None:
        steps.append({"type": "Split", "pattern": {"Regex": pre.regex}, "behavior": "Isolated", "invert": False})
    steps.append({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": pre.regex is None})
    return {"type": "Sequence", "pretokenizers": steps}


def _added_token_json(token_id: int, text: str) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    return {"id": token_id, "content": text, **flags}


def from_gguf(path: Path) -> TokenizerSpec:
    """The tokenizer in a GGUF file's metadata. Raises ConfigError for any kind but those of `_PRE_TOKENIZERS`."""
    metadata = gguf_header(path).metadata

    def get(name: str, default: Any = None) -> Any:
        return metadata.get(f"tokenizer.ggml.{name}", default)

    model, pre_name = get("model"), get("pre", "none")
    pre = _PRE_TOKENIZERS.get(pre_name) if model == "gpt2" else None
    if pre is None:
        supported = ", ".join(f"gpt2/{name}" for name in _PRE_TOKENIZERS)
        raise ConfigError(f"{path.name}: tokenizer {model}/{pre_name} is not supported; supported are {supported}")

    tokens: list[str] = get("tokens", [])
    types: list[int] = get("token_type", [_GGUF_NORMAL] * len(tokens))
    if not tokens or len(types) != len(tokens):
        raise ConfigError(f"{path.name}: {len(tokens)} tokens with {len(types)} types: a broken file")
    text_tokens = {i: tokens[i] for i, kind in enumerate(types) if kind in _GGUF_TEXT_TYPES}
    special = tuple(SpecialToken(i, tokens[i]) for i, kind in enumerate(types) if kind in _GGUF_SPECIAL_TYPES)
    core = {
        "version": "1.0",
        "added_tokens": [_added_token_json(i, tokens[i]) for i, kind in enumerate(types) if kind == _GGUF_USER_DEFINED],
        "normalizer": {"type": "NFC"} if pre.nfc else None,
        "pre_tokenizer": _pre_tokenizer_json(pre),
        "model": {
            "type": "BPE",
            "vocab": {text: i for i, text in text_tokens.items()},
            "merges": get("merges", []),
            "ignore_merges": pre.ignore_merges,
        },
    }
    bos_id, eos_id = get("bos_token_id"), get("eos_token_id")
    with_bos = bos_id is not None and get("add_bos_token", pre.add_bos)
    return TokenizerSpec(
        core_json=json.dumps(core),
        text_tokens=text_tokens,
        special_tokens=special,
        bos_ids=(bos_id,) if with_bos else (),
        template_variables={name: tokens[i] for name, i in (("bos_token", bos_id), ("eos_token", eos_id)) if i is not None},
        chat_template=metadata.get("tokenizer.chat_template"),
    )


def from_directory(path: Path) -> TokenizerSpec:
    """The tokenizer of a directory with tokenizer.json. Raises ConfigError for any kind but byte-level BPE."""
    core: dict[str, Any] = dict(read_json(path / "tokenizer.json"))
    config_path = path / "tokenizer_config.json"
    config = read_json(config_path) if config_path.is_file() else {}
    model = core.get("model", {})
    if model.get("type") != "BPE" or not _has_byte_level_decoder(core.get("decoder")):
        raise ConfigError(f"{path}: tokenizer.json of type {model.get('type')} is not supported; supported is byte-level BPE")
    try:
        return _from_json(core, config, _directory_template(path, config))
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: tokenizer.json or tokenizer_config.json is incomplete: {error!r}") from error


def _from_json(core: dict[str, Any], config: Mapping[str, Any], chat_template: str | None) -> TokenizerSpec:
    vocab: dict[str, int] = core["model"]["vocab"]
    added = core.get("added_tokens", [])
    special = tuple(
        SpecialToken(token["id"], token["content"], token["lstrip"], token["rstrip"]) for token in added if _is_special(token)
    )
    for token in special:
        vocab.pop(token.text, None)
    plain = [token for token in added if not _is_special(token)]
    # The library gives an added token the id that the vocabulary has for it, and else the next free one.
    vocab.update((token["content"], token["id"]) for token in plain)
    bos_ids = _bos_ids(core.get("post_processor"), {token.text: token.token_id for token in special})
    core.update(added_tokens=plain, post_processor=None, truncation=None, padding=None)
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    return TokenizerSpec(
        core_json=json.dumps(core),
        text_tokens={i: text for text, i in vocab.items()},
        special_tokens=special,
        bos_ids=bos_ids,
        template_variables={name: text for name in names if (text := _token_text(config.get(name))) is not None},
        chat_template=chat_template,
    )


def _is_special(token: Mapping[str, Any]) -> bool:
    """Some models declare markers like <|fim_prefix|> as plain; llama.cpp's converter goes by their look, and so do we."""
    text: str = token["content"].replace(_FULL_WIDTH_BAR, "|")
    return bool(token["special"]) or (text.startswith("<|") and text.endswith("|>"))


def _has_byte_level_decoder(decoder: Mapping[str, Any] | None) -> bool:
    if decoder is None:
        return False
    return decoder["type"] == "ByteLevel" or any(step["type"] == "ByteLevel" for step in decoder.get("decoders", ()))


def _bos_ids(post_processor: Mapping[str, Any] | None, special_ids: Mapping[str, int]) -> tuple[int, ...]:
    """Ids that the post-processor's template puts before a single text."""
    ids: list[int] = []
    for step in (post_processor or {}).get("processors", [post_processor or {}]):
        for item in step.get("single", ()):
            if "Sequence" in item:
                break
            ids.append(special_ids[item["SpecialToken"]["id"]])
    return tuple(ids)


def _directory_template(path: Path, config: Mapping[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = next((entry["template"] for entry in template if entry["name"] == "default"), None)
    return template


def _token_text(token: Any) -> str | None:
    """tokenizer_config.json writes a token as its text or as an object."""
    text: str | None = token["content"] if isinstance(token, dict) else token
    return text
