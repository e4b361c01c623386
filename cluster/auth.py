"""Who calls: API keys, held as SHA-256 digests, and what the server derives from them. Nothing of Ray or HTTP here."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass

from configs.schema import ApiKey
from replicas.errors import AuthenticationError

_SCHEME = "bearer"
# Any prefix that no key hash starts with: the salt must not be the digest that the configuration shows.
_SALT_PREFIX = b"salt:"


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whose request it is. `salt` goes into the root of the block hashes: tenants never share cached blocks (case NS06)."""

    name: str
    salt: str


ANONYMOUS = Tenant(name="anonymous", salt="")


def hash_api_key(key: str) -> str:
    """Hex SHA-256 of a key, as `ingress.api_keys[].sha256` holds it. Keys are random and long: no slow hash is needed."""
    # surrogatepass: whatever str a header was decoded to has a digest, rather than an exception.
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def probe_key(secret: bytes) -> str:
    """The API key with which `up` sends its own request: only who knows the deployment's secret can compute it."""
    return hmac.new(secret, b"trieserve-probe", hashlib.sha256).hexdigest()


class Authenticator:
    """Without any keys everybody is ANONYMOUS; whether that may be so is the configuration's question (configs.check)."""

    def __init__(self, api_keys: Sequence[ApiKey]) -> None:
        self._tenants = [(key.sha256.lower(), _tenant(key)) for key in api_keys]

    def identify(self, authorization: str | None) -> Tenant:
        """The tenant of an Authorization header (`Bearer <key>`). Raises AuthenticationError, which never repeats the key.

        All keys are compared, each in constant time, so that the time taken tells nothing about any of them.
        """
        if not self._tenants:
            return ANONYMOUS
        if authorization is None:
            raise AuthenticationError("no API key: send it as `Authorization: Bearer <key>`", code="missing_api_key")
        scheme, _, key = authorization.strip().partition(" ")
        if scheme.lower() != _SCHEME or not key.strip():
            raise AuthenticationError("the Authorization header is not `Bearer <key>`")
        digest = hash_api_key(key.strip())
        found = None
        for known_digest, tenant in self._tenants:
            if hmac.compare_digest(known_digest, digest):
                found = tenant
        if found is None:
            raise AuthenticationError("unknown API key")
        return found


def _tenant(key: ApiKey) -> Tenant:
    return Tenant(name=key.name, salt=hashlib.sha256(_SALT_PREFIX + key.sha256.lower().encode()).hexdigest())
