"""From a request's bytes to a Generation that can be started: parse, render, tokenize, hash, choose sampling parameters.

All of it runs in a small pool of threads: a long prompt must not hold up the streams on the event loop (cases TP01, RF11).
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from cluster.auth import Tenant
from cluster.catalog import Catalog, Entry
from cluster.generate import Generation, Piece, PromptGroup, Usage, with_choices
from cluster.metrics import IngressMetrics
from cluster.openai_api import (
    GenerateCall,
    Kind,
    detokenize,
    prompt_token_ids,
    require_grammar,
    to_sampling,
)
from cluster.openai_parse import parse_chat, parse_completion, parse_detokenize, parse_tokenize
from cluster.responses import ChunkWriter, collect
from configs.schema import AppConfig
from replicas.blocks import chain_root, hash_blocks
from replicas.contract import EngineInfo, GenerationRequest
from replicas.errors import OverloadedError, RequestError
from replicas.tokenizer import Detokenizer

_NUM_THREADS = 2
_MAX_WAITING = 256

T = TypeVar("T")

_PARSERS = {Kind.CHAT: parse_chat, Kind.COMPLETION: parse_completion}
_ID_PREFIX = {Kind.CHAT: "chatcmpl-", Kind.COMPLETION: "cmpl-"}


@dataclass(frozen=True, slots=True)
class Prepared:
    """`writer` is None for an answer in one piece; `collect` makes that."""

    model: str
    generation: Generation
    writer: ChunkWriter | None
    collect: Callable[[list[Piece], Usage], dict[str, Any]]
    unknown_fields: tuple[str, ...]


class Preparer:
    def __init__(
        self,
        config: AppConfig,
        secret: bytes,
        catalog: Catalog,
        metrics: IngressMetrics,
    ) -> None:
        self._config = config
        self._secret = secret
        self._catalog = catalog
        self._metrics = metrics
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="prepare")
        self._num_waiting = 0

    async def generation(self, kind: Kind, body: bytes, tenant: Tenant) -> Prepared:
        """Raises RequestError for what the client did wrong, OverloadedError when too many wait for a thread."""
        call, entry, groups = await self._in_pool(lambda: self._groups(kind, body, tenant))
        tokenizer = entry.fleet.tokenizer
        generation = Generation(
            groups,
            entry.fleet.backend,
            self._metrics,
            lambda: Detokenizer(
                tokenizer,
                call.stop,
                include_stop=call.include_stop,
                skip_special_tokens=call.skip_special_tokens,
            ),
            timeout_s=self._config.ingress.limits.request_timeout_s,
        )
        response_id = _ID_PREFIX[kind] + secrets.token_hex(12)
        created = int(time.time())
        writer = ChunkWriter(call, tokenizer, response_id, created) if call.stream else None
        return Prepared(
            model=call.model,
            generation=generation,
            writer=writer,
            collect=lambda pieces, usage: collect(call, tokenizer, response_id, created, pieces, usage),
            unknown_fields=call.unknown_fields,
        )

    async def tokenize(self, body: bytes) -> dict[str, Any]:
        return await self._in_pool(lambda: self._tokenize(body))

    async def detokenize(self, body: bytes) -> dict[str, Any]:
        return await self._in_pool(lambda: self._detokenize(body))

    async def _in_pool(self, work: Callable[[], T]) -> T:
        if self._num_waiting >= _MAX_WAITING:
            raise OverloadedError("too many requests wait to be tokenized")
        self._num_waiting += 1
        try:
            async with asyncio.timeout(self._config.ingress.limits.template_timeout_s):
                return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        except TimeoutError:
            raise RequestError("rendering and tokenizing the prompt took too long", code="prompt_timeout") from None
        finally:
            self._num_waiting -= 1

    def _groups(self, kind: Kind, body: bytes, tenant: Tenant) -> tuple[GenerateCall, Entry, list[PromptGroup]]:
        call = _PARSERS[kind](body, self._config.ingress.limits)
        entry = self._catalog.find(call.model)
        info = entry.fleet.backend.info()  # once: a deployment in place may change it at any moment
        require_grammar(call, info.grammars)
        root = self._root(tenant, call.cache_salt, entry, info.model_revision)
        groups = []
        for index, prompt in enumerate(call.prompts):
            token_ids = prompt_token_ids(
                prompt, entry.fleet.tokenizer, vocab_size=info.vocab_size, max_model_len=info.max_model_len
            )
            requests = _sequences(call, entry.adapter_name, info, tuple(token_ids), root)
            groups.append(PromptGroup(requests, first_index=index * call.n))
        return call, entry, groups

    def _root(self, tenant: Tenant, cache_salt: str, entry: Entry, revision: str) -> bytes:
        """A client's salt only narrows what its own key's requests share (case NS06)."""
        salt = f"{tenant.salt}:{cache_salt}" if cache_salt else tenant.salt
        return chain_root(self._secret, salt=salt, adapter=entry.adapter_key, model_revision=revision)

    def _tokenize(self, body: bytes) -> dict[str, Any]:
        call = parse_tokenize(body, self._config.ingress.limits)
        fleet = self._catalog.find(call.model).fleet
        info = fleet.backend.info()
        token_ids = prompt_token_ids(
            call.prompt,
            fleet.tokenizer,
            vocab_size=info.vocab_size,
            add_special_tokens=call.add_special_tokens,
            add_generation_prompt=call.add_generation_prompt,
        )
        answer: dict[str, Any] = {"count": len(token_ids), "max_model_len": info.max_model_len, "tokens": token_ids}
        answer["token_strs"] = (
            [fleet.tokenizer.decode([each], skip_special_tokens=False) for each in token_ids]
            if call.return_token_strs
            else None
        )
        return answer

    def _detokenize(self, body: bytes) -> dict[str, Any]:
        call = parse_detokenize(body, self._config.ingress.limits)
        return {"prompt": detokenize(call, self._catalog.find(call.model).fleet.tokenizer)}


def _sequences(
    call: GenerateCall, adapter: str, info: EngineInfo, token_ids: tuple[int, ...], root: bytes
) -> tuple[GenerationRequest, ...]:
    request = GenerationRequest(
        # New for every sequence: clients repeat their own ids (case RQ06).
        request_id=secrets.token_hex(12),
        prompt_token_ids=token_ids,
        sampling=to_sampling(
            call,
            num_prompt_tokens=len(token_ids),
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            default_seed=secrets.randbits(63),
        ),
        hash_root=root,
        block_hashes=hash_blocks(root, token_ids, info.block_size),
        adapter=adapter,
    )
    return with_choices(request, call.n)
