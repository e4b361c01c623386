"""Every error that a user of Trieserve can meet, with the HTTP status it becomes.

    TrieserveError
    +-- ConfigError                     the configuration is wrong; nothing was started
    |   +-- CapacityError               model + KV cache don't fit in the memory given
    +-- RequestError            400     the client's fault; says which `param`
    |   +-- ContextLengthError  400     prompt (+ max_tokens) exceeds what the model or the whole cache can hold
    |   +-- UnsupportedError    400     a known field that this server does not implement
    |   +-- AuthenticationError 401
    |   +-- NotFoundError       404     unknown model or route
    |   +-- PayloadTooLarge     413
    |   +-- SlowRequestError    408     the body did not arrive in time
    +-- OverloadedError         503     nothing can serve it now; try again after `retry_after_s`
    |   +-- NoReplicaError      503     no replica is ready
    |   +-- DeadlineError       504     the request's deadline passed
    +-- ReplicaLostError        503     the replica died or the connection to it broke while it served the request
    +-- EngineError             500     a bug in the engine, confined to the request that met it

`code` is a stable snake_case word for programs, the message is for people and never echoes a prompt.
"""

from __future__ import annotations


class TrieserveError(Exception):
    """Root of the tree. `status` is the HTTP status, `kind` OpenAI's `error.type`, `code` OpenAI's `error.code`."""

    status = 500
    kind = "server_error"
    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class ConfigError(TrieserveError):
    code = "invalid_config"


class CapacityError(ConfigError):
    code = "does_not_fit"


class RequestError(TrieserveError):
    status = 400
    kind = "invalid_request_error"
    code = "invalid_request"


class ContextLengthError(RequestError):
    code = "context_length_exceeded"


class UnsupportedError(RequestError):
    code = "unsupported_parameter"


class AuthenticationError(RequestError):
    status = 401
    kind = "authentication_error"
    code = "invalid_api_key"


class NotFoundError(RequestError):
    status = 404
    kind = "not_found_error"
    code = "not_found"


class PayloadTooLarge(RequestError):
    status = 413
    code = "payload_too_large"


class SlowRequestError(RequestError):
    status = 408
    code = "request_timeout"


class OverloadedError(TrieserveError):
    status = 503
    kind = "overloaded_error"
    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float = 1.0, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.retry_after_s = retry_after_s


class NoReplicaError(OverloadedError):
    code = "no_replica"


class DeadlineError(OverloadedError):
    status = 504
    kind = "timeout_error"
    code = "deadline_exceeded"


class ReplicaLostError(TrieserveError):
    """`replica` names the one that was lost, where it is known, so that a retry can leave it out."""

    status = 503
    code = "replica_lost"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, replica: str | None = None) -> None:
        super().__init__(message, param=param, code=code)
        self.replica = replica


class EngineError(TrieserveError):
    code = "engine_error"


def _tree(root: type[TrieserveError]) -> dict[str, type[TrieserveError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found.update(_tree(child))
    return found


def rebuild(name: str, message: str, param: str | None, code: str | None, retry_after_s: float | None = None) -> TrieserveError:
    """The inverse of (type(e).__name__, e.message, e.param, e.code), for errors that crossed a process boundary."""
    error_type = _tree(TrieserveError).get(name, EngineError)
    if issubclass(error_type, OverloadedError):
        return (
            error_type(message, code=code)
            if retry_after_s is None
            else error_type(message, code=code, retry_after_s=retry_after_s)
        )
    return error_type(message, param=param, code=code)
