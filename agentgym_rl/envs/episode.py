"""One session's environment with the calls that it answers: the same code in the server's process and in a child's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from agentgym_rl.envs.base import Environment, InvalidCall, ResetResult, StepResult
from agentgym_rl.envs.wire import read_integer, read_text

if TYPE_CHECKING:
    from agentgym_rl.envs.registry import EnvSpec

Fields = Mapping[str, Any]
_Call = Callable[["Episode", Fields], Any]
_SHOWN = 200
"""Characters that an error repeats of a wrong value."""


class Episode:
    """An environment under its handle, and where its episode stands."""

    __slots__ = ("_calls", "_done", "_reward", "_started", "environment", "handle")

    def __init__(self, environment: Environment, handle: int, calls: EpisodeCalls) -> None:
        self.environment = environment
        self.handle = handle
        self._calls = calls
        self._started = False
        self._reward: float = 0
        self._done = False

    def create(self, fields: Fields) -> Any:
        """The content that answers ``/create``; begins the first episode where the environment's wire says so."""
        return self._calls.create(self, fields)

    def call(self, name: str, fields: Fields) -> Any:
        """The content that answers the call ``/<name>``.

        Raises `InvalidCall` and `MalformedRequest`; whatever else it raises is a fault of the environment.
        """
        if not self._started and name != "reset":
            raise InvalidCall(f"session {self.handle} has begun no episode: reset it first")
        return self._calls.by_name[name](self, fields)

    def reset(self, data_idx: int) -> ResetResult:
        self._reward, self._done = 0, False
        start = self.environment.reset(data_idx)
        check_start(self.environment, start)
        self._started = True
        return start

    def step(self, action: str) -> StepResult:
        result = self.environment.step(action)
        check_step(self.environment, result)
        self._reward, self._done = result.reward, result.done
        return result

    def detail(self) -> dict[str, Any]:
        observation = self.environment.observation()
        return {"observation": observation, "done": self._done, "reward": self._reward, "deleted": False}


class EpisodeCalls:
    """The calls of one environment by name, as its spec declares them. One per process."""

    def __init__(self, spec: EnvSpec) -> None:
        self._wire = spec.wire
        self.by_name: dict[str, _Call] = {
            "reset": self._reset,
            "step": self._step,
            "observation": lambda episode, fields: episode.environment.observation(),
            "available_actions": lambda episode, fields: list(episode.environment.available_actions()),
            "render": lambda episode, fields: episode.environment.render(),
            "detail": lambda episode, fields: episode.detail(),
        }
        self.by_name |= {name: _question(question) for name, question in spec.queries.items()}
        self.by_name |= {name: _command(command) for name, command in spec.commands.items()}
        self.by_name |= {name: _step_view(view) for name, view in spec.step_views.items()}

    def create(self, episode: Episode, fields: Fields) -> Any:
        if not self._wire.starts_on_create:
            return self._wire.created(episode.handle, None)
        field = self._wire.create_index_field
        # Clients fill fields that they do not use with null.
        named = field is not None and fields.get(field) is not None
        data_idx = read_integer(fields, field) if named and field is not None else 0
        return self._wire.created(episode.handle, episode.reset(data_idx))

    def _reset(self, episode: Episode, fields: Fields) -> Any:
        data_idx = read_integer(fields, self._wire.index_field, default=0)
        return self._wire.was_reset(episode.handle, episode.reset(data_idx))

    def _step(self, episode: Episode, fields: Fields) -> Any:
        return self._wire.stepped(episode.step(read_text(fields, "action")))


def _question(question: Callable[[Any], Any]) -> _Call:
    return lambda episode, fields: question(episode.environment)


def _command(command: Callable[[Any, Fields], Any]) -> _Call:
    return lambda episode, fields: command(episode.environment, fields)


def _step_view(view: Callable[[Any, Any], Any]) -> _Call:
    return lambda episode, fields: view(episode.environment, episode.step(read_text(fields, "action")))


def check_start(environment: Environment, start: Any) -> None:
    """Raise TypeError when `Environment.reset` returned what it must not."""
    if not isinstance(start, ResetResult):
        raise TypeError(_contract(environment, "reset", "a ResetResult with a str observation", start))
    if not isinstance(start.observation, str):
        raise TypeError(_contract(environment, "reset", "a ResetResult with a str observation", start.observation))


def check_step(environment: Environment, result: Any) -> None:
    """Raise TypeError or ValueError when the environment broke its own contract: one such value would spoil a batch."""
    if not isinstance(result, StepResult):
        raise TypeError(_contract(environment, "step", "a StepResult(observation, reward, done)", result))
    if not isinstance(result.observation, str):
        raise TypeError(_contract(environment, "step", "a str observation", result.observation))
    if not isinstance(result.done, bool):
        raise TypeError(_contract(environment, "step", "a Python bool as done", result.done))
    reward = result.reward
    if type(reward) is int:
        return
    if isinstance(reward, bool) or not isinstance(reward, int | float):
        raise TypeError(_contract(environment, "step", "a Python int or float as reward", reward))
    if not math.isfinite(reward):
        raise ValueError(_contract(environment, "step", "a finite reward", reward))


def _contract(environment: Environment, method: str, expected: str, value: Any) -> str:
    shown = repr(value)
    shown = shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "..."
    return f"{type(environment).__name__}.{method} must return {expected}, not {shown}"
