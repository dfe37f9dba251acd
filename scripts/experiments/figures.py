"""Curves of the experiments: the mean over seeds as a line, the range from the worst to the best seed as a band."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from report import HORIZONS, LONG, ON_DATA, SCALING, SHORT, title
from results import Result
from suites import WARM_UP

COLORS = {SCALING: "#0b6e4f", SHORT: "#d1495b", LONG: "#3066be"}
OTHERS = ("#d1495b", "#3066be", "#e09f3e", "#7b4b94", "#5f6b73", "#2a9d8f")
SMOOTH_STEPS = 5
"""Training curves are means over so many steps: one step has few goals."""
# Text stays text; the same input gives the same file.
plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "agentgym-rl", "font.size": 9, "axes.spines.top": False})
plt.rcParams.update({"axes.spines.right": False, "axes.grid": True, "grid.color": "#e6e6e6", "axes.axisbelow": True})


def draw(suite: str, results: Sequence[Result], folder: Path) -> list[Path]:
    """Write the figures of a suite; returns their files."""
    of = {name: [r for r in results if r.name == name] for name in dict.fromkeys(r.name for r in results)}
    figures = []
    horizons = {name: of[name] for name in HORIZONS if name in of}
    if horizons:
        figures.append(_horizons(horizons, folder / f"{suite}-horizons.svg"))
    algorithms = {name: runs for name, runs in of.items() if name not in (WARM_UP, SHORT, LONG, *ON_DATA)}
    if len(algorithms) > 1:
        figures.append(_algorithms(algorithms, folder / f"{suite}-algorithms.svg"))
    return figures


def _horizons(of: dict[str, list[Result]], target: Path) -> Path:
    """Held-out success by step and by tokens trained on; turns of a training trajectory."""
    figure, (by_step, by_tokens, turns) = plt.subplots(1, 3, figsize=(10.5, 3.1), constrained_layout=True)
    for name, runs in of.items():
        color = COLORS[name]
        steps = np.array(runs[0].validation["step"])
        success = np.array([run.validation["success"] for run in runs])
        _band(by_step, steps, success, color, title(name))
        tokens = np.mean([_tokens_until(run, steps) for run in runs], axis=0)
        _band(by_tokens, tokens / 1e6, success, color, title(name))
        _band(turns, np.array(runs[0].curves["step"]), _smoothed(runs, "turns"), color, title(name))
    _label(by_step, "training step", "held-out success")
    _label(by_tokens, "million tokens computed in training", "held-out success")
    _label(turns, "training step", "turns of a trajectory")
    by_step.legend(frameon=False, fontsize=8)
    return _save(figure, target)


def _algorithms(of: dict[str, list[Result]], target: Path) -> Path:
    """Training success by step of every estimator, and held-out success."""
    figure, (training, held_out) = plt.subplots(1, 2, figsize=(10.5, 3.4), constrained_layout=True)
    others = iter(OTHERS)
    for name, runs in of.items():
        color = COLORS.get(name) or next(others)
        _band(training, np.array(runs[0].curves["step"]), _smoothed(runs, "success"), color, name)
        success = np.array([run.validation["success"] for run in runs])
        _band(held_out, np.array(runs[0].validation["step"]), success, color, name)
    _label(training, "training step", f"success in training, mean of {SMOOTH_STEPS} steps")
    _label(held_out, "training step", "held-out success")
    held_out.legend(frameon=False, fontsize=8, ncols=2)
    return _save(figure, target)


def _band(axes: Axes, x: np.ndarray, values: np.ndarray, color: str, label: str) -> None:
    """``values`` are ``[seeds, points]``."""
    axes.plot(x, values.mean(axis=0), color=color, label=label, linewidth=1.6)
    axes.fill_between(x, values.min(axis=0), values.max(axis=0), color=color, alpha=0.12, linewidth=0)


def _smoothed(runs: Sequence[Result], name: str) -> np.ndarray:
    """``[seeds, steps]``: means over the last `SMOOTH_STEPS` steps, or as many as there are."""
    return np.array(
        [[_last_mean(run.curves[name], end) for end in range(1, len(run.curves[name]) + 1)] for run in runs]
    )


def _last_mean(values: Sequence[float], end: int) -> float:
    return float(np.mean(values[max(0, end - SMOOTH_STEPS) : end]))


def _tokens_until(run: Result, steps: np.ndarray) -> np.ndarray:
    """Tokens of all trajectories trained on up to each of ``steps``."""
    total = dict(zip([0, *run.curves["step"]], np.cumsum([0, *run.curves["tokens"]]), strict=True))
    return np.array([total[step] for step in steps])


def _label(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_ylim(bottom=0)


def _save(figure: plt.Figure, target: Path) -> Path:
    figure.savefig(target, metadata={"Date": None}, facecolor="white")
    plt.close(figure)
    return target
