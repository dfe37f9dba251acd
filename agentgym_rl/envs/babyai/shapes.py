"""How BabyAI's things are drawn in the viewer; needs no minigrid."""

from __future__ import annotations

from agentgym_rl.viewer.panel import Shape

_DOORS = {"open": Shape.OPEN_DOOR, "closed": Shape.CLOSED_DOOR, "locked": Shape.LOCKED_DOOR}
_SHAPES = {"key": Shape.KEY, "ball": Shape.BALL, "box": Shape.BOX}


def shape_of(kind: str, state: str = "") -> Shape:
    """The shape of a thing; ``state`` is a door's."""
    return _DOORS[state] if state else _SHAPES.get(kind, Shape.TILE)
