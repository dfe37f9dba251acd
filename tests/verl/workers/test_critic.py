from __future__ import annotations

import pytest
import torch
from support.batches import random_batch
from support.models import save_tiny_model, tiny_qwen2

from verl.config import CriticConfig, ModelConfig, OptimConfig
from verl.protocol import DataProto
from verl.trainer.core_algos import BatchTotals
from verl.workers.critic import Critic

LENGTHS = [5, 17, 3, 40, 9, 22]


@pytest.fixture(scope="module")
def model_config(tmp_path_factory):
    return ModelConfig(path=str(save_tiny_model(tmp_path_factory.mktemp("model"))))


def make_critic(model_config: ModelConfig, **options) -> Critic:
    options = {"optim": OptimConfig(lr=1e-2), "cliprange_value": None} | options
    return Critic(model_config, CriticConfig(**options), device="cpu", total_updates=100, loss_norm_constant=10.0)


def returns_batch(seed: int = 0) -> DataProto:
    """Random sequences; the return of a token is a function of the token before it, which a critic can learn."""
    batch = random_batch(LENGTHS, seed=seed)
    before_T = torch.cat([torch.zeros(1, dtype=torch.int64), batch.input_ids_T[:-1]])
    returns_T = torch.where(batch.loss_mask_T, (before_T % 2).float(), 0.0)
    return batch.replace(returns_T=returns_T, values_T=torch.zeros(batch.num_tokens))


def update_once(critic: Critic, batch: DataProto) -> dict[str, float]:
    return critic.update([batch], [BatchTotals.of(batch)])


def weights(critic: Critic) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in critic.module.named_parameters()}


def furthest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def test_values_begin_at_zero_and_stand_on_sampled_tokens_only(model_config):
    critic, batch = make_critic(model_config), returns_batch()
    assert critic.values(batch).tolist() == [0.0] * batch.num_tokens
    torch.nn.init.ones_(critic.module.value_head.bias)
    assert critic.values(batch).tolist() == batch.loss_mask_T.float().tolist()


def test_a_value_is_that_of_the_state_before_its_token(model_config):
    critic, batch = make_critic(model_config), returns_batch()
    torch.manual_seed(0)
    torch.nn.init.normal_(critic.module.value_head.weight)
    head, backbone = critic.module.value_head, tiny_qwen2().model
    expected = []
    for index in range(len(batch)):
        ids = batch.select([index]).input_ids_T[None]
        values = head(backbone(input_ids=ids).last_hidden_state[0])[:, 0]
        expected.append(torch.cat([torch.zeros(1), values[:-1]]))
    expected_T = torch.where(batch.loss_mask_T, torch.cat(expected), 0.0)
    assert torch.allclose(critic.values(batch), expected_T, atol=1e-5)


def test_a_critic_learns_what_follows_from_the_state(model_config):
    critic = make_critic(model_config)
    metrics = [update_once(critic, returns_batch(seed % 4)) for seed in range(40)]
    assert metrics[0]["critic/vf_loss"] > 0.15 and metrics[-1]["critic/vf_loss"] < 0.02
    # Values of 0 explain less than the mean return would.
    assert metrics[0]["critic/explained_variance"] < 0 < 0.9 < metrics[-1]["critic/explained_variance"]


def test_the_first_loss_is_half_the_mean_squared_return(model_config):
    batch = returns_batch()
    metrics = update_once(make_critic(model_config), batch)
    returns_S = batch.returns_T[batch.loss_mask_T]
    assert metrics["critic/vf_loss"] == pytest.approx(0.5 * returns_S.square().mean().item())
    assert metrics["critic/return_mean"] == pytest.approx(returns_S.mean().item())
    assert metrics["critic/value_mean"] == 0


def test_values_far_from_the_old_ones_are_clipped_and_counted(model_config):
    batch = returns_batch()
    far = batch.replace(values_T=torch.full((batch.num_tokens,), 3.0))
    assert update_once(make_critic(model_config, cliprange_value=0.5), batch)["critic/vf_clip_frac"] == 0
    assert update_once(make_critic(model_config, cliprange_value=0.5), far)["critic/vf_clip_frac"] == 1


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_the_size_of_micro_batches_changes_nothing(model_config, mode):
    batch, results = returns_batch(), []
    for size in (1, 2, 4, None):
        critic = make_critic(
            model_config, optim=OptimConfig(lr=1e-3), ppo_micro_batch_size_per_gpu=size, loss_agg_mode=mode
        )
        results.append(([update_once(critic, batch) for _ in range(3)], weights(critic)))
    first_metrics, first_weights = results[0]
    for metrics, updated in results[1:]:
        for one, other in zip(metrics, first_metrics, strict=True):
            assert one == pytest.approx(other, rel=1e-4, abs=1e-6)
        assert furthest(updated, first_weights) < 1e-5


def test_resumed_training_equals_uninterrupted_training_to_the_last_bit(model_config, tmp_path):
    straight, first = make_critic(model_config), make_critic(model_config)
    metrics = [update_once(straight, returns_batch(seed)) for seed in range(4)]
    for seed in range(2):
        update_once(first, returns_batch(seed))
    first.save(tmp_path / "critic")
    second = make_critic(model_config)
    second.load(tmp_path / "critic")
    assert [update_once(second, returns_batch(seed)) for seed in range(2, 4)] == metrics[2:]
    assert furthest(weights(second), weights(straight)) == 0


def test_a_batch_without_returns_is_refused(model_config):
    with pytest.raises(ValueError, match="returns_T"):
        update_once(make_critic(model_config), random_batch(LENGTHS))
