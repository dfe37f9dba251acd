"""Expert episodes as conversations."""

from __future__ import annotations

import dataclasses
import json

import pytest
from support.environments import Script
from support.parity import parity_spec

from agentgym_rl.agent.actions import parse_action
from agentgym_rl.cli import main
from agentgym_rl.data.conversations import read_conversations
from agentgym_rl.data.demonstrations import demonstrate
from agentgym_rl.envs.registry import get_spec, register
from agentgym_rl.envs.textcraft.environment import TextCraft
from agentgym_rl.errors import ConfigError, EnvError
from agentgym_rl.types import Item, Role

ITEMS = [Item("textcraft", index) for index in (3, 200, 500)]


def test_the_actions_of_a_demonstration_reach_the_goal_they_stand_for():
    for item, conversation in zip(ITEMS, demonstrate(ITEMS, get_spec("textcraft"), "act"), strict=True):
        environment = TextCraft()
        observations = [environment.reset(item.index).observation]
        answers = [m.content for m in conversation.messages[2:] if m.role == Role.ASSISTANT]
        for answer in answers:
            result = environment.step(parse_action(answer))
            observations.append(result.observation)
        assert (conversation.item_id, result.reward, result.done) == (item.item_id, 1, True)
        assert [m.content for m in conversation.messages[2:] if m.role == Role.USER] == observations[:-1]


def test_only_the_experts_turns_are_trained_on():
    conversation = demonstrate(ITEMS[:1], get_spec("textcraft"), "react")[0]
    assert [m.role for m in conversation.messages[:3]] == [Role.USER, Role.ASSISTANT, Role.USER]
    assert conversation.train_flags[:3] == (None, False, None)
    assert set(conversation.train_flags[3::2]) == {True}
    assert conversation.messages[-1].role == Role.ASSISTANT


def test_actions_that_an_expert_names_beyond_the_end_are_left_out():
    spec = get_spec("textcraft")
    talkative = dataclasses.replace(spec, expert=lambda environment: [*spec.expert(environment), "inventory"])
    assert demonstrate(ITEMS, talkative, "act") == demonstrate(ITEMS, spec, "act")


def test_an_environment_without_expert_is_refused_and_a_failing_one_named():
    spec = get_spec("textcraft")
    with pytest.raises(ConfigError, match="'textcraft' has no expert"):
        demonstrate(ITEMS, dataclasses.replace(spec, expert=None), "act")
    lazy = dataclasses.replace(spec, expert=lambda environment: ["inventory"])
    with pytest.raises(EnvError, match="textcraft_3: the expert"):
        demonstrate(ITEMS, lazy, "act")


def test_the_command_writes_a_file_to_train_on(tmp_path, capsys):
    items, out = tmp_path / "items.json", tmp_path / "new" / "demonstrations.jsonl"
    items.write_text('["textcraft_3", "textcraft_200"]')
    assert main(["demonstrate", "textcraft", "--items", str(items), "--out", str(out), "--agent", "act"]) == 0
    assert [row.item_id for row in read_conversations(out)] == ["textcraft_3", "textcraft_200"]
    assert main(["demonstrate", "textcraft", "--items", str(items), "--out", str(out), "--agent", "dance"]) == 1
    assert "dance" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("listed", "out", "said"),
    [
        ("parity_1024", "demonstrations.jsonl", "items.json row 2: item_id 'parity_1024' does not exist"),
        ("parity_1", "demonstrations.txt", "demonstrations.txt: conversation files end in .json or .jsonl"),
    ],
)
def test_what_is_wrong_with_the_items_or_the_name_of_the_file_is_said_before_anything_is_played(
    listed, out, said, tmp_path, capsys
):
    def expert(environment):
        raise AssertionError("played")

    register(dataclasses.replace(parity_spec(Script(turns=1)), expert=expert, num_items=1024))
    items = tmp_path / "items.json"
    items.write_text(json.dumps(["parity_0", listed]))
    assert main(["demonstrate", "parity", "--items", str(items), "--out", str(tmp_path / out)]) == 1
    assert said in capsys.readouterr().err and not (tmp_path / out).exists()
