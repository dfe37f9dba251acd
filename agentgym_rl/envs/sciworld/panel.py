"""SciWorld in the viewer: rooms and doors, where the agent is, what it holds, and the score turn by turn.

Read from the episode's own words, so it knows what the agent could know: a room that was never looked at has only those
doors that were seen from the other side, and what is held is as of the latest listing and what was moved since.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import accumulate

from agentgym_rl.envs.sciworld.client import SciWorldClient
from agentgym_rl.types import Trajectory
from agentgym_rl.viewer.panel import (
    Block,
    Facts,
    Graph,
    Line,
    Meter,
    Panel,
    Table,
    Text,
    Tone,
    first_observation,
    observations,
)

_ROOM = re.compile(r"^This (?:room|(?:outside )?location) is called the (.+?)\.", re.MULTILINE)
_MOVED_TO = re.compile(r"^You (?:move|teleport) to the (.+?)\.$", re.MULTILINE)
_DOOR = re.compile(r"^\s*A door to the (.+?) \(that is (open|closed)\)", re.MULTILINE)
_OPENED = re.compile(r"door to (?:the )?(.+)")
_HELD = re.compile(r"^In your inventory, you see:\n((?:[ \t].*(?:\n|$))*)", re.MULTILINE)
_TAKEN = re.compile(r"^You move the (.+?) to the inventory\.$", re.MULTILINE)
_PUT = re.compile(r"^You move the (.+?) to the (.+?)\.$", re.MULTILINE)
_CONTENT_END = "You also see:"


@dataclass(frozen=True, slots=True)
class _Known:
    """What the agent knows of the world at one frame."""

    room: str = ""
    doors: tuple[tuple[str, str, bool], ...] = ()
    """Room, room beyond, whether the door was open when it was last seen."""
    visited: frozenset[str] = frozenset()
    seen: str = ""
    """Description of the room as last read."""
    held: tuple[str, ...] = ()


def panel(trajectory: Trajectory) -> Panel:
    """Map, inventory and score after each turn."""
    known, frames = _Known(), []
    scores = _scores(trajectory)
    for number, observation in enumerate(observations(trajectory)):
        known = _after(known, observation)
        frames.append(_frame(known, scores, number))
    task, _, _ = first_observation(trajectory).partition("\n\n")
    return Panel(tuple(frames), always=(Text(task, "Task"),), note="Read from what the agent was told.", goal=task)


def _scores(trajectory: Trajectory) -> tuple[float, ...]:
    """The simulator's score, 0..100, at each frame; rewards in files are scaled."""
    scale = SciWorldClient.reward_scale
    return tuple(round(score / scale, 4) for score in accumulate([0.0, *(turn.reward for turn in trajectory.turns)]))


def _after(known: _Known, observation: str) -> _Known:
    """What is known after one more observation."""
    if moved := _MOVED_TO.search(observation):
        known = replace(known, room=moved[1], visited=known.visited | {moved[1]}, seen="")
    if room := _ROOM.search(observation):
        doors = _merged(known.doors, room[1], _DOOR.findall(observation))
        seen = observation[room.start() :]
        known = replace(known, room=room[1], visited=known.visited | {room[1]}, seen=seen, doors=doors)
    return replace(known, held=_held_after(known.held, observation))


def _merged(
    doors: tuple[tuple[str, str, bool], ...], room: str, found: list[tuple[str, str]]
) -> tuple[tuple[str, str, bool], ...]:
    """The doors with those of a room as it was just described; each pair of rooms once."""
    fresh = {frozenset((room, beyond)): (room, beyond, state == "open") for beyond, state in found}
    return (*(door for door in doors if frozenset(door[:2]) not in fresh), *fresh.values())


def _held_after(held: tuple[str, ...], observation: str) -> tuple[str, ...]:
    if listing := _HELD.search(observation):
        return tuple(line.strip() for line in listing[1].splitlines() if line.strip())
    if taken := _TAKEN.search(observation):
        return (*(thing for thing in held if thing != taken[1]), taken[1])
    if put := _PUT.search(observation):
        name = put[1]
        return tuple(thing for thing in held if thing != name and name not in thing.split(",")[0])
    return held


def _frame(known: _Known, scores: tuple[float, ...], number: int) -> tuple[Block, ...]:
    blocks: list[Block] = [
        Meter(max(0.0, scores[number]), SciWorldClient.max_score, "Score"),
        Line(scores, number, "Score over the turns"),
        Facts((("Room", known.room or "unknown"),)),
        _map(known),
        Table(("thing",), tuple((thing,) for thing in known.held), "Inventory", empty="nothing known of"),
    ]
    if known.seen:
        blocks.append(Text(known.seen.partition(_CONTENT_END)[0].strip(), "In this room, when last looked at"))
    return tuple(blocks)


def _map(known: _Known) -> Graph:
    names = sorted({name for door in known.doors for name in door[:2]} | known.visited)
    nodes = tuple((name, _tone_of(name, known)) for name in names)
    edges = tuple((one, other, Tone.GOOD if is_open else Tone.MUTED) for one, other, is_open in known.doors)
    return Graph(nodes, edges, "Rooms seen (green: visited; doors solid when open)")


def _tone_of(room: str, known: _Known) -> Tone:
    if room == known.room:
        return Tone.NEXT
    return Tone.GOOD if room in known.visited else Tone.MUTED
