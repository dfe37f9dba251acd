"""Task name -> environment, its client and what the rest of the system must know of it.

An environment of another package is found through the entry-point group ``agentgym_rl.envs``: the name is the task, the
object an `EnvSpec`. In that package's ``pyproject.toml``::

    [project.entry-points."agentgym_rl.envs"]
    myworld = "myworld:SPEC"

Its environment is an `Environment`, its client an `EnvClient` that names task, description and an example action; then
``agentgym-rl serve myworld`` serves it, and ``actor_rollout_ref.agentgym.task_name=myworld`` trains on it.
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
    """Makes the environment of one session; called from several threads at once unless `runs_inline`."""
    client: type[EnvClient]
    num_items: int
    """Task instances: ``data_idx`` 0 .. num_items - 1."""
    default_port: int
    data_version: Callable[[], str]
    """Package and version of the data; raises `ConfigError` when it is not installed."""
    runs_inline: bool = False
    """True when every call takes microseconds, so that the server needs no threads for it. A slow call would hold up
    every session of the server."""
    queries: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    """Further ``GET /<name>?id=`` calls, each a question to the session's environment that has a JSON answer."""
    expert: Callable[[Any], list[str]] | None = None
    """Actions that reach the goal of a freshly reset environment; None where nobody can say."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` for what would otherwise fail in the middle of a run."""
        missing = [name for name in ("task", "task_description", "example_action") if not hasattr(self.client, name)]
        if missing:
            raise ConfigError(f"environment {self.name!r}: {self.client.__name__} lacks {', '.join(missing)}")
        if self.client.task != self.name:
            raise ConfigError(f"environment {self.name!r}: {self.client.__name__}.task is {self.client.task!r}")
        if self.num_items < 1:
            raise ConfigError(f"environment {self.name!r}: num_items={self.num_items}, must be at least 1")

    @property
    def max_score(self) -> float:
        """The score that counts as success."""
        return self.client.max_score

    @property
    def reward_is_cumulative(self) -> bool:
        """True when a step reports the score so far instead of its own reward."""
        return self.client.reward_is_cumulative


_registered: dict[str, EnvSpec] = {}


def register(spec: EnvSpec) -> None:
    """Make an environment known to this process; a package that other processes shall find needs an entry point."""
    _registered[spec.name] = spec


def get_spec(task_name: str) -> EnvSpec:
    """The environment registered under ``task_name``; raises `ConfigError` that lists the known ones."""
    if task_name in _registered:
        return _registered[task_name]
    point = _entry_points().get(task_name)
    if point is None:
        nearest = difflib.get_close_matches(task_name, known_tasks(), n=1)
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
        raise ConfigError(f"agentgym.task_name={task_name!r}: known environments are {', '.join(known_tasks())}{hint}")
    try:
        spec = point.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"entry point {point.value!r} of environment {task_name!r} does not load: {error}") from error
    if not isinstance(spec, EnvSpec):
        raise ConfigError(f"entry point {point.value!r} of environment {task_name!r} is {spec!r}, must be an EnvSpec")
    if spec.name != task_name:
        raise ConfigError(f"entry point {point.value!r} of environment {task_name!r} is the EnvSpec of {spec.name!r}")
    return spec


def known_tasks() -> list[str]:
    """Names of all registered environments."""
    return sorted(_entry_points().keys() | _registered.keys())


@functools.cache
def _entry_points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
