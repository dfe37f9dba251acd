"""TextCraft in the viewer: what is held, and the tree of crafts that leads to the goal, with how far it is done.

All of it is read from the episode's own words: the commands of the first observation, the actions and the replies.
Where the recipes are installed they tell, besides, which items belong to a group such as planks.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from agentgym_rl.envs.textcraft.environment import recipe_book
from agentgym_rl.errors import ConfigError
from agentgym_rl.types import Trajectory
from agentgym_rl.viewer.panel import Block, Meter, Node, Panel, Table, Tone, Tree, asked, first_observation

_COMMAND = re.compile(r"craft ([0-9]{1,6}) (.+?) using (.+)", re.IGNORECASE)
_COUNTED = re.compile(r"\s*([0-9]{1,6}) (.+?)\s*")
_INPUTS = re.compile(r" using (.+)", re.IGNORECASE)
_GOAL = re.compile(r"^Goal: craft (.+?)\.?$", re.MULTILINE)
_GOT = re.compile(r"Got ([0-9]{1,6}) (.+)")
_CRAFTED = re.compile(r"Crafted ([0-9]{1,6}) (?:minecraft:)?(.+)")
_LISTED = re.compile(r"\[([^\]]+)\] \(([0-9]{1,9})\)")
_MAX_NODES = 300
"""Of the tree. Recipes branch, and a file that is no real episode may hold any."""


@dataclass(frozen=True, slots=True)
class _Command:
    """A crafting command as the observation lists it."""

    text: str
    item: str
    count: int
    inputs: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class _Step:
    """A part of the tree: so many of an item, made by a command or fetched."""

    item: str
    need: int
    accepted: frozenset[str]
    """Items that serve as it: those of a group, else itself."""
    command: _Command | None
    parts: tuple[_Step, ...]


def panel(trajectory: Trajectory) -> Panel:
    """Inventory and progress after each turn."""
    opening = first_observation(trajectory)
    commands = _read_commands(opening)
    goal = match[1].strip().lower() if (match := _GOAL.search(opening)) else ""
    used = _crafts_of(trajectory)
    planner = _Planner(commands, used)
    tree = planner.step(goal, 1) if goal else None
    inventories = list(_inventories(trajectory))
    frames = tuple(
        _frame(tree, inventory, inventories[max(0, number - 1)]) for number, inventory in enumerate(inventories)
    )
    return Panel(frames, always=(_command_table(commands, tree, planner),), goal=goal)


# ------------------------------------------------------------------------------------------------------------- reading


def _read_commands(opening: str) -> list[_Command]:
    commands = []
    for line in opening.splitlines():
        if match := _COMMAND.fullmatch(line.strip()):
            commands.append(_Command(line.strip(), match[2].lower(), int(match[1]), _read_inputs(match[3])))
    return commands


def _read_inputs(text: str) -> tuple[tuple[str, int], ...]:
    found = (_COUNTED.fullmatch(part) for part in text.split(","))
    return tuple((_plain(match[2]), int(match[1])) for match in found if match)


def _plain(name: str) -> str:
    return " ".join(name.lower().replace("_", " ").removeprefix("minecraft:").rstrip(".").split())


def _crafts_of(trajectory: Trajectory) -> list[_Command]:
    """The crafts that the agent carried out."""
    crafts = (_craft_of(action, reply) for action, reply in _exchanges(trajectory))
    return [craft for craft in crafts if craft is not None]


def _exchanges(trajectory: Trajectory) -> Iterator[tuple[str, str]]:
    """Action and reply of each turn."""
    for action, turn in zip(asked(trajectory), trajectory.turns, strict=True):
        yield action, (turn.observation or "").strip()


def _craft_of(action: str, reply: str) -> _Command | None:
    """What an action crafted from what; None when it crafted nothing."""
    done, inputs = _CRAFTED.fullmatch(reply), _INPUTS.search(action)
    if done is None or inputs is None:
        return None
    return _Command(reply, _plain(done[2]), int(done[1]), _read_inputs(inputs[1].replace("_", " ")))


def _inventories(trajectory: Trajectory) -> Iterator[Counter[str]]:
    """What is held at each frame. A listing of the inventory sets right what had been reckoned."""
    held = Counter[str]()
    yield held
    for action, reply in _exchanges(trajectory):
        held = Counter(held)
        if craft := _craft_of(action, reply):
            held.subtract(dict(_summed(craft.inputs)))
            held[craft.item] += craft.count
        elif got := _GOT.fullmatch(reply):
            held[_plain(got[2])] += int(got[1])
        elif reply.startswith("Inventory:"):
            held = Counter({_plain(item): int(count) for item, count in _LISTED.findall(reply)})
        held = +held  # drops what is used up
        yield held


def _summed(inputs: Sequence[tuple[str, int]]) -> Counter[str]:
    total = Counter[str]()
    for item, count in inputs:
        total[item] += count
    return total


# ---------------------------------------------------------------------------------------------------------------- tree


class _Planner:
    """Chooses for each item the command that makes it: one that the agent used, else the first with the least parts."""

    def __init__(self, commands: Sequence[_Command], used: Sequence[_Command]) -> None:
        self._ways: dict[str, list[_Command]] = {}
        for command in commands:
            self._ways.setdefault(command.item, []).append(command)
        self._groups = _groups()
        self._used = used
        self._used_items = {command.item for command in used} | {name for each in used for name, _ in each.inputs}
        self._nodes = 0

    def step(self, name: str, need: int, above: frozenset[str] = frozenset()) -> _Step:
        """The tree of ``need`` pieces of an item or group; what stands ``above`` it is not unfolded again."""
        self._nodes += 1
        group = self._groups.get(name, frozenset()) if name not in self._ways else frozenset()
        item = self._item_for(name, group)
        command = self._choose(item) if item not in above and self._nodes < _MAX_NODES else None
        times = 0 if command is None else math.ceil(need / max(1, command.count))
        inner = above | {item}
        parts = () if command is None else tuple(self.step(part, n * times, inner) for part, n in command.inputs)
        return _Step(name, need, group or frozenset({name}), command, parts)

    def _item_for(self, name: str, group: frozenset[str]) -> str:
        """The item of a group that the agent dealt with, else the first that a command makes."""
        makeable = sorted(item for item in group if item in self._ways)
        return next((item for item in makeable if item in self._used_items), makeable[0] if makeable else name)

    def _choose(self, item: str) -> _Command | None:
        ways = self._ways.get(item, [])
        return min(ways, key=lambda way: (not self.times_used(way), len(way.inputs)), default=None)

    def times_used(self, way: _Command) -> int:
        """How often the agent crafted by it, concrete items standing for groups."""
        return sum(self._follows(craft, way) for craft in self._used)

    def _follows(self, craft: _Command, way: _Command) -> bool:
        given = [name for name, _ in craft.inputs]
        return craft.item == way.item and all(
            any(each in self._groups.get(name, frozenset({name})) for each in given) for name, _ in way.inputs
        )


def _groups() -> Mapping[str, frozenset[str]]:
    try:
        return recipe_book().tags
    except ConfigError:  # the recipes are not installed: a group then has no branch
        return {}


# ------------------------------------------------------------------------------------------------------------- showing


def _frame(tree: _Step | None, held: Counter[str], before: Counter[str]) -> tuple[Block, ...]:
    inventory = _inventory_table(held, before)
    if tree is None:
        return (inventory,)
    node = _node(tree, Counter(held), is_done=False)
    reached, total = _count_done(node)
    return Meter(reached, total, "Parts of the goal at hand", is_goal=True), Tree((node,), "Way to the goal"), inventory


def _node(step: _Step, free: Counter[str], *, is_done: bool) -> Node:
    """Takes what it needs out of ``free``, so that no item counts twice."""
    have = step.need if is_done else _take(step, free)
    done = have >= step.need
    children = tuple(_node(part, free, is_done=done) for part in step.parts)
    ready = not done and bool(children) and all(child.tone == Tone.GOOD for child in children)
    tone = Tone.GOOD if done else Tone.NEXT if ready or not children else Tone.PLAIN
    how = "" if step.command is None else f" · {step.command.text}"
    return Node(f"{step.need} {step.item}", f"{have} of {step.need}{how}", tone, children)


def _take(step: _Step, free: Counter[str]) -> int:
    taken = 0
    for item in sorted(step.accepted):
        some = min(free[item], step.need - taken)
        free[item] -= some
        taken += some
    return taken


def _count_done(node: Node) -> tuple[int, int]:
    inner = [_count_done(child) for child in node.children]
    reached = sum(done for done, _ in inner) + (node.tone == Tone.GOOD)
    return reached, 1 + sum(total for _, total in inner)


def _inventory_table(held: Counter[str], before: Counter[str]) -> Table:
    """What is held and what the last turn changed."""
    items = sorted(held.keys() | before.keys())
    changes = [held[item] - before[item] for item in items]
    tones = tuple(Tone.GOOD if change > 0 else Tone.BAD if change < 0 else Tone.PLAIN for change in changes)
    rows = tuple(
        (item, str(held[item]), f"{change:+d}" if change else "") for item, change in zip(items, changes, strict=True)
    )
    return Table(("item", "held", "change"), rows, "Inventory", tones, empty="nothing yet")


def _command_table(commands: Sequence[_Command], tree: _Step | None, planner: _Planner) -> Table:
    """The commands shown, those of the tree first."""
    needed = set(_commands_in(tree)) if tree else set()
    ordered = sorted(commands, key=lambda command: command.text not in needed)
    rows = tuple(
        (command.text, "yes" if command.text in needed else "", str(planner.times_used(command) or ""))
        for command in ordered
    )
    tones = tuple(Tone.PLAIN if command.text in needed else Tone.MUTED for command in ordered)
    return Table(("command", "on the way", "used"), rows, "Crafting commands", tones)


def _commands_in(step: _Step) -> Iterator[str]:
    if step.command is not None:
        yield step.command.text
    for part in step.parts:
        yield from _commands_in(part)
