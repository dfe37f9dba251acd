"""What an environment is: rules in plain Python, without HTTP, sessions or models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass


class InvalidCall(Exception):
    """The caller asked for what the environment does not offer: an index outside the data, a step after the end.

    The server reports it to the caller; it is no fault of the environment, and no reward.
    """


@dataclass(frozen=True, slots=True)
class ResetResult:
    """The start of an episode; a subclass adds what the environment's wire form needs beyond it."""

    observation: str


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one action did; a subclass adds what the environment's wire form needs beyond it."""

    observation: str
    reward: float
    """As the environment's wire table defines it; an int stays an int on the wire."""
    done: bool


class Environment(ABC):
    """One episode at a time, started by `reset`; used by one thread at a time, but (unless its spec asks for child
    processes) not always by the same one.

    `reset` is called before anything else: by ``/create`` for item 0 where the environment's wire form answers that
    with an observation. Later it is reset to one item after another, also in the middle of an episode or after a fault.
    Anything but `InvalidCall` that a method raises is a fault of the environment: the server answers HTTP 500.
    """

    @abstractmethod
    def reset(self, data_idx: int) -> ResetResult:
        """Begin the episode of task instance ``data_idx``; raises `InvalidCall` when there is none."""

    @abstractmethod
    def step(self, action: str) -> StepResult:
        """Execute one action; raises `InvalidCall` once the episode is done. What it does not understand, it says so
        in the observation."""

    @abstractmethod
    def observation(self) -> str:
        """The observation that the last `reset` or `step` returned."""

    def available_actions(self) -> list[str]:
        """Actions that make sense now; empty when the environment cannot tell."""
        return []

    def render(self) -> str:
        """The state for a human reader: text, or an image as ``data:image/png;base64,...``."""
        return self.observation()

    def close(self) -> None:  # noqa: B027 - most environments hold nothing outside Python
        """Free what the environment holds outside Python; it is not used afterwards."""
