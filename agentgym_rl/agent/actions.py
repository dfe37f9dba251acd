"""From the text of an assistant turn to the action it asks for (the ReAct form ``Thought: ... Action: ...``).

The last ``Action:`` at the start of a line decides; when none starts a line, the last one anywhere. The action is the
first line after the label. Code fences, backticks, quotes, asterisks and a final full stop around it are dropped.

Not read is what a model only considered: all up to the last ``</think>``. Thinking that never ends is read, for many a
model forgets to end it. Nor is its own guess at the environment's answer: what follows an action from a line
``Observation:`` on.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_LABEL_AT_LINE_START = re.compile(r"^[ \t>*_#`]*action[ \t]*:", re.IGNORECASE | re.MULTILINE)
_LABEL_ANYWHERE = re.compile(r"\baction[ \t]*:", re.IGNORECASE)
_THOUGHT_LABEL = re.compile(r"^[\s*_#]*thought[ \t]*:[\s*_]*", re.IGNORECASE)
_THINKING_BEGIN, _THINKING_END = "<think>", "</think>"
_GUESSED_ANSWER = re.compile(r"^[ \t*_#]*observation[ \t]*:", re.IGNORECASE | re.MULTILINE)
_FENCE_LINE = re.compile(r"```[a-z]*", re.IGNORECASE)
_QUOTED = re.compile(r"""(["'])((?:(?!\1).)*)\1""")
_DECORATION = "`* \t"


@dataclass(frozen=True, slots=True)
class FoundAction:
    """Where a turn has its action: the line ``text[start:end]``."""

    label_start: int
    """Where ``Action:`` begins, and so what precedes it ends."""
    start: int
    end: int
    action: str
    """On one line with single spaces, undecorated."""


def parse_action(text: str) -> str | None:
    """The action that ``text`` asks for, on one line with single spaces; None when it names none."""
    found = find_action(text)
    return None if found is None else found.action


def split_thought(text: str) -> tuple[str, str | None]:
    """Thought and action of a turn. Without an action the whole text is the thought."""
    found = find_action(text)
    thought, action = (text, None) if found is None else (text[: found.label_start], found.action)
    return _THOUGHT_LABEL.sub("", thought, count=1).strip(), action


def find_action(text: str) -> FoundAction | None:
    """The action of a turn and where it stands; None when there is none."""
    answer_start = end_of_thinking(text)
    read = before_guessed_answer(text[answer_start:])
    label = last_action_label(read)
    if label is None:
        return None
    start = label.end()
    for line in read[label.end() :].splitlines(keepends=True):
        shown = line.strip()
        action = None if _FENCE_LINE.fullmatch(shown) else _undecorated(" ".join(line.split()))
        if action:
            begin = answer_start + start + line.index(shown)
            return FoundAction(answer_start + label.start(), begin, begin + len(shown), action)
        start += len(line)
    return None


def end_of_thinking(text: str) -> int:
    """Where the answer begins: behind the last ``</think>``; 0 without one."""
    end = text.rfind(_THINKING_END)
    return 0 if end < 0 else end + len(_THINKING_END)


def outside_thinking(text: str) -> str:
    """``text`` without all thinking that ends; what a chat template opened begins with the text."""
    said, position = [], 0
    while (end := text.find(_THINKING_END, position)) >= 0:
        begin = text.find(_THINKING_BEGIN, position, end)
        said.append(text[position : max(begin, position)])
        position = end + len(_THINKING_END)
    return "\n".join([*said, text[position:]])


def before_guessed_answer(text: str, action: re.Pattern[str] = _LABEL_ANYWHERE) -> str:
    """``text`` up to the observation that the model made up for the first ``action``; all of it without one."""
    acted = action.search(text)
    guess = None if acted is None else _GUESSED_ANSWER.search(text, acted.end())
    return text if guess is None else text[: guess.start()]


def last_action_label(text: str) -> re.Match[str] | None:
    """The ``Action:`` that decides: see the module's text."""
    for pattern in (_LABEL_AT_LINE_START, _LABEL_ANYWHERE):
        labels = list(pattern.finditer(text))
        if labels:
            return labels[-1]
    return None


def _undecorated(line: str) -> str:
    inner = line.strip(_DECORATION).removesuffix(".").strip(_DECORATION)
    quoted = _QUOTED.fullmatch(inner)
    return quoted[2].strip(_DECORATION) if quoted else inner
