"""The action grammar: from the text of an assistant's turn to one `Action`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from agentgym_rl.agent.actions import end_of_thinking, parse_action

MAX_ECHO = 200


class Kind(StrEnum):
    """What an agent can do."""

    CLICK = "click"
    """``click [id]``; an option of a list is chosen."""
    HOVER = "hover"
    """``hover [id]``."""
    TYPE = "type"
    """``type [id] [text] [0|1]``: click, type, and press Enter unless 0."""
    PRESS = "press"
    """``press [keys]`` such as ``ctrl+a``."""
    SCROLL = "scroll"
    """``scroll [up|down]`` by one screen."""
    GOTO = "goto"
    """``goto [url]``."""
    NEW_TAB = "new_tab"
    TAB_FOCUS = "tab_focus"
    """``tab_focus [n]``, counted from 0."""
    CLOSE_TAB = "close_tab"
    GO_BACK = "go_back"
    GO_FORWARD = "go_forward"
    STOP = "stop"
    """``stop [answer]`` ends the episode."""


class NotAnAction(Exception):
    """The text asks for nothing that can be done; says why, for the agent."""


@dataclass(frozen=True, slots=True)
class Action:
    """One action; fields that its kind does not use keep their defaults."""

    kind: Kind
    element: int = 0
    """The number in front of a node."""
    text: str = ""
    """What is typed, the answer, the address, the keys in Playwright's spelling."""
    enter: bool = False
    """Press Enter after typing."""
    number: int = 0
    """The tab; for scrolling 1 is down and -1 is up."""


_KINDS = "|".join(Kind)
_LANGUAGE = rf"(?!(?:{_KINDS})\b)[a-z]+[ \t]*\r?\n"
"""The word behind the opening backticks, where it is no action."""
_BLOCK = re.compile(rf"```(?:{_LANGUAGE})?(.*?)```", re.DOTALL | re.IGNORECASE)
_ALONE = re.compile(rf"\s*(?:{_KINDS})\s*(?:\[.*\]\s*)?", re.DOTALL)
_WORD = re.compile(r"\s*([a-z_]+)\s*(.*)", re.DOTALL | re.IGNORECASE)
_ELEMENT = re.compile(r"\[\s*(\d{1,9})\s*\]")
_TYPE = re.compile(r"\[\s*(\d{1,9})\s*\]\s*\[(.*?)\]\s*(?:\[\s*(?:press_enter_after\s*=\s*)?([01])\s*\])?", re.DOTALL)
_BRACKETS = re.compile(r"\[(.*)\]", re.DOTALL)
_SCROLL = re.compile(r"\[\s*(?:direction\s*=\s*)?(up|down)\s*\]", re.IGNORECASE)
_KEYS: Mapping[str, str] = {
    "ctrl": "Control", "control": "Control", "cmd": "Meta", "command": "Meta", "meta": "Meta", "alt": "Alt",
    "option": "Alt", "shift": "Shift", "enter": "Enter", "return": "Enter", "esc": "Escape", "escape": "Escape",
    "tab": "Tab", "space": "Space", "backspace": "Backspace", "delete": "Delete", "del": "Delete", "home": "Home",
    "end": "End", "pageup": "PageUp", "pagedown": "PageDown", "arrowup": "ArrowUp", "arrowdown": "ArrowDown",
    "arrowleft": "ArrowLeft", "arrowright": "ArrowRight", "up": "ArrowUp", "down": "ArrowDown", "left": "ArrowLeft",
    "right": "ArrowRight",
}  # fmt: skip
"""Names of keys as agents write them -> as Playwright does."""


def read_action(text: str) -> Action:
    """The action in the first triple-backtick block, else in a ReAct line ``Action: ...``, else the whole text where
    that is one; raises `NotAnAction`. Lone surrogates, which models do write, become question marks.
    """
    written = written_action(text.encode(errors="replace").decode())
    if written is None:
        raise NotAnAction("no action found: write one action between triple backticks, such as ```scroll [down]```")
    word = _WORD.fullmatch(written)
    name = word[1].lower() if word else ""
    if word is None or name not in _READERS:
        raise NotAnAction(f"{_echo(written)!r} is no action: use one of {', '.join(Kind)}")
    return _READERS[Kind(name)](Kind(name), word[2].strip())


def written_action(text: str) -> str | None:
    """The action as the agent wrote it behind its thinking; None when it wrote none."""
    answer = text[end_of_thinking(text) :]
    if (block := _BLOCK.search(answer)) is not None:
        return block[1].strip()
    return answer.strip() if _ALONE.fullmatch(answer) else parse_action(answer)


def _bare(kind: Kind, rest: str) -> Action:
    if rest not in ("", "[]"):
        raise NotAnAction(f"{kind} takes nothing, not {_echo(rest)!r}")
    return Action(kind)


def _on_element(kind: Kind, rest: str) -> Action:
    match = _ELEMENT.match(rest)
    if match is None:
        raise NotAnAction(f"{kind} needs the number of an element, such as {kind} [12], not {_echo(rest)!r}")
    return Action(kind, element=int(match[1]))


def _type(kind: Kind, rest: str) -> Action:
    match = _TYPE.fullmatch(rest)
    if match is None:
        raise NotAnAction(f"type needs an element and a text, such as type [12] [lamp] [1], not {_echo(rest)!r}")
    return Action(kind, element=int(match[1]), text=match[2], enter=match[3] != "0")


def _press(kind: Kind, rest: str) -> Action:
    keys = _inside(kind, rest, "press [ctrl+a]")
    named = [_KEYS.get(key.strip().lower(), key.strip()) for key in re.split(r"\+(?!$)", keys)]
    if not all(named):
        raise NotAnAction(f"press needs keys, such as press [ctrl+a], not {_echo(rest)!r}")
    return Action(kind, text="+".join(named))


def _scroll(kind: Kind, rest: str) -> Action:
    match = _SCROLL.fullmatch(rest)
    if match is None:
        raise NotAnAction(f"scroll needs a direction: scroll [up] or scroll [down], not {_echo(rest)!r}")
    return Action(kind, number=1 if match[1].lower() == "down" else -1)


def _goto(kind: Kind, rest: str) -> Action:
    return Action(kind, text=_inside(kind, rest, "goto [http://homepage.com]").strip())


def _tab_focus(kind: Kind, rest: str) -> Action:
    return Action(kind, number=_on_element(kind, rest).element)


def _stop(kind: Kind, rest: str) -> Action:
    inside = _BRACKETS.fullmatch(rest)
    return Action(kind, text=(rest if inside is None else inside[1]).strip())


def _inside(kind: Kind, rest: str, example: str) -> str:
    inside = _BRACKETS.fullmatch(rest)
    if inside is None or not inside[1].strip():
        raise NotAnAction(f"{kind} needs something in brackets, such as {example}, not {_echo(rest)!r}")
    return inside[1]


_READERS: Mapping[Kind, Callable[[Kind, str], Action]] = {
    Kind.CLICK: _on_element,
    Kind.HOVER: _on_element,
    Kind.TYPE: _type,
    Kind.PRESS: _press,
    Kind.SCROLL: _scroll,
    Kind.GOTO: _goto,
    Kind.NEW_TAB: _bare,
    Kind.TAB_FOCUS: _tab_focus,
    Kind.CLOSE_TAB: _bare,
    Kind.GO_BACK: _bare,
    Kind.GO_FORWARD: _bare,
    Kind.STOP: _stop,
}


def _echo(text: str) -> str:
    return text if len(text) <= MAX_ECHO else text[:MAX_ECHO] + "..."
