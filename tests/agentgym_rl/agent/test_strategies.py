"""Ways of thinking: what an agent is told, how its turns are read, and how a user adds one."""

from __future__ import annotations

import re
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from agentgym_rl.agent import strategies
from agentgym_rl.agent.actions import parse_action
from agentgym_rl.agent.formats import FormatName, TaskView
from agentgym_rl.agent.strategies import (
    Agent,
    AgentChoice,
    Outcome,
    Text,
    conversation_start,
    find_agent,
    known_agents,
    register_agent,
)
from agentgym_rl.envs.registry import get_spec, known_tasks
from agentgym_rl.errors import ConfigError
from agentgym_rl.types import PartKind, Role, StopReason

TASK = TaskView("Craft the goal.\n", ("get <n> <item>", "inventory"), "inventory")
BUILT_IN = ("react", "act", "plan", "reflect")


def parts_of(text, parts):
    return [(str(part.kind), text[part.start : part.end]) for part in parts]


@pytest.mark.parametrize("agent", BUILT_IN)
def test_a_conversation_opens_with_the_description_and_the_form_of_an_answer(agent):
    instruction, acknowledgement = conversation_start("Craft the goal.\n", agent)
    assert (instruction.role, acknowledgement.role) == (Role.USER, Role.ASSISTANT)
    assert instruction.content.startswith("Craft the goal.\nAnswer with:\n")
    assert instruction.content.endswith("Action: <one action>")
    assert ("Thought:" in instruction.content) == (agent != "act")


@pytest.mark.parametrize("task", known_tasks())
@pytest.mark.parametrize("action_format", FormatName)
def test_every_task_can_be_thought_about_in_every_way(task, action_format):
    client = get_spec(task).client
    for name in BUILT_IN:
        agent = AgentChoice(name, action_format).make(TaskView.of(client))
        *_, (role, text) = agent.opening("what is seen")
        assert role == Role.USER and text.content.startswith("what is seen")
        agent.read("Plan: think")  # what the planner is asked for first
        written = agent.write(client.example_action, "why not")
        reply = agent.read(written)
        assert reply.for_environment is not None, written
        assert "action" in [str(part.kind) for part in reply.parts]
        if action_format != FormatName.REACT:
            # The client finds in it what it finds in a line of ReAct.
            assert reply.for_environment == f"Action: {client.example_action}"
        assert agent.observe("next").content.startswith("next")


def test_an_experts_answer_is_read_back_as_its_action():
    react, act = (AgentChoice(name).make(TASK) for name in ("react", "act"))
    assert react.write("get 1 oak log", "I need a log.") == "Thought: I need a log.\nAction: get 1 oak log"
    assert act.write("get 1 oak log", "I need a log.") == "Action: get 1 oak log"
    assert react.write("inventory") == "Action: inventory"
    for agent in (react, act):
        assert parse_action(agent.write("get 1 oak log", "I need a log.")) == "get 1 oak log"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Thought: so.\nAction: go", [("thought", "so."), ("action", "go")]),
        ("Action: go", [("action", "go")]),
        ("just thinking", [("thought", "just thinking")]),
        ("hm\nThought: so\nAction: `go`", [("thought", "hm"), ("thought", "so"), ("action", "`go`")]),
        ("**Plan:** a\nb\n**Thought:** so\n\nAction:\ngo", [("plan", "a\nb"), ("thought", "so"), ("action", "go")]),
        ("Thought: so\nPlan: a\nAction: go\nObservation: won", [("thought", "so"), ("plan", "a"), ("action", "go")]),
        ("Thought:\nAction: go", [("action", "go")]),
        (
            "<think>\nPlan: b\nAction: look\n</think>\nPlan: a\nAction: go",
            [("thought", "<think>\nPlan: b\nAction: look\n</think>"), ("plan", "a"), ("action", "go")],
        ),
        ("<think>so</think>Plan: a\nAction: go", [("thought", "<think>so</think>"), ("plan", "a"), ("action", "go")]),
        ("", []),
        ("   \n", []),
    ],
)
def test_the_parts_of_a_turn(text, expected):
    reply = AgentChoice("react").make(TASK).read(text)
    assert parts_of(text, reply.parts) == expected
    assert reply.for_environment == text  # its client finds the action by its own rule
    assert all(one.end <= other.start for one, other in zip(reply.parts, reply.parts[1:], strict=False))


@pytest.mark.parametrize(
    ("text", "plan"),
    [
        ("Plan: look, then go", "look, then go"),
        ("1. look\n2. go", "1. look\n2. go"),
        ("1. look\nAction: look", "1. look"),
        ("Plan: look\nThought: now\nAction: look\nObservation: a door", "look"),
        ("Action: look", "Action: look"),
        ("<think>\nPlan: go at once?\n</think>\n\nPlan: look, then go", "look, then go"),
        ("Thought: which?\n</think>\n1. look\n2. go", "1. look\n2. go"),
        ("<think>all was thinking</think>", ""),
        ("<think>without an end", "<think>without an end"),
        ("", ""),
    ],
)
def test_the_first_turn_of_a_planner_is_its_plan_whatever_else_it_says(text, plan):
    agent = AgentChoice("plan").make(TASK)
    reply = agent.read(text)
    assert (reply.aside, reply.for_environment, agent.plan) == (PartKind.PLAN, None, plan)
    assert parts_of(text, reply.parts) == ([("plan", plan)] if plan else [])
    shown = agent.observe("a door")
    assert shown.content == (f"a door\n\nYour plan: {plan}" if plan else "a door")


def test_lessons_are_shown_before_the_first_observation_and_empty_ones_are_not():
    agent = AgentChoice("reflect").make(TASK, lessons=["look twice", "", "go left"])
    text = agent.first_observation("a door")
    assert parts_of(text.content, text.parts)[1:] == [
        *(("reflection", "look twice"), ("reflection", "go left"), ("observation", "a door")),
    ]
    assert AgentChoice("reflect").make(TASK, lessons=[""]).first_observation("a door").content == "a door"


def test_a_reflection_is_asked_for_in_view_of_what_the_last_action_did():
    agent = AgentChoice("reflect").make(TASK)
    request = agent.reflection_request(Outcome(0.0, StopReason.MAX_ROUNDS, "nothing happened"))
    assert request.content.startswith("nothing happened\n\n") and "turns are used up" in request.content
    assert "it is over" in agent.reflection_request(Outcome(0.0, StopReason.DONE, None)).content
    lesson = agent.lesson("  Reflection: look twice \n")
    assert lesson.content == "look twice"
    assert parts_of("  Reflection: look twice \n", lesson.parts) == [("reflection", "look twice")]
    assert agent.lesson("\n") == Text("")
    assert agent.lesson("<think>\nReflection: hm\n</think>\n\nReflection: look twice").content == "look twice"


def test_a_plan_that_is_only_considered_replaces_none():
    agent = AgentChoice("plan").make(TASK)
    agent.read("look, then go")
    agent.read("<think>\nPlan: run away?\n</think>\nThought: no.\nAction: look")
    assert agent.plan == "look, then go"


def test_a_demonstration_of_a_plan_lists_what_the_expert_does():
    agent = AgentChoice("plan").make(TASK)
    assert agent.preface(["look", "go"]) == "1. look\n2. go"
    assert AgentChoice("react").make(TASK).preface(["look"]) is None


# ------------------------------------------------------------------------------------------------------------- choosing


def test_only_agents_that_try_again_make_several_trials():
    assert [AgentChoice(name, max_trials=4).trials for name in BUILT_IN] == [1, 1, 1, 4]
    assert not AgentChoice("reflect", max_trials=1).tries_again


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"agent": "reakt"}, r"agentgym.agent='reakt': must be one of react, act, plan, reflect.*did you mean react\?"),
        ({"agent": "no.such.module:Agent"}, "no.such.module:Agent cannot be imported"),
        ({"agent": "agentgym_rl.types:Nothing"}, "cannot be imported"),
        ({"agent": "agentgym_rl.types:Role"}, "must be a subclass of agentgym_rl.agent.strategies.Agent"),
        ({"action_format": "json"}, "action_format='json': must be one of react, function_calling, code_as_action"),
        ({"max_trials": 0}, "max_trials=0: must be from 1 to 8"),
        ({"max_trials": 9}, "max_trials=9: must be from 1 to 8"),
    ],
)
def test_what_does_not_exist_is_a_configuration_error(values, message):
    with pytest.raises(ConfigError, match=message):
        AgentChoice(**values)


DOCUMENT = Path(__file__).parents[3] / "docs" / "agents.md"


def test_a_user_adds_a_way_of_thinking_in_one_file(tmp_path, monkeypatch):
    """The one that the documentation shows."""
    (example,) = re.findall(r"```python\n# careful.py\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    (tmp_path / "careful.py").write_text(example)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "careful", raising=False)
    agent = AgentChoice("careful:Careful").make(TASK)
    assert "Doubt: <what may go wrong>\nAction: <one action>" in agent.instruction()
    assert [agent.observe("a door").content for _ in range(2)] == [
        *("a door\n(1 actions so far)", "a door\n(2 actions so far)"),
    ]
    sys.modules.pop("careful")


def test_a_package_can_name_its_ways_of_thinking(monkeypatch):
    point = EntryPoint("thoughtful", "agentgym_rl.agent.strategies:Reflect", strategies.ENTRY_POINT_GROUP)
    monkeypatch.setattr(strategies, "_entry_points", lambda: {"thoughtful": point})
    assert find_agent("thoughtful") is strategies.Reflect
    assert known_agents() == [*BUILT_IN, "thoughtful"]


def test_a_way_of_thinking_can_be_given_a_name(monkeypatch):
    monkeypatch.setattr(strategies, "_agents", dict(strategies._agents))

    @register_agent("hasty")
    class Hasty(Agent):
        lead = ""

    assert find_agent("hasty") is Hasty and "hasty" in known_agents()
    assert AgentChoice("hasty").make(TASK).name == "hasty"
