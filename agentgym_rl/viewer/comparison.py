"""Two trajectories side by side: turn by turn, with the words that differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from agentgym_rl.agent.actions import split_thought
from agentgym_rl.types import Part as MessagePart
from agentgym_rl.types import PartKind, Trajectory, Turn
from agentgym_rl.viewer.differences import Part, compare_texts
from agentgym_rl.viewer.panel import first_observation

_Parts = tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class ComparedTurn:
    """One side of a row."""

    thought: tuple[Part, ...]
    action: tuple[Part, ...]
    observation: tuple[Part, ...]
    reward: float
    done: bool
    tokens: int


@dataclass(frozen=True, slots=True)
class ComparedRow:
    """The same turn of both; a side whose episode had ended is None."""

    turn: int
    """Counted from 1."""
    left: ComparedTurn | None
    right: ComparedTurn | None
    differs: bool


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two trajectories."""

    opening: tuple[tuple[Part, ...], tuple[Part, ...]]
    """First observations."""
    rows: tuple[ComparedRow, ...]
    first_difference: int | None
    """The first turn in which they differ; None where they are alike."""


def compare(left: Trajectory, right: Trajectory) -> Comparison:
    """Rows for every turn of the longer one."""
    count = max(len(left.turns), len(right.turns))
    rows = tuple(_row(number, _turn_of(left, number), _turn_of(right, number)) for number in range(1, count + 1))
    return Comparison(
        opening=compare_texts(first_observation(left), first_observation(right)),
        rows=rows,
        first_difference=next((row.turn for row in rows if row.differs), None),
    )


def comparison_json(comparison: Comparison) -> Any:
    """The comparison as plain JSON values."""
    return msgspec.to_builtins(comparison)


@dataclass(frozen=True, slots=True)
class _Said:
    """A turn and what its text falls into."""

    turn: Turn
    texts: tuple[str, str, str]
    """Thought (a plan included), action and observation."""


def _turn_of(trajectory: Trajectory, number: int) -> _Said | None:
    if number > len(trajectory.turns):
        return None
    turn = trajectory.turns[number - 1]
    places = trajectory.turn_messages[number - 1 : number]
    parts = trajectory.parts[places[0]] if places and places[0] < len(trajectory.parts) else ()
    return _Said(turn, (*_pieces(turn.text, parts), turn.observation or ""))


def _pieces(text: str, parts: Sequence[MessagePart]) -> tuple[str, str]:
    """Thought and action, as the trajectory tells them or, where it does not, as they are usually written."""
    if not parts:
        thought, action = split_thought(text)
        return thought, action or ""
    thoughts = [text[part.start : part.end] for part in parts if part.kind != PartKind.ACTION]
    return "\n".join(thoughts), "".join(text[part.start : part.end] for part in parts if part.kind == PartKind.ACTION)


def _row(number: int, left: _Said | None, right: _Said | None) -> ComparedRow:
    if left is None or right is None:
        return ComparedRow(number, _alone(left), _alone(right), differs=True)
    thoughts, actions, observations = (compare_texts(*texts) for texts in zip(left.texts, right.texts, strict=True))
    differs = any(part.changed for pair in (thoughts, actions, observations) for side in pair for part in side)
    one, other = (
        _side(said.turn, (thoughts[side], actions[side], observations[side])) for side, said in enumerate((left, right))
    )
    return ComparedRow(number, one, other, differs=differs or left.turn.reward != right.turn.reward)


def _alone(said: _Said | None) -> ComparedTurn | None:
    if said is None:
        return None
    thought, action, observation = ((Part(text, True),) if text else () for text in said.texts)
    return _side(said.turn, (thought, action, observation))


def _side(turn: Turn, parts: tuple[_Parts, _Parts, _Parts]) -> ComparedTurn:
    return ComparedTurn(*parts, reward=turn.reward, done=turn.done, tokens=turn.num_tokens)
