"""One HTTP request to an ASGI application, message by message: what test clients hide, such as who leaves and when."""

from __future__ import annotations

import asyncio
import json
from typing import Any


class AsgiCall:
    """`async with` starts the application; leaving waits for its end, and lets the client go if that takes a disconnect.

    `status` and `headers` are None until the application has sent them.
    """

    def __init__(self, app: Any, method: str, path: str, body: Any = None, *, headers: dict[str, str] | None = None) -> None:
        self.status: int | None = None
        self.headers: dict[str, str] | None = None
        self._app = app
        self._body = json.dumps(body).encode()
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8000),
        }
        self._chunks: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._has_left = asyncio.Event()
        self._reads = asyncio.Event()
        self._reads.set()

    async def __aenter__(self) -> AsgiCall:
        self._task = asyncio.ensure_future(self._app(self._scope, self._receive, self._send))
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.disconnect()
        await self.ended()

    def disconnect(self) -> None:
        self._has_left.set()

    def stop_reading(self) -> None:
        """The application's next send waits, as it does when a client's connection is full."""
        self._reads.clear()

    async def ended(self) -> None:
        """The application has returned."""
        async with asyncio.timeout(10):
            await self._task

    async def chunk(self) -> bytes:
        """The next part of the body that isn't empty; b"" at its end."""
        async with asyncio.timeout(10):
            return await self._chunks.get() or b""

    async def rest(self) -> bytes:
        """All of the body that wasn't taken yet."""
        chunks = []
        while chunk := await self.chunk():
            chunks.append(chunk)
        return b"".join(chunks)

    async def _receive(self) -> dict[str, Any]:
        body, self._body = self._body, b""
        if not body:
            await self._has_left.wait()
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": body, "more_body": False}

    async def _send(self, message: dict[str, Any]) -> None:
        await self._reads.wait()
        if message["type"] == "http.response.start":
            assert self.status is None, "the headers were sent twice"
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            return
        assert self.status is not None, "a body before the headers"
        if message["body"]:
            self._chunks.put_nowait(message["body"])
        if not message.get("more_body"):
            self._chunks.put_nowait(None)


def events(data: bytes) -> list[Any]:
    """The events of a stream, `[DONE]` as that string; comments are left out."""
    assert data.endswith(b"\n\n"), data
    parts = [part for part in data.removesuffix(b"\n\n").split(b"\n\n") if not part.startswith(b":")]
    texts = [part.removeprefix(b"data: ").decode() for part in parts]
    return [text if text == "[DONE]" else json.loads(text) for text in texts]
