"""A client that leaves frees the engine. Every engine's step for nobody is one less for those who wait.

The body comes in a packet after the headers, as it does from many clients: proxies and servers that look for the client's
leaving only while they read the body have got this wrong.
"""

from __future__ import annotations

import time

import pytest
from app_client import endless_body, gauges_at_rest
from processes import until

# It takes milliseconds; the limit leaves room for a busy machine and is far below the request's half a minute.
_LIMIT_S = 1.0


def leave_during_an_answer(app, *, stream: bool, num_bytes: int) -> None:
    with app.request_in_two_packets(endless_body(stream=stream, num_bytes=num_bytes)) as connection:
        until(app.num_running, 10, "the request did not start")
        if stream:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
    left_at = time.monotonic()
    until(lambda: app.num_running() == 0, 10, "the engine went on for nobody")
    assert time.monotonic() - left_at < _LIMIT_S


@pytest.mark.parametrize("num_bytes", [0, 100_000], ids=["small", "100kB"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_client_that_leaves_ends_its_request(app, stream, num_bytes):
    for _ in range(5):
        leave_during_an_answer(app, stream=stream, num_bytes=num_bytes)
    assert set(gauges_at_rest(app.metrics()).values()) == {0}


def test_a_client_that_leaves_ends_its_other_choices_too(app):
    with app.openai() as client:
        stream = client.completions.create(model="fake", prompt=["a", "b"], n=2, max_tokens=2000, stream=True)
        next(iter(stream))
        until(lambda: app.num_running() == 4, 10)
        stream.close()
    until(lambda: app.num_running() == 0, 10)
