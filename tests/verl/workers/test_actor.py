from __future__ import annotations

import math

import pytest
import torch
from support.batches import random_batch
from support.models import save_tiny_model, tiny_qwen2
from transformers import AutoModelForCausalLM

from agentgym_rl.errors import TrainingDiverged
from verl.config import ActorConfig, ModelConfig, OptimConfig, RefConfig
from verl.protocol import DataProto
from verl.trainer.core_algos import BatchTotals, ppo_clip_loss
from verl.workers.actor import Actor
from verl.workers.language_model import MicroBatchLimits, learning_rate
from verl.workers.reference import Reference
from verl.workers.sft import SupervisedTrainer

LENGTHS = [5, 17, 3, 40, 9, 22]
TEMPERATURE = 0.8


@pytest.fixture(scope="module")
def model_config(tmp_path_factory):
    return ModelConfig(path=str(save_tiny_model(tmp_path_factory.mktemp("model"))))


def make_actor(model_config: ModelConfig, **options) -> Actor:
    options = {"optim": OptimConfig(lr=1e-3), "ppo_max_token_len_per_gpu": 50} | options
    return Actor(
        model_config,
        ActorConfig(**options),
        device="cpu",
        temperature=TEMPERATURE,
        total_updates=10,
        loss_norm_constant=10.0,
    )


def weights(actor: Actor) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in actor.state_dict_items()}


def furthest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def update_once(actor: Actor, batch: DataProto) -> dict[str, float]:
    return actor.update([batch], [BatchTotals.of(batch)])


def log_probs_by_hand(model, batch: DataProto) -> torch.Tensor:
    """``T``, from unpacked sequences and full logits; 0 at a sequence's first token."""
    rows = []
    for index in range(len(batch)):
        ids = batch.select([index]).input_ids_T[None]
        log_p = (model(input_ids=ids).logits[0] / TEMPERATURE).log_softmax(-1)
        rows.append(torch.cat([torch.zeros(1), log_p[:-1].gather(-1, ids[0, 1:, None])[:, 0]]))
    return torch.cat(rows)


# ----------------------------------------------------------------------------------------------------- log-probs


def test_log_probs_are_those_of_separate_rows_at_the_sampling_temperature(model_config):
    batch = random_batch(LENGTHS)
    seen, entropy = make_actor(model_config).log_probs_and_entropy(batch)
    expected = torch.where(batch.loss_mask_T, log_probs_by_hand(tiny_qwen2(), batch), 0.0)
    assert torch.allclose(seen, expected, atol=1e-5)
    assert ((entropy > 0) == batch.loss_mask_T).all()


def test_the_reference_agrees_with_an_actor_that_has_not_learned(model_config):
    batch = random_batch(LENGTHS)
    actor = make_actor(model_config)
    reference = Reference(model_config, RefConfig(), device="cpu", temperature=TEMPERATURE)
    before = reference.log_probs(batch)
    assert torch.allclose(before, actor.log_probs(batch), atol=1e-6)
    update_once(actor, batch)
    assert torch.equal(reference.log_probs(batch), before)
    assert not torch.allclose(actor.log_probs(batch), before, atol=1e-4)


# ------------------------------------------------------------------------------------------------------- updates


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_the_size_of_micro_batches_changes_nothing(model_config, mode):
    batch = random_batch(LENGTHS)
    batch = batch.replace(old_log_probs_T=-torch.rand(batch.num_tokens), ref_log_probs_T=-torch.rand(batch.num_tokens))
    options = {"loss_agg_mode": mode, "use_kl_loss": True, "entropy_coeff": 0.01}
    results = []
    for size in (1, 2, 4, None):
        actor = make_actor(model_config, ppo_micro_batch_size_per_gpu=size, **options)
        results.append((update_once(actor, batch), weights(actor)))
    first_metrics, first_weights = results[0]
    for metrics, updated in results[1:]:
        assert metrics == pytest.approx(first_metrics, rel=1e-4, abs=1e-6)
        assert furthest(updated, first_weights) < 1e-5


def test_gradients_equal_a_textbook_loss_on_full_logits(model_config):
    batch = random_batch(LENGTHS)
    old_T = log_probs_by_hand(tiny_qwen2(), batch).detach() + 0.3 * torch.randn(
        batch.num_tokens, generator=torch.Generator().manual_seed(1)
    )
    batch = batch.replace(old_log_probs_T=old_T)
    metrics = update_once(make_actor(model_config, grad_clip=0.0), batch)
    model, sampled = tiny_qwen2(), batch.loss_mask_T
    new_S = log_probs_by_hand(model, batch)[sampled]
    policy = ppo_clip_loss(new_S, old_T[sampled], batch.advantages_T[sampled], clip_low=0.2, clip_high=0.2)
    policy.loss_S.mean().backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert metrics["actor/pg_loss"] == pytest.approx(policy.loss_S.mean().item(), abs=1e-5)
    assert metrics["actor/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert metrics["actor/clip_frac"] == pytest.approx(policy.clipped_S.float().mean().item())
    assert metrics["actor/ppo_kl"] == pytest.approx((old_T[sampled] - new_S).mean().item(), abs=1e-5)


def test_tokens_of_the_environment_get_no_gradient_and_every_sampled_token_gets_some(model_config):
    batch = random_batch([12]).replace(advantages_T=torch.ones(12))
    actor = make_actor(model_config)
    captured = []
    handle = actor.model.get_output_embeddings().register_forward_hook(lambda *_: captured.append("full logits"))
    hidden = []
    actor.model.base_model.register_forward_hook(lambda _, __, output: hidden.append(output.last_hidden_state))
    log_probs_S = actor.module(batch).numbers
    hidden[0].retain_grad()
    log_probs_S.sum().backward()
    handle.remove()
    gets_gradient = hidden[0].grad[0].abs().sum(-1) > 0
    assert torch.equal(gets_gradient[:-1], batch.loss_mask_T[1:]) and not gets_gradient[-1]
    assert captured == []


def test_without_old_log_probs_the_first_update_is_exactly_on_policy(model_config):
    batch = random_batch(LENGTHS)
    metrics = update_once(make_actor(model_config), batch)
    assert metrics["actor/ppo_kl"] == 0 and metrics["actor/clip_frac"] == 0
    expected = -batch.advantages_T[batch.loss_mask_T].mean()
    assert metrics["actor/pg_loss"] == pytest.approx(expected.item(), abs=1e-6)


def test_the_first_update_is_the_same_with_old_log_probs_computed_before(model_config):
    batch = random_batch(LENGTHS)
    implicit, explicit = make_actor(model_config), make_actor(model_config)
    update_once(implicit, batch)
    update_once(explicit, batch.replace(old_log_probs_T=explicit.log_probs(batch)))
    assert furthest(weights(implicit), weights(explicit)) < 1e-5


def test_the_gap_to_the_engine_is_measured_in_probabilities(model_config):
    batch = random_batch(LENGTHS)
    actor = make_actor(model_config)
    exact = actor.log_probs(batch)
    metrics = update_once(actor, batch.replace(rollout_log_probs_T=exact, old_log_probs_T=exact))
    assert metrics["training/rollout_probs_diff_max"] == 0
    off_T = exact.clone()
    token = int(batch.loss_mask_T.nonzero()[3])
    off_T[token] = math.log(0.5 + math.exp(exact[token]))
    metrics = update_once(actor, batch.replace(rollout_log_probs_T=off_T, old_log_probs_T=exact))
    assert metrics["training/rollout_probs_diff_max"] == pytest.approx(0.5, abs=1e-5)
    assert metrics["training/rollout_probs_diff_mean"] == pytest.approx(0.5 / batch.num_sampled_tokens, rel=1e-3)


def test_an_update_raises_what_was_better_than_its_group(model_config):
    batch = random_batch(LENGTHS).replace(advantages_T=None)
    better_T = torch.where(batch.sequence_index_T % 2 == 0, 1.0, -1.0)
    actor = make_actor(model_config)
    before = actor.log_probs(batch)
    update_once(actor, batch.replace(advantages_T=better_T))
    change_T = (actor.log_probs(batch) - before)[batch.loss_mask_T]
    assert (change_T * better_T[batch.loss_mask_T]).mean() > 0


def test_a_loss_that_is_not_finite_changes_nothing_and_is_counted(model_config):
    batch = random_batch(LENGTHS)
    actor = make_actor(model_config)
    before = weights(actor)
    broken = batch.replace(advantages_T=batch.advantages_T * torch.inf)
    assert update_once(actor, broken)["actor/skipped_updates"] == 1
    assert furthest(weights(actor), before) == 0
    assert update_once(actor, batch)["actor/skipped_updates"] == 0
    assert 0 < furthest(weights(actor), before) < 1


def test_updates_that_stay_not_finite_end_the_run_and_say_what_was_seen(model_config):
    batch = random_batch(LENGTHS)
    actor = make_actor(model_config, optim=OptimConfig(lr=1e-3, max_skipped_updates=3))
    broken = batch.replace(advantages_T=batch.advantages_T * torch.nan)
    for each in (broken, broken, batch, broken, broken):  # never three in a row
        update_once(actor, each)
    with pytest.raises(
        TrainingDiverged, match=r"3 updates in a row .* loss nan .*optim\.lr=0\.001.*max_skipped_updates"
    ):
        update_once(actor, broken)


def test_a_batch_without_sampled_tokens_trains_nothing(model_config):
    actor = make_actor(model_config)
    before = weights(actor)
    metrics = update_once(actor, random_batch(LENGTHS, sampled_share=0.0))
    assert metrics["actor/pg_loss"] == 0 and metrics["actor/grad_norm"] == 0
    assert furthest(weights(actor), before) == 0


def test_gradient_checkpointing_changes_memory_and_not_the_result(model_config):
    batch = random_batch(LENGTHS)
    plain, recomputing = (
        make_actor(model_config),
        make_actor(ModelConfig(path=model_config.path, enable_gradient_checkpointing=True)),
    )
    assert update_once(plain, batch) == pytest.approx(update_once(recomputing, batch), rel=1e-5)
    assert furthest(weights(plain), weights(recomputing)) < 1e-6


def test_learning_rate_schedules():
    def rates(count, **options):
        config = OptimConfig(lr=1.0, **options)
        return [learning_rate(config, update, 6) for update in range(count)]

    assert rates(3) == [1, 1, 1]
    assert rates(4, lr_warmup_steps=2) == [0.5, 1, 1, 1]
    assert rates(8, lr_warmup_steps=2, lr_schedule="cosine") == pytest.approx(
        [0.5, 1, 1, 0.5 + 0.5 * math.sqrt(0.5), 0.5, 0.5 - 0.5 * math.sqrt(0.5), 0, 0]
    )
    # Half way between 1 and .2 is .6; the end is kept however many more updates come.
    assert rates(8, lr_schedule="cosine", min_lr_ratio=0.2)[3:] == pytest.approx(
        [0.6, 0.4, 0.6 - 0.4 * math.sqrt(0.75), 0.2, 0.2]
    )


# --------------------------------------------------------------------------------------------------- checkpoints


def test_resumed_training_equals_uninterrupted_training_to_the_last_bit(model_config, tmp_path):
    batches = [random_batch(LENGTHS, seed=seed) for seed in range(4)]
    optim = OptimConfig(lr=1e-3, lr_schedule="cosine")
    straight = make_actor(model_config, optim=optim)
    metrics = [update_once(straight, batch) for batch in batches]
    first = make_actor(model_config, optim=optim)
    for batch in batches[:2]:
        update_once(first, batch)
    first.save(tmp_path / "actor")
    second = make_actor(model_config, optim=optim)
    second.load(tmp_path / "actor")
    assert [update_once(second, batch) for batch in batches[2:]] == metrics[2:]
    assert furthest(weights(second), weights(straight)) == 0


def test_an_export_gives_transformers_the_actors_log_probs(model_config, tmp_path):
    batch = random_batch(LENGTHS)
    actor = make_actor(model_config)
    update_once(actor, batch)
    actor.export_huggingface(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    expected = torch.where(batch.loss_mask_T, log_probs_by_hand(model, batch), 0.0)
    assert torch.allclose(actor.log_probs(batch), expected, atol=1e-5)


def test_weights_come_under_their_hugging_face_names_tied_ones_once(model_config):
    names = [name for name, _ in make_actor(model_config).state_dict_items()]
    assert names == [name for name, _ in tiny_qwen2().named_parameters()]
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names


# ----------------------------------------------------------------------------------------------------------- SFT


def test_supervised_training_fits_both_tokens_of_an_answer(model_config):
    batch = DataProto.from_sequences([[3, 4, 9, 1], [5, 6, 20, 1]], [[0, 0, 1, 1]] * 2)
    trainer = SupervisedTrainer(
        model_config, OptimConfig(lr=1e-2), MicroBatchLimits(max_tokens=4), device="cpu", total_updates=60
    )
    losses = [trainer.update(batch, BatchTotals.of(batch))["train/loss"] for _ in range(60)]
    assert losses[0] > 1 and losses[-1] < 0.05
    assert trainer.log_probs(batch)[batch.loss_mask_T].exp().min() > 0.9


def test_supervised_loss_is_the_mean_over_all_loss_tokens(model_config):
    batch = random_batch(LENGTHS)
    trainer = SupervisedTrainer(
        model_config, OptimConfig(), MicroBatchLimits(max_sequences=2), device="cpu", total_updates=1
    )
    expected = -trainer.log_probs(batch)[batch.loss_mask_T].mean()
    assert trainer.update(batch, BatchTotals.of(batch))["train/loss"] == pytest.approx(expected.item(), rel=1e-5)
