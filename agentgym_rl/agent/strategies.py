"""Ways of thinking: what an agent is told, what its turns consist of, and what it sees between them.

An `Agent` lives for one trajectory. It writes the opening conversation, reads every assistant turn, and dresses what
the environment says; the collector does the rest. It knows neither tokens nor models, so that training, evaluation and
hosted models think alike. Which one is chosen by name (``agentgym.agent``), or as ``package.module:Class``:

* ``react``: a thought, then an action.
* ``act``: an action only.
* ``plan``: a plan before the first action. It is shown again with every observation, and replaced when a turn begins
  with a new one (``Plan: ...``).
* ``reflect``: as ``react``; after a failed trial the agent writes what to do differently and tries the same item again
  with that in view.

How an action itself is written is another matter: `agentgym_rl.agent.formats`.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, entry_points
from typing import Any, ClassVar, TypeVar

from agentgym_rl.agent.actions import end_of_thinking
from agentgym_rl.agent.formats import FormatName, Found, TaskView, make_format, parse_format
from agentgym_rl.errors import ConfigError
from agentgym_rl.types import Message, Part, PartKind, Role, StopReason

ACKNOWLEDGEMENT = "OK."
ENTRY_POINT_GROUP = "agentgym_rl.agents"
"""Packages name their own ways of thinking here: ``name = "package.module:Class"``."""
MOST_TRIALS = 8
"""Of one item by one sample."""

_LABEL = re.compile(r"^[ \t>*_#]*(?P<kind>plan|thought)[ \t]*:[ \t*_]*", re.IGNORECASE | re.MULTILINE)
_NEXT_LABEL = re.compile(r"^[ \t>*_#]*(?:thought|action|observation)[ \t]*:", re.IGNORECASE | re.MULTILINE)
_OWN_LABEL = re.compile(r"\s*[*_#]*(?:plan|reflection)[ \t]*:[ \t*_]*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Text:
    """A message's text, and what its stretches are."""

    content: str
    parts: tuple[Part, ...] = ()

    @classmethod
    def of(cls, *pieces: tuple[PartKind | None, str]) -> Text:
        """Pieces end to end; those without a kind, such as labels and line breaks, belong to no part."""
        return cls("").then(*pieces)

    def then(self, *pieces: tuple[PartKind | None, str]) -> Text:
        """The same with further pieces behind it."""
        parts, position = list(self.parts), len(self.content)
        for kind, piece in pieces:
            if kind is not None and piece:
                parts.append(Part(kind, position, position + len(piece)))
            position += len(piece)
        return Text(self.content + "".join(piece for _, piece in pieces), tuple(parts))


@dataclass(frozen=True, slots=True)
class Reply:
    """What an assistant turn comes to."""

    parts: tuple[Part, ...]
    """Of the turn's own text."""
    for_environment: str | None = None
    """What the client's ``step`` gets; None: the environment is not asked."""
    answer: Text | None = None
    """What the agent is told instead, where the environment is not asked."""
    aside: PartKind | None = None
    """Set when the turn was never meant for the environment: it is then no turn of the episode."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a trial came to that did not succeed."""

    score: float
    stop_reason: StopReason
    last_observation: str | None
    """What the environment said to the last action, if the agent has not seen it yet."""


@dataclass(frozen=True, slots=True)
class AgentChoice:
    """The way of thinking and the form of actions, as the configuration names them."""

    agent: str = "react"
    action_format: FormatName | str = FormatName.REACT
    max_trials: int = 3
    """Trials of an item by one sample, for agents that try again."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` for what does not exist."""
        find_agent(self.agent)
        parse_format(self.action_format)
        if not 1 <= self.max_trials <= MOST_TRIALS:
            raise ConfigError(f"agentgym.max_trials={self.max_trials!r}: must be from 1 to {MOST_TRIALS}")

    @property
    def tries_again(self) -> bool:
        """True when a sample may make several trajectories."""
        return find_agent(self.agent).tries_again and self.max_trials > 1

    @property
    def trials(self) -> int:
        """The most trajectories of a sample."""
        return self.max_trials if self.tries_again else 1

    def tools(self, task: TaskView) -> tuple[dict[str, Any], ...]:
        """Functions that the model may call, as JSON schemas; none in other formats."""
        return make_format(self.action_format, task).tools()

    def make(self, task: TaskView, *, lessons: Iterable[str] = (), are_tools_shown: bool = False) -> Agent:
        """The agent of one trajectory.

        ``lessons``: what the same sample wrote after its earlier trials. ``are_tools_shown``: the chat template, or the
        model's server, lists `tools` itself.
        """
        return find_agent(self.agent)(task, self.action_format, lessons=tuple(lessons), are_tools_shown=are_tools_shown)


class Agent:
    """One trajectory's way of thinking: a thought, then an action (``react``), unless a subclass says otherwise.

    A subclass in a file of its own is chosen as ``agentgym.agent=package.module:Class``. What it may override:
    `lead` (how an answer begins), `first_observation`, `read`, `observe`, and `reflection_request` with
    ``tries_again = True``. All of them return text; the collector sees to tokens, masks and budgets.
    """

    name: ClassVar[str] = ""
    lead: ClassVar[str] = "Thought: <reason>\n"
    """What stands before the action in the form of an answer."""
    tries_again: ClassVar[bool] = False
    """True when `reflection_request` may ask for another trial of the item."""

    def __init__(
        self, task: TaskView, action_format: FormatName | str, *, lessons: tuple[str, ...], are_tools_shown: bool
    ) -> None:
        self.task, self.lessons = task, lessons
        self.format = make_format(action_format, task)
        self._are_tools_shown = are_tools_shown

    # ------------------------------------------------------------------------------------------ what the agent is told

    def opening(self, observation: str) -> tuple[tuple[Role, Text], ...]:
        """The conversation before the first assistant turn; it ends with the first observation."""
        return (
            (Role.USER, Text.of((PartKind.INSTRUCTION, self.instruction()))),
            (Role.ASSISTANT, Text.of((PartKind.ACKNOWLEDGEMENT, ACKNOWLEDGEMENT))),
            (Role.USER, self.first_observation(observation)),
        )

    def instruction(self) -> str:
        """The task's description, then the form of an answer; short, since every turn carries it along."""
        functions, form = self.format.describe(are_tools_shown=self._are_tools_shown)
        return "\n".join(part for part in (self.task.description.strip(), functions, self.form_of_answer(form)) if part)

    def form_of_answer(self, action: str) -> str:
        """The last lines of the instruction; ``action`` is the form of an action."""
        return f"Answer with:\n{self.lead}{action}"

    def first_observation(self, observation: str) -> Text:
        """The first observation, after what was learned in earlier trials."""
        if not any(self.lessons):
            return Text.of((PartKind.OBSERVATION, observation))
        pieces: list[tuple[PartKind | None, str]] = [
            (PartKind.INSTRUCTION, "You have tried this before and failed. What you wrote then:")
        ]
        for lesson in filter(None, self.lessons):
            pieces += [(None, "\n"), (PartKind.REFLECTION, lesson)]
        return Text.of(*pieces, (None, "\n\n"), (PartKind.OBSERVATION, observation))

    def observe(self, observation: str) -> Text:
        """What the agent sees of the environment's answer to an action."""
        return Text.of((PartKind.OBSERVATION, observation))

    # ------------------------------------------------------------------------------------------- what the agent writes

    def read(self, text: str) -> Reply:
        """What an assistant turn asks for; called once for each, in order."""
        return self.read_action(text)

    def read_action(self, text: str) -> Reply:
        """Thought, perhaps a plan, and action of a turn."""
        found = self.format.find(text)
        parts = (*_lead_parts(text[: found.lead_end]), *_action_part(found))
        if found.for_environment is not None:
            return Reply(parts, found.for_environment)
        return Reply(parts, answer=Text.of((PartKind.INSTRUCTION, found.complaint)))

    def write(self, action: str, thought: str = "") -> str:
        """The turn by which an expert who thinks ``thought`` does ``action``."""
        written = self.format.write(action)
        return f"Thought: {thought}\n{written}" if thought and self.lead else written

    def preface(self, actions: Sequence[str]) -> str | None:
        """The turn by which an expert who is going to do ``actions`` begins, where that is not the first action."""
        return None

    # ------------------------------------------------------------ trying again

    def reflection_request(self, outcome: Outcome) -> Text | None:
        """What a trial that ended without success asks of the agent before it tries again; None: it does not."""
        return None

    def lesson(self, text: str) -> Text:
        """What the next trials see of the agent's answer; its one part says where in the answer it stands."""
        start = _own_text(text)
        kept = text[start:].strip()
        begin = text.index(kept, start)
        return Text(kept, (Part(PartKind.REFLECTION, begin, begin + len(kept)),) if kept else ())


class React(Agent):
    """A thought, then an action."""

    name = "react"


class Act(Agent):
    """An action only."""

    name = "act"
    lead = ""


class Plan(Agent):
    """A plan in a turn of its own before the first action; in view with every observation since."""

    name = "plan"
    plan = ""
    """The plan in view."""
    _has_planned = False

    def first_observation(self, observation: str) -> Text:
        request = "Before you act, write your plan: a few short steps."
        return super().first_observation(observation).then((None, "\n\n"), (PartKind.INSTRUCTION, request))

    def read(self, text: str) -> Reply:
        if not self._has_planned:
            self._has_planned = True
            return self._read_first_plan(text)
        reply = self.read_action(text)
        for part in reply.parts:
            if part.kind == PartKind.PLAN:
                self.plan = text[part.start : part.end]
        return reply if reply.answer is None else replace(reply, answer=self._in_view(reply.answer))

    def preface(self, actions: Sequence[str]) -> str | None:
        return "\n".join(f"{number}. {action}" for number, action in enumerate(actions, 1))

    def observe(self, observation: str) -> Text:
        return self._in_view(super().observe(observation))

    def _in_view(self, shown: Text) -> Text:
        """``shown``, and the plan after it."""
        return shown.then((None, "\n\nYour plan: "), (PartKind.PLAN, self.plan)) if self.plan else shown

    def _read_first_plan(self, text: str) -> Reply:
        """The turn up to where it begins to think or act, which it was not asked for yet."""
        start = _own_text(text)
        following = _NEXT_LABEL.search(text, start)
        end = following.start() if following and text[start : following.start()].strip() else len(text)
        part = _stripped_part(PartKind.PLAN, text, start, end)
        self.plan = text[part.start : part.end]
        answer = "Now carry it out. To change the plan, write a new one as Plan: ... before your thought."
        parts = (part,) if self.plan else ()
        return Reply(parts, answer=Text.of((PartKind.INSTRUCTION, answer)), aside=PartKind.PLAN)


class Reflect(Agent):
    """After a failed trial, what to do differently; then the same item again with that in view."""

    name = "reflect"
    tries_again = True

    def reflection_request(self, outcome: Outcome) -> Text | None:
        ending = "your turns are used up" if outcome.stop_reason == StopReason.MAX_ROUNDS else "it is over"
        request = (
            f"You have not reached the goal, and {ending}. You will try once more from the start. In two or three "
            "sentences, write what went wrong and what you will do differently."
        )
        seen = outcome.last_observation
        before: tuple[tuple[PartKind | None, str], ...] = (
            () if not seen else ((PartKind.OBSERVATION, seen), (None, "\n\n"))
        )
        return Text.of(*before, (PartKind.INSTRUCTION, request))


# ------------------------------------------------------------ registry

_AgentT = TypeVar("_AgentT", bound=type[Agent])
_agents: dict[str, type[Agent]] = {}


def register_agent(name: str) -> Callable[[_AgentT], _AgentT]:
    """A class decorator: make a way of thinking known to this process under ``name``.

    Processes that shall find it by name without importing its file need an entry point of `ENTRY_POINT_GROUP`;
    ``package.module:Class`` needs neither.
    """

    def enter(agent: _AgentT) -> _AgentT:
        agent.name = name
        _agents[name] = agent
        return agent

    return enter


for _agent in (React, Act, Plan, Reflect):
    register_agent(_agent.name)(_agent)


def find_agent(name: str) -> type[Agent]:
    """The way of thinking registered as ``name``, or imported from ``package.module:Class``.

    Raises `ConfigError` that lists the known ones, or says what is wrong with the import.
    """
    if name in _agents:
        return _agents[name]
    if name in _entry_points():
        return _import_agent(name, _entry_points()[name].value)
    if ":" in name:
        return _import_agent(name, name)
    known = known_agents()
    nearest = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {nearest[0]}?" if nearest else ""
    raise ConfigError(f"agentgym.agent={name!r}: must be one of {', '.join(known)}, or package.module:Class{hint}")


def known_agents() -> list[str]:
    """Names of all registered ways of thinking, the built-in ones first."""
    return [*_agents, *sorted(_entry_points().keys() - _agents.keys())]


def _import_agent(name: str, place: str) -> type[Agent]:
    module, _, attribute = place.partition(":")
    try:
        agent = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"agentgym.agent={name!r}: {place} cannot be imported: {error}") from error
    if not (isinstance(agent, type) and issubclass(agent, Agent)):
        raise ConfigError(
            f"agentgym.agent={name!r}: {place} is {agent!r}, must be a subclass of {Agent.__module__}.Agent"
        )
    return agent


@functools.cache
def _entry_points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


# ------------------------------------------------------------------------------------------------------------- openings


def conversation_start(source: Any, agent: str = "react", action_format: str = "react") -> tuple[Message, Message]:
    """Instruction and acknowledgement that open every conversation; ``source`` is a client or its task description."""
    task = TaskView(source) if isinstance(source, str) else TaskView.of(source)
    opening = AgentChoice(agent, action_format).make(task).opening("")
    first, second = (Message(role, text.content) for role, text in opening[:2])
    return first, second


# ----------------------------------------------------------------------------------------------------- reading a turn


def _lead_parts(lead: str) -> Iterable[Part]:
    """Plan and thought that stand before an action. What has no label is thought, and so is all up to ``</think>``."""
    said = end_of_thinking(lead)
    found = _LABEL.finditer(lead[said:])
    labels = [(match["kind"].lower(), said + match.start(), said + match.end()) for match in found]
    if not labels or lead[: labels[0][1]].strip():
        labels.insert(0, (PartKind.THOUGHT, 0, 0))
    ends = [start for _, start, _ in labels[1:]] + [len(lead)]
    for (kind, _, begin), end in zip(labels, ends, strict=True):
        part = _stripped_part(PartKind(kind), lead, begin, end)
        if part.end > part.start:
            yield part


def _own_text(text: str) -> int:
    """Where a plan or a reflection begins: behind thinking, and behind its label."""
    start = end_of_thinking(text)
    own = _OWN_LABEL.match(text, start)
    return own.end() if own else start


def _action_part(found: Found) -> tuple[Part, ...]:
    return (Part(PartKind.ACTION, found.start, found.end),) if found.end > found.start else ()


def _stripped_part(kind: PartKind, text: str, start: int, end: int) -> Part:
    inner = text[start:end]
    begin = start + len(inner) - len(inner.lstrip())
    return Part(kind, begin, max(begin, start + len(inner.rstrip())))
