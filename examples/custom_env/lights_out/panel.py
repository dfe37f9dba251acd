"""The lamps as the viewer draws them beside the turns."""

from __future__ import annotations

from agentgym_rl.types import Trajectory
from agentgym_rl.viewer.panel import Grid, Panel, Shape, Thing, observations
from lights_out.environment import LAMPS


def panel(trajectory: Trajectory) -> Panel:
    """A frame for the start and one for each turn, each a list of blocks; here one grid."""
    lit: set[str] = set()
    frames = []
    for text in observations(trajectory):
        if text.startswith("  A B C"):
            rows = [line.split() for line in text.splitlines()[1:]]
            lit = {column + row[0] for row in rows for column, lamp in zip("ABC", row[1:], strict=False) if lamp == "*"}
        elif text == "All lamps are dark.":
            lit = set()
        frames.append((_square(lit),))
    return Panel(tuple(frames))


def _square(lit: set[str]) -> Grid:
    tiles = (
        Thing("ABC".index(lamp[0]), int(lamp[1]) - 1, Shape.TILE, "yellow" if lamp in lit else "grey", lamp)
        for lamp in LAMPS
    )
    return Grid(3, 3, tuple(tiles), "Lamps")
