"""The overrides that AgentGym-RL's published launch scripts and README use, of ``tests/cases/config-keys.txt``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_FILE = Path(__file__).parents[1] / "cases" / "config-keys.txt"
TASKS = ("textcraft", "babyai", "sciworld", "searchqa", "webarena")
HORIZONS = {
    "textcraft": ("30", "[10,20,30]"),
    "babyai": ("20", "[6,13,20]"),
    "sciworld": ("20", "[10,20,30]"),
    "searchqa": ("5", "[5,8,10]"),
    "webarena": ("15", "[8,12,15]"),
}
"""Rounds of the published runs: fixed, and staged."""


def published_values() -> dict[str, dict[str, tuple[str, ...]]]:
    """program -> key -> the values that were published for it."""
    values: dict[str, dict[str, tuple[str, ...]]] = {}
    program = ""
    for line in _FILE.read_text().splitlines():
        if line.startswith("# main:"):
            program = line.rsplit(".", 1)[-1]
        elif line and not line.startswith("#"):
            key, _, text = line.partition("=")
            values.setdefault(program, {})[key] = tuple(text.split("|"))
    return values


def published_lists() -> Iterator[tuple[str, list[str]]]:
    """(program, overrides) of each published script: every task with both horizons, every estimator, and evaluation."""
    values = published_values()
    training = {key: choices[0] for key, choices in values["main_ppo"].items()}
    for task in TASKS:
        for kind, rounds in zip(("fixed", "scaling_inter_stepwise"), HORIZONS[task], strict=True):
            schedule = {"algorithm.rounds_ctrl.type": kind, "algorithm.rounds_ctrl.rounds": rounds}
            schedule["algorithm.rounds_ctrl.steps_scaling_inter"] = "80" if task == "webarena" else "100"
            yield "main_ppo", _written(training | schedule | _of_task(task, "actor_rollout_ref.agentgym"))
    for estimator in values["main_ppo"]["algorithm.adv_estimator"]:
        yield "main_ppo", _written(training | {"algorithm.adv_estimator": estimator})
    evaluation = {key: choices[0] for key, choices in values["main_generation"].items()}
    for task in TASKS:
        yield "main_generation", _written(evaluation | _of_task(task, "agentgym"))


def _of_task(task: str, branch: str) -> dict[str, str]:
    data = (
        ("data.path", f"AgentEval/{task}")
        if branch == "agentgym"
        else ("data.train_file", f"AgentItemId/{task}_train.json")
    )
    return {f"{branch}.task_name": task, data[0]: data[1]}


def _written(overrides: dict[str, str]) -> list[str]:
    return [f"{key}={value}" for key, value in overrides.items()]
