"""TextCraft: crafting Minecraft items. See `environment` for the rules."""

from __future__ import annotations

from importlib.metadata import version

from agentgym_rl.envs.registry import EnvSpec
from agentgym_rl.envs.textcraft.client import TextCraftClient
from agentgym_rl.envs.textcraft.environment import TextCraft, recipe_book
from agentgym_rl.envs.textcraft.planner import plan

NUM_GOALS = 544


def _data_version() -> str:
    recipe_book()
    return f"textcraft {version('textcraft')}"


SPEC = EnvSpec(
    name="textcraft",
    title="TextCraft",
    environment=TextCraft,
    client=TextCraftClient,
    num_items=NUM_GOALS,
    is_endless=True,
    default_port=36001,
    data_version=_data_version,
    runs_inline=True,
    panel="agentgym_rl.envs.textcraft.panel:panel",
    expert=lambda environment: plan(environment.goal),
    queries={
        "goal": lambda environment: environment.goal,
        "commands": lambda environment: "\n".join(environment.commands),
    },
)
