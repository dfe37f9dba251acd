"""Expert play: minigrid's bot where it reaches the goal, in this environment's actions.

The bot knows the worlds from inside and plays in minigrid's steps. Where one of the path-finding actions does the same
as the bot's next steps (takes and opens the same things at the same places, and ends where the bot ends), in no more
steps, it stands for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from minigrid.core.actions import Actions
from minigrid.core.world_object import Box
from minigrid.envs.babyai.core.roomgrid_level import RoomGridLevel
from minigrid.envs.babyai.core.verifier import AfterInstr, AndInstr, BeforeInstr, Instr, PutNextInstr
from minigrid.utils.baby_ai_bot import BabyAIBot, GoNextToSubgoal

from agentgym_rl.envs.babyai.environment import BabyAI
from agentgym_rl.envs.babyai.levels import open_level, place_of
from agentgym_rl.envs.babyai.paths import Ground, Pose

MAX_STEPS = 400
"""minigrid's steps after which the bot is given up: it needs 20 to 200 where it succeeds, and can walk in circles."""
_MAX_SEARCHES = 200
"""Searches for a way within one decision, after which the bot is given up: it can plan in circles."""
_MOVES = (Actions.left, Actions.right, Actions.forward)


def plan(environment: BabyAI) -> list[str]:
    """Actions that reach the goal of the episode's start; none where the bot does not reach it.

    ``environment`` is left as it is.
    """
    primitives = _bot_play(environment.data_idx)
    if primitives is None:
        return []
    for actions in (_shortened(environment.data_idx, primitives), _one_by_one(environment.data_idx, primitives)):
        if _reaches_goal(environment.data_idx, actions):
            return actions
    return []


# ------------------------------------------------------------------------------------------------------------- the bot


class _GivesUp(Exception):
    """The bot does not know what to do."""


class _Bot(BabyAIBot):
    """The bot, which gives up where minigrid's would plan for ever."""

    def decide(self) -> Actions:
        """Its next step."""
        self.bfs_counter = 0
        try:
            return self.replan()
        # How it fails: on what it takes for impossible (AssertionError), with no place to drop a thing (TypeError), and
        # on things that it loses sight of (the others).
        except (AssertionError, TypeError, AttributeError, IndexError) as error:
            raise _GivesUp from error

    def _breadth_first_search(self, *arguments: object, **options: object) -> object:
        if self.bfs_counter > _MAX_SEARCHES:
            raise _GivesUp
        return super()._breadth_first_search(*arguments, **options)


def _bot_play(data_idx: int) -> list[Actions] | None:
    """minigrid's steps by which the bot reaches the goal; None when it does not."""
    level = open_level(place_of(data_idx))
    taken: list[Actions] = []
    try:
        for action in _decisions(level):
            taken.append(action)
            _, reward, terminated, truncated, _ = level.step(action)
            if terminated or truncated or len(taken) >= MAX_STEPS:
                return taken if reward > 0 else None
    except _GivesUp:
        pass
    return None


def _decisions(level: RoomGridLevel) -> Iterator[Actions]:
    """The bot's steps; each must be executed before the next is asked for."""
    for box in _filled_boxes(level):
        yield from _opening(level, box)
    bot = _Bot(level)
    if level.carrying is not None and _is_to_be_moved(level):
        # It begins with what is to be moved in its hands, and would look for it in vain: leave out going and taking.
        del bot.stack[-2:]
    while True:
        yield bot.decide()


def _filled_boxes(level: RoomGridLevel) -> list[Box]:
    """Boxes that hold something, for which the bot would not look there."""
    boxes = [thing for thing in level.grid.grid if isinstance(thing, Box)]
    return [box for box in boxes if box.contains]


def _opening(level: RoomGridLevel, box: Box) -> Iterator[Actions]:
    bot = _Bot(level)
    bot.stack = [GoNextToSubgoal(bot, box)]
    while (action := bot.decide()) != Actions.done:
        yield action
    yield Actions.toggle


def _is_to_be_moved(level: RoomGridLevel) -> bool:
    instruction = _instruction(level)
    return isinstance(instruction, PutNextInstr) and level.carrying in instruction.desc_move.obj_set


# --------------------------------------------------------------------------------------------------------- translation


@dataclass(frozen=True, slots=True)
class _Moment:
    """How things stand between two of the bot's steps."""

    pose: Pose
    progress: tuple[object, ...]
    """Which parts of the instruction are done."""


@dataclass(frozen=True, slots=True)
class _Effect:
    """What a run of steps does: where the agent ends, and what it did to things from which poses."""

    end: Pose
    deeds: tuple[tuple[Pose, Actions], ...]


def _reaches_goal(data_idx: int, actions: list[str]) -> bool:
    environment = BabyAI()
    environment.reset(data_idx)
    for action in actions:
        if environment.step(action).done:
            break
    return environment.score > 0


def _one_by_one(data_idx: int, primitives: list[Actions]) -> list[str]:
    """Each step as an action of its own."""
    environment = BabyAI()
    environment.reset(data_idx)
    actions = []
    for primitive in primitives:
        action = _action_of(environment, primitive)
        if action:
            environment.step(action)
            actions.append(action)
    return actions


def _shortened(data_idx: int, primitives: list[Actions]) -> list[str]:
    """Path-finding actions in the place of as many steps as each can stand for."""
    trace = _trace(data_idx, primitives)
    environment = BabyAI()
    environment.reset(data_idx)
    actions: list[str] = []
    position = 0
    while position < len(primitives) and not environment.done:
        action, position = _longest(environment, primitives, trace, position)
        if action:
            environment.step(action)
            actions.append(action)
    return actions


def _trace(data_idx: int, primitives: list[Actions]) -> list[_Moment]:
    """How things stand before each step, and after the last."""
    environment = BabyAI()
    environment.reset(data_idx)
    moments = [_Moment(environment.pose, _progress(_instruction(environment.level)))]
    for primitive in primitives:
        environment.level.step(primitive)
        moments.append(_Moment(environment.pose, _progress(_instruction(environment.level))))
    return moments


def _instruction(level: RoomGridLevel) -> Instr:
    instruction: Instr = getattr(level, "instrs")  # noqa: B009 - the class declares no such name
    return instruction


def _progress(instruction: Instr) -> tuple[object, ...]:
    """Which parts of an instruction are done."""
    if not isinstance(instruction, BeforeInstr | AfterInstr | AndInstr):
        return ()
    parts = (_progress(instruction.instr_a), _progress(instruction.instr_b))
    return (instruction.a_done, instruction.b_done, *parts)


def _longest(environment: BabyAI, primitives: list[Actions], trace: list[_Moment], position: int) -> tuple[str, int]:
    """The action that stands for the most steps from ``position`` on, and the position after these."""
    best, end = _action_of(environment, primitives[position]), position + 1
    later = _later_effects(primitives, trace, position)
    for action in environment.available_actions():
        steps = environment.primitives(action)
        reached = later.get(_effect(environment, steps), -1)
        if reached > end and reached - position >= len(steps):
            best, end = action, reached
    return best, end


def _later_effects(primitives: list[Actions], trace: list[_Moment], position: int) -> dict[_Effect, int]:
    """Effect of the steps from ``position`` on -> the last position at which it is that.

    No further than to where a part of the instruction is done, or its order might be lost.
    """
    deeds: tuple[tuple[Pose, Actions], ...] = ()
    found = {}
    for index in range(position, len(primitives)):
        if primitives[index] not in _MOVES:
            deeds += ((trace[index].pose, primitives[index]),)
        if len(deeds) > 1:  # no action does more
            break
        found[_Effect(trace[index + 1].pose, deeds)] = index + 1
        if trace[index + 1].progress != trace[position].progress:
            break
    return found


def _effect(environment: BabyAI, steps: tuple[Actions, ...]) -> _Effect:
    # A plan makes no step into what is in the way, and what it opens is open when it goes on.
    unobstructed = Ground(environment.level.width, lambda cell: True)
    pose, deeds = environment.pose, []
    for step in steps:
        if step in _MOVES:
            pose = unobstructed.after(pose, step)
        else:
            deeds.append((pose, step))
    return _Effect(pose, tuple(deeds))


def _action_of(environment: BabyAI, primitive: Actions) -> str:
    """The action that does one step; empty for a step without effect."""
    names = {
        Actions.left: "turn left",
        Actions.right: "turn right",
        Actions.forward: "move forward",
        Actions.drop: "drop",
        Actions.toggle: "toggle",
    }
    if primitive in names:
        return names[primitive]
    faced = environment.faced()
    verb = "pickup" if primitive == Actions.pickup else "go to"
    return "" if faced is None else f"{verb} {faced.name}"
