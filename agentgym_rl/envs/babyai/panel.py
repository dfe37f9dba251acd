"""BabyAI in the viewer: the world from above after each turn.

The world is played again from the item's seed and the recorded actions, where minigrid is installed; as long as that
gives the recorded observations it is the world that was. Otherwise the agent's view is drawn from its own words.
"""

from __future__ import annotations

import re
from importlib.util import find_spec

from agentgym_rl.envs.babyai.shapes import shape_of
from agentgym_rl.types import Trajectory
from agentgym_rl.viewer.panel import (
    Block,
    Facts,
    Grid,
    Panel,
    Shape,
    Text,
    Thing,
    asked,
    first_observation,
    observations,
)

_GOAL = re.compile(r"^Your goal: (.+)$", re.MULTILINE)
_IN_VIEW = re.compile(r"^In view: (.*)\.$", re.MULTILINE)
_THING = re.compile(r"(\w+) (?:(open|closed|locked) )?(\w+) (\d+) \(([^)]*)\)")
_BEARING = re.compile(r"(\d+) steps? (forward|left|right)")
_CARRIED = re.compile(r"^You carry (.*)\.$", re.MULTILINE)
_VIEW_SIDE = 7
"""Cells of the agent's view, which stands in the middle of its last row."""
_UP = 3
_MAX_INDEX = 2**31


def panel(trajectory: Trajectory) -> Panel:
    """The world, what is carried and the steps used, at each frame."""
    seen = observations(trajectory)
    goal = match[1] if (match := _GOAL.search(first_observation(trajectory))) else ""
    replayed = _replayed(trajectory, seen)
    drawn = [_view_frame(text) for text in seen[len(replayed) :]]
    return Panel((*replayed, *drawn), always=(Text(goal, "Goal"),), note=_note(len(replayed), len(seen)), goal=goal)


def _note(replayed: int, total: int) -> str:
    if replayed == total:
        return "Played again from the item's seed; bright is what the agent sees."
    if replayed:
        return (
            f"From turn {replayed} on, playing again from the item's seed gave other observations than those "
            "recorded: drawn from the agent's words instead."
        )
    return "Drawn from the agent's words: what it sees, itself at the bottom."


def _replayed(trajectory: Trajectory, seen: list[str]) -> list[tuple[Block, ...]]:
    """Frames of the world itself as far as they can be had; none without minigrid."""
    if find_spec("minigrid") is None or not 0 <= trajectory.item.index < _MAX_INDEX:
        return []
    from agentgym_rl.envs.babyai.replay import replay

    return list(replay(trajectory.item.index, asked(trajectory), seen))


# ---------------------------------------------------------------------------------------------------- the agent's words


def _view_frame(text: str) -> tuple[Block, ...]:
    carried = match[1] if (match := _CARRIED.search(text)) else "unknown"
    facts = Facts((("Carries", carried),))
    if not (view := _IN_VIEW.search(text)):
        return (facts,)
    things = [thing for match in _THING.finditer(view[1]) if (thing := _seen_thing(match)) is not None]
    middle, last = _VIEW_SIDE // 2, _VIEW_SIDE - 1
    agent = Thing(middle, last, Shape.AGENT, "red", "the agent", _UP)
    return Grid(_VIEW_SIDE, _VIEW_SIDE, (*things, agent), "The agent's view"), facts


def _seen_thing(match: re.Match[str]) -> Thing | None:
    """A thing of ``red ball 1 (3 steps forward, 1 step left)``; None outside the view."""
    colour, state, kind, number, bearing = match.groups()
    steps = {direction: int(count) for count, direction in _BEARING.findall(bearing) if len(count) < 4}
    x = _VIEW_SIDE // 2 + steps.get("right", 0) - steps.get("left", 0)
    y = _VIEW_SIDE - 1 - steps.get("forward", 0)
    if not (0 <= x < _VIEW_SIDE and 0 <= y < _VIEW_SIDE):
        return None
    label = " ".join(filter(None, (colour, state, kind, number)))
    return Thing(x, y, shape_of(kind, state or ""), colour, label)
