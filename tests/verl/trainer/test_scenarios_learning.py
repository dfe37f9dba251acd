"""What must come out as said of advantages and losses, from the token record on."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batches import batch_of
from support.rollouts import make_generation, make_limits, make_requests
from support.tokenizers import make_tokenizer

from agentgym_rl.agent.chat import ChatTemplate
from agentgym_rl.rollout.handler import RewardRule, RolloutHandler
from agentgym_rl.types import Message, Part, PartKind, Role, StepOutput, StopReason, Trajectory
from verl.config import ADV_ESTIMATORS, AlgorithmConfig
from verl.protocol import DataProto, group_code
from verl.trainer.core_algos import compute_advantages, discounted_returns
from verl.trainer.metrics import has_signal
from verl.trainer.mini_batches import mini_batch_rows, share_mini_batch
from verl.utils.balancing import balanced_partition, pack, restore_order

LENGTHS = [9, 2, 7, 4]


def play(turns: list[tuple[str | None, float]], *, is_cumulative: bool = False) -> Trajectory:
    """A trajectory of these texts (None: nothing was sampled) and rewards of the steps."""
    chat = ChatTemplate(make_tokenizer())
    start = (Message(Role.USER, "Be good."), Message(Role.ASSISTANT, "OK."), Message(Role.USER, "Goal: log"))
    handler = RolloutHandler(
        make_requests([7])[0], start, chat, make_limits(), max_rounds=10, rewards=RewardRule(is_cumulative)
    )
    for text, reward in turns:
        handler.append_generation(make_generation([] if text is None else chat.encode_answer(text)))
        handler.append_step(StepOutput("seen", reward, False))
        handler.append_observation("seen")
    return handler.finish(StopReason.MAX_ROUNDS)


def rewarded_by_index() -> DataProto:
    """Sequences of `LENGTHS` tokens, the last of each rewarded with the sequence's number."""
    batch = batch_of([[1] * (length - 1) for length in LENGTHS], groups=["a", "b", "c", "d"], scores=[0, 1, 2, 3])
    rewards_T = torch.zeros(batch.num_tokens)
    rewards_T[batch.offsets_B1[1:] - 1] = torch.arange(4.0)
    return batch.replace(token_rewards_T=rewards_T)


def rewards_by_length(batch: DataProto) -> dict[int, float]:
    """The reward of the last token of each sequence, by its length, which names it."""
    return dict(zip(batch.lengths_B.tolist(), batch.token_rewards_T[batch.offsets_B1[1:] - 1].tolist(), strict=True))


@settings(deadline=None)
@given(st.permutations(range(4)))
@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_plus_plus_baseline"])
def test_permuting_the_members_of_a_group_permutes_their_advantages(name, order):
    batch = batch_of(
        [[1, 1], [1], [0, 1], [1, 0, 1]],
        rewards=[[0, 1], [0], [0, 0.5], [0, 0, 0.25]],
        scores=[1, 0, 0.5, 0.25],
        groups=["a"] * 4,
    )
    config = AlgorithmConfig(adv_estimator=name)
    expected = compute_advantages(batch, config).select(order).advantages_T
    assert torch.allclose(compute_advantages(batch.select(order), config).advantages_T, expected, atol=1e-6)


def test_packing_and_sharing_out_over_ranks_leave_every_trajectory_with_its_own_reward():
    batch, expected = rewarded_by_index(), {9: 0.0, 2: 1.0, 7: 2.0, 4: 3.0}
    shares = balanced_partition(batch.lengths_B.tolist(), 2)
    joined = DataProto.concat([batch.select(share) for share in shares])
    restored = joined.select(restore_order(shares))
    assert restored.lengths_B.tolist() == LENGTHS and restored.scores_B.tolist() == [0, 1, 2, 3]
    assert rewards_by_length(restored) == expected
    seen: dict[int, float] = {}
    rows = mini_batch_rows(["a", "b", "c", "d"], ["a", "b", "c", "d"], groups=2, epochs=1, shuffle=True, seed=1)
    for mini_batch in rows:
        for share in share_mini_batch(batch.select(mini_batch), 2).shares:
            for indices in pack(share.lengths_B.tolist(), max_tokens=10):
                seen |= rewards_by_length(share.select(indices))
    assert seen == expected


@pytest.mark.parametrize(("is_cumulative", "reported"), [(True, [0.2, 0.5, 1.0]), (False, [0.2, 0.3, 0.5])])
def test_step_rewards_of_a_cumulative_score_reach_the_turns_that_earned_them(is_cumulative, reported):
    trajectory = play([("look", reward) for reward in reported], is_cumulative=is_cumulative)
    batch = DataProto.from_trajectories([trajectory])
    returns_T = discounted_returns(batch.token_rewards_T, batch, AlgorithmConfig(adv_estimator="gae"))
    by_turn = [returns_T[batch.loss_mask_T & (batch.message_ids_T == message)].unique() for message in (3, 5, 7)]
    assert [returns.tolist() for returns in by_turn] == [pytest.approx([value]) for value in (1.0, 0.8, 0.5)]
    assert float(batch.token_rewards_T.sum()) == pytest.approx(1.0) == float(batch.scores_B[0])


def test_the_anchor_of_a_turn_is_the_observation_that_it_answers():
    batch = DataProto.from_trajectories([play([("look", 0.0), ("take", 1.0)])])
    anchors = [batch.anchor_ids_T[batch.loss_mask_T & (batch.message_ids_T == message)] for message in (3, 5)]
    assert [codes.unique().tolist() for codes in anchors] == [[group_code("Goal: log")], [group_code("seen")]]
    assert batch.anchor_ids_T[~batch.loss_mask_T].abs().max() == 0


def test_a_plan_that_is_shown_with_the_observation_is_no_part_of_the_anchor():
    """Else no two turns of samples with plans of their own would ever answer the same."""
    played = play([("look", 0.0), ("take", 1.0)])
    messages, parts = list(played.messages), [()] * len(played.messages)
    messages[4] = Message(Role.USER, "seen\n\nYour plan: look, then take")
    parts[4] = (Part(PartKind.OBSERVATION, 0, 4), Part(PartKind.PLAN, 17, 32))
    planned = dataclasses.replace(played, messages=tuple(messages), parts=tuple(parts))
    plain, shown = (DataProto.from_trajectories([each]).anchor_ids_T for each in (played, planned))
    assert torch.equal(plain, shown)


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "gae", "gigpo"])
def test_an_empty_completion_writes_no_reward_and_leaves_the_others_as_they_were(name):
    others = [play([("look", 0.0), ("take", 1.0)]), play([("take", 0.5)])]
    empty = play([("look", 0.0), (None, 0.7)])
    assert empty.token_rewards.tolist() == [0.0] * empty.num_tokens
    config = AlgorithmConfig(adv_estimator=name)

    def returns_of(trajectories: list[Trajectory]) -> torch.Tensor:
        batch = DataProto.from_trajectories(trajectories)
        batch = batch.replace(values_T=torch.zeros(batch.num_tokens))
        return compute_advantages(batch, config, with_returns=True).select([0, 1]).returns_T

    assert torch.equal(returns_of([*others, empty]), returns_of(others))


def test_a_trajectory_of_which_nothing_was_sampled_has_no_part_in_a_batch():
    batch = DataProto.from_trajectories([play([("take", 1.0)]), play([(None, 1.0)])])
    assert batch.sampled_lengths_B[1] == 0 and float(batch.token_rewards_T.sum()) == 1
    for name in set(ADV_ESTIMATORS) - {"remax"}:
        result = compute_advantages(
            batch.replace(values_T=torch.zeros(batch.num_tokens)), AlgorithmConfig(adv_estimator=name)
        )
        assert result.select([1]).advantages_T.abs().max() == 0, name


@pytest.mark.parametrize("name", ADV_ESTIMATORS)
def test_a_batch_in_which_nobody_did_better_has_no_signal(name):
    batch = DataProto.from_trajectories([play([("look", 0.0), ("take", 0.35)]) for _ in range(4)])
    values_T = torch.where(batch.loss_mask_T, 0.35, 0.0)
    batch = batch.replace(
        values_T=values_T, baselines_B=torch.full((4,), float(torch.tensor(0.35)), dtype=torch.float64)
    )
    assert not has_signal(compute_advantages(batch, AlgorithmConfig(adv_estimator=name)))
