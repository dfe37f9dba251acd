"""What counts as an action in an assistant's text."""

from __future__ import annotations

import pytest

from agentgym_rl.agent.actions import FoundAction, find_action, parse_action, split_thought


@pytest.mark.parametrize(
    "text",
    [
        "Action: get 1 oak logs",
        "Thought: I need wood.\nAction: get 1 oak logs",
        "Thought: I need wood.\n\nAction:\nget 1 oak logs\n",
        "Thought: I need wood. Action: get 1 oak logs",
        "action : get 1  oak   logs",
        "**Action:** get 1 oak logs",
        "Action: `get 1 oak logs`",
        'Action: "get 1 oak logs"',
        "Action: get 1 oak logs.",
        "Action:\n```\nget 1 oak logs\n```",
        "Action: ```\nget 1 oak logs\n```",
        "```text\nAction: get 1 oak logs\n```",
        "Action: get 1 oak logs\nObservation: Got 1 oak logs\nThought: next\nAction: inventory",
        "Thought: the Action: line comes now.\nAction: get 1 oak logs",
        "Action: look\nThought: no, wood first.\nAction: get 1 oak logs",
        "Thought: ok\nObservation: none seen\nAction: get 1 oak logs",
        "Thought: ok\n**Observation:** a tree\nAction: get 1 oak logs\nObservation: Got 1 oak logs\nAction: inventory",
        "Observation: a tree\nAction: get 1 oak logs\nObservation: Got 1 oak logs\nAction: inventory",
        "Thought: wood. Action: get 1 oak logs\nObservation: Got 1 oak logs\nAction: inventory",
        "<think>\nAction: look?\n</think>\nAction: get 1 oak logs",
        "<think>\nmaybe Action: look\nObservation: a tree\n</think>\nThought: wood\nAction: get 1 oak logs",
        "Action: look\nObservation: a tree\n</think>\n\nAction: get 1 oak logs\nObservation: Got it\nAction: inventory",
        "<think>look</think>Action: get 1 oak logs",
        "<think>one</think>\nAction: look\n<think>two</think>\nAction: get 1 oak logs",
        "<think>\nwood first\nAction: get 1 oak logs",
    ],
)
def test_the_action_is_found_where_the_meaning_is_plain(text: str) -> None:
    assert parse_action(text) == "get 1 oak logs"


@pytest.mark.parametrize(
    "text", ["", "   ", "I will get wood.", "Thought: hm", "Action:", "Action: ```\n```", "Action: **",
             "<think>Action: look</think>", "<think>\nAction: look\n</think>\nI do not know."]
)  # fmt: skip
def test_a_text_without_an_action_gives_none(text: str) -> None:
    assert parse_action(text) is None


def test_commas_counts_and_underscores_of_an_action_stay() -> None:
    text = "Action: craft 1 oak_sign using 6 oak_planks, 1 stick"
    assert parse_action(text) == "craft 1 oak_sign using 6 oak_planks, 1 stick"


def test_thought_and_action_are_told_apart() -> None:
    assert split_thought("Thought: I need\nwood.\nAction: get 1 oak logs") == ("I need\nwood.", "get 1 oak logs")
    assert split_thought("I need wood.\nAction: get 1 oak logs") == ("I need wood.", "get 1 oak logs")
    assert split_thought("Action: get 1 oak logs") == ("", "get 1 oak logs")


@pytest.mark.parametrize(
    "before", ["", "Thought: so\n", "Observation: a tree\n", "<think>\nAction: look\n</think>\n\n"]
)
@pytest.mark.parametrize("after", ["", "\nObservation: Got 1 oak logs\nAction: inventory"])
def test_an_action_is_told_where_it_stands_in_the_whole_turn(before: str, after: str) -> None:
    found = find_action(f"{before}Action: get 1 oak logs{after}")
    assert found == FoundAction(len(before), len(before) + 8, len(before) + 22, "get 1 oak logs")


def test_without_an_action_the_whole_text_is_the_thought() -> None:
    assert split_thought("Thought: what now?") == ("what now?", None)


def test_quotes_are_dropped_only_when_they_enclose_the_whole_action() -> None:
    assert parse_action("""Action: 'a' and 'b'""") == "'a' and 'b'"
    assert parse_action("""Action: "it's here" """) == "it's here"
