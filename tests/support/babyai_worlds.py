"""Small worlds made by hand, in place of generated ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from minigrid.core.world_object import Ball, WorldObj
from minigrid.envs.babyai.core.roomgrid_level import RoomGridLevel
from minigrid.envs.babyai.core.verifier import GoToInstr, Instr, ObjDesc

from agentgym_rl.envs.babyai import environment as module
from agentgym_rl.envs.babyai.environment import BabyAI

RIGHT, DOWN, LEFT, UP = range(4)
Point = tuple[int, int]


def go_to_the_red_ball() -> Instr:
    return GoToInstr(ObjDesc("ball", "red"))


class HandMade(RoomGridLevel):
    """Two rooms of 6 x 6 cells, from (1, 1) to (6, 6) and from (8, 1) to (13, 6), with a wall between them.

    A red ball, the goal, lies in the far corner (13, 6) unless the goal is another one.
    """

    def __init__(
        self, things: dict[Point, WorldObj], agent: Point, facing: int, goal: Callable[[], Instr] = go_to_the_red_ball
    ) -> None:
        self._things = {(13, 6): Ball("red"), **things}
        self._agent, self._facing, self._goal = agent, facing, goal
        super().__init__(room_size=8, num_rows=1, num_cols=2)

    def gen_mission(self) -> None:
        self.agent_pos, self.agent_dir = self._agent, self._facing
        for place, thing in self._things.items():
            self.put_obj(thing, *place)
        self.instrs = self._goal()


def begin(
    monkeypatch: pytest.MonkeyPatch,
    things: dict[Point, WorldObj],
    *,
    agent: Point = (1, 3),
    facing: int = RIGHT,
    goal: Callable[[], Instr] = go_to_the_red_ball,
) -> BabyAI:
    """An environment at the start of an episode in such a world."""
    level = HandMade(things, agent, facing, goal)
    level.reset(seed=0)
    monkeypatch.setattr(module, "open_level", lambda place: level)
    environment = BabyAI()
    environment.reset(0)
    return environment


def stands(environment: BabyAI) -> tuple[Point, int]:
    """Place and direction of the agent."""
    x, y = environment.level.agent_pos
    return (int(x), int(y)), int(environment.level.agent_dir)
