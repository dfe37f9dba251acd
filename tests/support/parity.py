"""An environment that pays even a random model now and then: 1 when its last text has an even number of characters."""

from __future__ import annotations

from dataclasses import replace

from support.environments import Script, ScriptedClient, ScriptedEnvironment, scripted_spec

from agentgym_rl.envs.base import StepResult
from agentgym_rl.envs.registry import EnvSpec
from agentgym_rl.types import StepOutput

TASK = "parity"


class ParityEnvironment(ScriptedEnvironment):
    def step(self, action: str) -> StepResult:
        result = super().step(action)
        return replace(result, reward=float(len(action) % 2 == 0) if result.done else 0.0)


class ParityClient(ScriptedClient):
    """Sends the whole text, so that everything a model writes is an action."""

    task = TASK

    def step(self, text: str) -> StepOutput:
        self._step += 1
        return self._execute(text)


class IndifferentEnvironment(ScriptedEnvironment):
    """Pays nothing for anything."""

    def step(self, action: str) -> StepResult:
        return replace(super().step(action), reward=0.0)


def parity_spec(script: Script, *, is_indifferent: bool = False) -> EnvSpec:
    """Register it to make the task known; with ``is_indifferent`` there is nothing to learn."""
    environment = IndifferentEnvironment if is_indifferent else ParityEnvironment
    return replace(scripted_spec(script), name=TASK, environment=lambda: environment(script), client=ParityClient)
