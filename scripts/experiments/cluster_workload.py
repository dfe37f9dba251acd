"""What trajectories are like: drawn from a task's statistics, or read from a run's own files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from cluster_rollout import TrajectoryScript, TurnScript

from agentgym_rl.rollout.log import read_trajectories
from agentgym_rl.types import Trajectory
from verl.utils.tracking import read_metrics

_TURNS_SIGMA, _PROMPT_SIGMA = 0.6, 0.2
_MOST_TURNS = 64


@dataclass(frozen=True)
class TaskProfile:
    """Statistics of a task's trajectories, tokens as log-normal numbers by mean and sigma of the logarithm."""

    name: str
    prompt: float
    sampled: float
    """Tokens of a turn."""
    observed: float
    natural_turns: float
    """Turns, on average, until an episode ends of its own accord; the horizon cuts longer ones."""
    env_s: float
    """Of a step of the environment, on average."""
    sampled_sigma: float = 0.5
    observed_sigma: float = 0.5
    env_sigma: float = 1.0
    """1: one in a hundred takes over 6 times the average; 1.5: over 10 times."""
    reset_s: float = 0.05
    max_response: int = 8192
    """Tokens after the prompt, as ``data.max_response_length``."""

    def scripts(self, *, items: int, samples: int, horizon: int, seed: int) -> list[TrajectoryScript]:
        """``samples`` trajectories of each of ``items`` items. A trajectory's random numbers are its own, so that it
        stays the same when others are added, and changes little with a statistic."""
        return [
            script
            for item in range(items)
            for script in self._group(item, samples, horizon, np.random.default_rng([seed, item]))
        ]

    def _group(self, item: int, samples: int, horizon: int, random: np.random.Generator) -> list[TrajectoryScript]:
        prompt = _tokens(self.prompt, _PROMPT_SIGMA, random.standard_normal(1))[0]
        return [self._trajectory(f"item{item}", prompt, horizon, random) for _ in range(samples)]

    def _trajectory(self, uid: str, prompt: int, horizon: int, random: np.random.Generator) -> TrajectoryScript:
        normal = random.standard_normal((4, _MOST_TURNS))
        num_turns = min(_tokens(self.natural_turns, _TURNS_SIGMA, normal[3, :1])[0], horizon, _MOST_TURNS)
        sampled = _tokens(self.sampled, self.sampled_sigma, normal[0])
        observed = _tokens(self.observed, self.observed_sigma, normal[1])
        env_s = _log_normal(self.env_s, self.env_sigma, normal[2])
        turns: list[TurnScript] = []
        room = self.max_response
        for tokens, answer, seconds in zip(sampled[:num_turns], observed, env_s, strict=False):
            turns.append(TurnScript(min(tokens, room), answer, float(seconds)))
            room -= tokens + answer
            if room < 1:
                break
        return TrajectoryScript(uid, prompt, self.reset_s, tuple(turns), shared=prompt)


def _log_normal(mean: float, sigma: float, normal: np.ndarray) -> np.ndarray:
    return mean * np.exp(sigma * normal - sigma**2 / 2)


def _tokens(mean: float, sigma: float, normal: np.ndarray) -> list[int]:
    return np.maximum(np.rint(_log_normal(mean, sigma, normal)), 1).astype(int).tolist()


PROFILES = {
    profile.name: profile
    for profile in (
        TaskProfile("textcraft", prompt=305, sampled=60, observed=14, natural_turns=12, env_s=0.005),
        TaskProfile("babyai", prompt=363, sampled=60, observed=115, natural_turns=14, env_s=0.01),
        TaskProfile("sciworld", prompt=508, sampled=60, observed=28, natural_turns=19, env_s=0.03, max_response=16384),
        TaskProfile("searchqa", prompt=500, sampled=90, observed=450, natural_turns=5, env_s=0.3, env_sigma=1.0),
        TaskProfile(
            "webarena",
            prompt=2500,
            sampled=110,
            observed=1500,
            natural_turns=10,
            env_s=2.0,
            env_sigma=1.2,
            reset_s=5.0,
            max_response=14098,
        ),
    )
}
"""Prompts and observations of the first three are counted here, from 30 episodes of the expert's play with SmolLM2's
tokenizer; all else is assumed: a 7B model that thinks in a sentence or two before it acts."""


# --------------------------------------------------------------------------------------------------------- real runs


@dataclass(frozen=True)
class MeasuredStep:
    """A training step of a real run: what happened in it, and how long it took."""

    step: int
    horizon: int
    scripts: tuple[TrajectoryScript, ...]
    """In the batch's order; faults are left out."""
    gen_s: float
    update_s: float
    step_s: float

    @property
    def num_tokens(self) -> int:
        return sum(script.num_tokens for script in self.scripts)


def read_run(folder: Path, *, first: int = 1, last: int | None = None) -> list[MeasuredStep]:
    """Steps ``first`` to ``last`` of a finished run's folder. Raises `ValueError` when none of them is there."""
    metrics = [row for row in read_metrics(folder / "metrics.jsonl") if "timing_s/update" in row]
    chosen = [row for row in metrics if row["step"] >= first and (last is None or row["step"] <= last)]
    if not chosen:
        raise ValueError(f"{folder}: no finished training step between {first} and {last}")
    return [_read_step(folder, row) for row in chosen]


def _read_step(folder: Path, row: dict[str, float]) -> MeasuredStep:
    files = sorted((folder / "trajectories" / f"step{row['step']}").glob("*.jsonl"))
    trajectories = [trajectory for file in files for trajectory in read_trajectories(file).trajectories]
    return MeasuredStep(
        step=int(row["step"]),
        horizon=int(row["rounds/max_rounds"]),
        scripts=tuple(scripts_of([trajectory for trajectory in trajectories if not trajectory.masked])),
        gen_s=row["timing_s/gen"],
        update_s=row["timing_s/update"],
        step_s=row["timing_s/step"],
    )


def scripts_of(trajectories: Sequence[Trajectory]) -> list[TrajectoryScript]:
    """What happened in real trajectories, group by group."""
    groups: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.uid, []).append(trajectory)
    return [script for group in groups.values() for script in _group_scripts(group)]


def _group_scripts(group: Sequence[Trajectory]) -> list[TrajectoryScript]:
    shared = _common_prefix([trajectory.input_ids for trajectory in group])
    return [replace(_script_of(trajectory), shared=shared) for trajectory in group]


def _script_of(trajectory: Trajectory) -> TrajectoryScript:
    """Spans of sampled tokens are the turns, with what was sampled beside them; what lies between was observed."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], trajectory.loss_mask, [0]])))
    spans = list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
    gaps = [begin - end for (_, end), (begin, _) in pairwise(spans)] + [0]
    env_s = [turn.env_s for turn in trajectory.turns] + [0.0] * len(spans)
    turns = tuple(
        TurnScript(end - begin, gap, seconds) for (begin, end), gap, seconds in zip(spans, gaps, env_s, strict=False)
    )
    spent = sum(turn.generation_s + turn.env_s for turn in trajectory.turns)
    reset_s = max(trajectory.duration_s - spent, 0.0)
    return TrajectoryScript(trajectory.uid, trajectory.prompt_length, reset_s, turns, shared=0)


def _common_prefix(rows: Sequence[np.ndarray]) -> int:
    """First tokens that all rows have, each with at least one token beside them; 0 for a single row."""
    if len(rows) < 2:
        return 0
    most = min(map(len, rows)) - 1
    different = np.flatnonzero(np.any([row[:most] != rows[0][:most] for row in rows[1:]], axis=0))
    return int(different[0]) if len(different) else most


def resample(scripts: Sequence[TrajectoryScript], *, items: int, samples: int, seed: int) -> list[TrajectoryScript]:
    """Groups of ``samples`` for ``items`` items, drawn with replacement from those of real steps."""
    groups: dict[str, list[TrajectoryScript]] = {}
    for script in scripts:
        groups.setdefault(script.uid, []).append(script)
    random, known = np.random.default_rng(seed), list(groups.values())
    drawn: list[TrajectoryScript] = []
    for item in range(items):
        group = known[int(random.integers(len(known)))]
        members = [group[int(random.integers(len(group)))] for _ in range(samples)]
        drawn += [replace(member, uid=f"item{item}") for member in members]
    return drawn
