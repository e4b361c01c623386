"""The public HTTP routes. Every route but those marked public needs an API key when there are keys: default-deny.

No Ray here: `Api` works with any Backend, so tests drive it with a fake fleet.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.answer import GenerationResponse
from cluster.auth import Authenticator
from cluster.backend import Dispatched
from cluster.catalog import Catalog, Entry
from cluster.generate import Generation
from cluster.metrics import IngressMetrics, Outcome, merge
from cluster.openai_api import Kind
from cluster.openai_errors import error_body, error_headers
from cluster.prepare import Preparer
from configs.schema import AppConfig
from replicas.errors import (
    EngineError,
    NoReplicaError,
    NotFoundError,
    PayloadTooLarge,
    RequestError,
    SlowRequestError,
    TrieserveError,
)

logger = logging.getLogger(__name__)

_BODY_TIMEOUT_S = 30.0
_MAX_FIELDS_LOGGED = 100

Handler = Callable[["Api", Request], Awaitable[ASGIApp]]


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


@dataclass(frozen=True, slots=True)
class RouteSpec:
    path: str
    method: str
    handler: Handler
    public: bool = False


class Api:
    """The handlers. What a request becomes is cluster.prepare's, how it is answered cluster.answer's."""

    def __init__(self, config: AppConfig, catalog: Catalog, preparer: Preparer, metrics: IngressMetrics, auth: Authenticator):
        self.config = config
        self.catalog = catalog
        self.preparer = preparer
        self.metrics = metrics
        self.auth = auth
        self._created = int(time.time())
        self._fields_logged: set[str] = set()

    async def chat(self, _request: Request) -> ASGIApp:
        return partial(self._generate, Kind.CHAT)

    async def completions(self, _request: Request) -> ASGIApp:
        return partial(self._generate, Kind.COMPLETION)

    async def _generate(self, kind: Kind, scope: Scope, receive: Receive, send: Send) -> None:
        with self.metrics.track(scope["route_template"]) as tracked:
            try:
                body = await read_body(Request(scope, receive), self.config.ingress.limits.max_body_bytes)
            except ClientDisconnect:
                tracked.outcome = Outcome.CANCELLED
                return
            prepared = await self.preparer.generation(kind, body, scope["tenant"])
            tracked.model = prepared.model
            self._note_unknown_fields(prepared.unknown_fields)
            respond = GenerationResponse(
                prepared.generation,
                tracked,
                self.metrics,
                headers=lambda: self._answer_headers(prepared.generation),
                timeout_s=self.config.ingress.limits.request_timeout_s,
                keep_alive_s=self.config.ingress.keep_alive_s,
                writer=prepared.writer,
                collect=prepared.collect,
            )
            await respond(scope, receive, send)

    def _note_unknown_fields(self, names: Iterable[str]) -> None:
        """Counted each time, logged once (case RQ07); the names are the client's, so there is an end to those kept."""
        for name in names:
            self.metrics.on_unknown_field(name)
            if name not in self._fields_logged and len(self._fields_logged) < _MAX_FIELDS_LOGGED:
                self._fields_logged.add(name)
                logger.warning("requests have a field that means nothing here and is ignored: %s", name)

    def _answer_headers(self, generation: Generation) -> dict[str, str]:
        sent = generation.dispatched
        return routing_headers(sent) if self.config.ingress.expose_routing and sent is not None else {}

    async def tokenize(self, request: Request) -> ASGIApp:
        body = await read_body(request, self.config.ingress.limits.max_body_bytes)
        return JsonResponse(await self.preparer.tokenize(body))

    async def detokenize(self, request: Request) -> ASGIApp:
        body = await read_body(request, self.config.ingress.limits.max_body_bytes)
        return JsonResponse(await self.preparer.detokenize(body))

    async def models(self, _request: Request) -> ASGIApp:
        return JsonResponse({"object": "list", "data": [self._model(entry) for entry in self.catalog.listed()]})

    async def model(self, request: Request) -> ASGIApp:
        return JsonResponse(self._model(self.catalog.find(request.path_params["model"])))

    def _model(self, entry: Entry) -> dict[str, Any]:
        """`max_model_len` is null as long as no replica of the model was heard of."""
        try:
            max_model_len = entry.fleet.backend.info().max_model_len
        except NoReplicaError:
            max_model_len = None
        return {
            "id": entry.name,
            "object": "model",
            "created": self._created,
            "owned_by": "trieserve",
            "root": entry.name,
            "parent": None if entry.adapter is None else entry.fleet.name,
            "max_model_len": max_model_len,
        }

    async def health(self, _request: Request) -> ASGIApp:
        return JsonResponse({"status": "ok"})

    async def ready(self, _request: Request) -> ASGIApp:
        """An app is ready when each of its models has a replica."""
        ready = await self.catalog.ready()
        wanted = {fleet.name: fleet.config.replicas.num for fleet in self.catalog.fleets}
        is_ready = all(ready.values())
        body = {
            "ready": is_ready,
            "replicas_ready": sum(ready.values()),
            "replicas_wanted": sum(wanted.values()),
            "models": {name: {"replicas_ready": ready[name], "replicas_wanted": wanted[name]} for name in wanted},
        }
        return JsonResponse(body, status_code=200 if is_ready else 503)

    async def version(self, _request: Request) -> ASGIApp:
        return JsonResponse({"version": package_version()})

    async def metrics_page(self, _request: Request) -> ASGIApp:
        text = merge(await self.catalog.metrics())
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


ROUTES = (
    RouteSpec("/v1/chat/completions", "POST", Api.chat),
    RouteSpec("/v1/completions", "POST", Api.completions),
    RouteSpec("/v1/models", "GET", Api.models),
    RouteSpec("/v1/models/{model:path}", "GET", Api.model),
    RouteSpec("/tokenize", "POST", Api.tokenize),
    RouteSpec("/detokenize", "POST", Api.detokenize),
    RouteSpec("/version", "GET", Api.version),
    RouteSpec("/health", "GET", Api.health, public=True),
    RouteSpec("/ready", "GET", Api.ready, public=True),
    RouteSpec("/metrics", "GET", Api.metrics_page, public=True),
)


def make_app(api: Api) -> ASGIApp:
    """The ASGI application of one ingress."""
    routes = [Route(spec.path, _Endpoint(api, spec), methods=[spec.method]) for spec in ROUTES]
    handlers: Any = {TrieserveError: _answer_error, HTTPException: _answer_http_exception, Exception: _answer_unexpected}
    return _Edge(Starlette(routes=routes, exception_handlers=handlers), api.metrics)


class _Endpoint:
    """A guarded route: nobody unidentified reaches the handler unless the route says so."""

    def __init__(self, api: Api, spec: RouteSpec) -> None:
        self._api = api
        self._spec = spec

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        scope["route_template"] = self._spec.path.replace(":path", "")
        if not self._spec.public:
            scope["tenant"] = self._api.auth.identify(request.headers.get("authorization"))
        response = await self._spec.handler(self._api, request)
        await response(scope, receive, send)


class _Edge:
    """Counts each answer. (`x-request-id` is Serve's: it takes the client's or makes one, and sends it back.)"""

    def __init__(self, app: ASGIApp, metrics: IngressMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 499  # no answer was begun: the client had gone

        async def counting(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, counting)
        except ClientDisconnect:
            pass
        finally:
            self._metrics.on_http(scope.get("route_template", "unmatched"), scope["method"], status)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body. Raises PayloadTooLarge as soon as it is, SlowRequestError when it takes too long (case RQ05)."""
    chunks, size = [], 0
    try:
        async with asyncio.timeout(_BODY_TIMEOUT_S):
            async for chunk in request.stream():
                size += len(chunk)
                if size > max_bytes:
                    raise PayloadTooLarge(f"the body is larger than {max_bytes} bytes")
                chunks.append(chunk)
    except TimeoutError:
        raise SlowRequestError(f"the body did not arrive within {_BODY_TIMEOUT_S:.0f} s") from None
    return b"".join(chunks)


def routing_headers(sent: Dispatched) -> dict[str, str]:
    """Why this replica: for people who asked for it with ingress.expose_routing."""
    headers = {"x-trieserve-replica": sent.replica}
    decision = sent.decision
    if decision is None:
        return headers | {"x-trieserve-reason": "fallback_serve"}
    costs = ",".join(f"{each.replica}={_ms(each.ttft_s)}" for each in decision.candidates)
    return headers | {
        "x-trieserve-reason": str(decision.reason),
        "x-trieserve-matched-tokens": str(decision.matched_tokens),
        "x-trieserve-predicted-ttft-ms": _ms(decision.predicted_ttft_s),
        "x-trieserve-candidates": costs,
    }


def _ms(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{seconds * 1e3:.1f}"


def package_version() -> str:
    return importlib.metadata.version("trieserve")


def _error_response(error: TrieserveError) -> JsonResponse:
    return JsonResponse(error_body(error), status_code=error.status, headers=error_headers(error))


async def _answer_error(_request: Request, error: TrieserveError) -> Response:
    return _error_response(error)


async def _answer_http_exception(_request: Request, error: HTTPException) -> Response:
    ours: TrieserveError = NotFoundError("no such route")
    if error.status_code != 404:
        ours = RequestError(str(error.detail), code="http_error")
        ours.status = error.status_code
    response = _error_response(ours)
    response.headers.update(error.headers or {})
    return response


async def _answer_unexpected(request: Request, error: Exception) -> Response:
    logger.error("unexpected error in %s", request.scope.get("route_template", "a request"), exc_info=error)
    return _error_response(EngineError("internal error"))
