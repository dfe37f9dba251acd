"""Runs an ASGI application on a socket of this process with uvicorn."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import uvicorn

from agentgym_rl.errors import ConfigError

_IDLE_CONNECTION_S = 3600
"""Clients keep connections while a model thinks or trains; closing them early would only cost reconnects."""
_GRACE_S = 1
"""Seconds that calls in flight get at the end."""


def bind(host: str, port: int) -> socket.socket:
    """A bound TCP socket; ``port`` 0 takes a free one. Raises `ConfigError` when the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's delay (40 ms per answer) off only on sockets that say they are TCP.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
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


class Server(uvicorn.Server):
    """A uvicorn server that says when it listens."""

    def __init__(self, app: Any, *, on_ready: Callable[[], None]) -> None:
        config = uvicorn.Config(
            app,
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
