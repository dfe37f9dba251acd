"""A gate in front of one environment server: it hands calls on, writes down what the server answered, and spoils what
the client gets of it, as the weather says."""

from __future__ import annotations

import http.client
import json
import random
import select
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum, auto
from typing import Any

from fault_run.ledger import Ledger

_RESET_NOW = struct.pack("ii", 1, 0)
_UPSTREAM_LIMIT_S = 120.0
_PIECE_BYTES = 64
_HTML = b"<html><body>Something went wrong.</body></html>"


class Mishap(StrEnum):
    """What happens to one call. Those named ``unseen`` never reach the server; it has run the others."""

    DELAYED = auto()
    """The answer comes late, within the client's time limit or beyond it."""
    THROTTLED = auto()
    """The answer comes a few bytes at a time, within the limit."""
    DRIPPING = auto()
    """The answer comes so slowly that it is not whole within the limit."""
    CUT_UNSEEN = auto()
    """The connection breaks before the call is handed on."""
    ANSWER_LOST = auto()
    """The connection breaks in place of the answer."""
    CUT_MIDWAY = auto()
    """The connection breaks in the middle of the answer."""
    ERROR_500_UNSEEN = auto()
    ERROR_502 = auto()
    """A web page in place of the answer, with status 502, as a proxy gives it."""
    BUSY_UNSEEN = auto()
    """Status 503 with Retry-After."""
    NO_JSON = auto()
    """A web page with status 200."""
    HALF_JSON = auto()
    """The first half of the answer, as if it were all."""
    WRONG_TYPES = auto()
    """The fields of the answer with values of other types."""


@dataclass(frozen=True, slots=True)
class Weather:
    """What may happen to calls, and to which share of them."""

    mishaps: tuple[Mishap, ...] = ()
    share: float = 0.0
    delay_s: tuple[float, float] = (0.0, 0.0)
    """Shortest and longest delay."""


FAIR = Weather()


class Gate:
    """Listens on a port of its own for as long as it lives; what is behind it may come and go."""

    def __init__(self, name: str, ledger: Ledger, seed: int) -> None:
        self.name, self.weather = name, FAIR
        self.mishaps: Counter[str] = Counter()
        self._ledger = ledger
        self._dice, self._lock = random.Random(seed), threading.Lock()
        self._upstream, self._life = "", 0
        self._talks: set[socket.socket] = set()
        self._listener: socket.socket | None = None
        self._listen(0)
        assert self._listener is not None
        self._port: int = self._listener.getsockname()[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def open(self, upstream: str) -> None:
        """Hand calls on to ``host:port``, where a new life of the server has begun."""
        self._upstream, self._life = upstream, self._life + 1
        if self._listener is None:
            self._listen(self._port)

    def shut(self) -> None:
        """Be as a machine without the server: connections break, and new ones are refused."""
        listener, self._listener = self._listener, None
        if listener is not None:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        with self._lock:
            talks = list(self._talks)
        for talk in talks:
            _break(talk)

    # ------------------------------------------------------------------------------------------------------ connections

    def _listen(self, port: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", port), backlog=256)
        threading.Thread(target=self._accept, args=(self._listener,), name=f"gate-{self.name}", daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                talk, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(talk,), name=f"gate-{self.name}-talk", daemon=True).start()

    def _serve(self, talk: socket.socket) -> None:
        with self._lock:
            self._talks.add(talk)
        server = http.client.HTTPConnection(self._upstream, timeout=_UPSTREAM_LIMIT_S)
        try:
            with suppress(OSError, http.client.HTTPException):  # either side may go away at any time
                for call in _calls(talk):
                    if not self._answer(talk, server, call):
                        break
        finally:
            with self._lock:
                self._talks.discard(talk)
            _break(talk)
            talk.close()
            server.close()

    # ------------------------------------------------------------------------------------------------------------ calls

    def _answer(self, talk: socket.socket, server: http.client.HTTPConnection, call: _Call) -> bool:
        """Answer one call; False when the connection is over."""
        mishap, delay_s = self._draw()
        match mishap:
            case Mishap.CUT_UNSEEN:
                return False
            case Mishap.ERROR_500_UNSEEN:
                talk.sendall(_http(500, b'{"detail": "out of order"}'))
                return True
            case Mishap.BUSY_UNSEEN:
                talk.sendall(_http(503, b'{"detail": "busy"}', retry_after=1))
                return True
        return self._spoil(talk, self._hand_on(server, call), mishap, delay_s)

    def _draw(self) -> tuple[Mishap | None, float]:
        weather = self.weather
        with self._lock:
            if not weather.mishaps or self._dice.random() >= weather.share:
                return None, 0.0
            mishap = self._dice.choice(weather.mishaps)
            self.mishaps[mishap] += 1
            return mishap, self._dice.uniform(*weather.delay_s)

    def _hand_on(self, server: http.client.HTTPConnection, call: _Call) -> _Answer:
        """The server's own answer, which goes into the ledger before anything of it is sent on."""
        life = self._life
        if server.sock is not None and select.select([server.sock], [], [], 0)[0]:
            server.close()  # the server has ended an idle connection, which says nothing of this call
        if server.sock is None:
            server.connect()
        server.auto_open = 0  # a call whose connection broke may have been run: it is not sent again here
        server.request(call.method, call.path, call.body, call.headers)
        response = server.getresponse()
        answer = _Answer(response.status, response.read(), response.headers.get("Retry-After"))
        self._ledger.write(
            self.name, life, call.request_id, call.path, _decoded(call.body), answer.status, _decoded(answer.body)
        )
        return answer.for_request(call.request_id)

    def _spoil(self, talk: socket.socket, answer: _Answer, mishap: Mishap | None, delay_s: float) -> bool:
        """Send what the mishap leaves of an answer; False when the connection is over."""
        whole = answer.encoded()
        match mishap:
            case None:
                talk.sendall(whole)
            case Mishap.DELAYED:
                time.sleep(delay_s)
                talk.sendall(whole)
            case Mishap.THROTTLED | Mishap.DRIPPING:
                pieces = [whole[start : start + _PIECE_BYTES] for start in range(0, len(whole), _PIECE_BYTES)]
                pause_s = (delay_s if mishap == Mishap.DRIPPING else min(delay_s, 1.0)) / len(pieces)
                for piece in pieces:
                    talk.sendall(piece)
                    time.sleep(pause_s)
            case Mishap.ANSWER_LOST:
                return False
            case Mishap.CUT_MIDWAY:
                talk.sendall(whole[: len(whole) - len(answer.body) // 2 - 1])
                return False
            case Mishap.ERROR_502:
                talk.sendall(_http(502, _HTML, request_id=answer.request_id))
            case Mishap.NO_JSON:
                talk.sendall(_http(200, _HTML, request_id=answer.request_id))
            case Mishap.HALF_JSON:
                talk.sendall(_http(200, answer.body[: len(answer.body) // 2], request_id=answer.request_id))
            case Mishap.WRONG_TYPES:
                body = b'{"id": "x", "observation": 7, "reward": "1", "score": [1], "done": null}'
                talk.sendall(_http(200, body, request_id=answer.request_id))
        return True


@dataclass(frozen=True, slots=True)
class _Call:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def request_id(self) -> str:
        return self.headers.get("x-request-id", "")


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    body: bytes
    retry_after: str | None
    request_id: str = ""

    def for_request(self, request_id: str) -> _Answer:
        return _Answer(self.status, self.body, self.retry_after, request_id)

    def encoded(self) -> bytes:
        return _http(self.status, self.body, request_id=self.request_id, retry_after=self.retry_after)


def _calls(talk: socket.socket) -> Iterator[_Call]:
    """The calls of one connection, header names in small letters."""
    with talk.makefile("rb") as stream:
        while line := stream.readline():
            headers = {}
            while (header := stream.readline().strip()) != b"":
                name, _, value = header.decode("latin-1").partition(":")
                headers[name.strip().lower()] = value.strip()
            method, path, _ = line.decode("latin-1").split()
            yield _Call(method, path, headers, stream.read(int(headers.get("content-length", 0))))


def _http(status: int, body: bytes, *, request_id: str = "", retry_after: int | str | None = None) -> bytes:
    lines = [f"HTTP/1.1 {status} X", "Content-Type: application/json", f"Content-Length: {len(body)}"]
    lines += [f"X-Request-Id: {request_id}"] if request_id else []
    lines += [f"Retry-After: {retry_after}"] if retry_after is not None else []
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def _decoded(body: bytes) -> Any:
    try:
        return json.loads(body or b"{}")
    except ValueError:
        return body.decode(errors="replace")


def _break(talk: socket.socket) -> None:
    """End a connection by RST, as a crash does."""
    with suppress(OSError):
        talk.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_NOW)
        talk.shutdown(socket.SHUT_RDWR)
