"""A replica's metrics over HTTP, on a thread of their own: GET /metrics and nothing else.

Scrapers of engines (the Gateway API Inference Extension, KEDA, aiperf) read each replica directly and under vLLM's names,
which Ray's own metrics agent would rewrite.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from http.server import ThreadingHTTPServer
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import MetricsHandler


class _OnlyMetrics(MetricsHandler):
    timeout = 10.0  # seconds of silence after which a connection, and its thread, is given up

    def do_GET(self) -> None:
        if urlsplit(self.path).path == "/metrics":
            super().do_GET()
        else:
            self.send_error(404)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, host: str, handler: type[MetricsHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, 0), handler)


def serve_metrics(registry: CollectorRegistry, host: str) -> tuple[int, Callable[[], None]]:
    """Listen on a free port of `host`; returns it and what stops the server. Raises OSError if `host` isn't ours."""
    server = _Server(host, _OnlyMetrics.factory(registry))
    thread = threading.Thread(target=server.serve_forever, name="metrics-http", daemon=True)
    thread.start()

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return server.server_address[1], close
