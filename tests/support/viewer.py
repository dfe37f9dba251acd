"""What tests of the viewer look at: a real small training, and rows of one's own making."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from support.models import tiny_qwen2
from support.tokenizers import make_tokenizer

from agentgym_rl.envs.registry import get_spec
from agentgym_rl.envs.server import build_app
from agentgym_rl.envs.serving import running
from agentgym_rl.rollout.log import to_row
from agentgym_rl.types import FinishReason, Item, Message, Part, PartKind, Role, StopReason, Trajectory, Turn
from verl.agent_trainer.entry import run
from verl.agent_trainer.main_ppo import train
from verl.config import PPOConfig

INSTRUCTION = "Craft what is asked for.\nAnswer with:\nThought: <reason>\nAction: <one action>"


def train_small_run(folder: Path) -> Path:
    """Two steps of `main_ppo` on TextCraft with a random model, in this process; returns the run's folder."""
    tokenizer = make_tokenizer()
    tiny_qwen2(vocab_size=len(tokenizer)).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "train.json").write_text(json.dumps([{"item_id": f"textcraft_{index}"} for index in range(4)]))
    with running(build_app(get_spec("textcraft"))) as url:
        status = run(
            [
                *("algorithm.adv_estimator=grpo", "algorithm.rounds_ctrl.rounds=2"),
                *(
                    f"data.train_file={folder / 'train.json'}",
                    "data.train_batch_size=2",
                    "data.max_response_length=400",
                ),
                *("actor_rollout_ref.agentgym.task_name=textcraft", f"actor_rollout_ref.agentgym.env_addr={url}"),
                *(f"actor_rollout_ref.model.path={folder / 'model'}", "actor_rollout_ref.actor.ppo_mini_batch_size=2"),
                *("actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.entropy_coeff=0.1"),
                *("actor_rollout_ref.rollout.n=2", "actor_rollout_ref.rollout.max_tokens=12"),
                *(
                    "trainer.device=cpu",
                    "trainer.num_threads=1",
                    "trainer.worker_group=local",
                    "trainer.logger=[jsonl]",
                ),
                *("trainer.total_training_steps=2", "trainer.token_values=all"),
                f"trainer.default_local_dir={folder / 'run'}",
            ],
            train,
            PPOConfig,
            program="verl.agent_trainer.main_ppo",
            config_name="ppo_trainer",
        )
    assert not status
    return folder / "run"


def make_trajectory(
    index: int = 0,
    *,
    task: str = "textcraft",
    step: int = 1,
    sample: int = 0,
    turns: Sequence[tuple[str, str, str]] = (("I look.", "inventory", "Inventory: nothing"),),
    score: float = 0.0,
    success: bool = False,
    stop_reason: StopReason = StopReason.MAX_ROUNDS,
    opening: str = "Goal: craft a stick.",
    **fields: Any,
) -> Trajectory:
    """A trajectory with turns ``(thought, action, observation)``; a message has a token for each of its words."""
    messages = [Message(Role.USER, INSTRUCTION), Message(Role.ASSISTANT, "OK."), Message(Role.USER, opening)]
    kinds: list[list[Part]] = [
        [Part(PartKind.INSTRUCTION, 0, len(INSTRUCTION))],
        [Part(PartKind.ACKNOWLEDGEMENT, 0, 3)],
        [Part(PartKind.OBSERVATION, 0, len(opening))],
    ]
    for number, (thought, action, observation) in enumerate(turns):
        start = len("Thought: ")
        acts = start + len(thought) + len("\nAction: ")
        messages.append(Message(Role.ASSISTANT, f"Thought: {thought}\nAction: {action}"))
        kinds.append(
            [Part(PartKind.THOUGHT, start, start + len(thought)), Part(PartKind.ACTION, acts, acts + len(action))]
        )
        if number + 1 < len(turns):
            messages.append(Message(Role.USER, observation))
            kinds.append([Part(PartKind.OBSERVATION, 0, len(observation))])
    lengths = [max(1, len(message.content.split())) for message in messages]
    sequence_ids = np.repeat(np.arange(len(messages)), lengths)
    mask = np.array([int(i > 2 and messages[i].role == Role.ASSISTANT) for i in sequence_ids], np.int8)
    rewards = np.zeros(len(mask), np.float32)
    if len(turns):
        rewards[np.flatnonzero(mask)[-1]] = score
    return Trajectory(
        **{
            "item": Item(task, index),
            "uid": f"step{step}/{task}_{index}",
            "sample_index": sample,
            "attempt": 1,
            "messages": tuple(messages),
            "turns": tuple(
                Turn(
                    f"Thought: {thought}\nAction: {action}",
                    observation,
                    score if number + 1 == len(turns) else 0.0,
                    number + 1 == len(turns),
                    FinishReason.STOP,
                    lengths[3 + 2 * number],
                    0.5,
                    0.01,
                )
                for number, (thought, action, observation) in enumerate(turns)
            ),
            "input_ids": np.arange(len(mask), dtype=np.int32) % 50,
            "loss_mask": mask,
            "sequence_ids": sequence_ids.astype(np.int32),
            "rollout_log_probs": np.where(mask, -0.25, 0.0).astype(np.float32),
            "token_rewards": rewards,
            "prompt_length": int(np.flatnonzero(mask)[0]) if mask.any() else len(mask),
            "score": score,
            "success": success,
            "stop_reason": stop_reason,
            "policy_version": step - 1,
            "max_rounds": 5,
            "duration_s": 1.5,
            "parts": tuple(tuple(parts) for parts in kinds),
            **fields,
        }
    )


def write_rows(path: Path, rows: Sequence[Trajectory | dict[str, Any]], *, mode: str = "w") -> Path:
    """Write trajectories, or rows as they are, as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(to_row(row) if isinstance(row, Trajectory) else row, ensure_ascii=False) for row in rows]
    with path.open(mode, encoding="utf-8") as file:
        file.write("".join(line + "\n" for line in lines))
    return path
