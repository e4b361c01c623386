"""Chat templates: messages in, text pieces and special tokens out, where no message can forge a special token.

A template writes special tokens as text (`<|im_start|>user`), and so might a message. Rendering therefore happens with
every marker inside a message *escaped*: the characters that begin markers are exchanged for private-use characters that
no message uses, and changed back once the rendered text was cut at the markers that are left, the template's own.

    message   "say <|im_end|>"        escaped   "say \\U000f0000|im_end|>"
    rendered  <|im_start|> user\\nsay \\U000f0000|im_end|> <|im_end|>
    pieces    [im_start]   "user\\nsay <|im_end|>"          [im_end]

Templates look into messages (`content.split('</think>')`), so the least is escaped that is enough: whole markers. That
leaves markers which a template puts together out of a message's parts (`content | replace('x', '')`). They are found by
rendering once more with *every* character escaped that begins a marker: if the markers differ, that rendering counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from replicas.errors import ConfigError, RequestError
from replicas.tokenizer_files import SpecialToken

Piece = str | SpecialToken

_PRIVATE_USE = range(0xF0000, 0xFFFFE)
_WHITE_SPACE = re.compile(r"\s*")


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """`role` must be one of a known set: templates put it next to markers."""

    role: str
    content: str
    name: str | None = None


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's part for training; here it only has to parse."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


class MarkerSplitter:
    """Cuts text at special tokens: leftmost first, then longest, as the tokenizers library does."""

    def __init__(self, special_tokens: Sequence[SpecialToken]) -> None:
        self._by_text = {token.text: token for token in special_tokens if token.text}
        longest_first = sorted(self._by_text, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self.first_characters = frozenset(text[0] for text in self._by_text)

    def split(self, text: str) -> list[Piece]:
        """No piece is empty, and no two texts follow each other."""
        pieces: list[Piece] = []
        position = 0
        for match in self.pattern.finditer(text):
            token = self._by_text[match[0]]
            before = text[position : match.start()]
            if token.lstrip:
                before = before.rstrip()
            if before:
                pieces.append(before)
            pieces.append(token)
            position = match.end()
            if token.rstrip and (space := _WHITE_SPACE.match(text, position)):
                position = space.end()
        if position < len(text):
            pieces.append(text[position:])
        return pieces


class ChatTemplate:
    """A model's chat template, which comes from the server's files and never from a request."""

    def __init__(
        self,
        source: str,
        variables: Mapping[str, str],
        splitter: MarkerSplitter,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Raises ConfigError if `source` isn't a template. `variables`: bos_token and the like."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        environment.globals.update(variables)
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ConfigError(f"the chat template is wrong in line {error.lineno}: {error.message}") from error
        self._splitter = splitter

    def render(
        self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool, options: Mapping[str, bool]
    ) -> list[Piece]:
        """Raises RequestError (`messages`) if the template refuses them. `options` are further template variables."""

        def pieces(escape: Callable[[str], str]) -> list[Piece]:
            return self._splitter.split(self._text(messages, escape, add_generation_prompt, options))

        characters = set[str]().union(*(text for m in messages for text in (m.role, m.content, m.name or "")))
        dangerous = sorted(characters & self._splitter.first_characters)
        if not dangerous:
            return pieces(str)
        unused = list(islice((chr(code) for code in _PRIVATE_USE if chr(code) not in characters), len(dangerous)))
        if len(unused) < len(dangerous):
            raise RequestError("the messages use every private-use character", param="messages")
        escapes = str.maketrans(dict(zip(dangerous, unused, strict=True)))
        unescapes = str.maketrans(dict(zip(unused, dangerous, strict=True)))

        chosen = pieces(lambda text: self._splitter.pattern.sub(lambda match: match[0].translate(escapes), text))
        strict = pieces(lambda text: text.translate(escapes))
        if _markers(chosen) != _markers(strict):
            chosen = strict
        return [piece.translate(unescapes) if isinstance(piece, str) else piece for piece in chosen]

    def _text(
        self,
        messages: Sequence[ChatMessage],
        escape: Callable[[str], str],
        add_generation_prompt: bool,
        options: Mapping[str, bool],
    ) -> str:
        rendered = []
        for message in messages:
            fields = {"role": escape(message.role), "content": escape(message.content)}
            if message.name is not None:
                fields["name"] = escape(message.name)
            rendered.append(fields)
        try:
            return self._template.render(
                messages=rendered, tools=None, documents=None, add_generation_prompt=add_generation_prompt, **options
            )
        except TemplateError as error:
            reason = (error.message or "it does not render them")[:200]
            raise RequestError(f"the model's chat template refuses these messages: {reason}", param="messages") from error
        except Exception as error:  # a template is a program: it can fail in any way on messages it did not foresee
            raise RequestError("the model's chat template fails on these messages", param="messages") from error


def _markers(pieces: Sequence[Piece]) -> list[SpecialToken]:
    return [piece for piece in pieces if isinstance(piece, SpecialToken)]
