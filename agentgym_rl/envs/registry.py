"""Task name -> environment, its client and what the rest of the system must know of it.

An environment of another package is found through the entry-point group ``agentgym_rl.envs``: the name is the task, the
object an `EnvSpec`.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from agentgym_rl.client.base import EnvClient
from agentgym_rl.envs.base import Environment
from agentgym_rl.errors import ConfigError

ENTRY_POINT_GROUP = "agentgym_rl.envs"


@dataclass(frozen=True)
class EnvSpec:
    """One environment, from the rules to the client."""

    name: str
    """The task name in configurations and item ids."""
    title: str
    """The name for human readers."""
    environment: Callable[[], Environment]
    """Makes the environment of one session."""
    client: type[EnvClient]
    num_items: int
    """Task instances: ``data_idx`` 0 .. num_items - 1."""
    default_port: int
    data_version: Callable[[], str]
    """Package and version of the data; raises `ConfigError` when it is not installed."""
    runs_inline: bool = False
    """True when every call takes microseconds, so that the server needs no threads for it."""
    queries: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    """Further ``GET /<name>?id=`` calls, each a question to the session's environment."""

    @property
    def max_score(self) -> float:
        """The score that counts as success."""
        return self.client.max_score

    @property
    def reward_is_cumulative(self) -> bool:
        """True when a step reports the score so far instead of its own reward."""
        return self.client.reward_is_cumulative


def get_spec(task_name: str) -> EnvSpec:
    """The environment registered under ``task_name``; raises `ConfigError` that lists the known ones."""
    known = _entry_points()
    if task_name not in known:
        nearest = difflib.get_close_matches(task_name, known, n=1)
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
        raise ConfigError(f"agentgym.task_name={task_name!r}: known environments are {', '.join(sorted(known))}{hint}")
    spec = known[task_name].load()
    if not isinstance(spec, EnvSpec):
        raise ConfigError(f"entry point {known[task_name].value!r} of {task_name!r} is no EnvSpec but {spec!r}")
    return spec


def known_tasks() -> list[str]:
    """Names of all registered environments."""
    return sorted(_entry_points())


@functools.cache
def _entry_points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
