"""The kinds of actions of a task as functions, for agents that call functions or write code.

A client lists its kinds of actions as a person would write them: ``get <n> <item>``, ``go to OBJ``, ``click [id]``,
``<search>words</search>``. Each is a function: its fixed words are the name, its gaps the parameters. A call is filled
back into the form, so that the environment reads the action that it has always read. Nothing of a call is ever run.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

_GAP = re.compile(
    r"<(?P<tag>\w+)>(?P<tagged>[^<>]+)</(?P=tag)>|<(?P<angle>\w+)>|\[(?P<bracket>[^\[\]]+)\]|\b(?P<upper>[A-Z]{2,})\b"
)
_REPEATS = re.compile(r",?\s*\.\.\.\s*$")
_UNFIT = re.compile(r"\n|\.\.\.|<[^<>]*\s[^<>]*>(?!.*</)")
"""Line breaks, things left out, and gaps named by several words."""
_WORD = re.compile(r"[A-Za-z0-9]+")
_GENERAL_NAME = "act"


class CallError(ValueError):
    """A call that fits no function; its text tells the agent what would."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A gap of a form."""

    name: str
    hint: str
    """The gap as the form has it."""
    choices: tuple[str, ...] = ()
    """Where the form allows only these."""


@dataclass(frozen=True, slots=True)
class ActionFunction:
    """One kind of action."""

    name: str
    form: str
    parameters: tuple[Parameter, ...]
    literals: tuple[str, ...]
    """What stands before, between and after the gaps: one more than there are parameters."""

    @property
    def signature(self) -> str:
        """``get(n, item)``."""
        return f"{self.name}({', '.join(parameter.name for parameter in self.parameters)})"

    def fill(self, positional: Sequence[Any], named: Mapping[str, Any]) -> str:
        """The action of a call, on one line. Raises `CallError` for arguments that do not fit."""
        names = [parameter.name for parameter in self.parameters]
        if len(positional) > len(names):
            raise CallError(f"{self.signature} takes {len(names)} arguments, not {len(positional) + len(named)}")
        values = dict(zip(names, positional, strict=False))
        for name, value in named.items():
            if name not in names or name in values:
                problem = "twice" if name in values else "unknown"
                raise CallError(f"{self.signature}: argument {name!r} is {problem}")
            values[name] = value
        missing = [name for name in names if name not in values]
        if missing:
            raise CallError(f"{self.signature}: {', '.join(missing)} must be given")
        texts = [self._text(parameter, values[parameter.name]) for parameter in self.parameters]
        return "".join(piece for pair in zip(self.literals, [*texts, ""], strict=True) for piece in pair)

    def match(self, action: str) -> dict[str, Any] | None:
        """The arguments by which `fill` gives ``action``; None when it is of another kind."""
        gaps = [re.escape(literal) for literal in self.literals]
        found = re.fullmatch("(.+?)".join(gaps[:-1]) + ("(.+)" if self.parameters else "") + gaps[-1], action)
        if found is None:
            return None
        values = zip(self.parameters, found.groups(), strict=True)
        return {parameter.name: int(text) if text.isdecimal() else text for parameter, text in values}

    def schema(self) -> dict[str, Any]:
        """The function as chat templates and model servers take it."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": f"The action: {self.form}",
                "parameters": {
                    "type": "object",
                    "properties": {parameter.name: _property(parameter) for parameter in self.parameters},
                    "required": [parameter.name for parameter in self.parameters],
                },
            },
        }

    def _text(self, parameter: Parameter, value: Any) -> str:
        if isinstance(value, list | tuple):
            return ", ".join(self._text(parameter, each) for each in value)
        if not isinstance(value, str | int | float):
            raise CallError(f"{self.signature}: {parameter.name} must be a text or a number")
        text = str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
        return text if self.name == _GENERAL_NAME else " ".join(text.split())


def _property(parameter: Parameter) -> dict[str, Any]:
    choices = {"enum": list(parameter.choices)} if parameter.choices else {}
    return {"type": "string", "description": parameter.hint, **choices}


@cache
def functions_of(forms: tuple[str, ...]) -> tuple[ActionFunction, ...]:
    """A function for each kind of action.

    One that takes the whole action, where the task lists no kinds or writes one in a way that has no plain gaps.
    """
    if not forms or any(_UNFIT.search(_REPEATS.sub("", form)) for form in forms):
        hint = "one action, written as " + " or ".join(forms) if forms else "one action"
        return (ActionFunction(_GENERAL_NAME, "any", (Parameter("action", hint),), ("", "")),)
    names: set[str] = set()
    return tuple(_function(form, names) for form in forms)


def find_function(functions: Iterable[ActionFunction], name: object) -> ActionFunction:
    """The function called ``name``; raises `CallError` that lists what there is."""
    functions = tuple(functions)
    for function in functions:
        if function.name == name:
            return function
    known = ", ".join(function.signature for function in functions)
    raise CallError(f"there is no function {str(name)[:60]!r}; there are {known}")


def as_call(functions: Iterable[ActionFunction], action: str) -> tuple[ActionFunction, dict[str, Any]]:
    """The call that asks for ``action``; raises `CallError` when none does."""
    for function in functions:
        arguments = function.match(action)
        if arguments is not None:
            return function, arguments
    raise CallError(f"the action {action!r} has none of the task's forms")


def _function(form: str, names: set[str]) -> ActionFunction:
    pieces = _pieces(form)
    literals, gaps = pieces[0::2], pieces[1::2]
    name = _unique(_identifier(" ".join(re.sub(r"</\w+>", "", literal) for literal in literals)), names)
    taken: set[str] = set()
    return ActionFunction(name, form, tuple(_parameter(gap, taken) for gap in gaps), tuple(literals))


def _pieces(form: str) -> list[str]:
    """Literal, gap, literal, ..., literal. Of a form that ends in ``...`` the repeated gaps are one."""
    repeats = _REPEATS.search(form)
    text = form[: repeats.start()] if repeats else form
    pieces, start = [], 0
    for gap in _GAP.finditer(text):
        group = next(name for name in ("tagged", "angle", "bracket", "upper") if gap[name] is not None)
        inside = group in ("tagged", "bracket")  # the frame around the gap's name belongs to the action
        begin, end = gap.span(group) if inside else gap.span()
        pieces += [text[start:begin], gap[group]]
        start = end
    pieces.append(text[start:])
    return _with_repeated_gap(pieces, form) if repeats else pieces


def _with_repeated_gap(pieces: list[str], form: str) -> list[str]:
    """Join the last gaps, as far as only blanks part them, to one of any length."""
    first = len(pieces) - 2
    while first > 2 and not pieces[first - 1].strip():
        first -= 2
    words = [literal for literal in pieces[:first:2] if literal.strip()]
    hint = form.rpartition(words[-1])[2].strip() if words else form
    return [*pieces[:first], f"rest\0{hint}", ""]


def _parameter(gap: str, taken: set[str]) -> Parameter:
    name, _, hint = gap.partition("\0")
    choices = tuple(name.split("|")) if "|" in name else ()
    return Parameter(_unique("choice" if choices else _identifier(name.lower()), taken), hint or name, choices)


def _identifier(text: str) -> str:
    name = "_".join(_WORD.findall(text)) or "action"
    return f"{name}_" if keyword.iskeyword(name) else name if name.isidentifier() else f"action_{name}"


def _unique(name: str, taken: set[str]) -> str:
    unique, number = name, 1
    while unique in taken:
        number += 1
        unique = f"{name}_{number}"
    taken.add(unique)
    return unique
