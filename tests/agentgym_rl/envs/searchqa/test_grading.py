"""When an answer is right: hand-worked normal forms, matches and F1."""

from __future__ import annotations

import pytest

from agentgym_rl.envs.searchqa.grading import exact_match, f1, normalise


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("The Eiffel Tower!", "eiffel tower"),
        ("  an   apple a day ", "apple day"),
        ("U.S.A.", "usa"),
        ("theatre", "theatre"),
        ("9-11", "911"),
        ("“Ee Mungu Nguvu Yetu”", "ee mungu nguvu yetu"),
        ("Co\u0302te d'Ivoire", "côte divoire"),
        ("The The", "the the"),
        ("?!", "?!"),
        ("", ""),
    ],
)
def test_normal_forms_worked_by_hand(answer: str, expected: str) -> None:
    assert normalise(answer) == expected


@pytest.mark.parametrize(
    ("answer", "golds", "right"),
    [
        ("nairobi", ["Nairobi"], True),
        ("the city of Nairobi", ["Nairobi"], False),
        ("KES", ["Kenyan shillings", "KES"], True),
        ("", ["Nairobi"], False),
        ("", ["The The"], False),
        ("the", ["The The"], False),
        ("THE THE", ["The The"], True),
        ("12 December 1963.", ["12 December 1963"], True),
        ("1963 December 12", ["12 December 1963"], False),
    ],
)
def test_an_answer_is_right_when_it_equals_one_gold_answer(answer: str, golds: list[str], right: bool) -> None:
    assert exact_match(answer, golds) is right


@pytest.mark.parametrize(
    ("answer", "golds", "expected"),
    [
        # given 3 words, gold 2, common 2: 2 * 2 / (3 + 2)
        ("the Kenyan shillings note", ["Kenyan shillings"], 0.8),
        # a repeated word counts as often as both have it: common 1, 2 * 1 / (2 + 1)
        ("Mali Mali", ["Mali"], 2 / 3),
        ("Mali", ["Chad", "the Republic of Mali"], 0.5),
        ("Chad", ["Mali"], 0.0),
        ("", ["Mali"], 0.0),
    ],
)
def test_f1_counts_common_words_against_the_best_gold_answer(answer: str, golds: list[str], expected: float) -> None:
    assert f1(answer, golds) == pytest.approx(expected)
