"""What the driver makes of its workers' shares of a rollout."""

from __future__ import annotations

from typing import Any

import pytest
from support.rollouts import make_trajectory

from agentgym_rl.rollout.sessions import SessionUsage
from agentgym_rl.types import Item, SamplingParams, StopReason
from verl.single_controller.base import WorkerGroup
from verl.trainer.metrics import usage_metrics
from verl.trainer.rollouts import RolloutUsage, generate, make_requests
from verl.workers.rollout.engine import EngineUsage
from verl.workers.setup import RolloutOrder, RolloutShare

ITEMS = [Item("toy", index) for index in range(4)]
REQUESTS = make_requests(ITEMS, n=1, purpose="x", seed=0)
ORDER = RolloutOrder(step=1, max_rounds=3, sampling=SamplingParams(8), log_name="x")


def share(*indices: int, only_faults: bool = False, **usage: Any) -> RolloutShare:
    """Item 2 is a fault."""
    trajectories = [
        make_trajectory(ITEMS[index], stop_reason=StopReason.ENV_ERROR if index == 2 else StopReason.DONE)
        for index in indices
        if index == 2 or not only_faults
    ]
    values = {"duration_s": 1.0, "engine": EngineUsage(), "sessions": SessionUsage()} | usage
    return RolloutShare(tuple(indices), tuple(trajectories), **values)


class AnsweringGroup(WorkerGroup):
    """Workers that answer every call with the given shares."""

    def __init__(self, *shares: RolloutShare) -> None:
        self.world_size, self._shares = len(shares), list(shares)

    def call_each(self, method: str, args: Any, **options: Any) -> list[RolloutShare]:
        assert method == "generate" and options["interruptible"]
        return self._shares

    def interrupt(self) -> None:
        pass

    def shutdown(self) -> None:
        pass


def test_trajectories_come_in_the_requests_order_whoever_made_them() -> None:
    rollout = generate(AnsweringGroup(share(1, 3), share(0, 2)), REQUESTS, ORDER)
    assert [trajectory.item for trajectory in rollout.trajectories] == ITEMS


def test_faults_alone_come_back_where_files_hold_the_rest() -> None:
    shares = share(1, 3, only_faults=True), share(0, 2, only_faults=True)
    order = RolloutOrder(step=1, max_rounds=3, sampling=SamplingParams(8), log_name="x", only_faults=True)
    assert [t.item.index for t in generate(AnsweringGroup(*shares), REQUESTS, order).trajectories] == [2]


def test_a_request_that_no_worker_took_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="took up 3 of 4 requests"):
        generate(AnsweringGroup(share(1, 3), share(0)), REQUESTS, ORDER)


def test_usage_is_summed_over_workers_and_over_rollouts() -> None:
    first = RolloutUsage.of(
        [
            share(duration_s=10.0, engine=EngineUsage(num_tokens=100, busy_s=9.0), sessions=SessionUsage(4, retries=1)),
            share(duration_s=6.0, engine=EngineUsage(num_tokens=140, busy_s=3.0), sessions=SessionUsage(3, retries=0)),
        ]
    )
    assert usage_metrics(first) == {
        "rollout/sessions_peak": 7,
        "rollout/client_retries": 1,
        "rollout/engine_tokens_per_s": 24.0,
        "rollout/engine_busy_share": 0.75,  # 12 of 16 worker seconds
    }
    refill = RolloutUsage.of([share(duration_s=2.0, engine=EngineUsage(48, 2.0), sessions=SessionUsage(2, retries=2))])
    assert usage_metrics(first + refill) == {
        "rollout/sessions_peak": 7,
        "rollout/client_retries": 3,
        "rollout/engine_tokens_per_s": 24.0,
        "rollout/engine_busy_share": 14 / 18,
    }
