"""Seconds of a training step of TRL's GRPO on the letters, wall and CPU, as JSON on the last line printed.

TRL gets a rollout function of its own: the plain loop's batched generation (`plain_loop`), so that what is compared is
the training step around it. One thread, 128 trajectories and one update a step, no logs but its own.

``PYTHONPATH=. python scripts/bench/trl_letters.py MODEL_FOLDER``, by an interpreter that has TRL.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from plain_loop import PlainLoop
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

ITEMS_PER_STEP, GROUP, STEPS = 16, 8, 12


class Clock(TrainerCallback):
    """When each step began, by the wall and by this process's CPU time."""

    def __init__(self) -> None:
        self.wall_s: list[float] = []
        self.cpu_s: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.wall_s.append(time.perf_counter())
        self.cpu_s.append(time.process_time())


def main(model: Path) -> None:
    torch.set_num_threads(1)
    loop = PlainLoop(model, lr=0.0)

    def roll_out(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        """Episodes as one completion each, of which the answers are the model's."""
        policy = trainer.accelerator.unwrap_model(trainer.model)
        policy.eval()
        loop._model = policy
        episodes = loop.rollout([int(prompt) for prompt in prompts])
        policy.train()
        start = int(loop._answers[0])
        mask = [0] * (episodes.ids_BT.shape[1] - start)
        for position in loop._answers.tolist():
            mask[position - start] = 1
        ids = episodes.ids_BT.tolist()
        return {
            "prompt_ids": [row[:start] for row in ids],
            "completion_ids": [row[start:] for row in ids],
            "logprobs": [[0.0] * len(mask) for _ in ids],
            "env_mask": [mask for _ in ids],
            "score": episodes.scores_B.tolist(),
        }

    clock = Clock()
    with tempfile.TemporaryDirectory() as out:
        options = GRPOConfig(
            output_dir=out,
            per_device_train_batch_size=ITEMS_PER_STEP * GROUP,
            num_generations=GROUP,
            max_steps=STEPS,
            learning_rate=3e-3,
            beta=0.0,
            max_completion_length=64,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=str(model),
            reward_funcs=lambda completions, score, **_: score,
            args=options,
            train_dataset=Dataset.from_list([{"prompt": str(item)} for item in range(1000)]),
            rollout_func=roll_out,
            callbacks=[clock],
        )
        trainer.train()
    print(json.dumps({"wall_s": median_gap(clock.wall_s), "cpu_s": median_gap(clock.cpu_s)}))


def median_gap(times: list[float]) -> float:
    """Without the first two steps, which warm up."""
    return statistics.median(later - earlier for earlier, later in pairwise(times[2:]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
