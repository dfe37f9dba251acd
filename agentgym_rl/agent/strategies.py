"""How an agent is told to answer, and how an expert's action is written in that form.

The instruction is the environment's own description followed by the form of an answer; both are short because every
turn of every trajectory carries them.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

from agentgym_rl.errors import ConfigError
from agentgym_rl.types import Message, Role

ACKNOWLEDGEMENT = "OK."


class Strategy(StrEnum):
    """What an assistant turn consists of."""

    REACT = "react"
    """A thought, then an action."""
    ACT = "act"
    """An action only."""


_FORMATS = {
    Strategy.REACT: "Answer with:\nThought: <reason>\nAction: <one action>",
    Strategy.ACT: "Answer with:\nAction: <one action>",
}


class DescribesTask(Protocol):
    """An environment client, as far as the instruction goes."""

    @property
    def task_description(self) -> str: ...


def parse_strategy(name: str) -> Strategy:
    """The strategy called ``name``; raises `ConfigError` for an unknown one."""
    try:
        return Strategy(name)
    except ValueError:
        allowed = ", ".join(Strategy)
        raise ConfigError(f"agentgym.strategy={name!r}: must be one of {allowed}") from None


def conversation_start(source: DescribesTask | str, strategy: Strategy | str) -> tuple[Message, Message]:
    """Instruction and acknowledgement that open every conversation; ``source`` is a client or its task description."""
    description = source if isinstance(source, str) else source.task_description
    instruction = f"{description.strip()}\n{_FORMATS[parse_strategy(strategy)]}"
    return Message(Role.USER, instruction), Message(Role.ASSISTANT, ACKNOWLEDGEMENT)


def format_action(action: str, thought: str, strategy: Strategy | str) -> str:
    """The assistant text by which an expert who thinks ``thought`` does ``action``."""
    if parse_strategy(strategy) == Strategy.ACT or not thought:
        return f"Action: {action}"
    return f"Thought: {thought}\nAction: {action}"
