"""A language model that says what a test wants, behind an OpenAI-compatible address."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


@contextmanager
def scripted_model(*replies: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """An OpenAI-compatible server that says these words in turn, and what it was asked; an empty word is HTTP 500."""
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append({**body, "path": self.path, "key": self.headers.get("Authorization")})
            reply = replies[min(len(asked), len(replies)) - 1]
            content = json.dumps({"choices": [{"message": {"content": reply}}]}).encode()
            self.send_response(200 if reply else 500)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1", asked
    finally:
        server.shutdown()
        server.server_close()
