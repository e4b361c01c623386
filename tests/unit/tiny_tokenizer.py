"""A byte-level BPE tokenizer with a handful of merges, made in a millisecond. Ids: special tokens, bytes, merges."""

import json

from replicas.tokenizer import Tokenizer
from replicas.tokenizer_files import from_directory

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PLAIN_ADDED = "<tool_call>"
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
ALPHABET = [chr(byte) for byte in _PRINTABLE] + [chr(0x100 + i) for i in range(len(_OTHERS))]
MERGES = (("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("Ã", "©"), ("Ċ", "Ċ"), ("i", "m"), ("<", "|"))


def added_token(token_id, text, special=True, rstrip=False):
    flags = {"single_word": False, "lstrip": False, "normalized": False}
    return {"id": token_id, "content": text, "special": special, "rstrip": rstrip, **flags}


def tokenizer_json():
    tokens = [*SPECIAL, *ALPHABET, *(a + b for a, b in MERGES)]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            *(added_token(i, text) for i, text in enumerate(SPECIAL)),
            added_token(len(tokens), PLAIN_ADDED, special=False),
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": {token: i for i, token in enumerate(tokens)}, "merges": [list(m) for m in MERGES]},
    }


def write(directory, content=None, config=None):
    (directory / "tokenizer.json").write_text(json.dumps(content or tokenizer_json()))
    (directory / "tokenizer_config.json").write_text(json.dumps(config or {"chat_template": CHATML, "eos_token": "<|im_end|>"}))
    return directory


def make(directory, content=None, config=None, chat_template=None):
    return Tokenizer(from_directory(write(directory, content, config)), eos_token_ids=(2,), chat_template=chat_template)
