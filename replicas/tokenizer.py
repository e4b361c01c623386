"""Text to token ids and back.

`encode` and `render_chat` run once per request, at the ingress. Special tokens come only from the server's own template (or
`allow_special=True`): the vocabulary that text is encoded with doesn't contain them. A Detokenizer turns one sequence's
tokens into text while they come.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Mapping, Sequence
from pathlib import Path

import tokenizers

from configs.schema import ModelConfig
from replicas.chat_template import ChatMessage, ChatTemplate, MarkerSplitter, Piece
from replicas.errors import ConfigError, UnsupportedError
from replicas.model_source import eos_token_ids, resolve
from replicas.tokenizer_files import TokenizerSpec, from_directory, from_gguf


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes for U+0100 and following."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _bytes_of(token: str) -> bytes:
    """A token with a character outside the alphabet is meant literally, as in the tokenizers library."""
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()


class Tokenizer:
    """Immutable; may be used from several threads."""

    def __init__(self, spec: TokenizerSpec, *, eos_token_ids: tuple[int, ...] = (), chat_template: str | None = None) -> None:
        """`eos_token_ids` end an answer; `chat_template` replaces the model's own.

        Raises ConfigError if the template or the vocabulary is wrong.
        """
        try:
            self._core = tokenizers.Tokenizer.from_str(spec.core_json)
        except Exception as error:  # what the library raises
            raise ConfigError(f"the tokenizer is inconsistent: {error}") from error
        self.special_ids = frozenset(token.token_id for token in spec.special_tokens)
        self.eos_token_ids = eos_token_ids
        self.vocab_size = 1 + max([*spec.text_tokens, *self.special_ids])
        shown = [b""] * self.vocab_size
        for token_id, token in spec.text_tokens.items():
            shown[token_id] = _bytes_of(token)
        self._text_bytes = tuple(shown)
        for special in spec.special_tokens:
            shown[special.token_id] = _bytes_of(special.text)
        self._all_bytes = tuple(shown)
        self.max_token_bytes = max(map(len, self._all_bytes))
        self._bos_ids = spec.bos_ids
        self._splitter = MarkerSplitter(spec.special_tokens)
        source = chat_template if chat_template is not None else spec.chat_template
        self._template = None if source is None else ChatTemplate(source, spec.template_variables, self._splitter)

    def encode(self, text: str, *, add_special_tokens: bool, allow_special: bool = False) -> list[int]:
        """Token ids. `add_special_tokens` puts the model's begin-of-sequence token first, if it uses one.

        `allow_special` reads special tokens written in `text` as such: never for what a client sent.
        """
        ids = list(self._bos_ids) if add_special_tokens else []
        return ids + self._encode_pieces(self._splitter.split(text) if allow_special else [text])

    def render_chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool = True,
        options: Mapping[str, bool] | None = None,
    ) -> list[int]:
        """Token ids of a conversation. Raises RequestError if the template refuses it, UnsupportedError without template."""
        if self._template is None:
            raise UnsupportedError("this model has no chat template; use /v1/completions", param="messages")
        pieces = self._template.render(messages, add_generation_prompt=add_generation_prompt, options=options or {})
        return self._encode_pieces(pieces)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of the ids; U+FFFD for bytes that are no UTF-8. Ids outside the vocabulary have no text."""
        table = self.bytes_table(skip_special_tokens=skip_special_tokens)
        return b"".join(table[i] for i in token_ids if 0 <= i < len(table)).decode("utf-8", "replace")

    def bytes_table(self, *, skip_special_tokens: bool) -> tuple[bytes, ...]:
        """Bytes of each token by id; empty for special ones if `skip_special_tokens`."""
        return self._text_bytes if skip_special_tokens else self._all_bytes

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for, special ones by their name; they need not be whole characters."""
        return self._all_bytes[token_id] if 0 <= token_id < self.vocab_size else b""

    def is_special(self, token_id: int) -> bool:
        return token_id in self.special_ids

    def _encode_pieces(self, pieces: Sequence[Piece]) -> list[int]:
        ids: list[int] = []
        for piece in pieces:
            if isinstance(piece, str):
                ids += self._core.encode(piece, add_special_tokens=False).ids
            else:
                ids.append(piece.token_id)
        return ids


class Detokenizer:
    """The text of one sequence, piece by piece.

    What `push` returns is final: bytes of an unfinished character and text that may turn out to begin a stop string are
    held back. However the tokens are cut into pushes, the pieces and `flush()` together are `tokenizer.decode(all)`, up to
    the first stop string. First is the one that *ends* first, and of several ending there the longest: a rule by characters,
    so that it doesn't depend on how many tokens arrive at once.
    """

    __slots__ = ("_bytes", "_held", "_include_stop", "_num_tokens", "_pending", "_stops", "stopped")

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_strings: Sequence[str] = (),
        *,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        """`stop_strings` must not be empty strings. `include_stop` leaves the stop string in the text."""
        assert all(stop_strings), "an empty stop string matches everywhere"
        self._bytes = tokenizer.bytes_table(skip_special_tokens=skip_special_tokens)
        self._stops = tuple(stop_strings)
        self._include_stop = include_stop
        self._pending = b""  # the beginning of a UTF-8 character
        self._held = ""  # the beginning of a stop string, perhaps
        self._num_tokens = 0
        self.stopped: str | None = None  # the stop string that ended the text

    @property
    def num_tokens_used(self) -> int:
        """Tokens pushed so far, up to and including the one that completed the stop string."""
        return self._num_tokens

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that is certain now. Nothing counts after a stop. Ids that the tokenizer doesn't know have no text."""
        if self.stopped is not None:
            return ""
        pending = data = self._pending
        try:
            for token_id in token_ids:
                data += self._bytes[token_id]
        except IndexError:  # a model may have more logits than its tokenizer has tokens
            data = pending + b"".join(map(self._bytes_or_none, token_ids))
        text, num_decoded = utf_8_decode(data, "replace", False)
        self._pending = data[num_decoded:]
        if not self._stops or not text:
            self._num_tokens += len(token_ids)
            return text
        num_held = len(self._held)
        piece, end = self._cut(text)
        self._num_tokens += len(token_ids) if end is None else self._num_tokens_to(end - num_held, pending, token_ids)
        return piece

    def flush(self) -> str:
        """The rest: what was held back is no stop string after all, and an unfinished character becomes U+FFFD."""
        if self.stopped is not None:
            return ""
        text, _ = utf_8_decode(self._pending, "replace", True)
        self._pending = b""
        piece, end = self._cut(text)
        if end is None:
            piece, self._held = piece + self._held, ""
        return piece

    def _bytes_or_none(self, token_id: int) -> bytes:
        return self._bytes[token_id] if token_id < len(self._bytes) else b""

    def _cut(self, text: str) -> tuple[str, int | None]:
        """The text to emit, and where in held + text a stop string ends, if one does."""
        window = self._held + text
        first: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = window.find(stop)
            if start >= 0:
                found = (start + len(stop), start, stop)
                first = found if first is None else min(first, found)
        if first is not None:
            end, start, self.stopped = first
            self._held, self._pending = "", b""
            return window[: end if self._include_stop else start], end
        keep = min((_begins_at(stop, window) for stop in self._stops), default=len(window))
        self._held = window[keep:]
        return window[:keep], None

    def _num_tokens_to(self, num_characters: int, pending: bytes, token_ids: Sequence[int]) -> int:
        """How many of the tokens it takes to complete so many characters after what was decoded before them."""
        for num_tokens, token_id in enumerate(token_ids, start=1):
            pending += self._bytes_or_none(token_id)
            text, num_decoded = utf_8_decode(pending, "replace", False)
            pending = pending[num_decoded:]
            num_characters -= len(text)
            if num_characters <= 0:
                return num_tokens
        return len(token_ids)


def _begins_at(stop: str, text: str) -> int:
    """The first position from which on `text` is a proper beginning of `stop`; len(text) if there is none."""
    position = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while position >= 0:
        if stop.startswith(text[position:]):
            return position
        position = text.find(stop[0], position + 1)
    return len(text)


def load_tokenizer(model: ModelConfig) -> Tokenizer:
    """The tokenizer of `model`. Raises ConfigError if its kind isn't supported or a file is missing or wrong."""
    files = resolve(model)
    spec = from_gguf(files.path) if files.kind == "gguf" else from_directory(files.path)
    template = None
    if model.chat_template:
        try:
            template = Path(model.chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"model.chat_template: {model.chat_template} can't be read: {error}") from error
    return Tokenizer(spec, eos_token_ids=eos_token_ids(model), chat_template=template)
