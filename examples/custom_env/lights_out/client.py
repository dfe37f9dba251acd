"""The agent's side: what it is told before the first observation."""

from __future__ import annotations

from agentgym_rl.client.base import EnvClient


class LightsClient(EnvClient):
    task = "lights"
    task_description = (
        "Nine lamps stand in columns A to C and rows 1 to 3; * is lit, . is dark. Pressing a lamp switches it and "
        "those above, below, left and right of it. Make all lamps dark within 12 presses. Action:\n"
        "press <lamp>: for example press B2"
    )
    action_forms = ("press <lamp>",)
    example_action = "press B2"
