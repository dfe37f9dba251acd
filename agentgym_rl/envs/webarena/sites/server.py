"""Serves the small sites on the loopback interface, each on a free port.

python -m agentgym_rl.envs.webarena.sites.server        to look at them in a browser of one's own
"""

from __future__ import annotations

import functools
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, urlsplit

from agentgym_rl.envs.webarena.sites.code import CODE
from agentgym_rl.envs.webarena.sites.data import Data, first_data
from agentgym_rl.envs.webarena.sites.forum import FORUM
from agentgym_rl.envs.webarena.sites.pages import Answer, Request, Site, not_found
from agentgym_rl.envs.webarena.sites.shop import ADMIN, SHOP

SITES = (SHOP, ADMIN, FORUM, CODE)
_HOST = "127.0.0.1"
_VISITOR = "visitor"
"""The cookie that tells visitors apart. All sites are on one host, and ports do not part cookies."""
_MAX_VISITORS = 1000
"""Whoever came longest ago begins again."""
_MAX_FORM = 100_000


def _user_cookie(site: Site) -> str:
    return f"{site.name.lower()}_user"


class SmallSites:
    """The running sites and each visitor's data."""

    def __init__(self) -> None:
        self._visitors: OrderedDict[str, tuple[Data, threading.Lock]] = OrderedDict()
        self._lock = threading.Lock()
        self._servers = [self._start(site) for site in SITES]
        self.addresses: Mapping[str, str] = {
            site.name: f"http://{_HOST}:{server.server_address[1]}{site.path}"
            for site, server in zip(SITES, self._servers, strict=True)
        }
        """Environment variable -> address."""

    def _start(self, site: Site) -> ThreadingHTTPServer:
        handler = type("Handler", (_Handler,), {"site": site, "sites": self})
        server = ThreadingHTTPServer((_HOST, 0), handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, name=f"webarena-{site.name.lower()}", daemon=True).start()
        return server

    def close(self) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def welcome(self) -> str:
        """A new visitor, with a fresh copy of the data."""
        visitor = secrets.token_hex(8)
        with self._lock:
            self._visitors[visitor] = (first_data(), threading.Lock())
            while len(self._visitors) > _MAX_VISITORS:
                self._visitors.popitem(last=False)
        return visitor

    def forget(self, visitor: str) -> None:
        with self._lock:
            self._visitors.pop(visitor, None)

    def cookies(self, visitor: str) -> list[dict[str, str]]:
        """What a browser must carry to be this visitor."""
        return [{"name": _VISITOR, "value": visitor, "domain": _HOST, "path": "/"}]

    def data_of(self, visitor: str) -> tuple[Data, threading.Lock] | None:
        with self._lock:
            return self._visitors.get(visitor)

    @property
    def num_visitors(self) -> int:
        return len(self._visitors)


class _Handler(BaseHTTPRequestHandler):
    """One connection; one request of a visitor is answered at a time."""

    site: Site
    sites: SmallSites
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "0")
        if not length.isdigit() or int(length) > _MAX_FORM:
            self.send_error(413)
            return
        self._answer(dict(parse_qsl(self.rfile.read(int(length)).decode(errors="replace"), keep_blank_values=True)))

    def log_message(self, format: str, *args: object) -> None:
        """Requests are the environment's business, which tells of them itself."""

    def _answer(self, form: Mapping[str, str]) -> None:
        cookies = self._read_cookies()
        visitor = cookies.get(_VISITOR, "")
        known = self.sites.data_of(visitor)
        if known is None:
            visitor = self.sites.welcome()
            known = self.sites.data_of(visitor)
        assert known is not None
        data, lock = known
        request = self._request(form, cookies)
        with lock:
            answer = self._page(data, request)
        self._send(answer, request, visitor)

    def _read_cookies(self) -> dict[str, str]:
        try:
            found = SimpleCookie(self.headers.get("Cookie", ""))
        except CookieError:
            return {}
        return {name: morsel.value for name, morsel in found.items()}

    def _request(self, form: Mapping[str, str], cookies: Mapping[str, str]) -> Request:
        parts = urlsplit(self.path)
        path = parts.path.removeprefix(self.site.path).rstrip("/") or "/"
        user = cookies.get(_user_cookie(self.site))
        user = user if user in self.site.passwords else None
        return Request(self.command, path, dict(parse_qsl(parts.query)), form, user)

    def _page(self, data: Data, request: Request) -> Answer:
        if not urlsplit(self.path).path.startswith(self.site.path):
            return not_found(self.path)
        return self.site.answer(data, request)

    def _send(self, answer: Answer, request: Request, visitor: str) -> None:
        body = b"" if answer.location else self.site.document(answer, request).encode()
        self.send_response(303 if answer.location else answer.status)
        if answer.location:
            self.send_header("Location", self.site.path + answer.location)
        if answer.log_in is not None:
            self.send_header("Set-Cookie", f"{_user_cookie(self.site)}={answer.log_in}; Path=/")
        self.send_header("Set-Cookie", f"{_VISITOR}={visitor}; Path=/")
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@functools.cache
def small_sites() -> SmallSites:
    """This process's sites, which run until it ends."""
    return SmallSites()


def main() -> None:
    """Serve them until the program is interrupted."""
    for name, address in small_sites().addresses.items():
        print(f"{name}={address}", flush=True)
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    main()
