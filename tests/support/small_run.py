"""A real small training, for tests of what reads its files."""

from __future__ import annotations

import json
from pathlib import Path

from support.models import tiny_qwen2
from support.tokenizers import make_tokenizer

from agentgym_rl.envs.registry import get_spec
from agentgym_rl.envs.server import build_app
from agentgym_rl.envs.serving import running
from verl.agent_trainer.loading import load_config, parse_command_line
from verl.agent_trainer.main_ppo import train
from verl.config import PPOConfig


def train_small_run(folder: Path, *overrides: str) -> Path:
    """Two steps of `main_ppo` on TextCraft with a random model, in this process; returns the run's folder."""
    tokenizer = make_tokenizer()
    tiny_qwen2(vocab_size=len(tokenizer)).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "train.json").write_text(json.dumps([{"item_id": f"textcraft_{index}"} for index in range(4)]))
    with running(build_app(get_spec("textcraft"))) as url:
        argv = [
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
            *overrides,
        ]
        command_line = parse_command_line(argv, program="verl.agent_trainer.main_ppo", config_name="ppo_trainer")
        train(load_config(PPOConfig, command_line))
    return folder / "run"
