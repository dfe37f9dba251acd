"""SearchQA: answer a question by searching a corpus.

What the agent writes is read whole, but for its thinking (``<think>...</think>``): the first
``<search>query</search>`` or ``<answer>text</answer>`` decides, for a model may go on and make up what follows. A
search shows the best passages. An answer that matches a right one (see `grading`) is rewarded with 1 and ends the
episode; a wrong one says so, and ends it when no answers are left.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from agentgym_rl.agent.actions import outside_thinking
from agentgym_rl.envs.base import Environment, InvalidCall, ResetResult, StepResult
from agentgym_rl.envs.searchqa.corpus import Passage
from agentgym_rl.envs.searchqa.grading import exact_match, f1
from agentgym_rl.envs.searchqa.questions import Question, Questions
from agentgym_rl.envs.searchqa.retrievers import Retriever

INSTRUCTION = (
    "Find out the answer to the question. Write <search>words</search> to look something up, and "
    "<answer>text</answer>, as short as can be, once you know it."
)
_REMINDER = "Neither a search nor an answer was found. Write <search>words</search> or <answer>text</answer>."
_MARKS_OF_RESULTS = re.compile(r"</?information>")


class Move(StrEnum):
    """What a turn does."""

    SEARCH = "search"
    ANSWER = "answer"


@dataclass(frozen=True, slots=True)
class SearchQAStep(StepResult):
    """What one turn did, and how near an answer was."""

    f1: float | None = None
    """Of an answer; None for any other turn."""
    golden_answers: tuple[str, ...] = ()
    """The right ones, of the answer that ends the episode: before that they might help somebody."""

    @property
    def info(self) -> dict[str, Any]:
        """What the wire tells beyond observation, reward and done."""
        judged = {} if self.f1 is None else {"f1": self.f1, "exact_match": float(self.reward)}
        return judged | ({"golden_answers": list(self.golden_answers)} if self.golden_answers else {})


def parse_move(text: str) -> tuple[Move, str] | None:
    """The first complete search or answer of a turn outside its thinking; None when there is none."""
    said = outside_thinking(text)
    moves = []
    for move in Move:
        start = said.find(f"<{move}>")
        inner = start + len(move) + 2
        end = said.find(f"</{move}>", inner)
        if start >= 0 and end >= 0:
            moves.append((start, move, said[inner:end].strip()))
    return min(moves)[1:] if moves else None


def show_passages(passages: list[Passage]) -> str:
    """Search results as the agent reads them; nothing in a passage can end them early."""
    if not passages:
        return "<information>No passage speaks of that.</information>"
    shown = (f"Doc {number}(Title: {each.title}) {each.text}" for number, each in enumerate(passages, start=1))
    return f"<information>{_MARKS_OF_RESULTS.sub('', chr(10).join(shown))}</information>"


class SearchQA(Environment):
    """One question after another, over what all sessions of the process share."""

    def __init__(self, questions: Questions, retriever: Retriever, *, top_k: int, max_answers: int | None) -> None:
        """``max_answers``: answers of one episode; None is any number."""
        self._questions = questions
        self._retriever = retriever
        self._top_k = top_k
        self._max_answers = max_answers
        self._question = Question("", ())
        self._answers_given = 0
        self._observation = ""
        self._done = True

    def reset(self, data_idx: int) -> ResetResult:
        try:
            self._question = self._questions[data_idx]
        except KeyError as error:
            raise InvalidCall(error.args[0]) from None
        self._answers_given = 0
        self._done = False
        self._observation = f"{INSTRUCTION}\n\n Question: {self._question.text}"
        return ResetResult(self._observation)

    def step(self, action: str) -> SearchQAStep:
        if self._done:
            raise InvalidCall("the question has been answered: reset before the next step")
        move = parse_move(action)
        if move is None:
            step = SearchQAStep(_REMINDER, 0, False)
        elif move[0] == Move.SEARCH:
            step = SearchQAStep(self._search(move[1]), 0, False)
        else:
            step = self._answer(move[1])
        self._observation, self._done = step.observation, step.done
        return step

    def observation(self) -> str:
        return self._observation

    def available_actions(self) -> list[str]:
        """A search for the question, and the form of an answer."""
        return [f"<search>{self._question.text}</search>", "<answer>text</answer>"]

    def solution(self) -> list[str]:
        """Turns that look the question up and give the first right answer."""
        return [f"<search>{self._question.text}</search>", f"<answer>{self._question.answers[0]}</answer>"]

    def _search(self, query: str) -> str:
        return show_passages(self._retriever.search(query, self._top_k))

    def _answer(self, text: str) -> SearchQAStep:
        right = exact_match(text, self._question.answers)
        self._answers_given += 1
        is_last = self._max_answers is not None and self._answers_given >= self._max_answers
        reply = "Right." if right else "That is not the answer." + (" No answers are left." if is_last else "")
        ends = right or is_last
        answers = self._question.answers
        return SearchQAStep(reply, int(right), ends, f1(text, answers), answers if ends else ())
