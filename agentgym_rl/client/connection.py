"""One kept-alive HTTP connection that carries JSON, with retries that never run a call twice."""

from __future__ import annotations

import itertools
import json
import time
import uuid
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import requests
from requests.adapters import HTTPAdapter
from requests.utils import get_environ_proxies
from urllib3.exceptions import MaxRetryError, NewConnectionError

from agentgym_rl.errors import EnvProtocolError, EnvServerError, EnvTimeout, EnvUnreachable

_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 2.0
_SHOWN = 300
"""Characters of an unexpected answer that an error repeats."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer of the server: ``content`` is decoded JSON, or text when the status is not 200 and it is no JSON."""

    status: int
    content: Any


class Connection:
    """Calls to one server, one at a time; for one thread."""

    def __init__(self, base_url: str, *, timeout_s: float, max_retries: int) -> None:
        self.base_url = base_url.rstrip("/")
        self.timeout_s = timeout_s
        self._max_retries = max_retries
        self._session = _session_for(self.base_url)
        self._request_ids = (f"{prefix}-{n}" for prefix in [uuid.uuid4().hex] for n in itertools.count())
        self._repeatable = False
        """True once the server has echoed a request id: it then runs no id twice."""

    def close(self) -> None:
        self._session.close()

    def get(self, path: str, query: dict[str, Any] | None = None) -> Reply:
        return self._call("GET", path, params=query)

    def post(self, path: str, fields: dict[str, Any], *, timeout_s: float | None = None) -> Reply:
        return self._call("POST", path, body=json.dumps(fields).encode(), timeout_s=timeout_s)

    def _call(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        params: dict[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> Reply:
        """The server's answer, whatever its status.

        A call is repeated when no connection was made, when the server answers 503 with Retry-After, and after a broken
        connection if the server knows request ids. Raises `EnvUnreachable`, `EnvTimeout`, `EnvServerError` (503 until
        the end), `EnvProtocolError` (no JSON).
        """
        what = f"{method} {self.base_url}/{path}"
        allowed_s = self.timeout_s if timeout_s is None else timeout_s
        end = time.monotonic() + allowed_s
        headers = {"Content-Type": "application/json", "X-Request-Id": next(self._request_ids)}
        failures = 0
        while True:
            left_s = max(end - time.monotonic(), 0.001)
            try:
                response = self._session.request(
                    method, f"{self.base_url}/{path}", data=body, params=params, headers=headers, timeout=left_s
                )
            except requests.Timeout as error:
                if isinstance(error, requests.ConnectTimeout):
                    raise EnvUnreachable(f"{what}: no connection within {allowed_s:g} s") from error
                raise EnvTimeout(f"{what}: no answer within {allowed_s:g} s") from error
            except requests.ConnectionError as error:
                failures += 1
                wait_s = min(_FIRST_BACKOFF_S * 2 ** (failures - 1), _MAX_BACKOFF_S)
                may_repeat = self._repeatable or _never_sent(error)
                if not may_repeat or failures > self._max_retries or time.monotonic() + wait_s >= end:
                    raise EnvUnreachable(f"{what}: {_cause(error)} (tries: {failures})") from error
            except requests.RequestException as error:
                raise EnvUnreachable(f"{what}: {error}") from error
            else:
                self._repeatable |= response.headers.get("X-Request-Id") == headers["X-Request-Id"]
                wait_s = _retry_after_s(response)
                if wait_s is None:
                    return _reply(what, response)
                if time.monotonic() + wait_s >= end:
                    raise EnvServerError(f"{what}: HTTP 503 for {allowed_s:g} s: {_shown(response)}")
            time.sleep(wait_s)


def _session_for(base_url: str) -> requests.Session:
    """A session with one connection. Proxies of the environment are read once (a loopback server has none), because
    reading them with every call takes longer than the call."""
    session = requests.Session()
    address = urlsplit(base_url)
    if address.scheme == "http":
        session.trust_env = False
        if address.hostname not in ("127.0.0.1", "localhost", "::1"):
            session.proxies.update(get_environ_proxies(base_url))
    session.mount(f"{address.scheme}://", HTTPAdapter(pool_connections=1, pool_maxsize=1))
    return session


def _never_sent(error: requests.ConnectionError) -> bool:
    """True when no connection was made at all, so that the server cannot have seen the call."""
    inner = error.args[0] if error.args else None
    return isinstance(inner, MaxRetryError) and isinstance(inner.reason, NewConnectionError)


def _cause(error: requests.ConnectionError) -> str:
    return "connection refused" if _never_sent(error) else f"the connection broke ({error})"


def _retry_after_s(response: requests.Response) -> float | None:
    """Seconds after which to repeat a call that the server turned away unseen; None for any other answer."""
    if response.status_code != 503:
        return None
    value = response.headers.get("Retry-After", "")
    return float(value) if value.isascii() and value.isdigit() else None


def _reply(what: str, response: requests.Response) -> Reply:
    try:
        return Reply(response.status_code, json.loads(response.content))
    except ValueError:
        if response.status_code == 200:
            raise EnvProtocolError(f"{what}: the answer is not JSON: {_shown(response)}") from None
        return Reply(response.status_code, response.content.decode(errors="replace"))


def _shown(response: requests.Response) -> str:
    return response.content[:_SHOWN].decode(errors="replace")
