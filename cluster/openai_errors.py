"""The one formatter of errors: OpenAI's error JSON and the headers that tell clients whether to try again."""

from __future__ import annotations

import math
from typing import Any

from replicas.errors import OverloadedError, ReplicaLostError, TrieserveError


def error_body(error: TrieserveError) -> dict[str, Any]:
    """OpenAI's error JSON; its HTTP status is `error.status`."""
    return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}}


def error_headers(error: TrieserveError) -> dict[str, str]:
    """OpenAI's clients honour both headers; without them they retry every 5xx twice (case RF05)."""
    if isinstance(error, OverloadedError):
        return {"retry-after": str(max(1, math.ceil(error.retry_after_s)))}
    if isinstance(error, ReplicaLostError):
        return {"retry-after": "1"}
    return {"x-should-retry": "false"} if error.status >= 500 else {}
