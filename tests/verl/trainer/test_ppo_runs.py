"""Whole training runs in this process: a tiny model, a real server, one worker."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.environments import Script
from support.parity import TASK, parity_spec
from support.servers import serve
from transformers import AutoModelForCausalLM

from agentgym_rl.envs.registry import register
from agentgym_rl.envs.server import build_app
from agentgym_rl.errors import ConfigError, TooManyFailures
from agentgym_rl.rollout.log import read_trajectories
from agentgym_rl.types import Item
from verl.agent_trainer.loading import load_config, parse_command_line
from verl.config import PPOConfig
from verl.single_controller.signals import Terminated
from verl.trainer.ppo import PPOTrainer, run_ppo
from verl.utils.checkpoint import CheckpointError
from verl.utils.tracking import read_metrics
from verl.workers.rollout import worker as rollout_worker

pytestmark = pytest.mark.server

Run = Callable[..., Path]


@pytest.fixture
def train(model: Path, tmp_path: Path) -> Iterator[Run]:
    """Runs the trainer on a scripted environment; returns the run's folder."""

    def run(*overrides: str, items: int = 8, script: Script | None = None, is_indifferent: bool = False) -> Path:
        spec = parity_spec(script or Script(turns=2), is_indifferent=is_indifferent)
        register(spec)
        with serve(build_app(spec)) as url:
            config = _config(model, url, tmp_path, overrides)
            rows = [Item(TASK, index) for index in range(items)]
            run_ppo(config, train_items=rows, val_items=[Item(TASK, index) for index in range(100, 103)])
        return Path(config.trainer.default_local_dir)

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
        f"trainer.default_local_dir={folder / 'run'}",
        *overrides,
    ]
    return load_config(PPOConfig, parse_command_line(argv, program="test", config_name="ppo_trainer"))


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    return read_metrics(folder / "metrics.jsonl")


def checkpoints_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("global_step_*"))


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder / "actor" / "huggingface").state_dict()


def results_of(row: dict[str, Any]) -> dict[str, Any]:
    """A step's numbers without those that measure time and memory, or the rounding of the engine's own log-probs, which
    depends on who happens to be decoded together."""
    measured = ("timing_s/", "perf/", "training/rollout_probs_diff", "rollout/engine_", "rollout/sessions_peak")
    return {key: value for key, value in row.items() if not key.startswith(measured) and "_s_" not in key}


def test_a_horizon_that_follows_the_trajectories_goes_on_where_a_stopped_run_left_it(
    train: Run, tmp_path: Path
) -> None:
    rounds = (
        "algorithm.rounds_ctrl.type=scaling_inter_adaptive",
        "algorithm.rounds_ctrl.rounds=[1,2,3]",
        "algorithm.rounds_ctrl.window=2",
        "algorithm.rounds_ctrl.max_cut_share=0.99",
        "algorithm.rounds_ctrl.min_rise=1",
    )
    whole = train(*rounds, "trainer.total_training_steps=7", f"trainer.default_local_dir={tmp_path / 'whole'}")
    # Horizon 1 cuts every trajectory for two steps, horizon 2 none; then success never rises by 1 within four steps.
    assert [row["rounds/max_rounds"] for row in metrics_of(whole)] == [1, 1, 2, 2, 2, 2, 3]
    train(*rounds, "trainer.total_training_steps=4")
    resumed = train(*rounds, "trainer.total_training_steps=7")
    assert [results_of(row) for row in metrics_of(resumed)] == [results_of(row) for row in metrics_of(whole)]


def test_checkpoints_are_written_every_so_often_and_at_the_last_step(train: Run) -> None:
    folder = train("trainer.total_training_steps=7", "trainer.save_freq=5")
    assert checkpoints_of(folder) == ["global_step_5", "global_step_7"]
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == "7"
    assert [row["step"] for row in metrics_of(folder)] == list(range(1, 8))


def test_only_the_newest_checkpoints_are_kept(train: Run) -> None:
    folder = train("trainer.total_training_steps=4", "trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=2")
    assert checkpoints_of(folder) == ["global_step_3", "global_step_4"]


def test_a_checkpoint_that_cannot_be_written_ends_the_run_with_the_cause_and_leaves_the_one_before(
    train: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to_disk = os.fsync

    def fill_up_at_step_2(descriptor: int) -> None:
        if "global_step_2" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        to_disk(descriptor)

    monkeypatch.setattr(os, "fsync", fill_up_at_step_2)
    with pytest.raises(CheckpointError, match=r"step 2 .*No space left on device; the last .*run/global_step_1$"):
        train("trainer.total_training_steps=9", "trainer.save_freq=1")
    assert checkpoints_of(tmp_path / "run") == ["global_step_1"]
    assert [row["step"] for row in metrics_of(tmp_path / "run")][:2] == [1, 2]


@pytest.mark.parametrize("is_async", [True, False])
def test_a_checkpoint_says_how_long_it_kept_training_and_how_long_it_took_to_write(train: Run, is_async: bool) -> None:
    folder = train("trainer.total_training_steps=2", "trainer.save_freq=1", f"trainer.async_save={is_async}")
    first, second = metrics_of(folder)
    assert first["timing_s/save"] > 0 and (second if is_async else first)["checkpoint/write_s"] > 0
    if not is_async:
        assert first["timing_s/save"] > first["checkpoint/write_s"]


def test_a_resumed_run_equals_one_that_never_stopped_to_the_last_digit(train: Run, tmp_path: Path) -> None:
    rounds = (
        "algorithm.rounds_ctrl.type=scaling_inter_stepwise",
        "algorithm.rounds_ctrl.rounds=[1,2,3]",
        "algorithm.rounds_ctrl.steps_scaling_inter=2",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.actor.shuffle=True",
    )
    whole = train(*rounds, "trainer.total_training_steps=6", f"trainer.default_local_dir={tmp_path / 'whole'}")
    parts = f"trainer.default_local_dir={tmp_path / 'parts'}"
    train(*rounds, "trainer.total_training_steps=3", parts)
    resumed = train(*rounds, "trainer.total_training_steps=6", parts)

    assert [results_of(row) for row in metrics_of(resumed)] == [results_of(row) for row in metrics_of(whole)]
    assert [row["rounds/max_rounds"] for row in metrics_of(resumed)] == [1, 1, 2, 2, 3, 3]
    expected, found = weights_of(whole / "global_step_6"), weights_of(resumed / "global_step_6")
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert any(row["actor/grad_norm"] > 0 for row in metrics_of(whole))


@pytest.mark.parametrize(
    ("phase", "step", "saved"),
    [
        ("_rollout", 2, 1),
        ("_add_advantages", 2, 2),
        ("_update_actor", 2, 2),
        ("validate", 2, 2),
        ("save", 1, 1),
        ("_rollout", 3, 2),
        ("_update_actor", 3, 3),
        ("validate", 3, 3),
    ],
)
def test_sigterm_in_any_phase_of_a_step_saves_the_last_finished_one(
    train: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str, step: int, saved: int
) -> None:
    original = getattr(PPOTrainer, phase)
    in_step = iter(range(1, 9))

    def asked_to_end(trainer: PPOTrainer, *arguments: Any) -> Any:
        if next(in_step) == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(trainer, *arguments)

    monkeypatch.setattr(PPOTrainer, phase, asked_to_end)
    monkeypatch.setattr(rollout_worker, "_INTERRUPT_INTERVAL_S", 1e-3)  # else a short rollout is over before it looks
    save_freq = 1 if phase == "save" else 9
    with pytest.raises(Terminated, match=f"terminated after step {saved}; .*global_step_{saved}$"):
        train("trainer.total_training_steps=3", "trainer.test_freq=1", f"trainer.save_freq={save_freq}")
    assert checkpoints_of(tmp_path / "run") == [f"global_step_{saved}"]


def test_resume_at_an_epochs_end_goes_on_with_the_next_epoch(train: Run) -> None:
    folder = train("trainer.total_training_steps=4", items=16)
    assert json.loads((folder / "global_step_4" / "trainer.json").read_text())["epoch"] == 0
    train("trainer.total_epochs=2", items=16)
    assert [row["step"] for row in metrics_of(folder)] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [row["training/epoch"] for row in metrics_of(folder)] == [0] * 4 + [1] * 4


def test_a_resumed_run_says_which_changes_give_it_other_items(train: Run, capsys: pytest.CaptureFixture[str]) -> None:
    train("trainer.total_training_steps=1", "data.seed=3")
    train("trainer.total_training_steps=2", "data.seed=4")
    assert "warning: data.seed was 3 until then and is 4 now: other items follow" in capsys.readouterr().out


def test_a_run_that_is_complete_is_not_run_again(train: Run, capsys: pytest.CaptureFixture[str]) -> None:
    train("trainer.total_training_steps=1")
    capsys.readouterr()
    train("trainer.total_training_steps=1")
    assert "nothing to do" in capsys.readouterr().out


def test_rows_of_steps_that_are_run_again_are_replaced(train: Run) -> None:
    folder = train("trainer.total_training_steps=3", "trainer.save_freq=2")
    resume = f"trainer.resume_from_path={folder / 'global_step_2'}"
    train("trainer.total_training_steps=3", "trainer.resume_mode=resume_path", resume)
    assert [row["step"] for row in metrics_of(folder)] == [1, 2, 3]


def test_resuming_from_a_path_that_does_not_exist_is_an_error(train: Run, tmp_path: Path) -> None:
    path = tmp_path / "global_step_9"
    with pytest.raises(ConfigError, match=r"global_step_9.*no such checkpoint"):
        train("trainer.resume_mode=resume_path", f"trainer.resume_from_path={path}")


def test_a_trajectory_whose_environment_crashes_is_masked_counted_told_and_never_scored_zero(
    train: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = train(
        "trainer.total_training_steps=1",
        "data.train_batch_size=8",
        "data.shuffle=False",
        "algorithm.adv_estimator=reinforce_plus_plus",
        "actor_rollout_ref.rollout.n=1",
        *("trainer.test_freq=1", "data.val_file=unused"),
        script=Script(turns=3, fails_at={5: 2, 101: 1}),
    )
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert [line.split(f": EnvServerError: {TASK} item")[0] for line in told] == [
        "warning: step 1: 1 of 8 trajectories masked, the first",
        "warning: validation at step 1: 1 of 3 trajectories masked, the first",
    ]
    assert "scripted fault of item 5 at step 2" in told[0] and "scripted fault of item 101" in told[1]
    [row] = metrics_of(folder)
    trajectories = read_trajectories(folder / "trajectories" / "step1").trajectories
    faults = [t for t in trajectories if t.masked]
    scores = [t.score for t in trajectories if not t.masked]
    assert [t.item.index for t in faults] == [5] and len(scores) == 7
    assert row["rollout/masked"] == 1 and row["rollout/errors/EnvServerError"] == 1
    assert row["rollout/score_mean"] == pytest.approx(sum(scores) / 7)
    assert row["training/tokens"] == sum(t.num_tokens for t in trajectories if not t.masked)
    assert row["rollout/stop/env_error"] == 1 / 8
    lines = (folder / "trajectories" / "step1" / "0.jsonl").read_text().splitlines()
    assert [json.loads(line)["reward"] for line in lines if json.loads(line)["item_id"] == f"{TASK}_5"] == [None]


def test_too_many_faults_end_the_run_with_the_first_cause(train: Run) -> None:
    with pytest.raises(TooManyFailures, match=r"EnvServerError: .*parity_\d+.* http"):
        train("trainer.total_training_steps=1", script=Script(fails_at=dict.fromkeys(range(8), 1)))


@pytest.mark.parametrize(("phase", "step"), [("_rollout", 3), ("validate", 2)])
def test_environments_that_fail_late_in_a_run_cost_no_finished_step(
    train: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str, step: int
) -> None:
    """By default nothing else is saved before the last step."""
    script, original, in_step = Script(turns=2, fails_at={}), getattr(PPOTrainer, phase), iter(range(1, 9))

    def with_dead_environments(trainer: PPOTrainer, *arguments: Any) -> Any:
        if next(in_step) == step:
            script.fails_at.update(dict.fromkeys(range(200), 1))
        return original(trainer, *arguments)

    options = ("trainer.total_training_steps=4", "trainer.test_freq=1")
    with monkeypatch.context() as patched, pytest.raises(TooManyFailures, match=r"EnvServerError: .*parity_\d+"):
        patched.setattr(PPOTrainer, phase, with_dead_environments)
        train(*options, script=script)
    assert checkpoints_of(tmp_path / "run") == ["global_step_2"]
    assert [row["step"] for row in metrics_of(train(*options))] == [1, 2, 3, 4]


def test_a_batch_without_signal_is_reported_and_not_trained_on(
    train: Run, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = train("trainer.total_training_steps=1", is_indifferent=True)
    [row] = metrics_of(folder)
    assert "step 1: every group has equal scores, all advantages are 0: no update is made" in capsys.readouterr().out
    assert row["rollout/groups_without_signal"] == row["rollout/groups"] == 4
    assert row["training/updates"] == 0
    before = AutoModelForCausalLM.from_pretrained(model).state_dict()
    assert all(torch.equal(before[name], tensor) for name, tensor in weights_of(folder / "global_step_1").items())


def test_validation_runs_before_training_every_so_often_and_at_the_end(train: Run) -> None:
    folder = train(
        "trainer.total_training_steps=3",
        "data.val_file=unused",
        "trainer.test_freq=2",
        "trainer.val_before_train=True",
        "actor_rollout_ref.rollout.val_kwargs.n=2",
        "actor_rollout_ref.rollout.val_kwargs.temperature=0",
    )
    rows = metrics_of(folder)
    assert [row["step"] for row in rows if "val/score_mean" in row] == [0, 2, 3]
    assert {row["val/trajectories"] for row in rows if "val/trajectories" in row} == {6}
    logged = sorted(path.name for path in (folder / "trajectories").iterdir())
    assert logged == ["step1", "step2", "step3", "val_step0", "val_step2", "val_step3"]


def test_validation_has_the_longest_horizon_of_the_schedule_or_one_of_its_own(train: Run, tmp_path: Path) -> None:
    schedule = ("algorithm.rounds_ctrl.type=scaling_inter_stepwise", "algorithm.rounds_ctrl.rounds=[1,2]")
    validated = ("trainer.total_training_steps=1", "data.val_file=unused", "trainer.test_freq=1", *schedule)
    longest = train(*validated, f"trainer.default_local_dir={tmp_path / 'longest'}")
    own = train(*validated, "algorithm.rounds_ctrl.val_rounds=3", f"trainer.default_local_dir={tmp_path / 'own'}")
    assert [horizons_of(longest, name) for name in ("step1", "val_step1")] == [{1}, {2}]
    assert [horizons_of(own, name) for name in ("step1", "val_step1")] == [{1}, {3}]


def horizons_of(folder: Path, name: str) -> set[int]:
    lines = (folder / "trajectories" / name / "0.jsonl").read_text().splitlines()
    return {json.loads(line)["max_rounds"] for line in lines}


@pytest.mark.parametrize(
    ("overrides", "updates", "has_old_log_probs"),
    [
        (("actor_rollout_ref.actor.ppo_mini_batch_size=4",), 1, False),
        (("actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.actor.ppo_epochs=3"), 3, True),
        (("actor_rollout_ref.actor.ppo_mini_batch_size=1",), 4, True),
        (("actor_rollout_ref.actor.ppo_mini_batch_size=4", "algorithm.kl_ctrl.kl_coef=0.1"), 1, True),
    ],
)
def test_old_log_probs_are_computed_only_where_they_differ_from_the_updates_own(
    train: Run, overrides: tuple[str, ...], updates: int, has_old_log_probs: bool
) -> None:
    [row] = metrics_of(train("trainer.total_training_steps=1", *overrides))
    assert row["training/updates"] == updates
    assert ("timing_s/old_log_prob" in row) == has_old_log_probs
    assert ("timing_s/ref" in row) == ("rollout/kl_mean" in row) == ("algorithm.kl_ctrl.kl_coef=0.1" in overrides)
    assert row["training/rollout_probs_diff_max"] < 1e-4


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_the_kl_over_the_whole_vocabulary_is_taken_from_the_reward_or_put_in_the_loss(
    train: Run, tmp_path: Path, lora_rank: int
) -> None:
    options = ("trainer.total_training_steps=2", f"actor_rollout_ref.model.lora_rank={lora_rank}")
    in_reward = ("algorithm.kl_ctrl.kl_coef=0.1", "algorithm.kl_penalty=full")
    rows = metrics_of(train(*options, *in_reward, f"trainer.default_local_dir={tmp_path / 'reward'}"))
    assert rows[0]["rollout/kl_mean"] == pytest.approx(0, abs=1e-6) and rows[1]["rollout/kl_mean"] > 1e-6
    assert all("timing_s/ref" in row for row in rows)
    in_loss = ("actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.kl_loss_type=full")
    rows = metrics_of(train(*options, *in_loss, f"trainer.default_local_dir={tmp_path / 'loss'}"))
    assert rows[1]["actor/kl_loss"] > 1e-6
    assert not any("timing_s/ref" in row or "rollout/kl_mean" in row for row in rows)


def test_kl_that_is_in_the_loss_is_not_also_taken_from_the_reward(train: Run) -> None:
    in_loss = ("actor_rollout_ref.actor.use_kl_loss=True", "algorithm.kl_ctrl.kl_coef=0.1")
    [row] = metrics_of(train("trainer.total_training_steps=1", *in_loss))
    assert "rollout/kl_mean" not in row and "timing_s/ref" in row


def test_a_step_reports_what_it_did(train: Run) -> None:
    [row] = metrics_of(train("trainer.total_training_steps=1"))
    shares = [value for key, value in row.items() if key.startswith("rollout/stop/")]
    assert sum(shares) == pytest.approx(1) and len(shares) == 6
    assert row["rollout/trajectories"] == 16 and row["rollout/groups"] == 4
    for key in ("score_mean", "success_mean", "turns_mean", "sampled_tokens_mean"):
        assert row[f"rollout/{key}"] >= 0
    assert row["rollout/attempts"] == 16 and row["rollout/client_retries"] == 0 and row["rollout/turns_max"] == 2
    assert 1 <= row["rollout/sessions_peak"] <= 16
    assert row["rollout/engine_tokens_per_s"] > 0 and 0 < row["rollout/engine_busy_share"] <= 1
    for part in ("generation_s", "env_s", "duration_s", "turn_tokens", "turn_generation_s", "turn_env_s"):
        mean, p95, most = (row[f"rollout/{part}_{kind}"] for kind in ("mean", "p95", "max"))
        assert 0 < mean <= most and p95 <= most
    for key in ("gen", "update", "sync", "save", "step", "old_log_prob"):
        assert row[f"timing_s/{key}"] > 0
    assert row["advantages/min"] < 0 < row["advantages/max"]
    assert row["perf/tokens_per_s"] > 0 and row["perf/max_memory_gib"] > 0
