"""Seconds of a training step of TRL's GRPO on the letters, wall and CPU, as JSON on the last line printed.

What is compared is a whole step, generation and update, of the same model on the same task: one thread, 128
trajectories and one update a step. TRL plays its episodes by a rollout function that generates as TRL does without an
inference server: transformers' ``generate`` on the trainer's own model, with the trainer's generation config, a turn at
a time from the whole conversation so far. All conversations have one length, so nothing is padded. Otherwise TRL keeps
its own defaults. It prints its metrics at each step, where ours writes them and all trajectories to files; it gets no
log-probs of the sampling, which it only needs beside vLLM.

``PYTHONPATH=. python scripts/bench/trl_letters.py MODEL_FOLDER``, by an interpreter that has TRL.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from letters import TURNS, answer_positions, encode, letters_of, pay
from transformers import PreTrainedTokenizerBase, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.models import unwrap_model_for_generation

ITEMS_PER_STEP, GROUP, STEPS = 16, 8, 12


class Clock(TrainerCallback):
    """When each step began, by the wall and by this process's CPU time."""

    def __init__(self) -> None:
        self.wall_s: list[float] = []
        self.cpu_s: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.wall_s.append(time.perf_counter())
        self.cpu_s.append(time.process_time())


def roll_out(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
    """Episodes as one completion each, of which the answers are the model's; a prompt is the number of an item."""
    shown = [letters_of(int(prompt)) for prompt in prompts]
    tokenizer = trainer.processing_class
    answers = tuple(answer_positions(tokenizer))
    start = answers[0]
    ids_BT = torch.tensor([encode(tokenizer, letters[:1]) for letters in shown])
    scores = [0.0] * len(prompts)
    with unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator) as policy, torch.no_grad():
        for turn in range(TURNS):
            ids_BT = policy.generate(
                input_ids=ids_BT,
                attention_mask=torch.ones_like(ids_BT),
                generation_config=trainer.generation_config,
                max_new_tokens=1,
            )
            texts = tokenizer.batch_decode(ids_BT[:, -1:], skip_special_tokens=True)
            scores = [s + pay(letters[turn], text) for s, letters, text in zip(scores, shown, texts, strict=True)]
            if turn + 1 < TURNS:
                following = [between(tokenizer, letters[turn + 1], answers) for letters in shown]
                ids_BT = torch.cat([ids_BT, torch.tensor(following)], 1)
    mask = [int(position in answers) for position in range(start, ids_BT.shape[1])]
    return {
        "prompt_ids": ids_BT[:, :start].tolist(),
        "completion_ids": ids_BT[:, start:].tolist(),
        "logprobs": [[0.0] * len(mask) for _ in prompts],
        "env_mask": [mask for _ in prompts],
        "score": scores,
    }


@cache
def between(tokenizer: PreTrainedTokenizerBase, letter: str, answers: tuple[int, ...]) -> list[int]:
    """What stands between two answers when ``letter`` is shown."""
    return encode(tokenizer, ["a", "a", letter])[answers[0] + 1 :]


def main(model: Path) -> None:
    torch.set_num_threads(1)
    clock = Clock()
    with tempfile.TemporaryDirectory() as out:
        options = GRPOConfig(
            output_dir=out,
            per_device_train_batch_size=ITEMS_PER_STEP * GROUP,
            num_generations=GROUP,
            max_steps=STEPS,
            learning_rate=2e-3,
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
