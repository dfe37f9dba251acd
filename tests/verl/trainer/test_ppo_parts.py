"""The pieces of a training step that are plain functions: order of items, shares, mini-batches, plan, metrics."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import chain

import pytest
import torch
from support.rollouts import make_trajectory

from agentgym_rl.errors import ConfigError
from agentgym_rl.types import Item, StopReason
from verl.agent_trainer.loading import load_config, parse_command_line
from verl.config import PPOConfig
from verl.protocol import DataProto
from verl.trainer.core_algos import GroupStatistics
from verl.trainer.item_order import ItemOrder
from verl.trainer.metrics import advantage_metrics, group_metrics, has_signal
from verl.trainer.mini_batches import mini_batch_rows, share_mini_batch
from verl.trainer.plan import PPOPlan
from verl.trainer.rollouts import make_requests
from verl.utils.seeding import derive_seed

ITEMS = [Item("toy", index) for index in range(10)]


def test_an_epoch_shows_each_item_once_in_an_order_of_its_own() -> None:
    order = ItemOrder(ITEMS, batch_size=5, seed=3)
    epochs = [[item for step in (2 * epoch + 1, 2 * epoch + 2) for item in order.batch(step)] for epoch in range(3)]
    assert all(sorted(epoch, key=ITEMS.index) == ITEMS for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert [order.epoch_of(step) for step in range(1, 6)] == [0, 0, 1, 1, 2]


def test_a_batch_depends_on_the_seed_and_the_step_alone() -> None:
    steps = [9, 1, 4]
    first = [ItemOrder(ITEMS, batch_size=4, seed=3).batch(step) for step in steps]
    again = [ItemOrder(ITEMS, batch_size=4, seed=3).batch(step) for step in reversed(steps)]
    assert first == again[::-1]
    order = ItemOrder(ITEMS, batch_size=4, seed=3)
    assert [order.batch(step) for step in steps] == first
    assert first != [ItemOrder(ITEMS, batch_size=4, seed=4).batch(step) for step in steps]
    assert ItemOrder(ITEMS, batch_size=4, seed=3, shuffle=False).batch(3) == ITEMS[:4]


def test_fewer_items_than_a_batch_takes_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"train_batch_size=11: data\.train_file has only 10 rows"):
        ItemOrder(ITEMS, batch_size=11, seed=0)


def test_seeds_tell_parts_and_their_order_apart() -> None:
    seeds = {derive_seed(*parts) for parts in [(1, 2), (2, 1), (12,), ("1", 2), (1, "2"), ("1\x1f2",), ()]}
    assert len(seeds) == 7 and all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed("sample", 0, "step1") == derive_seed("sample", 0, "step1")


def test_requests_of_one_item_share_a_group_and_each_has_a_seed_of_its_own() -> None:
    requests = make_requests(ITEMS[:2], n=3, purpose="step4", seed=0)
    assert [(r.item.index, r.sample_index) for r in requests] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert len({r.uid for r in requests}) == 2 and len({r.seed for r in requests}) == 6
    assert {r.uid for r in requests}.isdisjoint(r.uid for r in make_requests(ITEMS[:2], n=3, purpose="step5", seed=0))


def test_mini_batches_hold_whole_groups_and_leave_out_what_faults_removed() -> None:
    rows = ["a", "a", "b", "d", "d"]  # one of b and all of c were faults
    groups = ["a", "b", "c", "d"]
    assert mini_batch_rows(rows, groups, groups=2, epochs=1, shuffle=False, seed=0) == [[0, 1, 2], [3, 4]]
    assert mini_batch_rows(rows, groups, groups=1, epochs=2, shuffle=False, seed=0) == [[0, 1], [2], [3, 4]] * 2


def test_groups_that_dynamic_sampling_did_not_find_make_a_mini_batch_smaller() -> None:
    rows, groups = ["a", "a", "b", "c"], ["a", "b", "c"]
    assert mini_batch_rows(rows, groups, groups=2, epochs=1, shuffle=False, seed=0) == [[0, 1, 2], [3]]
    shuffled = mini_batch_rows(rows, groups, groups=2, epochs=3, shuffle=True, seed=0)
    assert sorted(chain(*shuffled)) == sorted([0, 1, 2, 3] * 3)
    assert mini_batch_rows([], [], groups=2, epochs=1, shuffle=False, seed=0) == []


def test_shuffled_mini_batches_differ_between_epochs_and_hold_each_row_once_in_each() -> None:
    uids = [str(index) for index in range(8)]
    batches = mini_batch_rows(uids, uids, groups=2, epochs=2, shuffle=True, seed=5)
    first, second = batches[:4], batches[4:]
    assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(8))
    assert first != second


def test_shares_of_a_mini_batch_are_balanced_and_carry_the_counts_of_the_whole() -> None:
    lengths = [9, 2, 7, 4]
    batch = DataProto.from_sequences([[1] * n for n in lengths], [[0] + [1] * (n - 1) for n in lengths])
    shared = share_mini_batch(batch, 2)
    assert sorted(share.num_tokens for share in shared.shares) == [11, 11]
    assert shared.totals.num_tokens == sum(lengths) - 4 and shared.totals.num_sequences == 4
    assert [len(share) for share in share_mini_batch(batch.select([0]), 3).shares] == [1, 0, 0]


def test_groups_without_two_different_scores_are_counted() -> None:
    trajectories = [
        *(make_trajectory(ITEMS[0], score=score) for score in (1.0, 1.0)),
        *(make_trajectory(ITEMS[1], score=score) for score in (1.0, 0.0)),
        make_trajectory(ITEMS[2], score=1.0),
        make_trajectory(ITEMS[2], score=0.0, stop_reason=StopReason.ENV_ERROR),
    ]
    assert group_metrics(trajectories) == {
        "rollout/groups": 3,
        "rollout/groups_without_signal": 2,
        "rollout/groups_reduced_to_one": 1,
    }


def test_scores_that_agree_but_for_rounding_are_alike_in_metrics_as_in_advantages() -> None:
    trajectories = [make_trajectory(ITEMS[0], score=score) for score in (0.1 + 0.2, 0.3)]
    assert trajectories[0].score != trajectories[1].score
    assert group_metrics(trajectories)["rollout/groups_without_signal"] == 1
    batch = DataProto.from_trajectories(trajectories)
    assert GroupStatistics.of(batch).centred_B.tolist() == [0, 0]


def test_only_faults_reduce_a_group_and_not_that_it_began_with_one_member() -> None:
    """As every group with one sample an item, and the second trial of the only sample that failed its first."""
    alone = make_trajectory(ITEMS[0], score=1.0)
    firsts = [make_trajectory(ITEMS[1], score=score) for score in (0.0, 1.0)]
    second = replace(make_trajectory(ITEMS[1], score=1.0), trial=2)
    assert group_metrics([alone, *firsts, second])["rollout/groups_reduced_to_one"] == 0
    broken = make_trajectory(ITEMS[2], score=0.0, stop_reason=StopReason.ENV_ERROR)
    assert group_metrics([alone, broken])["rollout/groups_reduced_to_one"] == 1


def test_advantages_are_described_over_sampled_tokens_only() -> None:
    batch = DataProto.from_sequences([[1, 2, 3, 4]], [[0, 1, 0, 1]])
    batch = batch.replace(advantages_T=torch.tensor([9.0, 1.0, 9.0, -1.0]) * batch.loss_mask_T)
    assert advantage_metrics(batch) == {
        "advantages/mean": 0.0,
        "advantages/std": 1.0,
        "advantages/min": -1.0,
        "advantages/max": 1.0,
    }
    assert has_signal(batch) and not has_signal(batch.replace(advantages_T=torch.zeros(4)))


def test_the_plan_says_the_resolved_numbers() -> None:
    overrides = [
        "data.train_file=x",
        "data.train_batch_size=32",
        "actor_rollout_ref.agentgym.task_name=x",
        "actor_rollout_ref.agentgym.env_addr=http://x",
        "actor_rollout_ref.model.path=x",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.rollout.n=4",
        "algorithm.rounds_ctrl.type=scaling_inter_stepwise",
        "algorithm.rounds_ctrl.rounds=[10,20,30]",
        "algorithm.rounds_ctrl.steps_scaling_inter=2",
        "trainer.total_epochs=2",
        "trainer.num_threads=3",
    ]
    config = load_config(PPOConfig, parse_command_line(overrides, program="test", config_name="ppo_trainer"))
    plan = PPOPlan.of(config, num_items=100, num_val_items=7, steps_per_epoch=3)
    text = plan.describe(config, "cpu")
    assert "32 items x n 4 = 128 trajectories, 8 updates of 16; 6 steps" in text
    assert "rounds: 10 in steps 1-2, 20 in steps 3-4, 30 in steps 5-6" in text
    assert "1 worker (ray, cpu, 3 threads each" in text
    assert plan.total_updates == 48 and plan.total_critic_updates == 0


def test_the_plan_counts_updates_of_policy_and_critic_apart() -> None:
    overrides = [
        "data.train_file=x",
        "data.train_batch_size=32",
        "actor_rollout_ref.agentgym.task_name=x",
        "actor_rollout_ref.agentgym.env_addr=http://127.0.0.1:1",
        "actor_rollout_ref.model.path=x",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
        "algorithm.adv_estimator=gae",
        "critic.ppo_mini_batch_size=8",
        "critic.ppo_epochs=3",
        "trainer.critic_warmup=2",
        "trainer.total_training_steps=5",
    ]
    config = load_config(PPOConfig, parse_command_line(overrides, program="test", config_name="ppo_trainer"))
    plan = PPOPlan.of(config, num_items=100, num_val_items=0, steps_per_epoch=3)
    assert plan.total_updates == 3 * 2 and plan.total_critic_updates == 5 * 12
    assert "12 updates of the critic a step; alone in the first 2 steps" in plan.describe(config, "cpu")
    config.trainer.total_training_steps = None  # one epoch
    with pytest.raises(ConfigError, match=r"trainer\.critic_warmup=2 must be below the run's 2 steps"):
        PPOPlan.of(config, num_items=64, num_val_items=0, steps_per_epoch=2)


def test_the_driver_does_not_import_what_only_workers_need() -> None:
    heavy = {"transformers", "torch.distributed.fsdp", "torch.distributed.checkpoint"}
    program = f"import sys, verl.trainer.ppo, verl.trainer.generation; print(*sorted({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "\n"
