"""SciWorld: experiments of school science in a small house, played in text.

The agent moves through rooms, opens, picks up, mixes, heats and measures things, and says by ``focus on`` what its
answer is. The simulator (package ``scienceworld``, a Java program, see `simulator`) knows the rules; this module is one
episode after another in one of its worlds: which task an index means, what is scored, and when an episode ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from agentgym_rl.envs.base import Environment, InvalidCall, ResetResult, StepResult
from agentgym_rl.envs.sciworld.client import opening
from agentgym_rl.envs.sciworld.items import Task
from agentgym_rl.envs.sciworld.simulator import (
    SimulatorError,
    World,
    give_back_gold_world,
    give_back_world,
    item_table,
    take_gold_world,
    take_world,
)

MAX_MOVES = 100
"""An episode ends with the first move beyond them. Looking around and the like are no moves."""
_FIRST_ACTION = "look around"


@dataclass(frozen=True, slots=True)
class SciWorldStart(ResetResult):
    """The start of an episode; `observation` is task and room together, as the agent reads them."""

    task_name: str
    var_num: int
    task_description: str
    room: str
    """What is seen first."""
    score: int
    """Above 0 where a part of the task is fulfilled from the start."""
    done: bool


@dataclass(frozen=True, slots=True)
class SciWorldStep(StepResult):
    """What an action did; `reward` is the change of the score."""

    score: int
    """Of the episode so far: 0..100, or -100 when the wrong thing was focused on."""
    moves: int


class SciWorld(Environment):
    """One episode after another in one of the simulator's worlds."""

    def __init__(self, worlds_ahead: int = 1) -> None:
        """``worlds_ahead``: how many environments are to share a Java process, when one is started for this one.

        Raises `ConfigError` without Java, `SimulatorError` when it does not start.
        """
        self._worlds_ahead = worlds_ahead
        self._world: World | None = take_world(worlds_ahead)
        self._gold_world: World | None = None
        self._items = item_table(self._world)
        self._start: SciWorldStart | None = None
        self._last: SciWorldStep | None = None
        self._actions: list[str] | None = None

    def reset(self, data_idx: int) -> SciWorldStart:
        task, variation = self._find(data_idx)
        self._start = self._last = None
        world = self._living_world()
        # Loading makes the world anew. The simulator's own reset would do the same again.
        world.load(task.name, variation)
        description = world.call("getTaskDescription")
        self._last = first = self._take(_FIRST_ACTION, score_before=0)
        self._start = SciWorldStart(
            observation=opening(description, first.observation),
            task_name=task.name,
            var_num=variation,
            task_description=description,
            room=first.observation,
            score=first.score,
            done=first.done,
        )
        return self._start

    def step(self, action: str) -> SciWorldStep:
        last = self._latest()
        if last.done:
            raise InvalidCall(f"the episode of {self.start.task_name} has finished: reset before the next step")
        self._last = None  # a step that fails ends the episode
        # Java reads UTF-8, which has no lone surrogates.
        text = " ".join(action.split()).encode(errors="replace").decode()
        self._last = self._take(text, score_before=last.score)
        return self._last

    def observation(self) -> str:
        last = self._latest()
        return self.start.observation if last.observation is self.start.room else last.observation

    def available_actions(self) -> list[str]:
        """All actions that the simulator takes to be valid now, some hundreds to thousands; listing takes 0.1 s and
        more, so that it is done when asked for, and once for each state."""
        self._latest()
        if self._actions is None:
            self._actions = self._loaded_world().texts("getValidActionObjectCombinations")
        return list(self._actions)

    def close(self) -> None:
        if self._world is not None:
            give_back_world(self._world)
        if self._gold_world is not None:
            give_back_gold_world(self._gold_world)
        self._world = self._gold_world = None

    # ------------------------------------------------------------------------------------- what the further calls tell

    @property
    def start(self) -> SciWorldStart:
        """How the current episode began."""
        if self._start is None:
            raise SimulatorError("no episode is under way: the last reset or step failed; reset again")
        return self._start

    @property
    def last_seen(self) -> str:
        """What the last action showed: after a reset the room, without the task."""
        return self._latest().observation

    def action_hint(self) -> dict[str, list[str]]:
        """Forms of actions, in which OBJ stands for a thing, and the things at hand."""
        self._latest()
        world = self._loaded_world()
        return {
            "possible_actions": world.texts("getPossibleActions"),
            "possible_objects": world.texts("getPossibleObjects"),
        }

    def detail(self) -> dict[str, Any]:
        """The last answer and the task."""
        last, start = self._latest(), self.start
        return {
            "task_name": start.task_name,
            "var_num": start.var_num,
            "task_description": start.task_description,
            "observation": last.observation,
            "reward": last.reward,
            "score": last.score,
            "done": last.done,
            "deleted": False,
        }

    def state(self) -> dict[str, Any]:
        """What is around and at hand, and how far the episode has gone; looking costs no move."""
        last = self._latest()
        return {
            "look": self._loaded_world().call("freeActionLook"),
            "inventory": self.inventory(),
            "moves": last.moves,
            "score": last.score,
            "done": last.done,
        }

    def inventory(self) -> str:
        self._latest()
        carried: str = self._loaded_world().call("freeActionInventory")
        return carried

    def object_tree(self) -> Any:
        """All things in the world and what they hold, nested."""
        self._latest()
        return self._loaded_world().object_tree()

    def goals(self) -> str:
        """The subgoals that make up the score, and which are reached: for a person, not for the agent."""
        self._latest()
        progress: str = self._loaded_world().call("getGoalProgressStr")
        return progress

    def gold_actions(self) -> list[str]:
        """Actions that complete the current task from its start; the simulator searches them for seconds."""
        if self._gold_world is None or not self._gold_world.simulator.alive:
            self._gold_world = take_gold_world()
        self._gold_world.load(self.start.task_name, self.start.var_num, gold=True)
        return self._gold_world.texts("getGoldActionSequence")

    # ------------------------------------------------------------------------------------------------------- details

    def _find(self, data_idx: int) -> tuple[Task, int]:
        try:
            return self._items.find(data_idx)
        except IndexError as error:
            raise InvalidCall(str(error)) from None

    def _living_world(self) -> World:
        """The world, or a fresh one when its process has ended."""
        if self._world is not None and not self._world.simulator.alive:
            give_back_world(self._world)
            self._world = None
        if self._world is None:
            self._world = take_world(self._worlds_ahead)
        return self._world

    def _loaded_world(self) -> World:
        assert self._world is not None
        return self._world

    def _latest(self) -> SciWorldStep:
        if self._last is None:
            raise SimulatorError("no episode is under way: the last reset or step failed; reset again")
        return self._last

    def _take(self, action: str, *, score_before: int) -> SciWorldStep:
        self._actions = None
        seen, score, completed, moves = self._loaded_world().step(action)
        score = round(100 * score)
        done = bool(completed) or score < 0 or moves > MAX_MOVES
        return SciWorldStep(seen, score - score_before, done, score, moves)
