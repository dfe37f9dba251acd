"""How the agent is told to answer."""

from __future__ import annotations

import pytest

from agentgym_rl.agent.actions import parse_action
from agentgym_rl.agent.strategies import Strategy, conversation_start, format_action
from agentgym_rl.errors import ConfigError
from agentgym_rl.types import Role


class Client:
    task_description = "Craft the goal.\n"


@pytest.mark.parametrize("strategy", Strategy)
def test_a_conversation_opens_with_the_description_and_the_form_of_an_answer(strategy):
    instruction, acknowledgement = conversation_start(Client(), strategy)
    assert (instruction.role, acknowledgement.role) == (Role.USER, Role.ASSISTANT)
    assert instruction.content.startswith("Craft the goal.\n")
    assert "Action:" in instruction.content
    assert ("Thought:" in instruction.content) == (strategy == Strategy.REACT)
    assert conversation_start("Craft the goal.", str(strategy)) == (instruction, acknowledgement)


def test_an_experts_answer_is_read_back_as_its_action():
    assert format_action("get 1 oak log", "I need a log.", "react") == "Thought: I need a log.\nAction: get 1 oak log"
    assert format_action("get 1 oak log", "I need a log.", "act") == "Action: get 1 oak log"
    assert format_action("inventory", "", "react") == "Action: inventory"
    for strategy in Strategy:
        assert parse_action(format_action("get 1 oak log", "I need a log.", strategy)) == "get 1 oak log"


def test_an_unknown_strategy_lists_the_known_ones():
    with pytest.raises(ConfigError, match="'plan': must be one of react, act"):
        conversation_start(Client(), "plan")
