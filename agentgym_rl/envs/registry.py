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
import re
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from agentgym_rl.client.base import EnvClient
from agentgym_rl.envs.base import Environment
from agentgym_rl.envs.wire import DIALECT_A, Wire
from agentgym_rl.errors import AgentGymError, ConfigError

ENTRY_POINT_GROUP = "agentgym_rl.envs"
_IMPORTERS = re.compile(rf"^<frozen |[/\\]importlib[/\\]|^{re.escape(__file__)}$")
"""Files whose lines are on the way to a module that is imported."""


@dataclass(frozen=True)
class Isolation:
    """How an environment that is heavy or may hang (a JVM, a browser) lives in child processes.

    A child that dies, or gives no answer in time and is killed, fails its own sessions only; a reset of such a session
    begins on a fresh child. In a child, all calls to one environment, its construction included, come from one thread.
    """

    sessions_per_child: int = 1
    """Environments that share a process, and what it holds at module level, such as a browser."""
    parallel: bool = False
    """True when each environment of a child has a thread of its own; False when one thread serves them in turn."""
    started_ahead: int = 1
    """Children without sessions that are kept ready, each with one environment constructed."""
    reuse: bool = False
    """True when the environment of a closed session serves the next one: `reset` must leave nothing over. Otherwise it
    is closed, and another one constructed in its child."""
    call_timeout_s: float = 120.0
    """A child that does not answer one call for so long, its wait for the thread included, is killed."""
    start_timeout_s: float = 120.0
    """The same for the start of a child and for ``/create``."""
    source: str = ""
    """``module:attribute`` of the spec, for the child to load; empty for the entry point of its name."""

    def __post_init__(self) -> None:
        for name, least in (("sessions_per_child", 1), ("started_ahead", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"Isolation.{name}={getattr(self, name)}: must be at least {least}")


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
    wire: Wire = DIALECT_A
    """How its calls look in JSON."""
    queries: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    """Further ``GET /<name>?id=`` calls: environment -> JSON answer. A name that the server has itself (``detail``) is
    replaced."""
    commands: Mapping[str, Callable[[Any, Mapping[str, Any]], Any]] = field(default_factory=dict)
    """Further ``POST /<name>`` calls: (environment, fields of the body) -> JSON answer. They take no step."""
    step_views: Mapping[str, Callable[[Any, Any], Any]] = field(default_factory=dict)
    """Further ``POST /<name>`` calls that take a step: (environment, what its `step` returned) -> JSON answer."""
    isolation: Isolation | None = None
    """How it lives in child processes; None when it lives in the server's own."""
    settings: Any = None
    """A frozen dataclass instance of what may be chosen when it is served: each field is an option of
    ``agentgym-rl serve <task>`` (``max_answers`` is ``--max-answers``; ``metadata={"help": ...}`` explains it)."""
    configure: Callable[[Any], EnvSpec] | None = None
    """Settings -> the spec that obeys them; its `settings` are these."""
    expert: Callable[[Any], list[str]] | None = None
    """Actions that reach the goal of a freshly reset environment; None where nobody can say."""
    is_endless: bool = False
    """True when `Environment.reset` takes every ``data_idx`` from 0 on, and `num_items` is only how many there are to
    sample from. Otherwise item lists with others are refused before a run."""
    expert_success: float = 1.0
    """The least share of items that the expert solves, for ``agentgym-rl check``; below 1 where some cannot be."""
    panel: str = ""
    """``module:function`` of what the viewer shows beside an episode's turns, see `agentgym_rl.viewer.panel`; empty for
    nothing. The viewer alone loads it."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` for what would otherwise fail in the middle of a run."""
        missing = [name for name in ("task", "task_description", "example_action") if not hasattr(self.client, name)]
        if missing:
            raise ConfigError(f"environment {self.name!r}: {self.client.__name__} lacks {', '.join(missing)}")
        if self.client.task != self.name:
            raise ConfigError(f"environment {self.name!r}: {self.client.__name__}.task is {self.client.task!r}")
        if self.num_items < 1:
            raise ConfigError(f"environment {self.name!r}: num_items={self.num_items}, must be at least 1")
        if not 0 <= self.expert_success <= 1:
            raise ConfigError(f"environment {self.name!r}: expert_success={self.expert_success}, must be in 0..1")
        if (self.settings is None) != (self.configure is None):
            raise ConfigError(f"environment {self.name!r}: settings and configure go together")
        if self.isolation is not None and self.runs_inline:
            raise ConfigError(f"environment {self.name!r}: runs_inline and isolation exclude each other")

    def with_settings(self, settings: Any) -> EnvSpec:
        """The spec under other settings; raises `ConfigError` when they are not of its kind."""
        if self.configure is None or type(settings) is not type(self.settings):
            raise ConfigError(f"environment {self.name!r}: has no settings of type {type(settings).__name__}")
        spec = self.configure(settings)
        if spec.settings != settings:
            raise ConfigError(f"environment {self.name!r}: configure lost its settings {settings!r}")
        return spec

    def most_items(self, served: int | None = None) -> int | None:
        """How many items a run may name; None where that is not known, or has no bound.

        ``served``: what the run's server says. Without it, an environment with settings may have any number.
        """
        if self.is_endless or (served is None and self.settings is not None):
            return None
        return self.num_items if served is None else served

    @property
    def max_score(self) -> float:
        """The highest score of an episode."""
        return self.client.max_score

    @property
    def success_score(self) -> float:
        """The least score that counts as success."""
        return self.client.succeeds_from()

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
    return load_spec(point, task_name)


def load_spec(point: EntryPoint, task_name: str) -> EnvSpec:
    """The `EnvSpec` of an entry point; raises `ConfigError` when it is none of ``task_name``."""
    try:
        spec = point.load()
    except AgentGymError:
        raise
    except Exception as error:  # a module's own code runs here
        where = f"entry point {point.value!r} of environment {task_name!r}"
        raise ConfigError(f"{where} does not load: {_import_error(error)}") from error
    if not isinstance(spec, EnvSpec):
        raise ConfigError(f"entry point {point.value!r} of environment {task_name!r} is {spec!r}, must be an EnvSpec")
    if spec.name != task_name:
        raise ConfigError(f"entry point {point.value!r} of environment {task_name!r} is the EnvSpec of {spec.name!r}")
    return spec


def _import_error(error: Exception) -> str:
    """What went wrong, with the file and line of the package where it did."""
    if isinstance(error, SyntaxError):
        return f"{error.msg} ({error.filename}, line {error.lineno})"
    kind = "" if isinstance(error, ImportError | AttributeError) else f"{type(error).__name__}: "
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _IMPORTERS.search(frame.filename)]
    return f"{kind}{error}" + (f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else "")


def known_tasks() -> list[str]:
    """Names of all registered environments."""
    return sorted(_entry_points().keys() | _registered.keys())


@functools.cache
def _entry_points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
