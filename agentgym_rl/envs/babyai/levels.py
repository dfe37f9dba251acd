"""The 40 levels, and how an index names one of them with a seed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium
import minigrid  # noqa: F401 - registers the levels with gymnasium
from gymnasium.envs.registration import load_env_creator
from minigrid.envs.babyai.core import roomgrid_level
from minigrid.envs.babyai.core.roomgrid_level import RoomGridLevel

# Level generation prints each world that it throws away. A name in the module is found before the built-in one; to
# redirect standard output instead would do so for every thread.
setattr(roomgrid_level, "print", lambda *words: None)  # noqa: B010 - the module declares no such name

FAMILIES = {
    "goto": (
        *("GoToRedBallGrey", "GoToRedBall", "GoToRedBallNoDists", "GoToObjS6", "GoToLocalS8N7", "GoToObjMazeS7"),
        *("GoToImpUnlock", "GoToSeqS5R2", "GoToRedBlueBall", "GoToDoor", "GoToObjDoor"),
    ),
    "open": ("Open", "OpenRedDoor", "OpenDoorLoc", "OpenRedBlueDoorsDebug", "OpenDoorsOrderN4Debug"),
    "pickup": ("Pickup", "UnblockPickup", "PickupLoc", "PickupDistDebug", "PickupAbove"),
    "putnext": ("PutNextLocalS6N4", "PutNextS7N4Carrying"),
    "unlock": (
        *("Unlock", "UnlockLocalDist", "KeyInBox", "UnlockPickupDist", "BlockedUnlockPickup", "UnlockToUnlock"),
    ),
    "other": ("ActionObjDoor", "FindObjS7", "KeyCorridorS6R3", "OneRoomS20", "MoveTwoAcrossS8N9"),
    "synth": ("SynthS5R2", "SynthLoc", "SynthSeq", "MiniBossLevel", "BossLevel", "BossLevelNoUnlock"),
}
"""Family -> names of its levels; level 1 is the first of the first family."""

LEVELS = tuple(name for names in FAMILIES.values() for name in names)
NUM_LEVELS = len(LEVELS)

_LATER_VERSIONS = {"GoToObjS6": "v1"}
"""Levels that minigrid registers under another version than v0."""


@dataclass(frozen=True, slots=True)
class Place:
    """What an index stands for."""

    level: int
    """1 .. `NUM_LEVELS`."""
    seed: int

    @property
    def name(self) -> str:
        """The level's name, without ``BabyAI-`` and version."""
        return LEVELS[self.level - 1]

    @property
    def family(self) -> str:
        return next(family for family, names in FAMILIES.items() if self.name in names)


def place_of(data_idx: int) -> Place:
    """Neighbouring indices are different levels; every `NUM_LEVELS` indices the seed goes up by one."""
    return Place(data_idx % NUM_LEVELS + 1, data_idx // NUM_LEVELS)


def open_level(place: Place) -> RoomGridLevel:
    """A fresh world, the same for the same place in every process."""
    level: RoomGridLevel = _creator(place.name)()
    level.reset(seed=place.seed)
    return level


@functools.cache
def _creator(name: str) -> Callable[[], Any]:
    # Not `gymnasium.make`: its wrappers check and count each step, which doubles the time of one.
    spec = gymnasium.spec(f"BabyAI-{name}-{_LATER_VERSIONS.get(name, 'v0')}")
    assert spec.entry_point is not None
    creator = load_env_creator(spec.entry_point) if isinstance(spec.entry_point, str) else spec.entry_point
    return functools.partial(creator, **spec.kwargs)
