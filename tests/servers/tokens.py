"""Google's token endpoint for service accounts: takes any assertion, gives the strict store's token."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Tokens:
    """`uri` is for a key file. What is given out may be changed at any time."""

    uri: str = ""
    token: str = "strict-token"
    valid_s: int = 3600
    given: int = 0
    """How often it was asked."""


@contextlib.contextmanager
def token_server() -> Iterator[Tokens]:
    tokens, lock = Tokens(), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            with lock:
                tokens.given += 1
            answer = {
                "access_token": tokens.token,
                "expires_in": tokens.valid_s,
                "token_type": "Bearer",
            }
            body = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        tokens.uri = f"http://127.0.0.1:{server.server_address[1]}/token"
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}).start()
        try:
            yield tokens
        finally:
            server.shutdown()
