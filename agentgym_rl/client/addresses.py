"""Where the environment servers of a run are: one URL or several, as a user writes them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from agentgym_rl.errors import ConfigError

TOKEN_VARIABLE = "AGENTGYM_TOKEN"
"""Environment variable with the token of servers that want one."""
_FORM = "must be a URL such as http://127.0.0.1:36001, or several in a list or with commas between"


def environment_token(variable: str = TOKEN_VARIABLE) -> str | None:
    """The token that servers ask for, from the environment, if there is one. Raises as `checked_token`."""
    return checked_token(os.environ.get(variable, ""), variable) or None


def checked_token(token: str, name: str) -> str:
    """``token`` without blanks around it, as a header can carry it; raises `ConfigError`, which does not repeat it."""
    token = token.strip()
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(f"{name}: must be printable ASCII without spaces")
    return token


def parse_addresses(env_addr: Any) -> tuple[str, ...]:
    """Base URLs without a slash at their end, from one URL, a list of them, or URLs with commas between.

    Raises `ConfigError` when there is none, one is no URL, or one stands twice.
    """
    given = env_addr.split(",") if isinstance(env_addr, str) else env_addr
    if not isinstance(given, Sequence) or not given:
        raise ConfigError(f"agentgym.env_addr={env_addr!r}: {_FORM}")
    addresses = tuple(_one_address(address) for address in given)
    twice = next((address for address in addresses if addresses.count(address) > 1), None)
    if twice is not None:
        raise ConfigError(f"agentgym.env_addr: {twice} stands twice; each server must be named once")
    return addresses


def addresses_by_task(tasks: Sequence[str], env_addr: Any, *, is_list: bool) -> dict[str, tuple[str, ...]]:
    """Addresses of each task's servers: of one task as `parse_addresses`, of a list of tasks an entry for each in turn.

    Raises `ConfigError` as `parse_addresses`, or when entries are missing or over.
    """
    if not is_list:
        return {tasks[0]: parse_addresses(env_addr)}
    entries = env_addr.split(",") if isinstance(env_addr, str) else env_addr
    if not isinstance(entries, Sequence) or len(entries) != len(tasks):
        raise ConfigError(
            f"agentgym.env_addr={env_addr!r}: must be a list with an entry for each of the tasks {', '.join(tasks)}, "
            "each a URL or a list of URLs"
        )
    return {task: parse_addresses(entry) for task, entry in zip(tasks, entries, strict=True)}


def _one_address(address: Any) -> str:
    text = address.strip().rstrip("/") if isinstance(address, str) else ""
    try:
        parts = urlsplit(text)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, a bracket that is not closed
        is_url = False
    if not is_url or parts.query or parts.fragment or "@" in parts.netloc:
        raise ConfigError(f"agentgym.env_addr={address!r}: {_FORM}")
    return text
