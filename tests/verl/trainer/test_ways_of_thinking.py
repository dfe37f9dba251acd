"""Planning and reflecting agents on TextCraft: they train, are evaluated, and their files tell who wrote what."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.servers import serve
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentgym_rl.agent.chat import ChatTemplate
from agentgym_rl.envs.registry import get_spec
from agentgym_rl.envs.server import build_app
from agentgym_rl.evaluation.report import Report
from agentgym_rl.rollout.log import read_trajectories
from agentgym_rl.types import Item, PartKind, Role, Trajectory
from verl.agent_trainer.loading import load_config, parse_command_line
from verl.config import GenerationConfig, PPOConfig
from verl.trainer.generation import run_generation
from verl.trainer.ppo import run_ppo
from verl.trainer.replay import read_step
from verl.utils.tracking import read_metrics

pytestmark = pytest.mark.server

OPENING = 3
TRIALS = 2
LIMITS = ("data.max_prompt_length=3000", "data.max_response_length=1500", "trainer.device=cpu")
WAYS = {
    "plan": ("agent=plan",),
    "reflect": ("agent=reflect", f"max_trials={TRIALS}"),
    "plan in code": ("agent=plan", "action_format=code_as_action"),
}


@pytest.fixture(scope="module")
def textcraft() -> Iterator[str]:
    with serve(build_app(get_spec("textcraft"))) as url:
        yield url


def load(root: type, name: str, *overrides: str) -> Any:
    command_line = parse_command_line(
        ["trainer.worker_group=local", *LIMITS, *overrides], program="t", config_name=name
    )
    return load_config(root, command_line)


def train(model: Path, url: str, folder: Path, way: tuple[str, ...]) -> None:
    config = load(
        PPOConfig,
        "ppo_trainer",
        "data.train_file=unused",
        "data.train_batch_size=2",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.agentgym.task_name=textcraft",
        f"actor_rollout_ref.agentgym.env_addr={url}",
        *(f"actor_rollout_ref.agentgym.{override}" for override in way),
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        # A random model crafts nothing, so entropy is what it is trained on.
        "actor_rollout_ref.actor.entropy_coeff=0.1",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.rollout.max_tokens=12",
        "algorithm.rounds_ctrl.rounds=2",
        "trainer.logger=[jsonl]",
        "trainer.total_training_steps=2",
        f"trainer.default_local_dir={folder}",
    )
    run_ppo(config, train_items=[Item("textcraft", index) for index in range(4)], val_items=[])


def evaluate(model: Path, url: str, folder: Path, way: tuple[str, ...]) -> Report:
    config = load(
        GenerationConfig,
        "generation",
        "data.path=unused",
        f"model.path={model}",
        "agentgym.task_name=textcraft",
        f"agentgym.env_addr={url}",
        *(f"agentgym.{override}" for override in way),
        "agentgym.max_rounds=2",
        "rollout.max_tokens=12",
        f"rollout.rollout_log_dir={folder}",
    )
    return run_generation(config, [Item("textcraft", index) for index in range(3)])


@pytest.fixture(scope="module", params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def trained(way: str, model: Path, textcraft: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training run of two steps."""
    folder = tmp_path_factory.mktemp("trained")
    train(model, textcraft, folder, WAYS[way])
    return folder


def written_messages(trajectory: Trajectory) -> list[int]:
    return [i for i, m in enumerate(trajectory.messages) if i >= OPENING and m.role == Role.ASSISTANT]


def kinds_of(trajectory: Trajectory, index: int) -> set[str]:
    return {str(part.kind) for part in trajectory.parts[index]}


def assert_tells_who_wrote_what(trajectory: Trajectory, chat: ChatTemplate) -> None:
    """Masks cover exactly what the model wrote, and every message's stretches are named."""
    mask = trajectory.loss_mask == 1
    assert sorted(set(trajectory.sequence_ids[mask].tolist())) == written_messages(trajectory)
    for index in written_messages(trajectory):
        sampled = trajectory.input_ids[mask & (trajectory.sequence_ids == index)]
        assert chat.decode(sampled) == trajectory.messages[index].content
    assert len(trajectory.parts) == len(trajectory.messages)
    asides = {aside.message: aside.kind for aside in trajectory.asides}
    assert len(written_messages(trajectory)) == len(trajectory.turns) + len(asides)
    for index, message in enumerate(trajectory.messages):
        kinds = kinds_of(trajectory, index)
        if index in written_messages(trajectory):
            assert kinds <= ({str(asides[index])} if index in asides else {"plan", "thought", "action"})
            assert kinds or not message.content.strip()
        else:
            assert kinds and kinds <= {"instruction", "acknowledgement", "observation", "plan", "reflection"}


def test_two_steps_are_trained_and_the_files_tell_plan_thought_action_reflection_and_observation_apart(
    way: str, trained: Path, model: Path
) -> None:
    chat = ChatTemplate(AutoTokenizer.from_pretrained(model), warns=False)
    trajectories = read_trajectories(trained / "trajectories").trajectories
    for trajectory in trajectories:
        assert not trajectory.masked
        assert_tells_who_wrote_what(trajectory, chat)
        if way.startswith("plan"):
            assert [(aside.kind, aside.message) for aside in trajectory.asides] == [(PartKind.PLAN, OPENING)]
            planned = "plan" in kinds_of(trajectory, OPENING)
            shown = [kinds_of(trajectory, index) for index in range(6, len(trajectory.messages), 2)]
            assert [("plan" in kinds) for kinds in shown] == [planned] * len(shown)
        else:
            assert (trajectory.reflection is None) == trajectory.is_last_trial
            assert trajectory.trial > 1 or "reflection" not in kinds_of(trajectory, 2)
    samples = 2 * 2 * 2
    assert len(trajectories) == samples * (TRIALS if way == "reflect" else 1)
    rows = read_metrics(trained / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2] and all(row["actor/grad_norm"] > 0 for row in rows)
    before, after = (
        AutoModelForCausalLM.from_pretrained(path).state_dict()
        for path in (model, trained / "global_step_2" / "actor" / "huggingface")
    )
    assert any(not torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_every_token_that_the_model_wrote_is_trained_on_once(way: str, trained: Path) -> None:
    rollouts = read_step(trained / "trajectories", 1)
    batch = rollouts.batch()
    assert batch.num_sampled_tokens == sum(t.num_sampled_tokens for t in rollouts.trajectories)
    reflections = [row for row in rollouts.rows if "/reflection" in row.group]
    assert len(reflections) == (4 if way == "reflect" else 0)
    assert len(batch) == len(rollouts.trajectories) + len(reflections)


def test_they_are_evaluated_and_each_sample_counts_once(way: str, model: Path, textcraft: str, tmp_path: Path) -> None:
    report = evaluate(model, textcraft, tmp_path, WAYS[way])
    assert (report.overall.num_items, report.num_trajectories, report.num_faults) == (3, 3, 0)
    chat = ChatTemplate(AutoTokenizer.from_pretrained(model), warns=False)
    trajectories = read_trajectories(tmp_path / "trajectories").trajectories
    assert len(trajectories) == 3 * (TRIALS if way == "reflect" else 1)
    for trajectory in trajectories:
        assert_tells_who_wrote_what(trajectory, chat)
    # What is there is not done again.
    assert evaluate(model, textcraft, tmp_path, WAYS[way]).num_trajectories == 3
    assert len(read_trajectories(tmp_path / "trajectories").trajectories) == len(trajectories)
