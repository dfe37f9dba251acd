"""WebArena in the viewer: the page as the agent read it, what it acts on next, and a screenshot where one was written.

Screenshots are written by ``agentgym-rl serve webarena --screenshots``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from agentgym_rl.envs.webarena.actions import NotAnAction, read_action, written_action
from agentgym_rl.types import Trajectory
from agentgym_rl.viewer.panel import (
    Block,
    Facts,
    Image,
    Node,
    Panel,
    Text,
    Tone,
    Tree,
    asked,
    is_image,
    observations,
    states,
)

_PARTS = re.compile(
    r"OBSERVATION:\n(?P<page>.*)\nURL: (?P<url>.*)\nOBJECTIVE: (?P<objective>.*)\nPREVIOUS ACTION: (?P<action>.*)",
    re.DOTALL,
)
_LINE = re.compile(r"(?P<tabs>\t*)\[(?P<number>\d+)\] (?P<text>.*)")
_MAX_LINES = 2000
_MAX_SHOWN = 500
"""Characters of an action."""


@dataclass(slots=True)
class _Branch:
    """A line of the tree while what hangs below it is read."""

    label: str
    note: str = ""
    tone: Tone = Tone.PLAIN
    children: list[_Branch] = field(default_factory=list)

    def node(self) -> Node:
        return Node(self.label, self.note, self.tone, tuple(child.node() for child in self.children))


def panel(trajectory: Trajectory) -> Panel:
    """Page, address and next action at each frame."""
    told = states(trajectory)
    seen = observations(trajectory)
    actions = [
        written_action(turn.text) or action for turn, action in zip(trajectory.turns, asked(trajectory), strict=True)
    ]
    opening = _PARTS.fullmatch(seen[0].strip())
    frames = tuple(_frame(*frame) for frame in zip(seen, [*actions, ""], told, strict=True))
    return Panel(frames, goal=opening["objective"] if opening else "")


def _frame(text: str, following: str, state: object) -> tuple[Block, ...]:
    blocks: list[Block] = []
    parts = _PARTS.fullmatch(text.strip())
    page = parts["page"] if parts else text
    rows = [("Objective", parts["objective"]), ("Address", parts["url"])] if parts else []
    if following:
        rows.append(("Next action", following[:_MAX_SHOWN]))
    if rows:
        blocks.append(Facts(tuple(rows)))
    screenshot = state.get("screenshot") if isinstance(state, dict) else None
    if is_image(screenshot):
        blocks.append(Image(str(screenshot), "Screenshot"))
    return (*blocks, *_page(page, _element_of(following)))


def _element_of(action: str) -> int | None:
    """The element that an action is about."""
    try:
        return read_action(f"```{action}```").element if action else None
    except NotAnAction:
        return None


def _page(text: str, chosen: int | None) -> Iterator[Block]:
    """The lines before the tree as text, the tree as one."""
    lines = text.split("\n")
    first = next((number for number, line in enumerate(lines) if _LINE.match(line)), len(lines))
    if head := "\n".join(lines[:first]).strip():
        yield Text(head, "Tabs")
    if roots := _nested(lines[first : first + _MAX_LINES], chosen):
        yield Tree(tuple(branch.node() for branch in roots), "Accessibility tree")


def _nested(lines: list[str], chosen: int | None) -> list[_Branch]:
    """Branches by their tabs; a line that is no element goes on the one before."""
    roots: list[_Branch] = []
    path: list[_Branch] = []
    for line in lines:
        match = _LINE.fullmatch(line)
        if match is None:
            if path and line.strip():
                path[-1].note += f" {line.strip()}"
            continue
        is_chosen = chosen is not None and int(match["number"]) == chosen
        branch = _Branch(f"[{match['number']}] {match['text']}", "acted on next" if is_chosen else "")
        branch.tone = Tone.NEXT if is_chosen else Tone.PLAIN
        depth = min(len(match["tabs"]), len(path), _MAX_DEPTH)
        del path[depth:]
        (path[-1].children if path else roots).append(branch)
        path.append(branch)
    return roots


_MAX_DEPTH = 60
"""Deeper lines are drawn at this depth."""
