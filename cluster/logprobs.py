"""Log-probabilities in OpenAI's two formats, that of chats and the older one of completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.openai_api import Kind
from replicas.contract import TokenLogprob
from replicas.tokenizer import Tokenizer

# JSON has no -inf; this is OpenAI's value for "very unlikely".
_LOWEST = -9999.0


@dataclass(slots=True)
class LogprobFormat:
    """Of one choice, in the order of its tokens: completions carry offsets into the text. `num_top`: alternatives shown."""

    kind: Kind
    tokenizer: Tokenizer
    num_top: int
    _num_characters: int = field(default=0, init=False)

    def to_json(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        """The `logprobs` object of the choice's next tokens."""
        if self.kind is Kind.CHAT:
            return {"content": [self._chat_entry(token) for token in tokens], "refusal": None}
        return {
            "tokens": [self._name(token.token_id) for token in tokens],
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [self._alternatives(token) for token in tokens] if self.num_top else None,
            "text_offset": [self._offset(token.token_id) for token in tokens],
        }

    def _chat_entry(self, token: TokenLogprob) -> dict[str, Any]:
        top = [self._described(token_id, logprob) for token_id, logprob in token.top[: self.num_top]]
        return {**self._described(token.token_id, token.logprob), "top_logprobs": top}

    def _described(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self.tokenizer.token_bytes(token_id)
        return {"token": data.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(data)}

    def _alternatives(self, token: TokenLogprob) -> dict[str, float]:
        """The chosen token is always among them. Of tokens with one name (parts of characters) the likeliest keeps it."""
        named: dict[str, float] = {}
        for token_id, logprob in (*token.top[: self.num_top], (token.token_id, token.logprob)):
            named.setdefault(self._name(token_id), _finite(logprob))
        return named

    def _name(self, token_id: int) -> str:
        return self.tokenizer.token_bytes(token_id).decode("utf-8", "replace")

    def _offset(self, token_id: int) -> int:
        """Where in the text the token's first byte lies; that may be inside the character that the last token began."""
        if self.tokenizer.is_special(token_id):
            return self._num_characters
        data = self.tokenizer.token_bytes(token_id)
        inside = bool(data) and _continues(data[0])
        offset = max(0, self._num_characters - inside)
        self._num_characters += sum(not _continues(byte) for byte in data)
        return offset


def _continues(byte: int) -> bool:
    """Whether a byte of UTF-8 belongs to the character before it."""
    return byte & 0xC0 == 0x80


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
