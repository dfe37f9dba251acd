"""The driver's side of a rollout: requests with their seeds, and what the workers make of them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from agentgym_rl.rollout.collector import RolloutRequest, by_sample
from agentgym_rl.rollout.log import TRAJECTORY_FOLDER
from agentgym_rl.rollout.requests import make_requests
from agentgym_rl.types import Trajectory
from verl.config import RolloutConfig
from verl.single_controller.base import WorkerGroup
from verl.utils.balancing import restore_order
from verl.workers.setup import RolloutOrder, RolloutShare

__all__ = ["Rollout", "RolloutUsage", "generate", "generate_anew", "make_requests", "trajectory_folder"]


@dataclass(frozen=True)
class RolloutUsage:
    """What a rollout took, over all workers; usages of several rollouts, one after the other, add up."""

    duration_s: float = 0.0
    """Until the last worker was done."""
    worker_s: float = 0.0
    """The sum of the workers' own durations."""
    engine_busy_s: float = 0.0
    """Of that, with at least one turn in the worker's engine."""
    engine_tokens: int = 0
    """Sampled by the engines, for trajectories that came to nothing too."""
    sessions_peak: int = 0
    """Most sessions, as the sum of each worker's most."""
    client_retries: int = 0

    @classmethod
    def of(cls, shares: Sequence[RolloutShare]) -> RolloutUsage:
        """Of the workers' shares of one rollout."""
        return cls(
            duration_s=max(share.duration_s for share in shares),
            worker_s=sum(share.duration_s for share in shares),
            engine_busy_s=sum(share.engine.busy_s for share in shares),
            engine_tokens=sum(share.engine.num_tokens for share in shares),
            sessions_peak=sum(share.sessions.peak for share in shares),
            client_retries=sum(share.sessions.retries for share in shares),
        )

    def __add__(self, other: RolloutUsage) -> RolloutUsage:
        return RolloutUsage(
            duration_s=self.duration_s + other.duration_s,
            worker_s=self.worker_s + other.worker_s,
            engine_busy_s=self.engine_busy_s + other.engine_busy_s,
            engine_tokens=self.engine_tokens + other.engine_tokens,
            sessions_peak=max(self.sessions_peak, other.sessions_peak),
            client_retries=self.client_retries + other.client_retries,
        )


@dataclass(frozen=True)
class Rollout:
    """What came of a number of requests."""

    trajectories: list[Trajectory]
    """In the requests' order, the trials of one sample in turn; with `RolloutOrder.only_faults` the faults alone."""
    usage: RolloutUsage


def generate(workers: WorkerGroup, requests: Sequence[RolloutRequest], order: RolloutOrder) -> Rollout:
    """The trajectories of all requests, made by all workers, with a progress bar on a terminal.

    The workers take the requests one by one as they have room, so that a slow item or worker holds up only itself.
    """
    with tqdm(total=len(requests), desc=order.log_name, unit=" trajectories", leave=False, disable=None) as bar:
        shares: list[RolloutShare] = workers.call_all(
            "generate", requests, order, on_progress=bar.update, interruptible=True
        )
    return Rollout(_joined(shares, order, len(requests)), RolloutUsage.of(shares))


def generate_anew(
    workers: WorkerGroup, requests: Sequence[RolloutRequest], order: RolloutOrder, *, folder: Path
) -> Rollout:
    """`generate` for a step that may have been begun before; ``folder`` holds the trajectory files of all steps."""
    if not order.append:
        # A run that died in this step, perhaps with more workers, left files that must not be mixed with new ones.
        shutil.rmtree(folder / order.log_name, ignore_errors=True)
    return generate(workers, requests, order)


def trajectory_folder(rollout: RolloutConfig, root: Path) -> Path:
    """Where the trajectory files of a run in ``root`` go, absolute."""
    return Path(rollout.rollout_log_dir or root / TRAJECTORY_FOLDER).resolve()


def _joined(shares: Sequence[RolloutShare], order: RolloutOrder, num_requests: int) -> list[Trajectory]:
    taken = [share.indices for share in shares]
    if (num_taken := sum(map(len, taken))) != num_requests:
        raise RuntimeError(f"the workers took up {num_taken} of {num_requests} requests")
    if order.only_faults:
        return [trajectory for share in shares for trajectory in share.trajectories]
    samples = [trials for share in shares for trials in by_sample(share.trajectories)]
    return [trajectory for place in restore_order(taken) for trajectory in samples[place]]
