"""Two trajectories side by side: which words differ, which turns, and that no text takes long."""

from __future__ import annotations

import time

from hypothesis import given, settings
from hypothesis import strategies as st
from support.episodes import made_up

from agentgym_rl.types import Part as MessagePart
from agentgym_rl.types import PartKind
from agentgym_rl.viewer.comparison import compare
from agentgym_rl.viewer.differences import Part, compare_texts

WORDS = st.lists(st.sampled_from(["a", "b", "c", "\n", " ", "é🧵"]), max_size=12).map(" ".join)


def test_words_that_differ_are_told_and_the_rest_is_not() -> None:
    left, right = compare_texts("get 4 bamboo now", "get 2 bamboo")
    assert left == (
        Part("get", False),
        Part(" ", False),
        Part("4", True),
        Part(" bamboo", False),
        Part(" ", False),
        Part("now", True),
    )
    assert [part.text for part in right if part.changed] == ["2"]


def test_line_breaks_between_words_make_no_difference() -> None:
    left, right = compare_texts("one two\n three", "one  two three")
    assert not any(part.changed for part in (*left, *right))


def longest_common(a: list[str], b: list[str]) -> int:
    """By the textbook's table."""
    table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, one in enumerate(a):
        for j, other in enumerate(b):
            table[i + 1][j + 1] = table[i][j] + 1 if one == other else max(table[i][j + 1], table[i + 1][j])
    return table[-1][-1]


@settings(max_examples=200, deadline=None)
@given(left=WORDS, right=WORDS)
def test_parts_give_the_texts_again_and_keep_as_many_words_as_can_be_kept(left: str, right: str) -> None:
    parts = compare_texts(left, right)
    assert ["".join(part.text for part in side) for side in parts] == [left, right]
    kept = [[word for part in side if not part.changed for word in part.text.split()] for side in parts]
    assert kept[0] == kept[1]
    assert len(kept[0]) == longest_common(left.split(), right.split())


def test_long_texts_that_have_nothing_in_common_are_told_apart_as_a_whole_and_at_once() -> None:
    started = time.process_time()
    left, right = compare_texts("same " + "x y " * 20_000 + "end", "same " + "v w z " * 20_000 + "end")
    assert time.process_time() - started < 5  # a table of all pairs of words would take an hour
    assert [part.changed for part in left] == [False, False, True, False]
    assert left[-1].text == right[-1].text == " end"


def test_turns_are_aligned_and_the_first_that_differs_is_told() -> None:
    opening = "Goal: x."
    first = ("Thought: a\nAction: look", "A room.", 0.0, False)
    left = made_up("t", 1, opening, [first, ("Action: go", "A hall.", 0.0, False)])
    right = made_up("t", 1, opening, [first, ("Action: go", "A hall.", 1.0, True), ("Action: more", "x", 0.0, False)])
    comparison = compare(left, right)
    assert [row.differs for row in comparison.rows] == [False, True, True]  # the second by its reward alone
    assert comparison.first_difference == 2
    assert comparison.rows[2].left is None
    assert compare(left, left).first_difference is None


def test_thought_and_action_are_where_the_trajectory_says_they_are() -> None:
    text = "Plan: p\nThought: t\nAction: f(1) here"
    spans = ((PartKind.PLAN, 6, 7), (PartKind.THOUGHT, 17, 18), (PartKind.ACTION, 27, 31))
    parts = ((), (), (), tuple(MessagePart(*span) for span in spans))
    trajectory = made_up("t", 1, "Goal", [(text, "ok", 0.0, True)], parts=parts)
    [row] = compare(trajectory, trajectory).rows
    assert row.left is not None
    assert row.left.thought == (Part("p\nt", False),)
    assert row.left.action == (Part("f(1)", False),)
