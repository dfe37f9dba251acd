"""RoundScheduler: how many turns a trajectory may take at each training step (ScalingInter-RL).

The schedules `fixed`, `scaling_inter_stepwise` and `scaling_inter_linear` are pure functions of the step.
`scaling_inter_adaptive` follows what the trajectories show; what it has seen is its state, which checkpoints keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Any

from agentgym_rl.errors import ConfigError


class RoundType(StrEnum):
    """The schedules."""

    FIXED = "fixed"
    """Always the same horizon."""
    STEPWISE = "scaling_inter_stepwise"
    """The next stage after so many steps."""
    LINEAR = "scaling_inter_linear"
    """From each stage to the next in equal parts, so many steps long."""
    ADAPTIVE = "scaling_inter_adaptive"
    """The next stage when the present one has no more to teach, or ends too many trajectories."""


ROUND_TYPES = tuple(str(each) for each in RoundType)


@dataclass(frozen=True, slots=True)
class Patience:
    """When `scaling_inter_adaptive` leaves a stage."""

    window: int = 10
    """Training steps that are averaged."""
    min_rise: float = 0.01
    """When the success rate of the last ``window`` steps is not higher by this than that of the ``window`` before, it
    has stopped rising: the next stage begins."""
    max_cut_share: float = 0.5
    """The next stage begins, too, when more than this share of the last ``window`` steps' trajectories ended by
    ``max_rounds``."""

    def __post_init__(self) -> None:
        if not _is_count(self.window):
            raise ConfigError(f"algorithm.rounds_ctrl.window={self.window!r}: must be an int >= 1")
        if not self.min_rise >= 0:
            raise ConfigError(f"algorithm.rounds_ctrl.min_rise={self.min_rise!r}: must be at least 0")
        if not 0 < self.max_cut_share <= 1:
            raise ConfigError(f"algorithm.rounds_ctrl.max_cut_share={self.max_cut_share!r}: must be in (0, 1]")


class RoundScheduler:
    """From training step to horizon."""

    def __init__(self, type: str, rounds: int | Sequence[int], steps_scaling_inter: int = 100) -> None:
        """``type``: ``fixed`` with an int, ``scaling_inter_stepwise`` with a rising list, a stage of which lasts
        ``steps_scaling_inter`` training steps, or ``scaling_inter_linear`` with a rising list, from each entry of which
        to the next it takes so many. Raises `ConfigError` for anything else."""
        if type not in ROUND_TYPES:
            raise ConfigError(f"algorithm.rounds_ctrl.type={type!r}: must be one of {', '.join(ROUND_TYPES)}")
        self.type = RoundType(type)
        self._stages = _fixed_stage(rounds) if type == RoundType.FIXED else _rising_stages(rounds, type)
        if not _is_count(steps_scaling_inter):
            raise ConfigError(f"algorithm.rounds_ctrl.steps_scaling_inter={steps_scaling_inter!r}: must be an int >= 1")
        self._steps_per_stage = steps_scaling_inter

    def rounds(self, step: int) -> int:
        """Turns allowed in training step ``step``, counted from 1."""
        _check_step(step)
        stage, within = divmod(step - 1, self._steps_per_stage)
        if stage >= len(self._stages) - 1:
            return self._stages[-1]
        rise = self._stages[stage + 1] - self._stages[stage] if self.type == RoundType.LINEAR else 0
        return self._stages[stage] + rise * within // self._steps_per_stage

    @property
    def stages(self) -> tuple[int, ...]:
        """The horizons that the schedule names."""
        return self._stages

    @property
    def steps_per_stage(self) -> int:
        """``steps_scaling_inter``."""
        return self._steps_per_stage

    @property
    def max_rounds(self) -> int:
        """The longest horizon of the schedule."""
        return self._stages[-1]

    def record(self, step: int, *, success: float | None, cut_share: float | None) -> None:
        """Tell what came of a step: the share of trajectories that succeeded, and of those that ``max_rounds`` ended.

        Each finished step is told once, in order; None where a step had no sound trajectory.
        """

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold for `rounds` to go on as it would have: JSON values."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take up the `state` of an earlier scheduler of the same type."""


@dataclass(slots=True)
class _Seen:
    """What an adaptive scheduler has seen."""

    starts: list[int] = field(default_factory=lambda: [1])
    """First step of each stage so far."""
    success: list[float] = field(default_factory=list)
    """Of the present stage, step by step; no more than can still count."""
    cut_shares: list[float] = field(default_factory=list)


class AdaptiveRoundScheduler(RoundScheduler):
    """The next stage when the present horizon has no more to teach, or is what ends the trajectories."""

    def __init__(self, rounds: Sequence[int], patience: Patience | None = None) -> None:
        """``rounds``: a rising list. Raises `ConfigError` for anything else."""
        super().__init__(RoundType.ADAPTIVE, rounds)
        self._patience = patience or Patience()
        self._seen = _Seen()

    def rounds(self, step: int) -> int:
        """Turns allowed in ``step``; of steps after the next one, what they would be if nothing changed."""
        _check_step(step)
        stage = sum(start <= step for start in self._seen.starts) - 1
        return self._stages[min(stage, len(self._stages) - 1)]

    def record(self, step: int, *, success: float | None, cut_share: float | None) -> None:
        if success is None or cut_share is None:
            return
        seen, kept = self._seen, 2 * self._patience.window
        seen.success = [*seen.success, success][-kept:]
        seen.cut_shares = [*seen.cut_shares, cut_share][-kept:]
        if len(seen.starts) < len(self._stages) and (self._has_stopped_rising() or self._cuts_too_many()):
            seen.starts.append(step + 1)
            seen.success, seen.cut_shares = [], []

    def state(self) -> dict[str, Any]:
        seen = self._seen
        return {
            "starts": list(seen.starts),
            "success": list(seen.success),
            "cut_shares": list(seen.cut_shares),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self._seen = _Seen(list(state["starts"]), list(state["success"]), list(state["cut_shares"]))

    def _has_stopped_rising(self) -> bool:
        window, success = self._patience.window, self._seen.success
        if len(success) < 2 * window:
            return False
        return _mean(success[-window:]) - _mean(success[-2 * window : -window]) < self._patience.min_rise

    def _cuts_too_many(self) -> bool:
        window, shares = self._patience.window, self._seen.cut_shares
        return len(shares) >= window and _mean(shares[-window:]) > self._patience.max_cut_share


def make_scheduler(
    type: str, rounds: int | Sequence[int], steps_scaling_inter: int = 100, patience: Patience | None = None
) -> RoundScheduler:
    """The schedule of a configuration; raises `ConfigError` for an impossible one."""
    if type == RoundType.ADAPTIVE:
        return AdaptiveRoundScheduler(rounds, patience)  # type: ignore[arg-type]  # an int is refused there
    return RoundScheduler(type, rounds, steps_scaling_inter)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _check_step(step: int) -> None:
    if step < 1:
        raise ValueError(f"step={step}: training steps are counted from 1")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _fixed_stage(rounds: Any) -> tuple[int, ...]:
    if not _is_count(rounds):
        raise ConfigError(f"algorithm.rounds_ctrl.rounds={rounds!r}: type=fixed takes one int >= 1")
    return (rounds,)


def _rising_stages(rounds: Any, type: str) -> tuple[int, ...]:
    is_list = isinstance(rounds, Sequence) and not isinstance(rounds, str) and len(rounds) > 0
    if not is_list or not all(_is_count(stage) for stage in rounds):
        raise ConfigError(
            f"algorithm.rounds_ctrl.rounds={rounds!r}: type={type} takes a list of ints >= 1, e.g. [10,20,30]"
        )
    if any(later < earlier for earlier, later in pairwise(rounds)):
        raise ConfigError(f"algorithm.rounds_ctrl.rounds={list(rounds)!r}: stages must not fall")
    return tuple(rounds)
