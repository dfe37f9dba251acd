"""A BabyAI episode played again from its seed, drawn from above for the viewer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from minigrid.core.world_object import Door, WorldObj

from agentgym_rl.envs.babyai.environment import BabyAI
from agentgym_rl.envs.babyai.shapes import shape_of
from agentgym_rl.envs.babyai.view import describe, state_of
from agentgym_rl.viewer.panel import Block, Facts, Grid, Meter, Shape, Thing


def replay(data_idx: int, actions: Sequence[str], seen: Sequence[str]) -> Iterator[tuple[Block, ...]]:
    """A frame of the start and one after each action, as long as the world says what was ``seen``."""
    world = BabyAI()
    if world.reset(data_idx).observation != seen[0]:
        return
    yield _frame(world)
    for action, observation in zip(actions, seen[1:], strict=True):
        # A turn without an action is answered by the client and changes nothing.
        if action and (world.done or world.step(action).observation != observation):
            return
        yield _frame(world)


def _frame(world: BabyAI) -> tuple[Block, ...]:
    level = world.level
    carried = "nothing" if level.carrying is None else describe(level.carrying)
    facts = (("Carries", carried), ("Steps", f"{level.step_count} of {level.max_steps}"), ("Score", f"{world.score:g}"))
    # Of the world as it was played again: what the server paid plays no part.
    return _grid(world), Meter(float(world.score > 0), 1.0, "Goal reached", is_goal=True), Facts(facts)


def _grid(world: BabyAI) -> Grid:
    level = world.level
    cells = level.grid.grid
    things = (_thing(number % level.width, number // level.width, each) for number, each in enumerate(cells))
    x, y = (int(part) for part in level.agent_pos)
    agent = Thing(x, y, Shape.AGENT, "red", "the agent", int(level.agent_dir))
    visible = _visible(world)
    return Grid(
        *(level.width, level.height, (*filter(None, things), agent), "World"),
        walls="".join("1" if each is not None and each.type == "wall" else "0" for each in cells),
        lit="".join("1" if number in visible else "0" for number in range(len(cells))),
    )


def _thing(x: int, y: int, thing: WorldObj | None) -> Thing | None:
    """A thing as it is drawn; None for an empty cell and for a wall."""
    if thing is None or thing.type == "wall":
        return None
    state = state_of(thing) if isinstance(thing, Door) else ""
    return Thing(x, y, shape_of(thing.type, state), thing.color, describe(thing))


def _visible(world: BabyAI) -> set[int]:
    """Numbers of the cells that the agent sees now."""
    level = world.level
    _, mask = level.gen_obs_grid()
    left, top, right, bottom = level.get_view_exts()
    cells = set()
    for y in range(max(0, top), min(level.height, bottom)):
        for x in range(max(0, left), min(level.width, right)):
            in_view = level.relative_coords(x, y)
            if in_view is not None and mask[in_view[0], in_view[1]]:
                cells.add(y * level.width + x)
    return cells
