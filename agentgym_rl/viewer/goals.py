"""What a panel says of the goal, held against what the environment paid.

A panel follows an episode by its words alone, so that it may show the goal as reached where no reward came: a fault of
the environment's, or of the panel's. Panels are made of whole rows, some milliseconds each; what was found is kept.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from enum import StrEnum

import msgspec

from agentgym_rl.errors import ConfigError
from agentgym_rl.viewer.episodes import decoded, read_episode
from agentgym_rl.viewer.library import Library
from agentgym_rl.viewer.panel import Block, Meter, Panel, find_panel, of_panel
from agentgym_rl.viewer.rows import Summary

_UNLIMITED = float("inf")


class GoalFilter(StrEnum):
    """Which trajectories pass, by what their panel says of the goal; those whose panel says nothing never do."""

    REACHED = "reached"
    """The panel shows the goal as reached at some turn."""
    UNREACHED = "unreached"
    """It shows it at none."""
    CONTRADICTED = "contradicted"
    """Reached without a success, or a success without having been reached; faults are left out."""


class Goal(msgspec.Struct, frozen=True, gc=False):
    """What a trajectory's panel says of the goal."""

    label: str = ""
    """What was to be reached; empty where the panel does not tell."""
    is_followed: bool = False
    """Each frame has a meter that is full when the goal is reached, or one is full: the panel can be held against the
    result."""
    reached_at: int | None = None
    """The first frame, 0 for the start, that shows it as reached."""


NO_GOAL = Goal()


def goal_in(panel: Panel | None) -> Goal:
    """What stands in a panel; `NO_GOAL` for none."""
    if panel is None:
        return NO_GOAL
    shown = [_is_full(frame) for frame in panel.frames]
    reached_at = shown.index(True) if True in shown else None
    is_followed = bool(shown) and (reached_at is not None or None not in shown)
    return Goal(str(panel.goal), is_followed, reached_at)


def _is_full(frame: Iterable[Block]) -> bool | None:
    """Whether a frame shows the goal as reached; None where it does not tell."""
    meters = [block for block in frame if isinstance(block, Meter) and block.is_goal]
    return any(meter.value >= meter.maximum for meter in meters) if meters else None


def passes(summary: Summary, goal: Goal, wanted: GoalFilter) -> bool:
    """Whether a trajectory is one of those that ``wanted`` names."""
    is_reached = goal.reached_at is not None
    if not goal.is_followed:
        return False
    if wanted == GoalFilter.CONTRADICTED:
        is_known = summary.success is not None and not summary.is_fault
        return is_known and summary.success is not is_reached
    return is_reached is (wanted == GoalFilter.REACHED)


class Goals:
    """Goals of trajectories, each found once. Safe to use from several threads."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Summary, Goal]] = {}
        """By id; another summary under the same id is that of a file written anew."""
        self._lock = threading.Lock()

    def of(self, library: Library, summary: Summary) -> Goal:
        """The goal of one trajectory; `NO_GOAL` where its row is gone or no episode."""
        return self.find(library, [summary]).get(summary.id, NO_GOAL)

    def find(self, library: Library, summaries: Iterable[Summary], budget_s: float = _UNLIMITED) -> dict[str, Goal]:
        """Goals by id. Panels are made for at most about ``budget_s`` seconds, at least one; the rest is left out."""
        wanted = {summary.id: summary for summary in summaries}
        began = time.monotonic()
        with self._lock:
            for summary, row in library.read_rows(self._unknown(wanted)):
                self._known[summary.id] = (summary, _goal_of(summary, row))
                if time.monotonic() - began > budget_s:
                    break
            return {id: self._known[id][1] for id in wanted.keys() - self._unknown(wanted)}

    def _unknown(self, wanted: dict[str, Summary]) -> set[str]:
        """Those that are still to be found; tasks without a panel are known from the start."""
        tasks = {task: _has_panel(task) for task in {summary.task for summary in wanted.values()}}
        unknown = {id for id, summary in wanted.items() if self._known.get(id, (None,))[0] is not summary}
        for id in [id for id in unknown if not tasks[wanted[id].task]]:
            self._known[id] = (wanted[id], NO_GOAL)
            unknown.remove(id)
        return unknown


def _has_panel(task: str) -> bool:
    try:
        return find_panel(task) is not None
    except ConfigError:  # told beside the trajectory
        return False


def _goal_of(summary: Summary, row: bytes) -> Goal:
    try:
        trajectory = read_episode(decoded(row, summary.item_id), summary.item_id)
    except ConfigError:  # told on the trajectory's page
        return NO_GOAL
    return of_panel(trajectory, goal_in)
