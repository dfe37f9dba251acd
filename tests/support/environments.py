"""Environments that do as a test says, for the real server and the real client.

``build_app(scripted_spec(turns=3))`` serves one whose episode is done, with reward 1, at its third step. Faults are
named by item: ``fails_at={5: 2}`` makes item 5 raise (HTTP 500) from its second step on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from agentgym_rl.client.base import EnvClient
from agentgym_rl.envs.base import Environment, InvalidCall, ResetResult, StepResult
from agentgym_rl.envs.registry import EnvSpec


@dataclass(eq=False)
class Script:
    """What the environments of one server do, and what was done to them."""

    turns: int = 3
    """The step that ends an episode with reward 1."""
    rewards: tuple[float, ...] = ()
    """Rewards of the steps, instead of 0, ..., 0, 1."""
    fails_at: Mapping[int, int] = field(default_factory=dict)
    """Item -> the step (from 1; 0 is the reset) from which on it raises."""
    fails_times: int | None = None
    """After so many faults an item works; None means never."""
    hangs_at: Mapping[int, int] = field(default_factory=dict)
    """Item -> the step (0: reset) that does not return until `release` is set."""
    latency_s: Callable[[int, int], float] = lambda item, step: 0.0
    """Seconds that a step of an item takes."""
    observation: Callable[[int, int], str] = lambda item, step: f"item {item} step {step}"
    invalid_items: Collection[int] = ()
    """Items that do not exist."""
    hanging: threading.Event = field(default_factory=threading.Event)
    """Set once a step hangs."""
    release: threading.Event = field(default_factory=threading.Event)
    """Set it at the end of a test so that hanging steps return."""
    faults: int = 0
    executed: list[tuple[int, int, str]] = field(default_factory=list)
    """(item, step, action) of every step that ran."""
    open: int = 0
    """Environments that are not closed."""


class ScriptedEnvironment(Environment):
    def __init__(self, script: Script) -> None:
        self._script = script
        self._item, self._step, self._done = 0, 0, False
        self._observation = ""
        script.open += 1
        self._started = False

    def reset(self, data_idx: int) -> ResetResult:
        # Sessions are created at item 0; only what a client then resets follows the script.
        created, self._started = not self._started, True
        if data_idx in self._script.invalid_items and not created:
            raise InvalidCall(f"data_idx {data_idx} does not exist")
        self._item, self._step, self._done = data_idx, 0, False
        if not created:
            self._misbehave()
        self._observation = self._script.observation(data_idx, 0)
        return ResetResult(self._observation)

    def step(self, action: str) -> StepResult:
        if self._done:
            raise InvalidCall("the episode has finished")
        self._step += 1
        self._script.executed.append((self._item, self._step, action))
        self._misbehave()
        time.sleep(self._script.latency_s(self._item, self._step))
        self._done = self._step >= self._script.turns
        self._observation = self._script.observation(self._item, self._step)
        return StepResult(self._observation, self._reward(), self._done)

    def observation(self) -> str:
        return self._observation

    def close(self) -> None:
        self._script.open -= 1

    def _reward(self) -> float:
        if self._script.rewards:
            return self._script.rewards[self._step - 1]
        return 1 if self._done else 0

    def _misbehave(self) -> None:
        script = self._script
        if self._step >= script.fails_at.get(self._item, 10**9) and script.faults != script.fails_times:
            script.faults += 1
            raise RuntimeError(f"scripted fault of item {self._item} at step {self._step}")
        if self._step == script.hangs_at.get(self._item):
            script.hanging.set()
            script.release.wait(60)


class ScriptedClient(EnvClient):
    task = "scripted"
    task_description = "Do anything."
    action_forms = ("anything",)
    example_action = "go"


class CumulativeClient(ScriptedClient):
    """Reads the rewards of the steps as the score so far."""

    reward_is_cumulative = True


def scripted_spec(script: Script | None = None, *, cumulative: bool = False, **behaviour: Any) -> EnvSpec:
    """A spec named ``scripted``; ``behaviour`` are fields of `Script`."""
    chosen = replace(Script(), **behaviour) if script is None else script
    return EnvSpec(
        name="scripted",
        title="Scripted",
        environment=lambda: ScriptedEnvironment(chosen),
        client=CumulativeClient if cumulative else ScriptedClient,
        num_items=1000,
        default_port=0,
        data_version=lambda: "none",
    )
