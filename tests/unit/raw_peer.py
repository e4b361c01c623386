"""A client of the token socket that does only what a test tells it to."""

from __future__ import annotations

import asyncio

from replicas import wire
from replicas.wire import Endpoint


class RawPeer:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, endpoint: Endpoint, secret: bytes) -> RawPeer:
        peer = cls(*await asyncio.open_connection(endpoint.host, endpoint.port, limit=1024))
        challenge = await peer.receive()
        nonce = wire.make_nonce()
        await peer.send(wire.Hello(nonce, wire.client_proof(secret, challenge.nonce, nonce)))
        welcome = await peer.receive()
        assert welcome.boot_id == endpoint.boot_id
        return peer

    async def send(self, message: wire.Message) -> None:
        await self.send_bytes(wire.encode_frame(message))

    async def send_bytes(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def receive(self) -> wire.Message:
        size = int.from_bytes(await self._reader.readexactly(4), "big")
        return wire.server_decoder.decode(await self._reader.readexactly(size))

    async def is_closed(self) -> bool:
        """Waits for the server to close the connection, reading what is left."""
        async with asyncio.timeout(10):
            try:
                while await self._reader.read(65536):
                    pass
            except ConnectionError:
                pass
        self._writer.close()
        return True
