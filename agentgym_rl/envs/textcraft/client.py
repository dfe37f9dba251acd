"""The agent's side of TextCraft."""

from __future__ import annotations

from agentgym_rl.client.base import EnvClient


class TextCraftClient(EnvClient):
    """Reward 1 for the step that crafts the goal, else 0."""

    task = "textcraft"
    task_description = (
        "Craft the goal item. Crafting commands are listed; some are of no use. Actions:\n"
        "get <n> <item>: take items that no command crafts\n"
        "craft <n> <item> using <n> <item>, ...: use one listed command exactly; for a group such as planks name one "
        "item of it\n"
        "inventory: see what you have"
    )
    action_forms = ("get <n> <item>", "craft <n> <item> using <n> <item>, ...", "inventory")
    example_action = "inventory"
