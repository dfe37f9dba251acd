"""Figures of cost against size, one for each group of curves, on logarithmic axes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import matplotlib
from bench import Curve

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, NullFormatter

COLORS = ("#0b6e4f", "#d1495b", "#3066be", "#e09f3e", "#7b4b94")
# Text stays text; the same input gives the same file.
plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "agentgym-rl", "font.size": 9, "axes.axisbelow": True})
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#e6e6e6"})


def draw(curves: Iterable[Curve], folder: Path) -> list[Path]:
    """Write ``scaling-<figure>.svg`` for each figure into ``folder``; returns the files."""
    figures: dict[str, list[Curve]] = {}
    for curve in curves:
        figures.setdefault(curve.figure, []).append(curve)
    return [_draw_one(group, folder / f"scaling-{name}.svg") for name, group in figures.items()]


def _draw_one(curves: Sequence[Curve], target: Path) -> Path:
    figure, axes = plt.subplots(figsize=(4.6, 3.1), constrained_layout=True)
    for curve, color in zip(curves, COLORS, strict=False):
        sizes, costs = zip(*curve.points, strict=True)
        axes.plot(sizes, costs, "o-", color=color, markersize=3.5, linewidth=1.4, label=_legend(curve))
    axes.set(xscale="log", yscale="log", xlabel=curves[0].size, ylabel=curves[0].cost)
    axes.set_xticks(sorted({size for curve in curves for size, _ in curve.points}))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(target, metadata={"Date": None})
    plt.close(figure)
    return target


def _legend(curve: Curve) -> str:
    return f"{curve.label}: size^{curve.exponent:.2f}"
