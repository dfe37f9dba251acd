"""Is the right environment server there? Asked once, before anything expensive starts."""

from __future__ import annotations

import time
from urllib.parse import urlsplit

from agentgym_rl.client.connection import Connection, Reply
from agentgym_rl.envs.registry import known_tasks
from agentgym_rl.errors import ConfigError, EnvError, EnvProtocolError, EnvUnreachable

_POLL_S = 0.2
_ANSWER_S = 10.0


def check_server(env_addr: str, task: str, *, wait_s: float = 0.0) -> None:
    """Return when a server of ``task`` answers at ``env_addr``.

    ``wait_s``: seconds to wait for it to come up. Raises `EnvUnreachable`, in one line with the command that starts a
    server, and `ConfigError` when ``env_addr`` is no URL or serves another task.
    """
    address = urlsplit(env_addr)
    if address.scheme not in ("http", "https") or not address.hostname:
        raise ConfigError(f"agentgym.env_addr={env_addr!r}: must be a URL such as http://127.0.0.1:36001")
    connection = Connection(env_addr, timeout_s=_ANSWER_S, max_retries=0)
    try:
        _check_task(_first_answer(connection, task, wait_s), connection, env_addr, task)
    finally:
        connection.close()


def _first_answer(connection: Connection, task: str, wait_s: float) -> Reply:
    end = time.monotonic() + wait_s
    while True:
        try:
            return connection.get("health")
        except EnvError as error:
            if time.monotonic() >= end:
                raise EnvUnreachable(_how_to_start(connection.base_url, task, error)) from error
        time.sleep(_POLL_S)


def _how_to_start(url: str, task: str, error: EnvError) -> str:
    address = urlsplit(url)
    port = f" --port {address.port}" if address.port else ""
    return (
        f"no {task} server at {url}: {error}; start one with: agentgym-rl serve {task} --host {address.hostname}{port}"
    )


def _check_task(health: Reply, connection: Connection, env_addr: str, task: str) -> None:
    """A server of this project says its name in ``/health``; of any other, what ``/`` says is looked at."""
    if health.status == 200 and isinstance(health.content, dict) and "environment" in health.content:
        served = health.content["environment"]
        if served != task:
            raise ConfigError(f"agentgym.env_addr={env_addr}: serves {served!r}, this run is for {task!r}")
        return
    try:
        root = connection.get("")
    except EnvProtocolError:  # a server that greets in plain text is one all the same
        return
    if root.status >= 500:
        raise EnvUnreachable(f"agentgym.env_addr={env_addr}: answers HTTP {root.status}: {root.content!r}")
    greeting = str(root.content).lower()
    others = [name for name in known_tasks() if name in greeting and task not in greeting]
    if others:
        raise ConfigError(f"agentgym.env_addr={env_addr}: serves {others[0]!r}, this run is for {task!r}")
