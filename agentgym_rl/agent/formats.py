"""How an action stands in an assistant's turn: as a line (ReAct), as a function call, or as a call in code.

A format says how an action is to be written and finds it in what was written. Calls are read by ``json`` and ``ast``
alone: text of a model is never evaluated, and a call does nothing but name an action of the environment.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import Any

from agentgym_rl.agent.actions import before_guessed_answer, end_of_thinking, find_action, last_action_label
from agentgym_rl.agent.functions import CallError, as_call, find_function, functions_of
from agentgym_rl.errors import ConfigError

_MAX_CALL_LENGTH = 4000
"""Characters of a call in code that are read; deeper nesting than fits in them would only exhaust the parser."""
_MAX_OPENINGS = 64
"""Brackets of a turn that are tried as the beginning of a call, each at the cost of the rest of the text."""
_JSON_OPENING = re.compile(r"[\[{]")
_TOOL_CALL = re.compile(r"<tool_call>\s*(?P<call>.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)
_FENCED = re.compile(r"```[a-z]*[ \t]*\n(?P<code>.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
_CODE_BEGINS = re.compile(r"\baction[ \t]*:|```|^[ \t`\[(]*\w+\(.*\)[ \t`\]]*$", re.IGNORECASE | re.MULTILINE)
"""The label, a fence, or a line that is a call."""


class FormatName(StrEnum):
    """The ways to write an action."""

    REACT = "react"
    """A line ``Action: ...``."""
    FUNCTION_CALLING = "function_calling"
    """A call of a function, in the model's own format where its chat template has one."""
    CODE_AS_ACTION = "code_as_action"
    """One call, as in Python."""


@dataclass(frozen=True, slots=True)
class TaskView:
    """What an agent is told of a task; `of` takes it from an environment client."""

    description: str
    action_forms: tuple[str, ...] = ()
    example_action: str = ""

    @classmethod
    def of(cls, client: Any) -> TaskView:
        """Of a client, or of its class."""
        forms = tuple(getattr(client, "action_forms", ()))
        return cls(client.task_description, forms, getattr(client, "example_action", ""))


@dataclass(frozen=True, slots=True)
class Found:
    """What was found of an action in a turn's text."""

    lead_end: int
    """Thought and plan stand before this."""
    start: int
    end: int
    """The action is ``text[start:end]``; empty where there is none."""
    for_environment: str | None
    """What the client's ``step`` gets; None: nothing that the environment could do."""
    complaint: str = ""
    """Why not, in words for the agent."""


class ActionFormat(ABC):
    """One way to write an action, for one task."""

    def __init__(self, task: TaskView) -> None:
        self.task = task

    @abstractmethod
    def describe(self, *, are_tools_shown: bool) -> tuple[str, str]:
        """What an agent must know before (empty, or a list of functions), and the last lines of an answer.

        ``are_tools_shown``: the chat template lists `tools` itself.
        """

    @abstractmethod
    def find(self, text: str) -> Found:
        """The action in a turn's text."""

    @abstractmethod
    def write(self, action: str) -> str:
        """The last lines of an answer that asks for ``action``. Raises `CallError` when no call does."""

    def tools(self) -> tuple[dict[str, Any], ...]:
        """Functions as chat templates and model servers take them; nothing where there are none to call."""
        return ()


class ReactFormat(ActionFormat):
    """The environment's client finds the action itself, as it always does: it gets the whole turn."""

    def describe(self, *, are_tools_shown: bool) -> tuple[str, str]:
        return "", "Action: <one action>"

    def find(self, text: str) -> Found:
        found = find_action(text)
        if found is None:
            return Found(len(text), len(text), len(text), text)
        return Found(found.label_start, found.start, found.end, text)

    def write(self, action: str) -> str:
        return f"Action: {action}"


class _CallFormat(ActionFormat):
    def __init__(self, task: TaskView) -> None:
        super().__init__(task)
        self.functions = functions_of(task.action_forms)

    def _listing(self) -> str:
        lines = [f"{function.signature}: {_meaning(function)}" for function in self.functions]
        return "Each kind of action is a function:\n" + "\n".join(lines)

    def _action(self, name: object, positional: list[Any], named: Mapping[str, Any]) -> str:
        return f"Action: {find_function(self.functions, name).fill(positional, named)}"


def _meaning(function: Any) -> str:
    return function.form if function.form != "any" else function.parameters[0].hint


class FunctionCallingFormat(_CallFormat):
    """A JSON object with ``name`` and ``arguments`` (or ``parameters``), alone or in ``<tool_call>``; the first."""

    def describe(self, *, are_tools_shown: bool) -> tuple[str, str]:
        if are_tools_shown:
            return "", "a call of one function"
        form = '<tool_call>\n{"name": <function>, "arguments": {<name>: <value>, ...}}\n</tool_call>'
        return self._listing(), form

    def find(self, text: str) -> Found:
        problem = "no function call was found"
        for lead_end, start, end, call in _json_calls(text):
            try:
                return Found(lead_end, start, end, self._read(call))
            except CallError as error:
                problem = str(error)
                break
        else:
            lead_end = start = end = len(text)
        complaint = f"The call does not fit: {problem}. Call one function, for example:\n{self._example()}"
        return Found(lead_end, start, end, None, complaint)

    def write(self, action: str) -> str:
        function, arguments = as_call(self.functions, action)
        return call_text(function.name, arguments)

    def tools(self) -> tuple[dict[str, Any], ...]:
        return tuple(function.schema() for function in self.functions)

    def _read(self, call: Mapping[str, Any]) -> str:
        arguments = call.get("arguments", call.get("parameters", {}))
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                raise CallError("its arguments are not JSON") from None
        if not isinstance(arguments, Mapping):
            raise CallError("its arguments are no JSON object")
        return self._action(call["name"], [], {str(name): value for name, value in arguments.items()})

    def _example(self) -> str:
        try:
            return self.write(self.task.example_action)
        except CallError:
            return call_text(self.functions[0].name, {each.name: "..." for each in self.functions[0].parameters})


class CodeFormat(_CallFormat):
    """One call with literal arguments, after ``Action:`` or in a fenced block; of a list of calls the first."""

    def describe(self, *, are_tools_shown: bool) -> tuple[str, str]:
        return self._listing(), "Action: <one call, with literal arguments>"

    def find(self, text: str) -> Found:
        lead_end, start, end = _code_span(text)
        try:
            return Found(lead_end, start, end, self._read(text[start:end]))
        except CallError as error:
            complaint = f"The call does not fit: {error}. Write one call, for example:\nAction: {self._example()}"
            return Found(lead_end, start, end, None, complaint)

    def write(self, action: str) -> str:
        return f"Action: {self._code(action)}"

    def _code(self, action: str) -> str:
        function, arguments = as_call(self.functions, action)
        return f"{function.name}({', '.join(f'{name}={value!r}' for name, value in arguments.items())})"

    def _read(self, code: str) -> str:
        call = _parse_call(code)
        named = {}
        for keyword in call.keywords:
            if keyword.arg is None:
                raise CallError("**arguments are not allowed")
            named[keyword.arg] = _literal(keyword.value)
        if not isinstance(call.func, ast.Name):
            raise CallError("only a function's bare name can be called")
        return self._action(call.func.id, [_literal(argument) for argument in call.args], named)

    def _example(self) -> str:
        try:
            return self._code(self.task.example_action)
        except CallError:
            return self.functions[0].signature


_FORMATS: dict[FormatName, type[ActionFormat]] = {
    FormatName.REACT: ReactFormat,
    FormatName.FUNCTION_CALLING: FunctionCallingFormat,
    FormatName.CODE_AS_ACTION: CodeFormat,
}


def parse_format(name: str) -> FormatName:
    """The format called ``name``; raises `ConfigError` for an unknown one."""
    try:
        return FormatName(name)
    except ValueError:
        raise ConfigError(f"agentgym.action_format={name!r}: must be one of {', '.join(FormatName)}") from None


def make_format(name: FormatName | str, task: TaskView) -> ActionFormat:
    """The format ``name`` for a task; raises `ConfigError` for an unknown one."""
    return _FORMATS[parse_format(name)](task)


def call_text(name: str, arguments: Mapping[str, Any]) -> str:
    """A function call as an assistant's text, e.g. of one that a model server sent apart from the text."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': dict(arguments)}, ensure_ascii=False)}\n</tool_call>"


# ------------------------------------------------------------------------------------------------------- reading calls


def _json_calls(text: str) -> Iterator[tuple[int, int, int, Mapping[str, Any]]]:
    """Calls in a turn's answer: end of what precedes, start, end and the JSON object; tagged ones, else bare ones."""
    answer_start = end_of_thinking(text)
    tagged = list(_TOOL_CALL.finditer(text, answer_start))
    for match in tagged:
        call = _load_call(match["call"])
        if call is not None:
            yield match.start(), match.start(), match.end(), call
    if not tagged:
        yield from _bare_calls(text, answer_start)


def _load_call(text: str) -> Mapping[str, Any] | None:
    try:
        return _as_call_object(json.loads(text))
    except (ValueError, RecursionError):
        return None


def _as_call_object(value: Any) -> Mapping[str, Any] | None:
    """A call, or the first of a list of calls."""
    first = value[0] if isinstance(value, list) and value else value
    return first if isinstance(first, dict) and isinstance(first.get("name"), str) else None


def _bare_calls(text: str, answer_start: int) -> Iterator[tuple[int, int, int, Mapping[str, Any]]]:
    decoder, end = json.JSONDecoder(), 0
    for opening in islice(_JSON_OPENING.finditer(text, answer_start), _MAX_OPENINGS):
        begin = opening.start()
        if begin < end:
            continue
        try:
            value, end = decoder.raw_decode(text, begin)
        except (ValueError, RecursionError):
            continue
        call = _as_call_object(value)
        if call is not None:
            yield begin, begin, end, call


def _code_span(text: str) -> tuple[int, int, int]:
    """End of what precedes, start and end of the code: after the last ``Action:``, else the last fenced block, else
    the last line that says something."""
    answer_start = end_of_thinking(text)
    lead_end, start, end = _code_span_of_answer(before_guessed_answer(text[answer_start:], _CODE_BEGINS))
    return answer_start + lead_end, answer_start + start, answer_start + end


def _code_span_of_answer(read: str) -> tuple[int, int, int]:
    label = last_action_label(read)
    begin = label.end() if label else 0
    fences = list(_FENCED.finditer(read, begin))
    if fences:
        fence = fences[0] if label else fences[-1]
        return (label.start() if label else fence.start(), *_stripped(read, *fence.span("code")))
    if label:
        return label.start(), *_stripped(read, begin, len(read), "` \t\r\n")
    shown = read.rstrip()
    start, end = _stripped(read, shown.rfind("\n") + 1, len(shown), "` \t\r\n")
    return start, start, end


def _stripped(text: str, start: int, end: int, blanks: str = " \t\r\n") -> tuple[int, int]:
    inner = text[start:end]
    start += len(inner) - len(inner.lstrip(blanks))
    return start, start + len(inner.strip(blanks))


def _parse_call(code: str) -> ast.Call:
    """The one call that the code consists of, or its first line does."""
    if len(code) > _MAX_CALL_LENGTH:
        raise CallError(f"it has {len(code)} characters, at most {_MAX_CALL_LENGTH} are read")
    for candidate in (code, code.partition("\n")[0]):
        node = _parse(candidate.strip().strip("`"))
        if isinstance(node, ast.List | ast.Tuple) and node.elts:
            node = node.elts[0]
        if isinstance(node, ast.Call):
            return node
    raise CallError("it is not one call")


def _parse(code: str) -> ast.expr | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of odd escapes, which are the model's own
        try:
            return ast.parse(code, mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        raise CallError("its arguments must be literal values") from None
