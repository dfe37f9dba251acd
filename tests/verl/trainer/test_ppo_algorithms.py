"""Whole runs of each algorithm in this process: a tiny model, a real server, one worker."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.environments import Script
from support.parity import TASK, parity_spec
from support.servers import serve
from support.textbook_loop import TextbookLoop
from transformers import AutoModelForCausalLM

from agentgym_rl.envs.registry import register
from agentgym_rl.envs.server import build_app
from agentgym_rl.errors import ConfigError
from agentgym_rl.rollout.log import read_trajectories
from agentgym_rl.types import Item
from verl.agent_trainer.loading import load_config, parse_command_line
from verl.config import ADV_ESTIMATORS, PPOConfig
from verl.trainer.ppo import run_ppo
from verl.utils.tracking import read_metrics

pytestmark = pytest.mark.server

Run = Callable[..., list[dict[str, Any]]]
FILTER = ("algorithm.filter_groups.enable=True", "algorithm.filter_groups.max_num_gen_batches=3")


@pytest.fixture
def train(model: Path, tmp_path: Path) -> Iterator[Run]:
    """Runs the trainer on a scripted environment into the test's folder ``run``; returns the rows of its metrics."""

    def run(*overrides: str, items: int = 8, is_indifferent: bool = False, script: Script | None = None) -> Any:
        spec = parity_spec(script or Script(turns=2), is_indifferent=is_indifferent)
        register(spec)
        with serve(build_app(spec)) as url:
            config = _config(model, url, tmp_path, overrides)
            run_ppo(config, train_items=[Item(TASK, index) for index in range(items)], val_items=[])
        return read_metrics(Path(config.trainer.default_local_dir) / "metrics.jsonl")

    yield run


def _config(model: Path, url: str, folder: Path, overrides: tuple[str, ...]) -> PPOConfig:
    argv = [
        "data.train_file=unused",
        "data.train_batch_size=4",
        "data.max_response_length=200",
        f"actor_rollout_ref.model.path={model}",
        f"actor_rollout_ref.agentgym.task_name={TASK}",
        f"actor_rollout_ref.agentgym.env_addr={url}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.rollout.max_tokens=8",
        "algorithm.rounds_ctrl.rounds=3",
        "trainer.logger=[jsonl]",
        "trainer.device=cpu",
        "trainer.worker_group=local",
        "trainer.total_training_steps=1",
        f"trainer.default_local_dir={folder / 'run'}",
        *overrides,
    ]
    return load_config(PPOConfig, parse_command_line(argv, program="test", config_name="ppo_trainer"))


def results_of(row: dict[str, Any]) -> dict[str, Any]:
    """A step's numbers without those that measure time, memory, or who happened to be decoded together."""
    measured = ("timing_s/", "timing_share/", "perf/", "training/rollout_probs_diff", "rollout/engine_", "checkpoint/")
    return {
        key: value
        for key, value in row.items()
        if not key.startswith(measured) and "_s_" not in key and key != "rollout/sessions_peak"
    }


def weights_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(checkpoint / "actor" / "huggingface").state_dict()


def test_every_estimator_trains_from_the_command_line(train: Run, tmp_path: Path) -> None:
    for name in ADV_ESTIMATORS:
        [row] = train(f"algorithm.adv_estimator={name}", f"trainer.default_local_dir={tmp_path / name}")
        assert row["training/updates"] == 2 and row["actor/grad_norm"] > 0, name
        assert row["advantages/min"] < 0 < row["advantages/max"], name
        assert ("critic/vf_loss" in row) == (name == "gae")
        assert ("rollout/greedy_score_mean" in row) == (name == "remax")


def test_a_run_leaves_the_weights_of_a_plain_loop_over_its_trajectories(
    train: Run, model: Path, tmp_path: Path
) -> None:
    actor, optim = "actor_rollout_ref.actor", "actor_rollout_ref.actor.optim"
    train(
        *("trainer.total_training_steps=3", "actor_rollout_ref.rollout.temperature=0.8"),
        *(f"{actor}.ppo_mini_batch_size=4", f"{actor}.ppo_epochs=2", f"{actor}.entropy_coeff=0.01"),
        *(f"{actor}.grad_clip=0.1", f"{optim}.lr_warmup_steps=4", f"{optim}.weight_decay=0.1"),
    )
    loop = TextbookLoop(model, temperature=0.8, lr=1e-3, warmup=4, weight_decay=0.1, grad_clip=0.1, entropy=0.01)
    for step in (1, 2, 3):
        trajectories = read_trajectories(tmp_path / "run" / "trajectories" / f"step{step}").trajectories
        for trajectory in trajectories:  # sampled from the weights that the last step left, not from older ones
            sampled = trajectory.loss_mask == 1
            expected = loop.log_probs_and_entropy(trajectory)[0].detach().numpy()
            assert trajectory.rollout_log_probs[sampled] == pytest.approx(expected, abs=1e-4)
        loop.step(trajectories, epochs=2)
    trained, initial = weights_of(tmp_path / "run" / "global_step_3"), AutoModelForCausalLM.from_pretrained(model)
    for name, expected in loop.model.state_dict().items():
        moved = expected - initial.state_dict()[name]
        assert (trained[name] - expected).norm() <= 0.01 * moved.norm() + 1e-6, name


def test_with_gae_a_critic_is_trained_and_the_policy_waits_for_it(train: Run, model: Path, tmp_path: Path) -> None:
    rows = train(
        "algorithm.adv_estimator=gae",
        "algorithm.lam=0.95",
        "critic.optim.lr=1e-2",
        "critic.ppo_mini_batch_size=1",
        "critic.ppo_epochs=3",
        "trainer.critic_warmup=2",
        "trainer.total_training_steps=3",
        "trainer.save_freq=2",
    )
    assert [row["training/updates"] for row in rows] == [0, 0, 2]
    assert ["timing_s/old_log_prob" in row for row in rows] == [False, False, True]
    assert ["actor/grad_norm" in row for row in rows] == [False, False, True]
    assert rows[0]["critic/lr"] == 1e-2 and all(row["timing_s/values"] > 0 for row in rows)
    # Values begin at 0 everywhere and then come near what was paid.
    assert rows[0]["critic/explained_variance"] < rows[2]["critic/explained_variance"]
    assert abs(rows[2]["critic/value_mean"]) > 0
    before, after = AutoModelForCausalLM.from_pretrained(model).state_dict(), weights_of(tmp_path / "run/global_step_2")
    assert all(torch.equal(before[name], tensor) for name, tensor in after.items())
    assert (tmp_path / "run" / "global_step_3" / "critic" / ".metadata").is_file()


def test_a_resumed_run_with_critic_and_adaptive_kl_equals_one_that_never_stopped(train: Run, tmp_path: Path) -> None:
    options = (
        "algorithm.adv_estimator=gae",
        "algorithm.lam=0.9",
        "algorithm.gamma_turn=0.9",
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.kl_coef=0.1",
        "algorithm.kl_ctrl.horizon=100",
        "critic.optim.lr=1e-3",
        "critic.shuffle=True",
        # What is decoded together moves log-probs by a millionth. With this seed no draw lies so near a bound.
        "trainer.seed=5",
        *FILTER,
    )
    whole = train(*options, "trainer.total_training_steps=6", f"trainer.default_local_dir={tmp_path / 'whole'}")
    parts = (*options, f"trainer.default_local_dir={tmp_path / 'parts'}")
    train(*parts, "trainer.total_training_steps=3")
    resumed = train(*parts, "trainer.total_training_steps=6")
    assert [results_of(row) for row in resumed] == [results_of(row) for row in whole]
    coefficients = [row["rollout/kl_coef"] for row in whole]
    assert coefficients[0] == 0.1 and len(set(coefficients)) == 6
    expected, found = weights_of(tmp_path / "whole/global_step_6"), weights_of(tmp_path / "parts/global_step_6")
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())


def test_a_run_without_critic_is_not_resumed_by_one_that_needs_it(train: Run, tmp_path: Path) -> None:
    train()
    with pytest.raises(
        ConfigError, match=r"global_step_1 has no critic/.*model\.path=.*global_step_1/actor/huggingface"
    ):
        train("algorithm.adv_estimator=gae", "trainer.total_training_steps=2")


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        ([], ["lora_rank=8"], r"lora_rank=8: the run that wrote .*global_step_1 had 0"),
        (["lora_rank=4"], [], r"lora_rank=0: .* had 4"),
        (["freeze=[model.embed_tokens.*]"], [], r"freeze=\[\]: .* had \['model.embed_tokens.\*'\]"),
    ],
)
def test_a_run_that_trains_other_weights_is_not_resumed_and_starts_no_workers(
    train: Run, monkeypatch: pytest.MonkeyPatch, before: list[str], now: list[str], message: str
) -> None:
    train(*(f"actor_rollout_ref.model.{override}" for override in before))
    monkeypatch.setattr("verl.trainer.loop.start_workers", None)
    with pytest.raises(ConfigError, match=rf"actor_rollout_ref\.model\.{message}.*global_step_1/actor/huggingface"):
        train(*(f"actor_rollout_ref.model.{override}" for override in now), "trainer.total_training_steps=2")


def test_greedy_rollouts_are_baselines_and_not_samples(train: Run, tmp_path: Path) -> None:
    [row] = train("algorithm.adv_estimator=remax", "actor_rollout_ref.rollout.n=2")
    assert row["rollout/trajectories"] == 8 and row["rollout/groups_without_baseline"] == 0
    logged = read_trajectories(tmp_path / "run" / "trajectories" / "step1").trajectories
    assert Counter(t.sample_index for t in logged) == {0: 4, 1: 4, 2: 4}
    sampled = [t for t in logged if t.sample_index < 2]
    greedy = {t.item: t.score for t in logged if t.sample_index == 2}
    assert row["rollout/greedy_score_mean"] == pytest.approx(sum(greedy.values()) / 4)
    assert row["training/tokens"] == sum(t.num_tokens for t in sampled)
    # Paid at the end only, so that each token of a trajectory has its score minus the greedy one.
    assert row["advantages/max"] == pytest.approx(max(t.score - greedy[t.item] for t in sampled))


def test_groups_without_signal_are_left_out_and_others_sampled_in_their_place(train: Run, tmp_path: Path) -> None:
    [row] = train(*FILTER, "actor_rollout_ref.rollout.n=2", items=16)
    groups = scores_by_group(tmp_path / "run" / "trajectories" / "step1")
    with_signal = [uid for uid, scores in groups.items() if len(set(scores)) > 1]
    assert row["rollout/groups"] == len(groups) == 4 + row["rollout/groups_left_out"] > 4
    assert row["rollout/gen_batches"] > 1 and len(with_signal) >= 4
    assert row["training/updates"] == 2 and row["rollout/trajectories"] == 2 * len(groups)


def test_sampling_in_place_of_groups_without_signal_is_bounded_and_reported(
    train: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    [row] = train(*FILTER, is_indifferent=True)
    assert row["rollout/gen_batches"] == 3 and row["rollout/groups_left_out"] == row["rollout/groups"] == 12
    assert row["training/updates"] == 0 and row["training/tokens"] == 0
    reported = "step 1: no group has different results after 3 rounds of sampling: no update is made"
    assert reported in capsys.readouterr().out


def test_a_step_that_lacks_groups_is_trained_on_those_there_are(train: Run, tmp_path: Path) -> None:
    [row] = train(*FILTER, "algorithm.filter_groups.max_num_gen_batches=1", "actor_rollout_ref.rollout.n=2", items=16)
    groups = scores_by_group(tmp_path / "run" / "trajectories" / "step1")
    kept = sum(len(set(scores)) > 1 for scores in groups.values())
    assert 0 < kept < 4 and row["rollout/groups_left_out"] == 4 - kept
    assert row["training/updates"] == -(-kept // 2)


def test_importance_weights_between_engine_and_trainer_change_nothing_where_both_agree(
    train: Run, tmp_path: Path
) -> None:
    [plain] = train(f"trainer.default_local_dir={tmp_path / 'plain'}")
    [weighted] = train("algorithm.rollout_is=True", f"trainer.default_local_dir={tmp_path / 'weighted'}")
    assert weighted["rollout_is/weight_mean"] == pytest.approx(1, abs=1e-4)
    assert weighted["rollout_is/truncated_fraction"] == 0
    assert weighted["actor/pg_loss"] == pytest.approx(plain["actor/pg_loss"], abs=1e-5)


def test_step_rewards_stand_on_the_last_sampled_tokens_of_their_turns_and_sum_to_the_score(
    train: Run, tmp_path: Path
) -> None:
    train("algorithm.adv_estimator=gigpo", "algorithm.gamma_turn=0.9")
    for trajectory in read_trajectories(tmp_path / "run" / "trajectories" / "step1").trajectories:
        assert trajectory.token_rewards.sum() == pytest.approx(trajectory.score)
        assert all(trajectory.loss_mask[trajectory.token_rewards.nonzero()] == 1)


def scores_by_group(folder: Path) -> dict[str, list[float]]:
    """Scores of a step's trajectories by group."""
    groups: dict[str, list[float]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            groups.setdefault(row["uid"], []).append(row["reward"])
    return groups
