"""SearchQA in the viewer: the question, each search and answer, and the passages with the answer marked in them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from agentgym_rl.envs.searchqa import made_question
from agentgym_rl.envs.searchqa.environment import Move, parse_move
from agentgym_rl.types import Trajectory, Turn
from agentgym_rl.viewer.panel import Block, Facts, Mark, Panel, Table, Text, Tone, asked, first_observation, states

_QUESTION = re.compile(r"^ ?Question: (.*)", re.MULTILINE | re.DOTALL)
_PASSAGE = re.compile(r"^Doc ([0-9]+)\(Title: (.*?)\) ?", re.MULTILINE)
_RESULTS = re.compile(r"<information>(.*)</information>", re.DOTALL)


def panel(trajectory: Trajectory) -> Panel:
    """The passages found after each turn, the moves so far, and what the right answer is, as far as it is known."""
    question = match[1].strip() if (match := _QUESTION.search(first_observation(trajectory))) else ""
    moves = [_move(turn, action) for turn, action in zip(trajectory.turns, asked(trajectory), strict=True)]
    right, given = _right_answers(trajectory, moves, question), _last_answer(moves)
    marked = right or ((given,) if given else ())
    tone = Tone.GOOD if right else Tone.NEXT
    frames = tuple(
        _frame(question, trajectory.turns, moves, number, marked, tone) for number in range(len(trajectory.turns) + 1)
    )
    return Panel(frames, always=(_answers(trajectory, right, given),), note=_note(right, given), goal=question)


def _note(right: Sequence[str], given: str) -> str:
    if right:
        return "Marked: a right answer."
    return "Marked: the agent's answer; the right one is not known here." if given else ""


def _move(turn: Turn, action: str) -> tuple[str, str]:
    """Kind and words of a turn's move; the kind is empty when it makes none."""
    move = parse_move(turn.text) or parse_move(action)
    return ("", "") if move is None else (str(move[0]), move[1])


def _last_answer(moves: Sequence[tuple[str, str]]) -> str:
    return next((words for kind, words in reversed(moves) if kind == Move.ANSWER), "")


def _right_answers(trajectory: Trajectory, moves: Sequence[tuple[str, str]], question: str) -> tuple[str, ...]:
    """Those that the server told; else those of the built-in question, if it is one; else an answer that was paid."""
    for state in reversed(states(trajectory)):
        told = state.get("golden_answers") if isinstance(state, dict) else None
        if isinstance(told, list) and told:
            return tuple(str(answer) for answer in told)
    built_in = made_question(trajectory.item.index)
    if built_in is not None and built_in.text == question:
        return built_in.answers
    paid = zip(trajectory.turns, moves, strict=True)
    return tuple(words for turn, (kind, words) in paid if kind == Move.ANSWER and turn.reward > 0)[:1]


def _frame(
    question: str,
    turns: Sequence[Turn],
    moves: Sequence[tuple[str, str]],
    number: int,
    answers: Sequence[str],
    tone: Tone,
) -> tuple[Block, ...]:
    blocks: list[Block] = [Text(question, "Question"), _moves_table(turns[:number], moves[:number])]
    searched = [turn for turn, found in enumerate(map(_found_by, turns[:number]), start=1) if found]
    if searched:
        title = "Passages found" if searched[-1] == number else f"Passages found in turn {searched[-1]}"
        blocks.append(_passages(_found_by(turns[searched[-1] - 1]), answers, tone, title))
    return tuple(blocks)


def _found_by(turn: Turn) -> str:
    """The passages that a turn was shown; empty where there are none."""
    match = _RESULTS.search(turn.observation or "")
    return match[1].strip() if match else ""


def _moves_table(turns: Sequence[Turn], moves: Sequence[tuple[str, str]]) -> Table:
    rows = [
        (str(number), kind or "nothing", words, _outcome(kind, turn))
        for number, (turn, (kind, words)) in enumerate(zip(turns, moves, strict=True), 1)
    ]
    tones = tuple(_tone_of(kind, turn) for turn, (kind, _) in zip(turns, moves, strict=True))
    return Table(("turn", "move", "words", "outcome"), tuple(rows), "Searches and answers", tones)


def _outcome(kind: str, turn: Turn) -> str:
    if kind == Move.ANSWER:
        return "right" if turn.reward > 0 else "wrong"
    if kind == Move.SEARCH:
        return f"{len(_PASSAGE.findall(_found_by(turn)))} passages"
    return ""


def _tone_of(kind: str, turn: Turn) -> Tone:
    if kind == Move.ANSWER:
        return Tone.GOOD if turn.reward > 0 else Tone.BAD
    return Tone.PLAIN if kind else Tone.MUTED


def _passages(text: str, answers: Sequence[str], tone: Tone, title: str) -> Text:
    marks = _marks(text, answers, tone)
    return Text(text, f"{title} (places with the answer: {len(marks)})" if answers else title, marks)


def _marks(text: str, answers: Sequence[str], tone: Tone) -> tuple[Mark, ...]:
    """Where an answer stands in a text, whatever its case and spaces; longer answers before those inside them."""
    words = sorted({" ".join(answer.split()) for answer in answers if answer.strip()}, key=len, reverse=True)
    if not words:
        return ()
    spaced = "|".join(r"\s+".join(re.escape(part) for part in word.split(" ")) for word in words)
    found = re.finditer(rf"(?<!\w)(?:{spaced})(?!\w)", text, re.IGNORECASE)
    return tuple(Mark(match.start(), match.end(), tone) for match in found)


def _answers(trajectory: Trajectory, right: Sequence[str], given: str) -> Facts:
    rows: list[tuple[str, Any]] = [("The agent's answer", given or "none")]
    if right:
        rows.append(("Right answers", "; ".join(right)))
    rows.append(("Judged", "right" if trajectory.success else "not right"))
    return Facts(tuple(rows), "Answer")
