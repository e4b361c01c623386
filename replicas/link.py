"""The ingress's end of a token connection, up to the point where it can be used: connect, prove, be welcomed, ping."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Callable

from replicas.channel import Channel
from replicas.errors import ReplicaLostError
from replicas.wire import (
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    Challenge,
    Endpoint,
    Hello,
    Ping,
    ServerMessage,
    Welcome,
    WireError,
    client_proof,
    make_nonce,
    server_decoder,
    server_proof,
)

_logger = logging.getLogger(__name__)

_MAX_SILENT_PINGS = 3


class Link(Channel):
    """An authenticated connection to one boot of one replica; made by `connect_link`.

    `on_server_message` gets what arrives after the welcome, `on_lost` is called once when the link ends, also by `close`.
    A server that answers none of three pings in a row is lost.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        secret: bytes,
        on_server_message: Callable[[ServerMessage], None],
        on_lost: Callable[[], None],
        ping_period_s: float,
    ) -> None:
        super().__init__(server_decoder, MAX_FRAME_BYTES)
        self.endpoint = endpoint
        self.welcomed: asyncio.Future[None] = self._loop.create_future()
        self._secret = secret
        self._on_server_message = on_server_message
        self._on_lost = on_lost
        self._ping_period_s = ping_period_s
        self._nonce = make_nonce()
        self._server_nonce = b""
        self._timer: asyncio.TimerHandle | None = None
        self.is_welcome = False

    def on_message(self, message: Challenge | Welcome | ServerMessage) -> None:
        if isinstance(message, Challenge):
            self._answer(message)
        elif isinstance(message, Welcome):
            self._check(message)
        elif self.is_welcome:
            self._on_server_message(message)
        else:
            raise WireError(f"{type(message).__name__} before Welcome")

    def on_closed(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self.is_welcome:
            self._on_lost()
        elif not self.welcomed.done():
            self.welcomed.set_exception(WireError("closed during the handshake: another secret or another server?"))

    def ping(self) -> None:
        """To be called every `ping_period_s`; the link's own timer does."""
        if self.num_silent_ticks >= _MAX_SILENT_PINGS:
            _logger.warning("the replica at %s:%d is silent", self.endpoint.host, self.endpoint.port)
            self.abort()
            return
        self.num_silent_ticks += 1
        self.send(Ping())
        self._timer = self._loop.call_later(self._ping_period_s, self.ping)

    def _answer(self, challenge: Challenge) -> None:
        if challenge.version != PROTOCOL_VERSION:
            raise WireError(f"the replica speaks version {challenge.version} of the protocol, not {PROTOCOL_VERSION}")
        if self._server_nonce:
            raise WireError("a second Challenge")
        self._server_nonce = challenge.nonce
        self.send(Hello(self._nonce, client_proof(self._secret, challenge.nonce, self._nonce)))

    def _check(self, welcome: Welcome) -> None:
        expected = server_proof(self._secret, self._server_nonce, self._nonce, welcome.boot_id)
        if not self._server_nonce or not hmac.compare_digest(welcome.proof, expected):
            raise WireError("the server does not know the deployment's secret")
        if welcome.boot_id != self.endpoint.boot_id:
            raise WireError("the replica has restarted")
        if self.is_welcome:
            raise WireError("a second Welcome")
        self.is_welcome = True
        self.welcomed.set_result(None)
        self._timer = self._loop.call_later(self._ping_period_s, self.ping)


async def connect_link(
    endpoint: Endpoint,
    secret: bytes,
    *,
    on_server_message: Callable[[ServerMessage], None],
    on_lost: Callable[[], None],
    connect_timeout_s: float,
    ping_period_s: float = 5.0,
) -> Link:
    """Raises ReplicaLostError if there is no such replica, or it isn't ready to talk within `connect_timeout_s`."""
    link = Link(endpoint, secret, on_server_message, on_lost, ping_period_s)
    try:
        async with asyncio.timeout(connect_timeout_s):
            await asyncio.get_running_loop().create_connection(lambda: link, endpoint.host, endpoint.port)
            await link.welcomed
    except (OSError, TimeoutError, WireError) as error:
        reason = repr(error)  # a log record that keeps the error keeps its whole task alive
        _logger.warning("cannot connect to the replica at %s:%d: %s", endpoint.host, endpoint.port, reason)
        raise ReplicaLostError("the replica cannot be reached") from error
    finally:
        if not link.is_welcome:
            link.welcomed.cancel()
            link.abort()
    return link
