"""The agent's side of SciWorld."""

from __future__ import annotations

from typing import Any

from agentgym_rl.client.base import EnvClient
from agentgym_rl.types import StepOutput


def opening(task_description: str, room: str) -> str:
    """The first observation of an episode: the task, then what is seen."""
    return f"{task_description}\n\n{room}"


class SciWorldClient(EnvClient):
    """The reward of a step is the score so far: 0..100, or -100 when the wrong thing was focused on."""

    task = "sciworld"
    task_description = (
        "Carry out an experiment in a house with several rooms and a garden. What you do has the effects that it would "
        "really have, some of them only after a while. Where the task says that you shall focus on something, do so "
        "only when you are sure: focusing on the wrong thing ends the experiment, and all is lost. There are at most "
        "100 moves. Actions, with OBJ for a thing or a place:\n"
        "open OBJ, close OBJ: doors and containers\n"
        "go to OBJ: a place behind an open door\n"
        "look around, look at OBJ, look in OBJ, read OBJ, inventory: see what is there and what you hold\n"
        "task, reset task: read the task again, start anew with its steps\n"
        "pick up OBJ, put down OBJ, move OBJ to OBJ, pour OBJ in OBJ, dunk OBJ in OBJ, mix OBJ\n"
        "activate OBJ, deactivate OBJ, use OBJ on OBJ: devices and tools, such as a thermometer on a thing\n"
        "connect OBJ to OBJ, disconnect OBJ: electrical parts; of a part name the terminal, such as anode in battery\n"
        "eat OBJ, flush OBJ\n"
        "focus on OBJ: say what the task asks for\n"
        "wait1, wait: let one step or ten of them pass\n"
        "When a request is called ambiguous, answer with the number of what you mean."
    )
    action_forms = (
        "activate OBJ",
        "close OBJ",
        "connect OBJ to OBJ",
        "deactivate OBJ",
        "disconnect OBJ",
        "dunk OBJ in OBJ",
        "eat OBJ",
        "flush OBJ",
        "focus on OBJ",
        "go to OBJ",
        "inventory",
        "look around",
        "look at OBJ",
        "look in OBJ",
        "mix OBJ",
        "move OBJ to OBJ",
        "open OBJ",
        "pick up OBJ",
        "pour OBJ in OBJ",
        "put down OBJ",
        "read OBJ",
        "reset task",
        "task",
        "use OBJ on OBJ",
        "wait",
        "wait1",
    )
    example_action = "look around"
    reward_is_cumulative = True
    max_score = 100.0
    reward_scale = 0.01

    def _read_reset(self, content: Any) -> str:
        return opening(self._text(content, "task_description", "reset"), self._text(content, "observation", "reset"))

    def _read_step(self, content: Any) -> StepOutput:
        return StepOutput(
            state=self._text(content, "observation", "step"),
            reward=self._number(content, "score", "step"),
            done=self._truth(content, "done", "step"),
        )
