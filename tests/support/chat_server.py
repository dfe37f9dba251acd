"""A chat endpoint that follows a script, over real sockets."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Scripted:
    """One answer of the endpoint."""

    status: int = 200
    content: Any = None
    """A JSON value, or bytes as they are."""
    headers: dict[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    drops: bool = False
    """Close the connection without an answer."""


def says(
    text: str | None, *, finish_reason: str = "stop", prompt_tokens: int = 10, completion_tokens: int = 3
) -> Scripted:
    """The answer of a model that writes ``text``."""
    return Scripted(
        content={
            "model": "scripted-2026-01-01",
            "choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}],
            "usage": {
                "prompt_tokens": 10,
                "completion_tokens": 3,
                "prompt_tokens_details": {"cached_tokens": 4},
            },
        }
    )


@dataclass
class ChatServer:
    """``answer(number, body)`` gives the answer to the request ``number``, counted from 0."""

    url: str
    answer: Callable[[int, dict[str, Any]], Scripted]
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    at: list[float] = field(default_factory=list)
    """When each request came, in seconds of `time.monotonic`."""


@contextmanager
def chat_server(answer: Callable[[int, dict[str, Any]], Scripted]) -> Iterator[ChatServer]:
    """The endpoint runs in threads of this process until the block ends."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                number = len(server.requests)
                server.requests.append(body)
                server.headers.append(dict(self.headers))
                server.at.append(time.monotonic())
            if self.path != "/v1/chat/completions":
                self._send(Scripted(404, {"error": {"message": f"no such path {self.path}"}}))
                return
            self._send(server.answer(number, body))

        def _send(self, scripted: Scripted) -> None:
            time.sleep(scripted.delay_s)
            if scripted.drops:
                self.close_connection = True
                return
            content = scripted.content if isinstance(scripted.content, bytes) else json.dumps(scripted.content).encode()
            self.send_response(scripted.status)
            for name, value in {"Content-Length": str(len(content)), **scripted.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            pass  # a client that hung up before the answer

    listener = Server(("127.0.0.1", 0), Handler)
    server = ChatServer(f"http://127.0.0.1:{listener.server_port}/v1", answer)
    thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        listener.shutdown()
        thread.join()
        listener.server_close()
