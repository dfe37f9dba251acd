"""BabyAI: an agent in a world of rooms, doors and things follows an instruction, in words. Worlds are minigrid's.

A text action stands for one or several of minigrid's steps; each of those counts, and an action is broken off where the
episode ends. An action that is not understood or not possible changes nothing and takes no step.
"""

from __future__ import annotations

import base64
import io
import json
from dataclasses import dataclass

import numpy as np
import pygame
from minigrid.core.actions import Actions
from minigrid.core.world_object import Box, Door, Key, WorldObj
from minigrid.envs.babyai.core.roomgrid_level import RoomGridLevel

from agentgym_rl.envs.babyai.actions import FORMS, Command, Target, Verb, parse
from agentgym_rl.envs.babyai.levels import open_level, place_of
from agentgym_rl.envs.babyai.paths import Ground, Pose, can_face, moves_to_face, reachable
from agentgym_rl.envs.babyai.view import Sighting, View, describe
from agentgym_rl.envs.base import Environment, InvalidCall, ResetResult, StepResult

_SIMPLE = {
    Verb.TURN_LEFT: Actions.left,
    Verb.TURN_RIGHT: Actions.right,
    Verb.MOVE_FORWARD: Actions.forward,
    Verb.DROP: Actions.drop,
    Verb.TOGGLE: Actions.toggle,
}
_MAX_ECHO = 80
"""Characters of an action that a reply repeats."""
_NO_STEPS: tuple[Actions, ...] = ()


@dataclass(frozen=True, slots=True)
class BabyAIStep(StepResult):
    """What one action did, and the score so far."""

    score: float


class _Refused(Exception):
    """An action that has no effect; its text is the reply to the agent."""


class BabyAI(Environment):
    """One BabyAI episode after another."""

    def __init__(self) -> None:
        self.data_idx = -1
        """The index of the latest reset."""
        self.score = 0.0
        """Sum of the rewards of this episode."""
        self.reward = 0.0
        """Of the latest action."""
        self.done = True
        self._level: RoomGridLevel
        self._view: View
        self._observation = ""

    @property
    def level(self) -> RoomGridLevel:
        """minigrid's world."""
        return self._level

    @property
    def pose(self) -> Pose:
        """Cell and direction of the agent."""
        x, y = self._level.agent_pos
        return int(y) * self._level.width + int(x), int(self._level.agent_dir)

    def faced(self) -> Sighting | None:
        """The thing right ahead of the agent."""
        return self._view.at(self._ground().ahead(self.pose))

    # ------------------------------------------------------------------------------------------------------- episode

    def reset(self, data_idx: int) -> ResetResult:
        if data_idx < 0:
            raise InvalidCall(f"data_idx {data_idx}: must be at least 0")
        self.data_idx = data_idx
        self._level = open_level(place_of(data_idx))
        self._view = View(self._level)
        # Not what minigrid's reset returned: some levels put a thing into the agent's hands after that.
        self._view.look(self._level.gen_obs()["image"])
        self.score, self.reward, self.done = 0.0, 0.0, False
        self._observation = f"Your goal: {self._level.mission}\n{self._scene()}"
        return ResetResult(self._observation)

    def step(self, action: str) -> BabyAIStep:
        if self.done:
            raise InvalidCall(f"the episode of index {self.data_idx} has finished: reset before the next step")
        self.reward = 0.0
        try:
            self._observation = self._execute(self._understood(action))
        except _Refused as refusal:
            self._observation = f"{refusal}\n{self._scene()}"
        return BabyAIStep(self._observation, self.reward, self.done, self.score)

    def observation(self) -> str:
        return self._observation

    def available_actions(self) -> list[str]:
        """All actions that are possible now; none once the episode is done."""
        if self.done:
            return []
        plain = [Command(verb) for verb in Verb if not verb.has_target and self._objection(Command(verb)) is None]
        ground = self._ground()
        reached = reachable(ground, self.pose[0])
        near = [sighting for sighting in self._view.sightings if can_face(ground, reached, sighting.cell)]
        aimed = [f"{verb} {each.name}" for each in near for verb in Verb if self._can_aim(verb, each)]
        return [*(str(command.verb) for command in plain), *aimed]

    def render(self) -> str:
        """The whole world from above, what the agent sees brighter, as a PNG."""
        pixels = np.ascontiguousarray(self._level.get_frame())
        height, width = pixels.shape[:2]
        file = io.BytesIO()
        pygame.image.save(pygame.image.frombuffer(pixels.tobytes(), (width, height), "RGB"), file, "world.png")
        return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"

    # ------------------------------------------------------------------------------------------------------- actions

    def primitives(self, action: str) -> tuple[Actions, ...]:
        """The steps of minigrid that an action stands for now; none for one that is not possible."""
        try:
            return self._plan(self._understood(action))
        except _Refused:
            return _NO_STEPS

    def _understood(self, action: str) -> Command:
        command = parse(action)
        if command is None:
            shown = action if len(action) <= _MAX_ECHO else action[:_MAX_ECHO] + "..."
            raise _Refused(f"Could not understand '{shown}'. Actions: {'; '.join(FORMS)}.")
        return command

    def _execute(self, command: Command) -> str:
        """Carry a command out as far as the episode lasts; returns the observation, or raises `_Refused`."""
        for primitive in self._plan(command):
            image, reward, terminated, truncated, _ = self._level.step(primitive)
            self._view.look(image["image"])
            if terminated or truncated:
                self.done, self.reward = True, float(reward)
                self.score += self.reward
                break
        return f"{self._ending(terminated)}\n{self._scene()}" if self.done else self._scene()

    def _ending(self, terminated: bool) -> str:
        if self.reward > 0:
            return "The goal is reached."
        if terminated:
            return "The goal is missed: this was not what it asks for."
        return f"The goal is missed: all {self._level.max_steps} steps are used."

    def _plan(self, command: Command) -> tuple[Actions, ...]:
        """The steps of a command; raises `_Refused` where it is not possible."""
        if (objection := self._objection(command)) is not None:
            raise _Refused(objection)
        if command.verb == Verb.CHECK:
            return _NO_STEPS
        if command.target is None:
            return (_SIMPLE[command.verb],)
        sighting = self._meant(command.target)
        moves = moves_to_face(self._ground(), self.pose, sighting.cell)
        if moves is None:
            raise _Refused(f"There is no way to the {sighting.name} through what you have seen.")
        return moves + self._at_target(command.verb, moves, sighting)

    def _at_target(self, verb: Verb, moves: tuple[Actions, ...], sighting: Sighting) -> tuple[Actions, ...]:
        """The steps once ``moves`` have led before the thing."""
        if verb == Verb.GO_TO:
            # Whoever faces it already must take some step for the goal to be looked at: minigrid's, which does nothing.
            return _NO_STEPS if moves else (Actions.done,)
        if verb == Verb.PICK_UP:
            return (Actions.pickup,)
        opening = (Actions.toggle,) if verb == Verb.TOGGLE_THROUGH else _NO_STEPS
        return (*opening, Actions.forward, *self._beyond(moves, sighting.cell))

    def _beyond(self, moves: tuple[Actions, ...], door: int) -> tuple[Actions, ...]:
        """The step out of a doorway on the far side, unless something stands there."""
        ground, pose = self._ground(), self.pose
        for move in moves:
            pose = ground.after(pose, move)
        return (Actions.forward,) if self._is_free(ground.ahead((door, pose[1]))) else _NO_STEPS

    def _objection(self, command: Command) -> str | None:
        """Why a command is not possible, apart from whether there is a way; None when nothing stands against it."""
        if command.target is not None:
            return self._objection_to(command.verb, self._meant(command.target))
        ahead = self._thing_at(self._ground().ahead(self.pose))
        if command.verb == Verb.MOVE_FORWARD and ahead is not None and not ahead.can_overlap():
            return f"Could not move forward: {_article(ahead)} is in the way."
        if command.verb == Verb.DROP:
            return self._objection_to_dropping(ahead)
        if command.verb == Verb.TOGGLE:
            return self._objection_to_toggling(ahead)
        return None

    def _objection_to_dropping(self, ahead: WorldObj | None) -> str | None:
        if (carried := self._level.carrying) is None:
            return "Could not drop anything: you carry nothing."
        if ahead is not None:
            return f"Could not drop the {describe(carried)}: {_article(ahead)} is where it would go."
        return None

    def _objection_to_toggling(self, thing: WorldObj | None) -> str | None:
        if not isinstance(thing, Door | Box):
            return "Could not toggle: neither a door nor a box is right ahead of you."
        if isinstance(thing, Door) and not self._opens(thing):
            return f"Could not open the {describe(thing)}: carry a {thing.color} key."
        return None

    def _objection_to(self, verb: Verb, sighting: Sighting) -> str | None:
        thing, carried = sighting.thing, self._level.carrying
        if verb == Verb.PICK_UP:
            if not thing.can_pickup():
                return f"Could not pick up the {sighting.name}: doors stay where they are."
            if carried is not None:
                return f"Could not pick up the {sighting.name}: drop the {describe(carried)} that you carry first."
        if verb in (Verb.GO_THROUGH, Verb.TOGGLE_THROUGH):
            if not isinstance(thing, Door):
                return f"Could not go through the {sighting.name}: it is no door."
            if thing.is_open != (verb == Verb.GO_THROUGH):
                other = Verb.GO_THROUGH if thing.is_open else Verb.TOGGLE_THROUGH
                return f"Could not {verb} the {sighting.name}: {other} it."
            if not thing.is_open and not self._opens(thing):
                return f"Could not open the {sighting.name}: carry a {thing.color} key."
        return None

    def _can_aim(self, verb: Verb, sighting: Sighting) -> bool:
        return verb.has_target and self._objection_to(verb, sighting) is None

    def _meant(self, target: Target) -> Sighting:
        sighting = target.find(self._view.sightings)
        if sighting is None:
            raise _Refused(f"There is no {target} in view.")
        return sighting

    # --------------------------------------------------------------------------------------------------------- world

    def _thing_at(self, cell: int) -> WorldObj | None:
        thing: WorldObj | None = self._level.grid.grid[cell]
        return thing

    def _is_free(self, cell: int) -> bool:
        """True where one can walk."""
        thing = self._thing_at(cell)
        return thing is None or thing.can_overlap()

    def _ground(self) -> Ground:
        """Ways lead over cells that the agent has seen in this episode."""
        return Ground(self._level.width, lambda cell: self._view.has_seen(cell) and self._is_free(cell))

    def _opens(self, door: Door) -> bool:
        """True when toggling has an effect on a door."""
        key = self._level.carrying
        return not door.is_locked or (isinstance(key, Key) and key.color == door.color)

    # --------------------------------------------------------------------------------------------------------- words

    def _scene(self) -> str:
        seen = "; ".join(f"{sighting.name} ({_bearing(sighting)})" for sighting in self._view.sightings)
        carried = self._level.carrying
        lines = [
            f"In view: {seen or 'nothing but floor and walls'}.",
            f"Ahead: {self._ahead()}.",
            f"You carry {'nothing' if carried is None else _article(carried)}.",
        ]
        if not self.done:
            lines.append(f"Available actions: {json.dumps(self.available_actions())}")
        return "\n".join(lines)

    def _ahead(self) -> str:
        """The first thing or wall straight ahead, and how far it is."""
        ground, (cell, direction) = self._ground(), self.pose
        for distance in range(1, self._level.agent_view_size):
            cell = ground.ahead((cell, direction))
            thing = self._thing_at(cell)
            if thing is not None and self._view.has_seen(cell):
                sighting = self._view.at(cell)
                what = "wall" if sighting is None else sighting.name
                return f"{what}, {_steps(distance)} away"
            if thing is not None:
                break
        return f"nothing within {self._level.agent_view_size - 1} steps"


def _bearing(sighting: Sighting) -> str:
    """``3 steps forward, 1 step left``."""
    parts = [f"{_steps(sighting.forward)} forward"] if sighting.forward else []
    if sighting.right:
        parts.append(f"{_steps(abs(sighting.right))} {'right' if sighting.right > 0 else 'left'}")
    return ", ".join(parts)


def _steps(count: int) -> str:
    return f"{count} step" if count == 1 else f"{count} steps"


def _article(thing: WorldObj) -> str:
    if thing.type == "wall":
        return "a wall"
    return f"a {describe(thing)}"
