"""One kept-alive HTTP connection that carries JSON, with retries that never run a call twice."""

from __future__ import annotations

import functools
import io
import ipaddress
import itertools
import json
import socket
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http.client import HTTPResponse
from typing import Any
from urllib.parse import urlsplit

import requests
from requests.adapters import HTTPAdapter
from urllib3 import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import MaxRetryError, NewConnectionError, ReadTimeoutError

from agentgym_rl.client.addresses import environment_token
from agentgym_rl.errors import EnvFull, EnvProtocolError, EnvTimeout, EnvUnreachable

CONNECT_TIMEOUT_S = 5.0
_KEEPALIVE_S = 60
"""Idle seconds after which the system asks whether the peer is there; routers forget idle connections after minutes."""
_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 2.0
_LEAST_TIMEOUT_S = 0.001
_SHOWN = 300
"""Characters of an unexpected answer that an error repeats."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer of the server: ``content`` is decoded JSON, or text when the status is not 200 and it is no JSON."""

    status: int
    content: Any


class Connection:
    """Calls to one server, one at a time; for one thread.

    A call goes to the transport of ``requests`` as a copy of a request that was prepared once per path, in one write.
    That halves its CPU time (600 to 340 microseconds), which counts with hundreds of clients beside a training process.
    Redirects are not followed, so the token of ``AGENTGYM_TOKEN`` reaches the given server only.
    """

    def __init__(
        self, base_url: str, *, timeout_s: float, max_retries: int, connect_timeout_s: float = CONNECT_TIMEOUT_S
    ) -> None:
        """``timeout_s``: for a call as a whole; ``connect_timeout_s``: for one try to make a connection."""
        self.base_url = base_url.rstrip("/")
        self.timeout_s = timeout_s
        self.retries = 0
        """Calls sent again so far."""
        self._connect_timeout_s = connect_timeout_s
        self._max_retries = max_retries
        self._session = session_for(self.base_url, environment_token())
        self._transport = self._session.get_adapter(self.base_url)
        # Proxies and certificates of the environment, looked up once instead of with every call.
        self._settings: dict[str, Any] = dict(
            self._session.merge_environment_settings(self.base_url, {}, False, None, None)
        )
        self._prepared: dict[str, requests.PreparedRequest] = {}
        self._ids = (f"{client}-{n}" for client in [uuid.uuid4().hex] for n in itertools.count())
        self._repeatable = False
        """True once the server has echoed a request id: it then runs no id twice."""

    def close(self) -> None:
        self._session.close()

    def get(self, path: str, query: Mapping[str, Any] | None = None) -> Reply:
        """See `_answer_to`."""
        request = requests.Request("GET", f"{self.base_url}/{path}", params=query)
        return self._answer_to(self._session.prepare_request(request), self.timeout_s, self._max_retries)

    def post(
        self, path: str, fields: Mapping[str, Any], *, timeout_s: float | None = None, max_retries: int | None = None
    ) -> Reply:
        """See `_answer_to`; the connection's own limits hold where none are given."""
        if path not in self._prepared:
            blank = requests.Request("POST", f"{self.base_url}/{path}", headers={"Content-Type": "application/json"})
            self._prepared[path] = self._session.prepare_request(blank)
        request = self._prepared[path].copy()
        request.body = json.dumps(fields).encode()
        request.headers["Content-Length"] = str(len(request.body))
        return self._answer_to(
            request,
            self.timeout_s if timeout_s is None else timeout_s,
            self._max_retries if max_retries is None else max_retries,
        )

    def _answer_to(self, request: requests.PreparedRequest, timeout_s: float, max_retries: int) -> Reply:
        """The server's answer, whatever its status.

        The call is sent again when the server cannot have run it: no connection was made, or it was turned away with
        503 and Retry-After. When the connection broke, only if running it twice is impossible (the server knows request
        ids) or harmless (GET; ``create``, as a session that nobody knows is lost anyway, and a server of this project
        gives the same one again). Raises `EnvUnreachable`, `EnvTimeout`, `EnvFull` (503 for too long),
        `EnvProtocolError` (no JSON).
        """
        request.headers["X-Request-Id"] = next(self._ids)
        what, end, broken = f"{request.method} {request.url}", time.monotonic() + timeout_s, 0
        while True:
            try:
                response = self._send(request, max(end - time.monotonic(), _LEAST_TIMEOUT_S))
            except requests.RequestException as error:
                broken += 1
                wait_s = min(_FIRST_BACKOFF_S * 2 ** (broken - 1), _MAX_BACKOFF_S)
                is_last = broken > max_retries or time.monotonic() + wait_s >= end
                if is_last or not self._may_send_again(request, error):
                    raise self._as_env_error(what, error, timeout_s, tries=broken) from error
            else:
                turned_away_s = _retry_after_s(response)
                if turned_away_s is None:
                    return _reply(what, response)
                wait_s = turned_away_s
                if time.monotonic() + wait_s >= end:
                    raise EnvFull(_refused_to_the_end(what, timeout_s, wait_s, response))
            self.retries += 1
            time.sleep(wait_s)

    def _send(self, request: requests.PreparedRequest, timeout_s: float) -> requests.Response:
        """The whole response; notes whether the server echoes request ids."""
        limits = (min(self._connect_timeout_s, timeout_s), timeout_s)
        response = self._transport.send(request, timeout=limits, **self._settings)
        _ = response.content  # read to the end, so that the connection is free for the next call
        self._repeatable |= response.headers.get("X-Request-Id") == request.headers["X-Request-Id"]
        return response

    def _may_send_again(self, request: requests.PreparedRequest, error: requests.RequestException) -> bool:
        if _never_sent(error):
            return True
        is_harmless = request.method == "GET" or request.path_url.endswith("/create")
        return _broke(error) and (self._repeatable or is_harmless)

    def _as_env_error(
        self, what: str, error: requests.RequestException, timeout_s: float, *, tries: int
    ) -> EnvUnreachable | EnvTimeout:
        if isinstance(error, requests.ConnectTimeout):
            limit_s = min(self._connect_timeout_s, timeout_s)
            return EnvUnreachable(f"{what}: no connection within {limit_s:g} s (tries: {tries})")
        if isinstance(error, requests.Timeout):
            return EnvTimeout(f"{what}: no answer within {timeout_s:g} s")
        if _stalled(error):
            return EnvTimeout(f"{what}: no whole answer within {timeout_s:g} s")
        return EnvUnreachable(f"{what}: {_cause(error)} (tries: {tries})")


class _Exchange(HTTPConnection):
    """Sends head and body of a request with one system call instead of two, and bounds the answer as a whole."""

    _parts: list[bytes] | None = None

    def request(self, *args: Any, **options: Any) -> None:
        self._parts = []
        try:
            super().request(*args, **options)
            whole = b"".join(self._parts)
        finally:
            self._parts = None
        super().send(whole)

    def send(self, data: Any) -> None:
        if self._parts is None:
            super().send(data)
        else:
            self._parts.append(data)

    def getresponse(self) -> Any:
        limit_s = self.timeout
        if isinstance(limit_s, int | float):
            self.response_class = functools.partial(_TimedResponse, end=time.monotonic() + limit_s)  # type: ignore[assignment]
        return super().getresponse()


class _TlsExchange(_Exchange, HTTPSConnection):
    pass


class _TimedResponse(HTTPResponse):
    """An answer that must be there, whole, by a fixed time, in seconds of `time.monotonic`."""

    def __init__(self, sock: socket.socket, *args: Any, end: float, **options: Any) -> None:
        super().__init__(sock, *args, **options)
        self.fp = io.BufferedReader(_TimedReader(self.fp.detach(), sock, end))  # type: ignore[assignment]


class _TimedReader(io.RawIOBase):
    """Reads from a socket until a fixed time: the socket's own time-out would begin anew with every byte."""

    def __init__(self, raw: io.RawIOBase, sock: socket.socket, end: float) -> None:
        self._raw, self._sock, self._end = raw, sock, end
        self._has_read = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        if self._has_read:  # the first time-out stands already, and one read is enough for most answers
            left_s = self._end - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("the time for the answer is over")
            self._sock.settimeout(left_s)
        self._has_read = True
        count: int | None = self._raw.readinto(buffer)  # type: ignore[attr-defined]
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Pool(HTTPConnectionPool):
    ConnectionCls = _Exchange


class _TlsPool(HTTPSConnectionPool):
    ConnectionCls = _TlsExchange


class _Adapter(HTTPAdapter):
    """One kept connection, on which the system looks for a peer that is gone and which no router forgets."""

    def init_poolmanager(self, *args: Any, **options: Any) -> None:
        super().init_poolmanager(*args, socket_options=_socket_options(), **options)
        self.poolmanager.pool_classes_by_scheme = {"http": _Pool, "https": _TlsPool}


def _socket_options() -> list[tuple[int, int, int]]:
    options = [*HTTPConnection.default_socket_options, (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL"):
        if hasattr(socket, name):  # not on every system
            options.append((socket.IPPROTO_TCP, getattr(socket, name), _KEEPALIVE_S))
    return options


def session_for(base_url: str, token: str | None) -> requests.Session:
    """A session of one connection, without proxies where the server is on this machine.

    A time-out that a request of it is given bounds the answer as a whole. ``token`` goes with every request.
    """
    session, address = requests.Session(), urlsplit(base_url)
    session.trust_env = not _is_this_machine(address.hostname or "")
    session.mount(f"{address.scheme}://", _Adapter(pool_connections=1, pool_maxsize=1))
    if token is not None:
        session.auth = _Bearer(token)
    return session


class _Bearer(requests.auth.AuthBase):
    """Puts the token into a request; as ``auth`` it goes before what a netrc file says."""

    def __init__(self, token: str) -> None:
        self._token = token

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        request.headers["Authorization"] = f"Bearer {self._token}"
        return request


def _is_this_machine(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    return address.is_loopback or address.is_unspecified


def _stalled(error: requests.RequestException) -> bool:
    """True when the answer began but did not end in time."""
    return bool(error.args) and isinstance(error.args[0], ReadTimeoutError)


def _never_sent(error: requests.RequestException) -> bool:
    """True when no connection was made at all, so that the server cannot have seen the call."""
    return isinstance(error, requests.ConnectTimeout) or _connect_error(error) is not None


def _broke(error: requests.RequestException) -> bool:
    """True when a connection ended in the middle of a call, which the server may or may not have run."""
    if isinstance(error, requests.exceptions.SSLError | requests.Timeout) or _stalled(error):
        return False
    return isinstance(error, requests.ConnectionError | requests.exceptions.ChunkedEncodingError)


def _connect_error(error: requests.RequestException) -> NewConnectionError | None:
    inner = error.args[0] if error.args else None
    reason = inner.reason if isinstance(inner, MaxRetryError) else None
    return reason if isinstance(reason, NewConnectionError) else None


def _cause(error: requests.RequestException) -> str:
    refused = _connect_error(error)
    if refused is not None:
        cause = refused.__cause__
        return str(getattr(cause, "strerror", None) or cause or refused).lower()
    return f"the connection broke ({error})" if _broke(error) else f"{type(error).__name__}: {error}"


def _retry_after_s(response: requests.Response) -> float | None:
    """Seconds after which to repeat a call that the server turned away unseen; None for any other answer."""
    wait_s = retry_after_s(response) if response.status_code == 503 else None
    return None if wait_s is None else max(wait_s, _FIRST_BACKOFF_S)


def retry_after_s(response: requests.Response) -> float | None:
    """Seconds until the time that an answer's ``Retry-After`` names, in seconds or as a date; None without one."""
    value = response.headers.get("Retry-After", "").strip()
    return float(value) if value.isascii() and value.isdigit() else _seconds_until(value)


def _seconds_until(http_date: str) -> float | None:
    """Seconds from now until a date as HTTP writes it; None for what is no date."""
    try:
        date = parsedate_to_datetime(http_date)
    except ValueError:
        return None
    if date.tzinfo is None:  # what "-0000" gives; HTTP's dates are in GMT
        date = date.replace(tzinfo=UTC)
    return (date - datetime.now(UTC)).total_seconds()


def _refused_to_the_end(what: str, timeout_s: float, wait_s: float, response: requests.Response) -> str:
    limit = f"the limit of {timeout_s:g} s"
    return f"{what}: HTTP 503, to be asked again in {round(wait_s, 1):g} s, which is beyond {limit}: {_shown(response)}"


def _reply(what: str, response: requests.Response) -> Reply:
    try:
        return Reply(response.status_code, json.loads(response.content))
    except (ValueError, RecursionError):
        if response.status_code == 200:
            raise EnvProtocolError(f"{what}: the answer is not JSON: {_shown(response)}") from None
        return Reply(response.status_code, response.content.decode(errors="replace"))


def _shown(response: requests.Response) -> str:
    return response.content[:_SHOWN].decode(errors="replace")
