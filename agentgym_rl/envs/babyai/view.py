"""What the agent sees: the things in its view by name, and the cells it has seen since the episode began.

Cells are numbered ``y * width + x``. Directions are minigrid's: 0 right, 1 down, 2 left, 3 up. Legend of arrays: ``V``
side of the view (7 cells), the agent in the middle of its last row.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from minigrid.core.constants import DIR_TO_VEC, OBJECT_TO_IDX
from minigrid.core.world_object import Door, WorldObj
from minigrid.envs.babyai.core.roomgrid_level import RoomGridLevel

_UNSEEN = OBJECT_TO_IDX["unseen"]
_NO_THINGS = (_UNSEEN, OBJECT_TO_IDX["empty"], OBJECT_TO_IDX["wall"])


@dataclass(frozen=True, slots=True)
class Sighting:
    """A thing in view."""

    thing: WorldObj
    cell: int
    forward: int
    """Steps ahead; never negative."""
    right: int
    """Steps to the right; negative to the left."""
    number: int
    """1 for the nearest of those with the same description, and so on."""

    @property
    def name(self) -> str:
        """As actions name it: ``red ball 1``, ``red closed door 2``."""
        return f"{describe(self.thing)} {self.number}"

    @property
    def distance(self) -> int:
        return self.forward + abs(self.right)


def describe(thing: WorldObj) -> str:
    """Colour, state of a door, and kind."""
    state = f" {state_of(thing)}" if isinstance(thing, Door) else ""
    return f"{thing.color}{state} {thing.type}"


def state_of(door: Door) -> str:
    """``open``, ``locked`` or ``closed``."""
    if door.is_open:
        return "open"
    return "locked" if door.is_locked else "closed"


class View:
    """What has been seen of one level so far; `look` after each change of it."""

    def __init__(self, level: RoomGridLevel) -> None:
        self._level = level
        self._seen = np.zeros((level.height, level.width), bool)
        self.sightings: tuple[Sighting, ...] = ()
        """Things in view, from near to far; of equally far ones those more to the left first."""

    def has_seen(self, cell: int) -> bool:
        return bool(self._seen.flat[cell])

    def at(self, cell: int) -> Sighting | None:
        """The thing that is seen in a cell."""
        return next((sighting for sighting in self.sightings if sighting.cell == cell), None)

    def look(self, image_VV: np.ndarray) -> None:
        """Take in minigrid's image of the view, which is indexed by column, then by row."""
        kinds_VV = image_VV[:, :, 0]
        columns, rows = np.nonzero(kinds_VV != _UNSEEN)
        forward, right = self._level.agent_view_size - 1 - rows, columns - self._level.agent_view_size // 2
        x, y = self._in_world(forward, right)
        inside = (x >= 0) & (x < self._level.width) & (y >= 0) & (y < self._level.height)
        self._seen[y[inside], x[inside]] = True
        # Where the agent stands the image shows what it carries.
        shown = inside & ~np.isin(kinds_VV[columns, rows], _NO_THINGS) & ((forward != 0) | (right != 0))
        found = zip(*(axis[shown].tolist() for axis in (x, y, forward, right)), strict=True)
        self.sightings = self._number([(int(f), int(r), int(px), int(py)) for px, py, f, r in found])

    def _in_world(self, forward: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        ahead_x, ahead_y = DIR_TO_VEC[self._level.agent_dir]
        x, y = self._level.agent_pos
        return x + forward * ahead_x - right * ahead_y, y + forward * ahead_y + right * ahead_x

    def _number(self, found: list[tuple[int, int, int, int]]) -> tuple[Sighting, ...]:
        """Sightings of things at (forward, right, x, y), from near to far."""
        counts, sightings = Counter[str](), []
        for forward, right, x, y in sorted(found, key=lambda place: (place[0] + abs(place[1]), place[1], place[0])):
            thing = self._level.grid.get(x, y)
            assert thing is not None  # the image shows one
            counts[describe(thing)] += 1
            cell = y * self._level.width + x
            sightings.append(Sighting(thing, cell, forward, right, counts[describe(thing)]))
        return tuple(sightings)
