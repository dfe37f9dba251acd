"""What keeps the viewer to its user: host check, token, same-origin writes, and headers that let no foreign text act.

Observations and model texts are untrusted. The page builds its DOM from text nodes alone, and the headers here forbid
the browser what a mistake in that would open: no inline script or style, no HTML sinks (Trusted Types), no request to
another origin, no framing.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders, QueryParams
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data: blob:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
_READING = ("GET", "HEAD")


@dataclass(frozen=True)
class Access:
    """Who may ask."""

    token: str = ""
    """What requests carry as ``Authorization: Bearer``, or as the cookie that ``/?token=`` sets; empty: nothing."""
    host_names: frozenset[str] = frozenset()
    """Names, beside those of this machine and addresses, that may stand in the Host header."""

    def allows_host(self, header: str) -> bool:
        """False for a name that is not ours: a page of another site whose name was pointed here (DNS rebinding)."""
        try:
            name = urlsplit(f"//{header}").hostname or ""
        except ValueError:
            return False
        return name in _own_names() | self.host_names or _is_address(name)

    def allows_token(self, headers: Headers, cookie_name: str) -> bool:
        if not self.token:
            return True
        scheme, _, sent = headers.get("authorization", "").partition(" ")
        offered = (sent if scheme.lower() == "bearer" else "", _cookie(headers, cookie_name))
        return any(self.is_token(value) for value in offered)

    def is_token(self, value: str) -> bool:
        return hmac.compare_digest(value.encode(), self.token.encode())


class Guard:
    """ASGI middleware that turns away what `Access` forbids and puts the headers on every answer."""

    def __init__(self, app: ASGIApp, *, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        refusal = self._refusal(scope)
        await (refusal or self._app)(scope, receive, send_guarded)

    def _refusal(self, scope: Scope) -> Response | None:
        """What is answered instead; None when the request may pass."""
        headers = Headers(scope=scope)
        if not self._access.allows_host(headers.get("host", "")):
            return PlainTextResponse("This name is not one of this machine; open the address that was printed.", 421)
        cookie_name = _cookie_name(scope)
        offered = QueryParams(scope["query_string"].decode("latin-1")).get("token")
        if self._access.token and scope["path"] == "/" and offered is not None and self._access.is_token(offered):
            answer = RedirectResponse("/", 303)
            answer.set_cookie(cookie_name, offered, httponly=True, samesite="strict")
            return answer
        if not self._access.allows_token(headers, cookie_name):
            return PlainTextResponse("Needs the token: open the address that was printed, with ?token=...", 401)
        if scope["method"] not in _READING and not _is_same_origin(headers):
            return PlainTextResponse("A page of another site may not ask for this.", 403)
        return None


def _is_same_origin(headers: Headers) -> bool:
    """False for what a browser sends on behalf of another site; programs that are no browser send no Origin."""
    origin = headers.get("origin")
    try:
        return origin is None or urlsplit(origin).netloc == headers.get("host")
    except ValueError:
        return False


def _cookie_name(scope: Scope) -> str:
    """Cookies are shared between the ports of a machine, so the name tells them apart."""
    server = scope.get("server") or ("", 0)
    return f"agentgym_viewer_{server[1]}"


def _cookie(headers: Headers, name: str) -> str:
    try:
        cookies = SimpleCookie(headers.get("cookie", ""))
    except CookieError:
        return ""
    return cookies[name].value if name in cookies else ""


def _own_names() -> frozenset[str]:
    return frozenset({"localhost", socket.gethostname().lower()})


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def host_names(names: Iterable[str]) -> frozenset[str]:
    return frozenset(name.lower() for name in names if name)
