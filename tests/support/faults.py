"""A server that does wrong what a test says: raw sockets, alone or in front of the real server.

`raw_server` answers by a function. `faulty_proxy` hands every call on to the real server, unless the test's script
names a `Fault` for it; so what is executed, and how often, is counted where it is executed.
"""

from __future__ import annotations

import http.client
import json
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum, auto
from typing import Any
from urllib.parse import urlsplit

Answer = Callable[[str, dict[str, Any], dict[str, str]], bytes | None]


def http_answer(content: Any, status: int = 200, **headers: str) -> bytes:
    """The bytes of a whole answer; ``_`` in a header's name stands for ``-``."""
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    lines = [
        f"HTTP/1.1 {status} X",
        f"Content-Length: {len(body)}",
        *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@contextmanager
def raw_server(answer: Answer) -> Iterator[str]:
    """A bare socket server: ``answer(path, body, headers)`` gives the bytes to send, None breaks the connection.

    An answer with ``Connection: close`` is the last one on its connection.
    """

    def talk(connection: socket.socket) -> None:
        for request in _requests(connection):
            sent = answer(request.path, request.fields, request.headers)
            if sent is None:
                return
            connection.sendall(sent)
            if b"Connection: close" in sent:
                return

    with _listening(talk) as url:
        yield url


class Fault(StrEnum):
    """What happens to a call. The first three never reach the server; it has run the others."""

    ERROR_500 = auto()
    """Answered HTTP 500."""
    HANG_UNSEEN = auto()
    """Not answered until the test releases it."""
    RESET_UNSEEN = auto()
    """The connection is reset instead of handing the call on."""
    HANG = auto()
    """Run, and its answer kept until the test releases it."""
    RESET = auto()
    """Run, and the connection reset instead of answering."""
    RESET_IN_BODY = auto()
    """Run, and the connection reset in the middle of the answer's body."""
    DRIP = auto()
    """Run, and its answer's body continued by white space, a byte at a time, without end."""
    DRIP_HEAD = auto()
    """Run, and its answer's head continued by header lines, one at a time, without end."""
    NOT_JSON = auto()
    """Run, and answered with a web page."""
    TRUNCATED_JSON = auto()
    """Run, and answered with half of the JSON."""
    WRONG_TYPES = auto()
    """Run, and answered with JSON values of other types."""


_UNSEEN = (Fault.ERROR_500, Fault.HANG_UNSEEN, Fault.RESET_UNSEEN)
_RESET_NOW = struct.pack("ii", 1, 0)
_DRIP_INTERVAL_S = 0.02
_LONG_S = 60.0


@dataclass(frozen=True)
class Call:
    """One request, with what the proxy knows of its session."""

    path: str
    item: int | None
    """What the session was last reset to."""
    step: int
    """Steps that were asked for since then, this one included; asking again under the same id counts once."""
    attempt: int
    """The how many'th session was reset to this item."""
    request_id: str
    tries: int
    """How often this id has been seen, this time included."""


@dataclass(eq=False)
class Proxy:
    """What `faulty_proxy` yields."""

    url: str = ""
    release: threading.Event = field(default_factory=threading.Event)
    """Set it to let hanging calls end."""
    calls: list[Call] = field(default_factory=list)
    closed: threading.Event = field(default_factory=threading.Event)
    """Set once a session is closed through the proxy."""
    caught: threading.Event = field(default_factory=threading.Event)
    """Set once a fault has begun."""


@contextmanager
def faulty_proxy(upstream: str, script: Callable[[Call], Fault | None]) -> Iterator[Proxy]:
    """A proxy before the server at ``upstream``; ``script`` says which calls meet which fault."""
    proxy = Proxy()
    exchange = _Exchange(upstream, script, proxy)
    with _listening(exchange.talk) as proxy.url:
        try:
            yield proxy
        finally:
            proxy.release.set()


class _Exchange:
    def __init__(self, upstream: str, script: Callable[[Call], Fault | None], proxy: Proxy) -> None:
        self._upstream, self._script, self._proxy = urlsplit(upstream).netloc, script, proxy
        self._items: dict[int, int] = {}
        self._steps: Counter[int] = Counter()
        self._attempts: dict[int, int] = {}
        self._resets: Counter[int] = Counter()
        self._tries: Counter[str] = Counter()
        self._lock = threading.Lock()

    def talk(self, connection: socket.socket) -> None:
        for request in _requests(connection):
            call = self._note(request)
            fault = self._script(call)
            if fault is not None:
                self._proxy.caught.set()
            answer = b"" if fault in _UNSEEN else self._forward(request)
            if not self._reply(connection, fault, answer):
                return
            if request.path == "/close":
                self._proxy.closed.set()

    def _note(self, request: _Request) -> Call:
        handle, request_id = request.fields.get("id", 0), request.headers.get("x-request-id", "")
        with self._lock:
            self._tries[request_id] += 1
            if request.path == "/reset" and self._tries[request_id] == 1:
                self._items[handle], self._steps[handle] = request.fields["data_idx"], 0
                self._resets[self._items[handle]] += 1
                self._attempts[handle] = self._resets[self._items[handle]]
            elif request.path == "/step" and self._tries[request_id] == 1:
                self._steps[handle] += 1
            call = Call(
                request.path,
                self._items.get(handle),
                self._steps[handle],
                self._attempts.get(handle, 0),
                request_id,
                self._tries[request_id],
            )
            self._proxy.calls.append(call)
        return call

    def _forward(self, request: _Request) -> bytes:
        connection = http.client.HTTPConnection(self._upstream, timeout=_LONG_S)
        connection.request(request.method, request.path, request.body, request.headers)
        response = connection.getresponse()
        kept = {name: response.headers[name] for name in ("X-Request-Id", "Retry-After") if name in response.headers}
        answer = http_answer(response.read(), response.status, **kept)
        connection.close()
        return answer

    def _reply(self, connection: socket.socket, fault: Fault | None, answer: bytes) -> bool:
        """Send what the fault leaves of the answer; False when the connection is over."""
        head, _, body = answer.partition(b"\r\n\r\n")
        match fault:
            case None:
                connection.sendall(answer)
            case Fault.ERROR_500:
                connection.sendall(http_answer({"detail": "broken by the test"}, 500))
            case Fault.HANG_UNSEEN | Fault.HANG:
                self._proxy.release.wait(_LONG_S)
                connection.sendall(answer or http_answer({"error": "too late"}))
            case Fault.RESET_UNSEEN | Fault.RESET:
                return _reset(connection)
            case Fault.RESET_IN_BODY:
                connection.sendall(head + b"\r\n\r\n" + body[: len(body) // 2])
                return _reset(connection)
            case Fault.DRIP:
                connection.sendall(b"HTTP/1.1 200 X\r\nContent-Length: 1000000\r\n\r\n" + body)
                return self._drip(connection, b" ")
            case Fault.DRIP_HEAD:
                connection.sendall(b"HTTP/1.1 200 X\r\n")
                return self._drip(connection, b"X-Wait: 1\r\n")
            case Fault.NOT_JSON:
                connection.sendall(http_answer(b"<html>sorry</html>"))
            case Fault.TRUNCATED_JSON:
                connection.sendall(http_answer(body[: len(body) // 2]))
            case Fault.WRONG_TYPES:
                connection.sendall(http_answer({"id": "x", "observation": 7, "reward": "1", "done": None}))
        return True

    def _drip(self, connection: socket.socket, drop: bytes) -> bool:
        with suppress(OSError):  # the client hangs up
            while not self._proxy.release.wait(_DRIP_INTERVAL_S):
                connection.sendall(drop)
        return False


@dataclass(frozen=True)
class _Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = json.loads(self.body or b"{}")
        return fields


def _requests(connection: socket.socket) -> Iterator[_Request]:
    """The requests of one connection, header names in small letters."""
    with connection.makefile("rb") as stream:
        while line := stream.readline():
            headers = {}
            while (header := stream.readline().strip()) != b"":
                name, _, value = header.decode().partition(": ")
                headers[name.lower()] = value
            method, path, _ = line.decode().split()
            yield _Request(method, path, headers, stream.read(int(headers.get("content-length", 0))))


def _reset(connection: socket.socket) -> bool:
    """Break the connection off by RST, as a crash or a router does; False: it is over."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_NOW)
    return False


@contextmanager
def _listening(talk: Callable[[socket.socket], None]) -> Iterator[str]:
    """The URL of a socket; each of its connections is handed to ``talk`` in a thread and closed after it."""

    def serve(connection: socket.socket) -> None:
        with connection, suppress(OSError):  # the client may go away at any time
            talk(connection)

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), name="test-connection", daemon=True).start()

    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=accept, name="test-listener", daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
