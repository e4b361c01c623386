"""A scripted engine behind a token socket, and a client of it."""

from __future__ import annotations

from scripted_engine import ManualClock, ScriptedEngine, make_request, until

from cluster.stream_client import StreamClient, TokenStream
from replicas.stream_hub import StreamHub
from replicas.stream_server import StreamServer

SECRET = b"the deployment's secret"


class TokenRig:
    """`orphaned`: the slots that the server gave back."""

    def __init__(self, window_tokens: int = 512) -> None:
        self.engine = ScriptedEngine()
        self.hub = StreamHub(self.engine, ManualClock())
        self.engine.start(self.hub.publish)
        self.orphaned: list[str] = []
        self._window_tokens = window_tokens

    async def __aenter__(self) -> TokenRig:
        self.server = StreamServer(self.hub, SECRET, "boot-1", on_orphaned_slot=self.orphaned.append)
        self.endpoint = await self.server.start("127.0.0.1")
        self.client = StreamClient(SECRET, window_tokens=self._window_tokens)
        return self

    async def __aexit__(self, *exc_info) -> None:
        await self.client.close()
        await self.server.close()
        await until(lambda: self.server.num_streams == 0)

    async def open(self, *names: str, slot: str | None = None) -> list[TokenStream]:
        return [await self.client.open(self.endpoint, make_request(name), slot) for name in names]

    def drop_connections(self) -> None:
        for connection in self.server.connections.copy():
            connection.abort()


async def read(stream: TokenStream) -> list[int]:
    """All tokens to the end."""
    return [token async for delta in stream for token in delta.token_ids]
