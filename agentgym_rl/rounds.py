"""RoundScheduler: how many assistant turns a trajectory may take at each training step (ScalingInter-RL)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from agentgym_rl.errors import ConfigError

ROUND_TYPES = ("fixed", "scaling_inter_stepwise")


class RoundScheduler:
    """A pure function from training step to horizon, so that a resumed run sees the same schedule."""

    def __init__(self, type: str, rounds: int | Sequence[int], steps_scaling_inter: int = 100) -> None:
        """``type``: ``fixed`` with an int, or ``scaling_inter_stepwise`` with a rising list, a stage of which lasts
        ``steps_scaling_inter`` training steps. Raises `ConfigError` for anything else."""
        if type not in ROUND_TYPES:
            raise ConfigError(f"algorithm.rounds_ctrl.type={type!r}: must be one of {', '.join(ROUND_TYPES)}")
        self._stages = _fixed_stage(rounds) if type == "fixed" else _rising_stages(rounds)
        if not _is_count(steps_scaling_inter):
            raise ConfigError(f"algorithm.rounds_ctrl.steps_scaling_inter={steps_scaling_inter!r}: must be an int >= 1")
        self._steps_per_stage = steps_scaling_inter

    def rounds(self, step: int) -> int:
        """Assistant turns allowed in training step ``step``, counted from 1."""
        if step < 1:
            raise ValueError(f"step={step}: training steps are counted from 1")
        return self._stages[min((step - 1) // self._steps_per_stage, len(self._stages) - 1)]

    @property
    def max_rounds(self) -> int:
        """The longest horizon of the schedule."""
        return self._stages[-1]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _fixed_stage(rounds: Any) -> tuple[int, ...]:
    if not _is_count(rounds):
        raise ConfigError(f"algorithm.rounds_ctrl.rounds={rounds!r}: type=fixed takes one int >= 1")
    return (rounds,)


def _rising_stages(rounds: Any) -> tuple[int, ...]:
    is_list = isinstance(rounds, Sequence) and not isinstance(rounds, str) and len(rounds) > 0
    if not is_list or not all(_is_count(stage) for stage in rounds):
        raise ConfigError(
            f"algorithm.rounds_ctrl.rounds={rounds!r}: type=scaling_inter_stepwise takes a list of ints >= 1, "
            "e.g. [10,20,30]"
        )
    if any(later < earlier for earlier, later in pairwise(rounds)):
        raise ConfigError(f"algorithm.rounds_ctrl.rounds={list(rounds)!r}: stages must not fall")
    return tuple(rounds)
