"""Are the right environment servers there? Asked once, before anything expensive starts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

from agentgym_rl.client.addresses import TOKEN_VARIABLE, parse_addresses
from agentgym_rl.client.connection import Connection, Reply
from agentgym_rl.envs.registry import known_tasks
from agentgym_rl.errors import AgentGymError, ConfigError, EnvError, EnvProtocolError, EnvUnreachable

_POLL_S = 0.2
_CONNECT_S = 3.0
_ANSWER_S = 10.0


def check_server(
    env_addr: str | Sequence[str], task: str, *, wait_s: float = 0.0, user: str = "this run"
) -> int | None:
    """Return when servers of ``task`` answer at every address of ``env_addr``: how many items all of them have, None
    where one does not say.

    ``wait_s``: seconds to wait for them to come up. ``user``: who wants the task, for messages.
    Raises `EnvUnreachable`, in one line with the command that starts a server, and `ConfigError` when an address is no
    URL, leads to another task or to no environment, or wants a token. With several servers all are asked side by side;
    the error is that of the first that is wrong and names the others.
    """
    addresses = parse_addresses(env_addr)
    with ThreadPoolExecutor(len(addresses)) as threads:
        answers = list(threads.map(lambda address: _look(address, task, wait_s, user), addresses))
    wrong = [(address, a) for address, a in zip(addresses, answers, strict=True) if isinstance(a, AgentGymError)]
    if not wrong:
        counts = [answer for answer in answers if isinstance(answer, int)]
        return min(counts) if len(counts) == len(addresses) else None
    error = wrong[0][1]
    if len(wrong) > 1:
        error = type(error)(f"{error} (also wrong: {', '.join(address for address, _ in wrong[1:])})")
    raise error


def _look(address: str, task: str, wait_s: float, user: str) -> int | AgentGymError | None:
    """How many items a server says it has, or what is wrong with it."""
    connection = Connection(address, timeout_s=_ANSWER_S, max_retries=0, connect_timeout_s=_CONNECT_S)
    try:
        health = _first_answer(connection, task, wait_s)
        _check_path(connection)
        _check_task(health, connection, task, user)
    except AgentGymError as error:
        return error
    finally:
        connection.close()
    items = health.content.get("items") if health is not None and isinstance(health.content, dict) else None
    return items if isinstance(items, int) else None


def _first_answer(connection: Connection, task: str, wait_s: float) -> Reply | None:
    """The answer to ``/health``; None for one that is no JSON."""
    end = time.monotonic() + wait_s
    while True:
        try:
            return connection.get("health")
        except EnvProtocolError:
            return None
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


def _check_path(connection: Connection) -> None:
    """Every environment server has ``/step``; it is looked for with calls that run nothing."""
    where = f"agentgym.env_addr={connection.base_url}"
    try:
        status = connection.get("step").status
        if status == 404:  # some servers say so too when only the method is wrong
            status = connection.post("step", {}).status
    except EnvProtocolError as error:
        raise ConfigError(f"{where}: no environment server answers there: {error}") from error
    except EnvError as error:
        raise EnvUnreachable(f"{where}: {error}") from error
    if status in (401, 403):
        raise ConfigError(f"{where}: HTTP {status}: the server wants its token in {TOKEN_VARIABLE}")
    if status == 404:
        raise ConfigError(f"{where}: {connection.base_url}/step is not found: is the path behind the host right?")


def _check_task(health: Reply | None, connection: Connection, task: str, user: str) -> None:
    """A server of this project says its name in ``/health``; of any other, what ``/`` says is looked at."""
    where = f"agentgym.env_addr={connection.base_url}"
    if health is not None and isinstance(health.content, dict) and "environment" in health.content:
        served = health.content["environment"]
        if served != task:
            raise ConfigError(f"{where}: serves {served!r}, {user} is for {task!r}")
        return
    try:
        root = connection.get("")
    except EnvProtocolError:  # a server that greets in plain text is one all the same
        return
    except EnvError as error:
        raise EnvUnreachable(f"{where}: {error}") from error
    if root.status >= 500:
        raise EnvUnreachable(f"{where}: answers HTTP {root.status}: {root.content!r}")
    greeting = str(root.content).lower()
    others = [name for name in known_tasks() if name in greeting and task not in greeting]
    if others:
        raise ConfigError(f"{where}: serves {others[0]!r}, {user} is for {task!r}")
