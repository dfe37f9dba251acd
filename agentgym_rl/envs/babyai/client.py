"""The agent's side of BabyAI."""

from __future__ import annotations

from typing import Any

from agentgym_rl.client.base import EnvClient
from agentgym_rl.types import StepOutput


class BabyAIClient(EnvClient):
    """Reward is the score so far: 0 until the goal is reached, then 1 less up to 0.9 for the steps that it took."""

    task = "babyai"
    task_description = (
        "You are in a world of rooms, seen from where you stand. Reach the goal in few steps. After each action you "
        "are told what is in view and how far off, and what you can do. Things are counted from near to far: red ball "
        "1 is nearer than red ball 2. Actions:\n"
        "turn left; turn right; move forward\n"
        "go to <color> <type> <k>: walk until it is right ahead of you, e.g. go to blue box 1\n"
        "pickup <color> <type> <k>: walk there and take it; you carry one thing at a time\n"
        "drop: put what you carry right ahead of you\n"
        "toggle: open or close the door right ahead of you, with its key when it is locked; or open the box there\n"
        "go through <color> open door <k>\n"
        "toggle and go through <color> closed door <k>; or locked instead of closed, when you carry its key\n"
        "check available actions"
    )
    action_forms = (
        *("turn left", "turn right", "move forward", "go to <color> <type> <k>", "pickup <color> <type> <k>", "drop"),
        *("toggle", "go through <color> open door <k>", "toggle and go through <color> closed door <k>"),
        "check available actions",
    )
    example_action = "check available actions"
    reward_is_cumulative = True
    success_score = 0.1
    """Paid when the goal is reached in the very last step that is allowed; no other score lies between 0 and this."""

    def _read_step(self, content: Any) -> StepOutput:
        return StepOutput(
            state=self._text(content, "observation", "step"),
            reward=self._number(content, "score", "step"),
            done=self._truth(content, "done", "step"),
        )
