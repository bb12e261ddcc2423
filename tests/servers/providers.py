"""Providers of credentials on loopback: Google's token endpoint, and a container's role on AWS."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Tokens:
    """Google's token endpoint for service accounts; any assertion is taken. May be changed at any time."""

    uri: str = ""
    token: str = "strict-token"
    valid_s: int = 3600
    given: int = 0
    """Number of requests."""

    def answer(self) -> Mapping[str, Any]:
        self.given += 1
        return {"access_token": self.token, "expires_in": self.valid_s, "token_type": "Bearer"}


@contextlib.contextmanager
def token_server() -> Iterator[Tokens]:
    tokens = Tokens()
    with answering(lambda: tokens.answer()) as tokens.uri:  # which a test may replace
        yield tokens


@contextlib.contextmanager
def answering(answer: Callable[[], Mapping[str, Any]]) -> Iterator[str]:
    """Start a server that answers every request with this, as JSON. Yields its URL."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with lock:
                body = json.dumps(answer()).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/given"
        finally:
            server.shutdown()
