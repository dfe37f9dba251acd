"""Each half of a training step alone: trajectories without updates, and updates on trajectories that are there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.environments import Script
from support.parity import TASK, parity_spec
from support.servers import serve
from transformers import AutoModelForCausalLM

from agentgym_rl.envs.registry import register
from agentgym_rl.envs.server import build_app
from agentgym_rl.errors import ConfigError
from agentgym_rl.rollout.log import read_trajectories
from agentgym_rl.types import Item, Trajectory
from verl.agent_trainer.loading import load_config, parse_command_line
from verl.config import PPOConfig
from verl.trainer.ppo import run_ppo
from verl.utils.tracking import read_metrics

pytestmark = pytest.mark.server

NO_SERVER = "http://127.0.0.1:9"
STEPS = "trainer.total_training_steps=2"
EVERYTHING = (
    "algorithm.adv_estimator=gae",
    "algorithm.kl_ctrl.kl_coef=0.01",
    "actor_rollout_ref.actor.ppo_epochs=2",
    "actor_rollout_ref.actor.shuffle=True",
    "actor_rollout_ref.agentgym.agent=reflect",
    "actor_rollout_ref.agentgym.max_trials=2",
    "algorithm.rounds_ctrl.type=scaling_inter_adaptive",
    "algorithm.rounds_ctrl.rounds=[2,3]",
    "algorithm.rounds_ctrl.window=1",
)
FILTERED = ("algorithm.filter_groups.enable=True", "algorithm.filter_groups.max_num_gen_batches=2")
Run = Callable[..., Path]


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Runs the trainer into a folder of the given name; its server is up unless it replays."""
    folder, spec = tmp_path_factory.mktemp("runs"), parity_spec(Script(turns=2))
    register(spec)

    def start(name: str, *overrides: str) -> Path:
        config = _config(model, folder / name, overrides)
        items = [Item(TASK, index) for index in range(8)]
        if config.trainer.replay:
            run_ppo(config, train_items=items, val_items=[])
            return folder / name
        with serve(build_app(spec)) as url:
            config.actor_rollout_ref.agentgym.env_addr = url
            run_ppo(config, train_items=items, val_items=[])
        return folder / name

    yield start


def _config(model: Path, folder: Path, overrides: tuple[str, ...]) -> PPOConfig:
    argv = [
        "data.train_file=unused",
        "data.train_batch_size=4",
        "data.max_response_length=400",
        f"actor_rollout_ref.model.path={model}",
        f"actor_rollout_ref.agentgym.task_name={TASK}",
        f"actor_rollout_ref.agentgym.env_addr={NO_SERVER}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.rollout.max_tokens=8",
        "algorithm.rounds_ctrl.rounds=3",
        "trainer.logger=[jsonl]",
        "trainer.device=cpu",
        "trainer.worker_group=local",
        "trainer.resume_mode=disable",
        f"trainer.default_local_dir={folder}",
        *overrides,
    ]
    return load_config(PPOConfig, parse_command_line(argv, program="test", config_name="ppo_trainer"))


@pytest.fixture(scope="module")
def original(run: Run) -> Path:
    """A training run of two steps."""
    return run("original", STEPS)


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    return read_metrics(folder / "metrics.jsonl")


def learning_of(row: dict[str, Any]) -> dict[str, Any]:
    """What a step learned from and how, in numbers that measure neither time nor the engine."""
    kept = (
        "actor/",
        "critic/",
        "advantages/",
        "rollout/score",
        "rollout/success",
        "rollout/kl",
        "rounds/",
        "training/",
    )
    return {name: value for name, value in row.items() if name.startswith(kept)}


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder / "global_step_2" / "actor" / "huggingface").state_dict()


def by_key(folder: Path) -> dict[tuple[str, int, int], Trajectory]:
    return {(t.uid, t.sample_index, t.trial): t for t in read_trajectories(folder).trajectories}


def assert_same(one: Path, other: Path) -> None:
    """Both learned the same, to the last digit."""
    assert list(map(learning_of, metrics_of(one))) == list(map(learning_of, metrics_of(other)))
    weights = weights_of(other)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in weights_of(one).items())


def test_a_replayed_step_equals_the_original_to_the_last_digit(run: Run, original: Path) -> None:
    replayed = run("replayed", STEPS, f"trainer.replay={original}")
    assert_same(original, replayed)
    assert metrics_of(original)[1]["actor/grad_norm"] > 0
    assert not (replayed / "trajectories").exists()


@pytest.mark.parametrize(("name", "overrides"), [("everything", EVERYTHING), ("filtered", FILTERED)])
def test_so_it_does_with_critic_reference_trials_schedules_and_groups_left_out(
    run: Run, name: str, overrides: tuple[str, ...]
) -> None:
    original = run(name, STEPS, *overrides)
    assert_same(original, run(f"{name} again", STEPS, *overrides, f"trainer.replay={original / 'trajectories'}"))
    if name == "everything":
        assert any(t.trial == 2 for t in read_trajectories(original / "trajectories").trajectories)
        assert metrics_of(original)[0]["rollout/trials_mean"] > 1


def test_rollouts_alone_are_those_of_a_training_run_by_the_model_it_starts_from(run: Run, original: Path) -> None:
    collected = run("collected", STEPS, "trainer.rollout_only=True")
    assert not list(collected.glob("global_step_*"))
    first, expected = by_key(collected / "trajectories/step1"), by_key(original / "trajectories/step1")
    assert first.keys() == expected.keys() and len(first) == 16
    for key, trajectory in first.items():
        for column in ("input_ids", "loss_mask", "token_rewards"):
            assert np.array_equal(getattr(trajectory, column), getattr(expected[key], column))
        # The last digits of the engine's own log-probs depend on who happens to be decoded together.
        np.testing.assert_allclose(trajectory.rollout_log_probs, expected[key].rollout_log_probs, atol=1e-5)
    second = read_trajectories(collected / "trajectories/step2").trajectories
    assert {t.policy_version for t in second} == {0} and len(second) == 16
    assert [row["step"] for row in metrics_of(collected)] == [1, 2]
    # They can be trained on, and the first step then is the training run's.
    trained = run("trained", STEPS, f"trainer.replay={collected}")
    before, after = learning_of(metrics_of(original)[0]), learning_of(metrics_of(trained)[0])
    engine = {name for name in before if name.startswith("training/rollout_probs_diff")}
    assert {name: before[name] for name in before.keys() - engine} == {
        name: after[name] for name in after.keys() - engine
    }


def test_rollouts_alone_never_replace_those_of_a_run_that_trained(run: Run, original: Path) -> None:
    with pytest.raises(ConfigError, match="holds checkpoints of a training run"):
        run("original", STEPS, "trainer.rollout_only=True")
    assert (original / "trajectories/step1/step.json").exists()


def copy_of(original: Path, folder: Path) -> Path:
    shutil.copytree(original / "trajectories", folder / "trajectories")
    return folder / "trajectories"


def _remove_a_step(folder: Path) -> None:
    shutil.rmtree(folder / "step2")


def _leave_a_step_unfinished(folder: Path) -> None:
    (folder / "step2/step.json").unlink()


def _tear_a_row(folder: Path) -> None:
    path = folder / "step2/0.jsonl"
    path.write_bytes(path.read_bytes()[:-40])


def _remove_a_row(folder: Path) -> None:
    path = folder / "step2/0.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))


def _write_a_row_twice(folder: Path) -> None:
    path = folder / "step1/0.jsonl"
    rows = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*rows[1:], rows[1]]))


def _spoil_the_record(folder: Path) -> None:
    (folder / "step1/step.json").write_text("{")


def _spoil_a_row(folder: Path) -> None:
    path = folder / "step1/0.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    del rows[2]["loss_mask"][0]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _copy_a_step(folder: Path) -> None:
    shutil.copyfile(folder / "step1/step.json", folder / "step2/step.json")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_remove_a_step, r"holds steps 1-1 whole, and the run has 2; trainer.total_training_steps=1 trains on those"),
        (_leave_a_step_unfinished, r"holds steps 1-1 whole, and the run has 2"),
        (_tear_a_row, r"step2/0.jsonl: its last row is torn"),
        (_remove_a_row, r"step2 has 15 rows in 1 files, its step.json names 16: a file is missing, or was changed"),
        (_write_a_row_twice, r"step1 lacks 1 trajectories, among them step1/parity_\d sample \d trial 1"),
        (_spoil_the_record, r"step1/step.json is no record of a step"),
        (_copy_a_step, r"step2/step.json has step 1, must be 2"),
        (_spoil_a_row, r"step1/0.jsonl line 3: input_ids, loss_mask, .* differ in length"),
    ],
)
def test_what_is_missing_or_torn_is_named(
    run: Run, original: Path, tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    folder = copy_of(original, tmp_path)
    damage(folder)
    with pytest.raises(ConfigError, match=message):
        run("damaged", STEPS, f"trainer.replay={folder}")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.train_batch_size=2"], r"data.train_batch_size=2: step 1 in .* has 4 items"),
        (["trainer.replay=/nowhere"], r"trainer.replay='/nowhere': no folders step<N> in it"),
        (["algorithm.adv_estimator=remax"], r"algorithm.adv_estimator=remax: step 1 in .* has no greedy rollouts"),
        (["trainer.rollout_only=True"], "one of the two"),
        (["trainer.test_freq=1"], "trainer.test_freq=1 with trainer.replay=.*: must be off, since there is no engine"),
    ],
)
def test_a_replay_that_does_not_fit_is_refused(run: Run, original: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run("refused", STEPS, f"trainer.replay={original}", *overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.val_before_train=True"], "must be off, since no policy changes"),
        (
            ["trainer.resume_mode=resume_path", "trainer.resume_from_path=saves/global_step_1"],
            "give the checkpoint's actor/huggingface folder",
        ),
    ],
)
def test_rollouts_alone_neither_validate_nor_resume(run: Run, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run("refused", "trainer.rollout_only=True", *overrides)


def test_tokens_of_another_tokenizer_are_refused(run: Run, original: Path, model: Path, tmp_path: Path) -> None:
    other = shutil.copytree(model, tmp_path / "model")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = dict(zip(vocabulary, reversed(vocabulary.values()), strict=True))
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match=r"step1: message 3 of parity_\d is .*, and reads .* by the tokenizer of"):
        run("misread", STEPS, f"trainer.replay={original}", f"actor_rollout_ref.model.path={other}")
