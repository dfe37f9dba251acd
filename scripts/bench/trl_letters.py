"""Training steps of TRL's GRPO on the letters, each when a line arrives; prints what it took, as `trl_loop` reads it.

What is compared is a whole step, generation and update, of the same model on the same task: one thread, 128
trajectories and one update a step. TRL plays its episodes by a rollout function that generates as TRL does without an
inference server: transformers' ``generate`` on the trainer's own model, with the trainer's generation config, a turn at
a time from the whole conversation so far. All conversations have one length, so nothing is padded. Otherwise TRL keeps
its own defaults. It prints its metrics at each step, where ours writes them and all trajectories to files; it gets no
log-probs of the sampling, which it only needs beside vLLM.

``PYTHONPATH=. python scripts/bench/trl_letters.py MODEL_FOLDER STEPS``, by an interpreter that has TRL. It ends after
so many steps, or when its input does.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from letters import TURNS, answer_positions, encode, letters_of, pay
from transformers import PreTrainedTokenizerBase, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.models import unwrap_model_for_generation
from trl_loop import MARK

ITEMS_PER_STEP, GROUP = 16, 8


class InTurn(TrainerCallback):
    """Waits for a line before each step, and then tells what the step before took, from its line to the next step.

    So all that a step needs is counted, its data and logs included, and the wait is not.
    """

    def __init__(self) -> None:
        self._began: tuple[float, float] | None = None

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._tell()
        if not sys.stdin.readline():
            sys.exit()
        self._began = (time.perf_counter(), time.process_time())

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._tell()

    def _tell(self) -> None:
        """The times of the step that is over; nothing but the readiness before the first."""
        times = {}
        if self._began is not None:
            wall, cpu = self._began
            times = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
        print(f"\n{MARK}{json.dumps(times)}", flush=True)


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


def main(model: Path, steps: int) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as out:
        options = GRPOConfig(
            output_dir=out,
            per_device_train_batch_size=ITEMS_PER_STEP * GROUP,
            num_generations=GROUP,
            max_steps=steps,
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
            callbacks=[InTurn()],
        )
        trainer.train()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
