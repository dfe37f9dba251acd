"""What a panel may show: blocks, in frames that follow the turns of an episode.

An environment's panel is a function ``(Trajectory) -> Panel``, named in its `EnvSpec`. It is pure Python over what was
recorded; the page, and files that are exported, draw the blocks. Texts of blocks are shown as they are, never as HTML.
"""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, TypeVar

import msgspec

from agentgym_rl.agent.actions import parse_action
from agentgym_rl.agent.formats import ActionFormat, FormatName, TaskView, make_format
from agentgym_rl.envs.registry import get_spec, known_tasks
from agentgym_rl.errors import ConfigError
from agentgym_rl.types import PartKind, Role, Trajectory

_MOST_TOLD = 300
_logger = logging.getLogger(__name__)

# -------------------------------------------------------------------------------------------------------------- blocks


class Tone(StrEnum):
    """What a colour says; each theme has its own."""

    PLAIN = "plain"
    GOOD = "good"
    """Reached, right, gained."""
    BAD = "bad"
    """Wrong, lost."""
    NEXT = "next"
    """Possible now, or chosen now."""
    MUTED = "muted"
    """Of no matter here."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A part of a text that is set off."""

    start: int
    """Characters (code points) from the text's beginning."""
    end: int
    tone: Tone = Tone.GOOD


@dataclass(frozen=True, slots=True)
class Text:
    """A text with its line breaks."""

    text: str
    title: str = ""
    marks: tuple[Mark, ...] = ()
    """In order and without overlap."""
    kind: Literal["text"] = field(default="text", init=False)


@dataclass(frozen=True, slots=True)
class Facts:
    """Names and values."""

    rows: tuple[tuple[str, str], ...]
    title: str = ""
    kind: Literal["facts"] = field(default="facts", init=False)


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under columns."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""
    tones: tuple[Tone, ...] = ()
    """One for each row; empty: all plain."""
    empty: str = "none"
    """Shown in the place of no rows."""
    kind: Literal["table"] = field(default="table", init=False)


@dataclass(frozen=True, slots=True)
class Node:
    """A part of a tree."""

    label: str
    note: str = ""
    tone: Tone = Tone.PLAIN
    children: tuple[Node, ...] = ()


@dataclass(frozen=True, slots=True)
class Tree:
    """Nested parts."""

    roots: tuple[Node, ...]
    title: str = ""
    kind: Literal["tree"] = field(default="tree", init=False)


class Shape(StrEnum):
    """How a thing in a grid is drawn."""

    TILE = "tile"
    """A filled square; with a text where the thing has one."""
    OPEN_DOOR = "open_door"
    CLOSED_DOOR = "closed_door"
    LOCKED_DOOR = "locked_door"
    KEY = "key"
    BALL = "ball"
    BOX = "box"
    AGENT = "agent"
    """A triangle that points where `Thing.facing` says."""


COLOURS = ("red", "green", "blue", "purple", "yellow", "grey")
"""Colours of things; any other is drawn as grey."""


@dataclass(frozen=True, slots=True)
class Thing:
    """What stands in a cell of a grid."""

    x: int
    y: int
    shape: Shape
    colour: str = "grey"
    label: str = ""
    """Said when the pointer rests on it; on a tile of at most two characters also written."""
    facing: int = 0
    """0 right, 1 down, 2 left, 3 up."""


@dataclass(frozen=True, slots=True)
class Grid:
    """A plane of cells, drawn from above."""

    width: int
    height: int
    things: tuple[Thing, ...]
    title: str = ""
    walls: str = ""
    """Row by row ``1`` for a cell that is wall and ``0`` for any other; empty: there are none."""
    lit: str = ""
    """Row by row ``1`` for a cell that is drawn bright and ``0`` for one that is dimmed; empty: all are bright."""
    kind: Literal["grid"] = field(default="grid", init=False)


@dataclass(frozen=True, slots=True)
class Graph:
    """Places and the ways between them."""

    nodes: tuple[tuple[str, Tone], ...]
    """Names, each once."""
    edges: tuple[tuple[str, str, Tone], ...]
    """Between two of the names."""
    title: str = ""
    kind: Literal["graph"] = field(default="graph", init=False)


@dataclass(frozen=True, slots=True)
class Meter:
    """How much of something is reached."""

    value: float
    maximum: float
    title: str = ""
    is_goal: bool = False
    """Full, it says that the task's goal is reached: the viewer then looks for a success."""
    kind: Literal["meter"] = field(default="meter", init=False)


@dataclass(frozen=True, slots=True)
class Line:
    """Values over the frames, the present one marked."""

    values: tuple[float, ...]
    """One for each frame."""
    present: int
    """Index of the frame that is shown."""
    title: str = ""
    kind: Literal["line"] = field(default="line", init=False)


_IMAGE = re.compile(r"data:image/(?:png|jpeg);base64,[A-Za-z0-9+/=]+")


@dataclass(frozen=True, slots=True)
class Image:
    """A picture, as ``data:image/png;base64,...`` or JPEG; raises ValueError for any other address."""

    source: str
    title: str = ""
    kind: Literal["image"] = field(default="image", init=False)

    def __post_init__(self) -> None:
        if not is_image(self.source):
            raise ValueError(f"Image.source={self.source[:40]!r}: must be a data URL of a PNG or JPEG")


def is_image(source: object) -> bool:
    """True for an address that `Image` takes."""
    return isinstance(source, str) and _IMAGE.fullmatch(source) is not None


Block = Text | Facts | Table | Tree | Grid | Graph | Meter | Line | Image


# --------------------------------------------------------------------------------------------------------------- panel


@dataclass(frozen=True, slots=True)
class Panel:
    """What is shown beside the turns of one episode."""

    frames: tuple[tuple[Block, ...], ...]
    """Frame 0 is the state before the first turn, frame k the state after turn k."""
    always: tuple[Block, ...] = ()
    """Shown below every frame."""
    note: str = ""
    """What a reader should know of how the panel was made, such as that it is a guess."""
    goal: str = ""
    """What was to be reached, in a line, for the list of items."""


PanelMaker = Callable[[Trajectory], Panel]
Read = TypeVar("Read")


def panel_of(trajectory: Trajectory) -> Panel | None:
    """The panel that the trajectory's environment brings; None when it brings none or is not installed here."""
    make = find_panel(trajectory.item.task)
    return None if make is None else make(trajectory)


def find_panel(task: str) -> PanelMaker | None:
    """The function that `EnvSpec.panel` of ``task`` names; raises `ConfigError` when there is no such function."""
    if task not in known_tasks():
        return None
    source = get_spec(task).panel
    if not source:
        return None
    module, _, name = source.partition(":")
    try:
        maker: PanelMaker = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"panel={source!r} of environment {task!r} does not load: {error}") from error
    return maker


def panel_json(panel: Panel | None) -> Any:
    """The panel as plain JSON values; None for none."""
    return msgspec.to_builtins(panel)


def panel_beside(trajectory: Trajectory) -> Any:
    """`panel_json` of the trajectory's panel; of one that fails an empty panel that says so, and a line in the log."""
    return of_panel(trajectory, panel_json)


def of_panel(trajectory: Trajectory, read: Callable[[Panel | None], Read]) -> Read:
    """What ``read`` makes of the trajectory's panel, or of an empty one with a note where panel or ``read`` fails.

    A panel is an environment's code, which may be anybody's, over files that may hold anything: whatever it raises,
    the trajectory is shown without it.
    """
    try:
        panel = panel_of(trajectory)
        if not isinstance(panel, Panel | None):
            raise TypeError(f"must be a Panel, got {type(panel).__name__}")
        return read(panel)
    except Exception as error:  # noqa: BLE001 - code of anybody, on files of anybody
        kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
        reason = " ".join(f"{kind}{error}".split())[:_MOST_TOLD]
        told = f"The panel of {trajectory.item.task} could not be made: {reason}"
        _logger.warning("%s", told)
        return read(Panel(frames=(), note=told))


# ------------------------------------------------------------------------------------- what panels read in a trajectory


def first_observation(trajectory: Trajectory) -> str:
    """What the agent saw before its first turn; empty for an episode that did not begin."""
    spoken = trajectory.turn_messages
    count = spoken[0] if spoken else len(trajectory.messages)
    heard = (index for index in reversed(range(count)) if trajectory.messages[index].role in (Role.USER, Role.TOOL))
    index = next(heard, None)
    if index is None:
        return ""
    text = trajectory.messages[index].content
    parts = trajectory.parts[index] if index < len(trajectory.parts) else ()
    return "".join(text[part.start : part.end] for part in parts if part.kind == PartKind.OBSERVATION) or text


def observations(trajectory: Trajectory) -> list[str]:
    """What was seen at each frame: at first, then after each turn; empty where there was no answer."""
    return [first_observation(trajectory), *(turn.observation or "" for turn in trajectory.turns)]


def asked(trajectory: Trajectory) -> list[str]:
    """The action of each turn, whether it was written as a line, as a function call or in code; empty for none."""
    view = TaskView.of(get_spec(trajectory.item.task).client)
    formats = [make_format(name, view) for name in (FormatName.FUNCTION_CALLING, FormatName.CODE_AS_ACTION)]
    return [_action_in(turn.text, formats) for turn in trajectory.turns]


def _action_in(text: str, formats: Sequence[ActionFormat]) -> str:
    found = (each.find(text).for_environment for each in formats)
    return parse_action(next((said for said in found if said is not None), text)) or ""


def states(trajectory: Trajectory) -> list[Any]:
    """What the environment's client told of each frame beyond the observation (`EnvClient.viewer_state`)."""
    told = trajectory.extra.get("states")
    known = told if isinstance(told, list) else []
    frames = len(trajectory.turns) + 1
    return [*known[:frames], *([None] * (frames - len(known)))]
