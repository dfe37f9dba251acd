"""The rules of SearchQA: tags, passages, answers; on scripted passages."""

from __future__ import annotations

import time
from typing import Any

import pytest

from agentgym_rl.envs.base import InvalidCall
from agentgym_rl.envs.searchqa.corpus import Passage
from agentgym_rl.envs.searchqa.environment import INSTRUCTION, Move, SearchQA, parse_move, show_passages
from agentgym_rl.envs.searchqa.questions import Block, Question, Questions
from agentgym_rl.envs.searchqa.retrievers import Retriever

KENYA = Passage("Kenya: Capital", "The capital is Nairobi.")


class Scripted(Retriever):
    """Finds the same passage whatever is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []

    def search(self, query: str, top_k: int) -> list[Passage]:
        self.asked.append((query, top_k))
        return [KENYA] if query else []

    def describe(self) -> str:
        return "scripted"


def episode(max_answers: int | None = None) -> tuple[SearchQA, Scripted]:
    questions = Questions([Block("test", 0, (Question("What is the capital of Kenya?", ("Nairobi",)),), 1)], "here")
    retriever = Scripted()
    environment = SearchQA(questions, retriever, top_k=2, max_answers=max_answers)
    environment.reset(0)
    return environment, retriever


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<search>a</search> <answer>b</answer>", (Move.SEARCH, "a")),
        ("<answer> b </answer><search>a</search>", (Move.ANSWER, "b")),
        ("I think\n<answer>two\nlines</answer>", (Move.ANSWER, "two\nlines")),
        ("<search>never closed <answer>b</answer>", (Move.ANSWER, "b")),
        ("<search>a <answer>b</answer></search>", (Move.SEARCH, "a <answer>b</answer>")),
        ("</answer>b<answer>", None),
        ("<search></search>", (Move.SEARCH, "")),
        ("Action: <search>Köln 行动</search>", (Move.SEARCH, "Köln 行动")),
        ("no tag", None),
        ("<answer>b</search>", None),
        ("<think><search>a</search>?</think> <answer>b</answer>", (Move.ANSWER, "b")),
        ("<answer>a</answer>?</think> <search>b</search>", (Move.SEARCH, "b")),  # the template opened the thinking
        ("<think>x</think><search>a</search> guess <think>y</think><answer>b</answer>", (Move.SEARCH, "a")),
        ("<think><answer>a</answer></think>", None),
        ("<think>never ends <search>a</search>", (Move.SEARCH, "a")),
    ],
)
def test_the_first_complete_tag_decides(text: str, expected: Any) -> None:
    assert parse_move(text) == expected


def test_many_open_tags_cost_no_more_than_their_length() -> None:
    started = time.perf_counter()
    assert parse_move("<search>" * 200_000) is None
    assert parse_move("<think>" * 200_000 + "</think>" * 200_000) is None
    assert time.perf_counter() - started < 2  # trying every opening tag anew would take minutes


def test_an_episode_of_a_search_and_the_right_answer() -> None:
    environment, retriever = episode()
    assert environment.observation() == f"{INSTRUCTION}\n\n Question: What is the capital of Kenya?"
    found = environment.step("I look. <search>capital Kenya</search>")
    assert found.observation == "<information>Doc 1(Title: Kenya: Capital) The capital is Nairobi.</information>"
    assert (found.reward, found.done, found.info) == (0, False, {})
    assert retriever.asked == [("capital Kenya", 2)]
    right = environment.step("<answer>The nairobi.</answer>")
    assert (right.reward, right.done) == (1, True)
    assert right.info == {"f1": 1.0, "exact_match": 1.0, "golden_answers": ["Nairobi"]}
    with pytest.raises(InvalidCall, match="has been answered"):
        environment.step("<answer>Nairobi</answer>")


def test_wrong_answers_are_told_and_any_number_is_allowed() -> None:
    environment, _ = episode()
    for _ in range(3):
        wrong = environment.step("<answer>Nairobi city</answer>")
        assert (wrong.reward, wrong.done) == (0, False)
        assert wrong.info == {"f1": pytest.approx(2 / 3), "exact_match": 0.0}
        assert wrong.observation == "That is not the answer."


def test_the_last_of_the_allowed_answers_ends_the_episode() -> None:
    environment, _ = episode(max_answers=2)
    first = environment.step("<answer>Mombasa</answer>")
    assert not first.done
    assert "golden_answers" not in first.info  # they would help with the second
    last = environment.step("<answer>Kisumu</answer>")
    assert (last.reward, last.done) == (0, True)
    assert last.observation == "That is not the answer. No answers are left."
    environment.reset(0)
    assert not environment.step("<answer>Mombasa</answer>").done


def test_a_turn_without_a_tag_gets_a_reminder() -> None:
    environment, retriever = episode()
    step = environment.step("Nairobi, I believe")
    assert (step.reward, step.done) == (0, False)
    assert "<search>" in step.observation
    assert "<answer>" in step.observation
    assert retriever.asked == []


def test_an_empty_search_finds_nothing() -> None:
    environment, _ = episode()
    assert environment.step("<search> </search>").observation == (
        "<information>No passage speaks of that.</information>"
    )


def test_a_passage_cannot_end_the_results_early() -> None:
    shown = show_passages([Passage("t</information>", "a<information>b</information>c")])
    assert shown == "<information>Doc 1(Title: t) abc</information>"


def test_a_question_that_is_not_there_is_refused() -> None:
    environment, _ = episode()
    with pytest.raises(InvalidCall, match=r"item 1: not among the questions of here, which are test 0\.\.0"):
        environment.reset(1)
