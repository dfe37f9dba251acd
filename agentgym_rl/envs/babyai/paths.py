"""Ways through a grid: which cells can be reached, and the fewest turns and steps that face one of them.

Cells are numbered ``y * width + x`` and the outermost are walls. A pose is a cell and a direction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from minigrid.core.actions import Actions

Pose = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Ground:
    """A grid, and where one can walk in it."""

    width: int
    passable: Callable[[int], bool]

    def ahead(self, pose: Pose) -> int:
        """The cell that a pose faces."""
        cell, direction = pose
        return cell + (1, self.width, -1, -self.width)[direction]

    def after(self, pose: Pose, move: Actions) -> Pose:
        """The pose after a turn or a step; a step into what is not passable goes nowhere."""
        cell, direction = pose
        if move == Actions.left:
            return cell, (direction - 1) % 4
        if move == Actions.right:
            return cell, (direction + 1) % 4
        ahead = self.ahead(pose)
        return (ahead, direction) if self.passable(ahead) else pose


def reachable(ground: Ground, start: int) -> set[int]:
    """All cells that one can walk to from ``start``, itself included."""
    reached, waiting = {start}, [start]
    while waiting:
        cell = waiting.pop()
        for direction in range(4):
            neighbour = ground.ahead((cell, direction))
            if neighbour not in reached and ground.passable(neighbour):
                reached.add(neighbour)
                waiting.append(neighbour)
    return reached


def can_face(ground: Ground, reached: set[int], target: int) -> bool:
    """True when one of the cells ``reached`` lies beside ``target``."""
    return any(ground.ahead((target, direction)) in reached for direction in range(4))


def moves_to_face(ground: Ground, start: Pose, target: int) -> tuple[Actions, ...] | None:
    """The fewest moves after which ``target`` is straight ahead; none when it is now; None when there is no way."""
    came_from: dict[Pose, tuple[Pose, Actions] | None] = {start: None}
    for pose in (queue := [start]):
        if ground.ahead(pose) == target:
            return _moves_to(pose, came_from)
        for move in (Actions.forward, Actions.left, Actions.right):
            following = ground.after(pose, move)
            if following not in came_from:
                came_from[following] = pose, move
                queue.append(following)
    return None


def _moves_to(pose: Pose, came_from: dict[Pose, tuple[Pose, Actions] | None]) -> tuple[Actions, ...]:
    moves = []
    while (origin := came_from[pose]) is not None:
        pose, move = origin
        moves.append(move)
    return tuple(reversed(moves))
