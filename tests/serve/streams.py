"""Streams that are read at the same time, and what their client saw of each."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from threading import Event

import httpx
from app_client import MODEL, sse_events

MAX_STREAMS = 32


@dataclass
class Stream:
    """What a client saw of one stream."""

    replica: str = ""
    events: list[str] = field(default_factory=list)
    was_cut: bool = False
    has_begun: Event = field(default_factory=Event)

    def read(self, app, prompt: str, **fields) -> None:
        body = {"model": MODEL, "prompt": prompt, "stream": True, **fields}
        try:
            with httpx.stream("POST", f"{app.url}/v1/completions", json=body, headers=app.headers, timeout=60) as reply:
                assert reply.status_code == 200
                self.replica = reply.headers["x-trieserve-replica"]
                for event in sse_events(reply.iter_lines()):
                    self.events.append(event)
                    self.has_begun.set()
        except httpx.TransportError:
            self.was_cut = True

    @property
    def finish_reasons(self) -> list[str]:
        choices = [choice for event in self.events if event != "[DONE]" for choice in json.loads(event).get("choices", ())]
        return [choice["finish_reason"] for choice in choices if choice["finish_reason"]]

    @property
    def error(self) -> dict | None:
        return json.loads(self.events[-2]).get("error") if self.events[-1] == "[DONE]" else None


def start_streams(app, pool, **fields):
    """At least eight that have a first token, on both replicas: one that is new gets the first few alone."""
    streams, done = [], []
    while len(streams) < 8 or len({stream.replica for stream in streams}) < 2:
        assert len(streams) < MAX_STREAMS
        streams.append(Stream())
        # What differs from the first token on shares no prefix.
        done.append(pool.submit(streams[-1].read, app, f"{os.urandom(4).hex()} is how it begins", **fields))
        assert streams[-1].has_begun.wait(30)
    return streams, done
