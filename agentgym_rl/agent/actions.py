"""From the text of an assistant turn to the action it asks for (the ReAct form ``Thought: ... Action: ...``).

The last ``Action:`` at the start of a line decides; when none starts a line, the last one anywhere. What a model writes
after a line ``Observation:`` is its own guess at the environment's answer and is not read. The action is the first line
after the label. Code fences, backticks, quotes, asterisks and a final full stop around it are dropped.
"""

from __future__ import annotations

import re

_LABEL_AT_LINE_START = re.compile(r"^[ \t>*_#`]*action[ \t]*:", re.IGNORECASE | re.MULTILINE)
_LABEL_ANYWHERE = re.compile(r"\baction[ \t]*:", re.IGNORECASE)
_THOUGHT_LABEL = re.compile(r"^[\s*_#]*thought[ \t]*:[\s*_]*", re.IGNORECASE)
_GUESSED_ANSWER = re.compile(r"^[ \t*_#]*observation[ \t]*:", re.IGNORECASE | re.MULTILINE)
_FENCE_LINE = re.compile(r"```[a-z]*", re.IGNORECASE)
_QUOTED = re.compile(r"""(["'])((?:(?!\1).)*)\1""")
_DECORATION = "`* \t"


def parse_action(text: str) -> str | None:
    """The action that ``text`` asks for, on one line with single spaces; None when it names none."""
    return split_thought(text)[1]


def split_thought(text: str) -> tuple[str, str | None]:
    """Thought and action of a turn. Without an action the whole text is the thought."""
    read = _before_guessed_answer(text)
    label = _last_label(read)
    action = None if label is None else _first_line(read[label.end() :])
    thought = text if label is None or action is None else read[: label.start()]
    return _THOUGHT_LABEL.sub("", thought, count=1).strip(), action


def _before_guessed_answer(text: str) -> str:
    """``text`` up to the observation that the model made up; all of it when nothing stands before."""
    guess = _GUESSED_ANSWER.search(text)
    return text if guess is None or not text[: guess.start()].strip() else text[: guess.start()]


def _last_label(text: str) -> re.Match[str] | None:
    for pattern in (_LABEL_AT_LINE_START, _LABEL_ANYWHERE):
        labels = list(pattern.finditer(text))
        if labels:
            return labels[-1]
    return None


def _first_line(text: str) -> str | None:
    """The first line that says something, undecorated."""
    for line in text.splitlines():
        if _FENCE_LINE.fullmatch(line.strip()):
            continue
        action = _undecorated(" ".join(line.split()))
        if action:
            return action
    return None


def _undecorated(line: str) -> str:
    inner = line.strip(_DECORATION).removesuffix(".").strip(_DECORATION)
    quoted = _QUOTED.fullmatch(inner)
    return quoted[2].strip(_DECORATION) if quoted else inner
