"""Runs an ASGI application on a socket of this process with uvicorn."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from agentgym_rl.errors import AgentGymError, ConfigError

_IDLE_CONNECTION_S = 3600
"""Clients keep connections while a model thinks or trains; closing them early would only cost reconnects."""
_START_S = 60.0
_GRACE_S = 1
"""Seconds that calls in flight get at the end."""


def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A bound TCP socket; ``port`` 0 takes a free one. Raises `ConfigError` when the address cannot be had.

    ``shared``: further sockets of this user may listen on the same address.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's delay (40 ms per answer) off only on sockets that say they are TCP.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    return listener


def url_of(listener: socket.socket) -> str:
    """The address that a client on this machine uses."""
    host, port = listener.getsockname()[:2]
    local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{local}]:{port}" if ":" in local else f"http://{local}:{port}"


def set_up_logging(level: str) -> None:
    """Log to stderr: faults from ``warning`` on, one line per request from ``info`` on."""
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")


class _JoinedWrites:
    """A transport that sends what is written in one turn of the event loop at once.

    uvicorn writes the head and the body of an answer apart. Joined they cost one system call less here and one less in
    the client, which is a third of the time of a call to a cheap environment.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._pending: list[bytes] = []

    def write(self, data: bytes) -> None:
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._flush)
        self._pending.append(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        pending, self._pending = self._pending, []
        if pending:
            self._transport.write(b"".join(pending))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


_HTTPProtocol: Any = AutoHTTPProtocol
"""httptools where it is installed, else h11."""


class _Protocol(_HTTPProtocol):
    def connection_made(self, transport: Any) -> None:
        super().connection_made(_JoinedWrites(transport))


class Server(uvicorn.Server):
    """A uvicorn server that says when it listens."""

    def __init__(self, app: Any, *, on_ready: Callable[[], None]) -> None:
        config = uvicorn.Config(
            app,
            http=_Protocol,
            access_log=False,
            log_level="warning",
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=_GRACE_S,
            timeout_keep_alive=_IDLE_CONNECTION_S,
            ws="none",
        )
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            self._on_ready()


@contextmanager
def running(app: Any, *, host: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    """The URL of ``app``, which runs in a thread of this process until the block ends."""
    listener = bind(host, port)
    ready = threading.Event()
    server = Server(app, on_ready=ready.set)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="server", daemon=True)
    thread.start()
    try:
        if not ready.wait(_START_S):
            raise AgentGymError(f"the server did not start within {_START_S:g} s")
        yield url_of(listener)
    finally:
        server.should_exit = True
        thread.join(_START_S)
        listener.close()
