from __future__ import annotations

import pytest

from agentgym_rl.envs.webarena.actions import Action, Kind, NotAnAction, read_action, written_action


@pytest.mark.parametrize(
    ("written", "action"),
    [
        ("click [12]", Action(Kind.CLICK, element=12)),
        ("click [12] where 12 is the link", Action(Kind.CLICK, element=12)),
        ("hover [3]", Action(Kind.HOVER, element=3)),
        ("type [7] [two words] [1]", Action(Kind.TYPE, element=7, text="two words", enter=True)),
        ("type [7] [two words] [0]", Action(Kind.TYPE, element=7, text="two words")),
        ("type [7] [two words]", Action(Kind.TYPE, element=7, text="two words", enter=True)),
        ("type [7] [a [b] c] [0]", Action(Kind.TYPE, element=7, text="a [b] c")),
        ("type [7] [one\ntwo] [press_enter_after=0]", Action(Kind.TYPE, element=7, text="one\ntwo")),
        ("type [7] [] [1]", Action(Kind.TYPE, element=7, enter=True)),
        ("press [ctrl+a]", Action(Kind.PRESS, text="Control+a")),
        ("press [Enter]", Action(Kind.PRESS, text="Enter")),
        ("press [ctrl++]", Action(Kind.PRESS, text="Control++")),
        ("scroll [down]", Action(Kind.SCROLL, number=1)),
        ("scroll [direction=up]", Action(Kind.SCROLL, number=-1)),
        ("goto [http://reddit.com]", Action(Kind.GOTO, text="http://reddit.com")),
        ("new_tab", Action(Kind.NEW_TAB)),
        ("tab_focus [1]", Action(Kind.TAB_FOCUS, number=1)),
        ("close_tab", Action(Kind.CLOSE_TAB)),
        ("go_back", Action(Kind.GO_BACK)),
        ("go_forward", Action(Kind.GO_FORWARD)),
        ("stop [$39.00]", Action(Kind.STOP, text="$39.00")),
        ("stop []", Action(Kind.STOP)),
        ("stop", Action(Kind.STOP)),
        ("Click [12]", Action(Kind.CLICK, element=12)),
    ],
)
def test_every_action_is_read_from_the_first_block(written: str, action: Action) -> None:
    assert read_action(f"Let me think. ```{written}``` or else ```go_back```") == action
    assert read_action(f"```\n{written}\n```") == action


@pytest.mark.parametrize("opening", ["", "\n", "bash\n", "Text \n", "typescript\n", "json\r\n"])
@pytest.mark.parametrize("kind", Kind)
def test_the_first_word_of_a_block_is_its_language_only_where_it_is_no_kind_of_action(kind: Kind, opening: str) -> None:
    text = f"```{opening}{kind}\n```"
    assert written_action(text) == kind


def test_an_action_may_take_several_lines() -> None:
    assert read_action("```scroll\n[down]\n```") == Action(Kind.SCROLL, number=1)
    assert read_action("```click \n[5]```") == Action(Kind.CLICK, element=5)


def test_an_action_that_is_only_considered_is_not_carried_out() -> None:
    assert read_action("<think>Perhaps ```go_back```?</think>\n```click [4]```") == Action(Kind.CLICK, element=4)
    assert read_action("go_back?\n</think>\nstop [39]") == Action(Kind.STOP, text="39")
    with pytest.raises(NotAnAction, match="no action found"):
        read_action("<think>Perhaps ```go_back```?</think>\nI do not know.")


def test_a_react_turn_without_a_block_is_understood_too() -> None:
    assert read_action("Thought: the lamp.\nAction: click [4]") == Action(Kind.CLICK, element=4)


def test_a_text_that_is_an_action_needs_no_block() -> None:
    assert read_action(" stop [39] ") == Action(Kind.STOP, text="39")
    assert read_action("go_back") == Action(Kind.GO_BACK)
    with pytest.raises(NotAnAction, match="no action found"):
        read_action("stop here, or click [3] perhaps")


def test_a_lone_surrogate_becomes_a_question_mark() -> None:
    assert read_action("```type [1] [a\ud800b] [0]```") == Action(Kind.TYPE, element=1, text="a?b")


def test_every_kind_of_action_can_be_read() -> None:
    examples = {"type": "[1] [x] [1]", "press": "[Enter]", "scroll": "[up]", "goto": "[http://gitlab.com]"}
    for kind in Kind:
        bare = kind in (Kind.NEW_TAB, Kind.CLOSE_TAB, Kind.GO_BACK, Kind.GO_FORWARD)
        assert read_action(f"```{kind} {'' if bare else examples.get(kind, '[1]')}```").kind == kind


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("I do not know", "no action found"),
        ("``````", "is no action"),
        ("```fly [1]```", "'fly \\[1\\]' is no action: use one of click, hover"),
        ("```click```", "click needs the number of an element"),
        ("```click [link]```", "click needs the number of an element"),
        ("```type [1]```", "type needs an element and a text"),
        ("```type [x] [y]```", "type needs an element and a text"),
        ("```scroll [left]```", "scroll needs a direction"),
        ("```press []```", "press needs something in brackets"),
        ("```press [+a]```", "press needs keys"),
        ("```goto```", "goto needs something in brackets"),
        ("```tab_focus [first]```", "tab_focus needs the number"),
        ("```go_back [2]```", "go_back takes nothing"),
        ("```click [99999999999]```", "click needs the number of an element"),
    ],
)
def test_what_is_no_action_is_explained(text: str, why: str) -> None:
    with pytest.raises(NotAnAction, match=why):
        read_action(text)


def test_a_long_text_is_not_repeated_whole() -> None:
    with pytest.raises(NotAnAction) as caught:
        read_action(f"```{'x' * 10_000}```")
    assert len(str(caught.value)) < 500
