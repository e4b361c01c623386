"""What the routers of this process need that must not travel in Serve's configuration: the secret and the dials.

Serve pickles a router class by value together with its module's globals, and stores its kwargs in plain sight; so an ingress
process sets `configure(...)` here before it first uses its handle, and the router reads it. A process that never configured
(a script with a handle of its own) gets power-of-two routing, counted under its own reason.
"""

from __future__ import annotations

from dataclasses import dataclass

from configs.schema import RouterConfig
from router.core import Router


@dataclass(frozen=True, slots=True)
class RouterContext:
    config: RouterConfig
    secret: bytes


_context: RouterContext | None = None
_routers: list[Router] = []


def configure(context: RouterContext) -> None:
    global _context
    _context = context


def context() -> RouterContext | None:
    return _context


def register(router: Router) -> None:
    _routers.append(router)


def routers() -> tuple[Router, ...]:
    """All cores made in this process, for metrics; read-only for everybody but their own event loop."""
    return tuple(_routers)
