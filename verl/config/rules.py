"""What the rules of all branches are made of: each raises `ConfigError` that names key, value and what is allowed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from agentgym_rl.errors import ConfigError


def one_of(key: str, value: Any, allowed: Iterable[Any]) -> None:
    allowed = tuple(allowed)
    if value not in allowed:
        raise ConfigError(f"{key}={value!r}: must be one of {', '.join(map(str, allowed))}")


def at_least(key: str, value: float, minimum: float) -> None:
    if not value >= minimum:  # as NaN is not
        raise ConfigError(f"{key}={value!r}: must be at least {minimum}")


def above(key: str, value: float, minimum: float) -> None:
    if not value > minimum:
        raise ConfigError(f"{key}={value!r}: must be above {minimum}")


def names_of(key: str, value: Any) -> tuple[str, ...]:
    """One name, or a list of different ones."""
    names = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list | tuple) else ()
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ConfigError(f"{key}={value!r}: must be a name, or a list of names")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"{key}={list(names)!r}: {twice} stands twice")
    return names


def check_sampling(branch: str, temperature: float, top_p: float, top_k: int) -> None:
    at_least(f"{branch}.temperature", temperature, 0)
    if not 0 < top_p <= 1:
        raise ConfigError(f"{branch}.top_p={top_p!r}: must be in (0, 1]")
    if top_k < 1 and top_k != -1:
        raise ConfigError(f"{branch}.top_k={top_k!r}: must be at least 1, or -1 for no cut")
