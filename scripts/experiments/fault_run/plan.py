"""What a fault run is to do: sizes, time limits, and which faults when."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class FaultKind(StrEnum):
    """What is done to the parts of a training run."""

    SERVER_KILLED = "environment server killed (SIGKILL), started again"
    SERVER_HUNG_BRIEFLY = "environment server hung, for less than the limit of a request"
    SERVER_HUNG_LONG = "environment server hung, for longer than the limit of a request"
    ALL_SERVERS_HUNG = "all servers of a task hung, for longer than the limit of a request"
    SLOW_NETWORK = "network slow: answers late, throttled, dripping"
    BROKEN_NETWORK = "connections cut: before a call, in place of the answer, in its middle"
    BAD_ANSWERS = "answers spoiled: 500, 502, 503, web pages, half of the JSON, wrong types"
    WORKER_KILLED = "training worker killed (SIGKILL)"
    WORKER_PAUSED = "training worker stopped and woken"
    DRIVER_KILLED = "driver killed (SIGKILL)"
    DRIVER_TERMINATED = "driver asked to end (SIGTERM)"
    DISK_FULL = "disk full"
    ENGINE_RAISES = "engine raises in the middle of a forward pass"

    @property
    def strikes_run(self) -> bool:
        """True for what may end the training processes, which are then started again."""
        return self in _OF_RUN


_OF_RUN = (
    *(FaultKind.WORKER_KILLED, FaultKind.WORKER_PAUSED, FaultKind.DRIVER_KILLED, FaultKind.DRIVER_TERMINATED),
    *(FaultKind.DISK_FULL, FaultKind.ENGINE_RAISES),
)


@dataclass(frozen=True)
class RunPlan:
    """One fault run."""

    seed: int
    training_s: float
    """Seconds for which a training process shall have run, all starts together."""
    least_steps: int
    """Training steps that must be behind it as well."""
    faults: tuple[FaultKind, ...] = ()
    """Those to inject once each, in this order, before the run may end; where there are none, random ones are drawn
    until the time is over."""
    env_gap_s: float = 5.0
    """Mean time between two faults of servers and network."""
    run_gap_s: float = 75.0
    """Mean time between the first progress of a training process and the next fault of the run itself."""
    weather_s: tuple[float, float] = (3.0, 15.0)
    """Shortest and longest time for which the network spoils calls."""
    disk_full_s: tuple[float, float] = (5.0, 25.0)
    """Shortest and longest time for which the disk is full."""
    items_per_task: int = 24
    warm_up_steps: int = 60
    items_per_step: int = 8
    samples: int = 6
    save_freq: int = 3
    request_timeout_s: float = 4.0
    trajectory_timeout_s: float = 25.0
    session_ttl_s: float = 60.0
    servers_per_task: int = 2
    num_workers: int = 2
    worker_group: str = "ray"
    """With ``local`` and one worker everything is in the driver's process, and there are no workers to strike."""

    def __post_init__(self) -> None:
        """Raise ValueError where batches would not divide a task's items, so that nobody could say what comes when."""
        share = self.items_per_step // 2
        if self.items_per_step % 2 or self.items_per_task % share:
            raise ValueError(f"items_per_step={self.items_per_step}: half of it must divide {self.items_per_task}")
