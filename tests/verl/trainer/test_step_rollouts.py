"""Which trajectories a step is made of, without models: greedy ones, groups left out, and what replaces them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice

import pytest
from support.rollouts import ScriptedClient, ScriptedEngine, ends_after, frameless_chat, make_settings, make_trajectory
from support.rollouts import make_requests as rollout_requests

from agentgym_rl.errors import TooManyFailures
from agentgym_rl.rollout.collector import RolloutRequest, collect
from agentgym_rl.types import Item, SamplingParams, StopReason, Trajectory
from verl.agent_trainer.loading import load_config, parse_command_line
from verl.config import PPOConfig
from verl.trainer.credit import differs
from verl.trainer.item_order import ItemOrder
from verl.trainer.rollouts import Rollout, RolloutUsage, make_requests
from verl.trainer.step_rollouts import StepRollouts, StepSampler
from verl.workers.setup import RolloutOrder

ITEMS = [Item("toy", index) for index in range(12)]
FILTER = ("algorithm.filter_groups.enable=True", "algorithm.filter_groups.max_num_gen_batches=3")


def sample(
    answer: Callable[[RolloutRequest], Trajectory], *overrides: str, step: int = 1
) -> tuple[StepRollouts, list[RolloutOrder]]:
    """A step of 4 items, n = 2, in which each request comes to what ``answer`` says."""
    argv = [
        "data.train_file=x",
        "data.train_batch_size=4",
        "actor_rollout_ref.agentgym.task_name=x",
        "actor_rollout_ref.agentgym.env_addr=http://127.0.0.1:1",
        "actor_rollout_ref.model.path=x",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.rollout.n=2",
        *overrides,
    ]
    config = load_config(PPOConfig, parse_command_line(argv, program="test", config_name="ppo_trainer"))
    orders: list[RolloutOrder] = []

    def generate(requests: Sequence[RolloutRequest], order: RolloutOrder) -> Rollout:
        orders.append(order)
        made = [replace(answer(request), uid=request.uid) for request in requests]
        return Rollout(made, RolloutUsage(duration_s=1.0))

    sampler = StepSampler(config, ItemOrder(ITEMS, batch_size=4, seed=0), generate)
    return sampler.sample(step, max_rounds=5, sampling=SamplingParams(max_tokens=9)), orders


def even_items_differ(request: RolloutRequest) -> Trajectory:
    differs = request.item.index % 2 == 0
    return make_trajectory(request.item, score=float(request.sample_index if differs else 1))


def test_without_filtering_all_groups_are_kept_and_sampled_once():
    rollouts, orders = sample(even_items_differ)
    assert len(rollouts.trajectories) == len(rollouts.rows) == 8 and len(rollouts.kept) == 4
    assert len(orders) == 1 and rollouts.metrics() == {}


def test_groups_without_signal_are_replaced_by_those_of_other_items():
    rollouts, orders = sample(even_items_differ, *FILTER)
    assert len(rollouts.kept) == 4 and all(row.trajectory.item.index % 2 == 0 for row in rollouts.rows)
    assert all(len(group) == 2 for group in rollouts.kept.values())
    items = [t.item.index for t in rollouts.trajectories]
    assert len(items) == 2 * len(set(items))  # None was sampled twice while others were left.
    assert [order.append for order in orders] == [False, *[True] * (len(orders) - 1)]
    assert {order.log_name for order in orders} == {"step1"}
    assert rollouts.usage.duration_s == len(orders) == rollouts.num_rounds
    assert rollouts.metrics()["rollout/groups_left_out"] == rollouts.num_groups - 4


def test_what_is_sampled_in_place_depends_on_the_step_alone():
    def uids(step: int) -> list[str]:
        return [t.uid for t in sample(even_items_differ, *FILTER, step=step)[0].trajectories]

    assert uids(1) == uids(1) and set(uids(1)).isdisjoint(uids(2))


def test_an_item_that_is_sampled_again_makes_a_group_and_samples_of_its_own():
    seeds: dict[tuple[str, int], int | None] = {}

    def nobody_differs(request: RolloutRequest) -> Trajectory:
        assert (request.uid, request.sample_index) not in seeds
        seeds[request.uid, request.sample_index] = request.seed
        return make_trajectory(request.item, score=1.0)

    rollouts, orders = sample(nobody_differs, *FILTER, "algorithm.filter_groups.max_num_gen_batches=5")
    assert len(orders) == 5 and rollouts.rows == [] and rollouts.num_groups == 20
    assert len(set(seeds.values())) == len(seeds) == 40


def test_no_more_groups_are_kept_than_the_batch_has_items():
    rollouts, _ = sample(lambda r: make_trajectory(r.item, score=float(r.sample_index)), *FILTER)
    assert len(rollouts.kept) == 4 and rollouts.num_rounds == 1


def test_groups_beyond_the_batch_are_left_out_however_many_a_later_round_finds():
    first_round: list[Item] = []

    def one_of_the_first_does_not_differ(request: RolloutRequest) -> Trajectory:
        if request.uid.count("/") == 1 and request.item not in first_round:
            first_round.append(request.item)
        alike = request.item == first_round[0]
        return make_trajectory(request.item, score=1.0 if alike else float(request.sample_index))

    rollouts, _ = sample(one_of_the_first_does_not_differ, *FILTER)
    assert rollouts.num_groups == 6 and len(rollouts.kept) == 4  # 3 of 4, then 2 for the one that is missing


def test_a_greedy_request_is_played_at_temperature_0_beside_the_others():
    chat = frameless_chat()
    engine = ScriptedEngine(chat)
    requests = [replace(request, greedy=request.sample_index == 1) for request in rollout_requests([3], n=2)]
    settings = make_settings(sampling=SamplingParams(max_tokens=50, temperature=0.7))
    asyncio.run(
        collect(requests, engine, make_client=lambda: ScriptedClient(ends_after(1)), chat=chat, settings=settings)
    )
    asked = {trajectory_id.split("/")[3]: sampling.temperature for trajectory_id, _, sampling in engine.requests}
    assert asked == {"0": 0.7, "1": 0.0}


def test_a_group_that_faults_left_with_one_member_has_no_signal():
    def one_fails(request: RolloutRequest) -> Trajectory:
        failed = request.sample_index == 1 and request.item.index % 2 == 0
        reason = StopReason.ENV_ERROR if failed else StopReason.DONE
        return make_trajectory(request.item, score=float(request.sample_index), stop_reason=reason)

    rollouts, _ = sample(one_fails, *FILTER, "actor_rollout_ref.rollout.max_failed_fraction=0.9")
    assert rollouts.kept and all(
        len(group) == 2 and not any(t.masked for t in group) for group in rollouts.kept.values()
    )


def test_faults_are_judged_after_each_round():
    def fails(request: RolloutRequest) -> Trajectory:
        return make_trajectory(request.item, stop_reason=StopReason.ENV_ERROR, error="EnvError: gone")

    with pytest.raises(TooManyFailures, match="EnvError: gone"):
        sample(fails, *FILTER)


def test_faults_of_a_late_round_are_judged_among_all_of_the_step():
    def fails_where_it_replaces(request: RolloutRequest) -> Trajectory:
        reason = StopReason.ENV_ERROR if request.uid.startswith("step1/2/") else StopReason.DONE
        # One of the first four groups is alike, so that the second round is a single group, and all of it fails.
        score = 0.0 if request.item == first else float(request.sample_index)
        return make_trajectory(request.item, score=score, stop_reason=reason, error="EnvError: gone")

    first = ItemOrder(ITEMS, batch_size=4, seed=0).batch(1)[0]
    rollouts, orders = sample(fails_where_it_replaces, *FILTER)
    assert len(orders) == 3 and len(rollouts.kept) == 4
    assert 0 < sum(t.masked for t in rollouts.trajectories) < len(rollouts.trajectories) / 2


@pytest.mark.parametrize(
    ("metric", "scores", "successes", "expected"),
    [
        ("score", [0.35, 0.35 + 1e-9], [False, True], False),
        ("seq_reward", [0.3, 0.4], [True, True], True),
        ("success", [0.3, 0.4], [True, True], False),
        ("acc", [0.5, 0.5], [False, True], True),
        ("score", [0.0, 0.0], [False, False], False),
        ("score", [1.0], [True], False),
    ],
)
def test_a_group_has_signal_when_the_metric_differs(metric, scores, successes, expected):
    group = [make_trajectory(ITEMS[0], score=s, success=won) for s, won in zip(scores, successes, strict=True)]
    assert differs(group, metric) is expected


def test_a_greedy_rollout_is_made_beside_each_group_and_one_that_fails_leaves_no_baseline():
    def answer(request: RolloutRequest) -> Trajectory:
        reason = StopReason.ENV_ERROR if request.greedy and request.item.index % 2 else StopReason.DONE
        return make_trajectory(request.item, score=0.25 if request.greedy else 1.0, stop_reason=reason)

    rollouts, _ = sample(answer, "algorithm.adv_estimator=remax")
    assert len(rollouts.trajectories) == 8 and len(rollouts.greedy) == 4
    odd = sum(t.item.index % 2 for t in rollouts.greedy.values())
    baselines = rollouts.batch().baselines_B.tolist()
    assert sum(math.isnan(b) for b in baselines) == 2 * odd and baselines.count(0.25) == 8 - 2 * odd
    assert rollouts.metrics() == {"rollout/groups_without_baseline": odd, "rollout/greedy_score_mean": 0.25}


def test_greedy_requests_come_last_in_their_group():
    requests = make_requests(ITEMS[:2], n=2, purpose="step1", seed=0, with_greedy=True)
    assert [(r.item.index, r.sample_index, r.greedy) for r in requests] == [
        *((0, 0, False), (0, 1, False), (0, 2, True)),
        *((1, 0, False), (1, 1, False), (1, 2, True)),
    ]


def test_others_are_all_items_beyond_the_batch_before_any_comes_again():
    order = ItemOrder(ITEMS, batch_size=4, seed=0)
    batch, others = order.batch(2), list(islice(order.others(2), 20))
    assert set(others[:8]).isdisjoint(batch) and set(others[8:12]) == set(batch)
    assert others[:8] == others[12:20] and len(set(others)) == 12
    assert others[:8] != list(islice(order.others(5), 8))
