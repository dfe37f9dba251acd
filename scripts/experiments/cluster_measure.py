"""Short trainings of several sizes on this machine, with the CPU time of their phases: what the simulator is held to.

``python scripts/experiments/cluster_measure.py --model MODEL --train-file ITEMS --out FOLDER``

All run in this process, on one thread, one size after the other and the list again; ``FOLDER/<repeat>/<size>`` holds
trajectories and ``metrics.jsonl`` as any run does, except that ``timing_s/...`` are seconds of this process's CPU.
Other programs on the machine change these less than the clock on the wall. Environments run in a server of their own.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

from agentgym_rl.threads import limit_threads

limit_threads(1)

# torch reads the number of threads when it is imported.
from agentgym_rl.envs.benching import served  # noqa: E402
from verl.agent_trainer.loading import load_config, parse_command_line  # noqa: E402
from verl.agent_trainer.main_ppo import train  # noqa: E402
from verl.config import PPOConfig  # noqa: E402


@dataclass(frozen=True)
class Size:
    """A training whose steps are measured."""

    items: int
    samples: int
    rounds: int

    def __str__(self) -> str:
        return f"{self.items}x{self.samples}-{self.rounds}"


SIZES = (Size(24, 8, 4), Size(6, 8, 4), Size(24, 8, 8), Size(12, 4, 6), Size(48, 8, 4), Size(12, 8, 2))
STEPS = 3
"""Of a size each time; the first of them, which warms everything up, is not looked at."""


def arguments(size: Size, *, model: str, train_file: str, url: str, out: Path) -> list[str]:
    """The quickstart's training of another size."""
    return [
        "algorithm.adv_estimator=grpo",
        f"algorithm.rounds_ctrl.rounds={size.rounds}",
        f"data.train_file={train_file}",
        f"data.train_batch_size={size.items}",
        "data.max_prompt_length=1024",
        "data.max_response_length=1024",
        "actor_rollout_ref.agentgym.task_name=textcraft",
        f"actor_rollout_ref.agentgym.env_addr={url}",
        "actor_rollout_ref.agentgym.agent=act",
        f"actor_rollout_ref.model.path={model}",
        f"actor_rollout_ref.rollout.n={size.samples}",
        "actor_rollout_ref.rollout.max_tokens=48",
        "actor_rollout_ref.rollout.max_model_len=2048",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={size.items}",
        "actor_rollout_ref.actor.optim.lr=0",
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=1",
        "trainer.worker_group=local",
        "trainer.logger=[jsonl]",
        "trainer.token_values=none",
        f"trainer.total_training_steps={STEPS}",
        f"trainer.default_local_dir={out}",
    ]


@contextmanager
def cpu_clock() -> Iterator[None]:
    """Let the trainer's stop-watch measure CPU time of this process."""
    with patch("verl.trainer.metrics.time", SimpleNamespace(perf_counter=time.process_time)):
        yield


def measure(sizes: Sequence[Size], *, model: str, train_file: str, out: Path, repeats: int) -> None:
    """Run all sizes, ``repeats`` times over, into ``out/<repeat>/<size>``."""
    out.mkdir(parents=True, exist_ok=True)
    with served("textcraft") as (url, _), cpu_clock():
        for repeat in range(repeats):
            for size in sizes:
                folder = out / str(repeat) / str(size)
                argv = arguments(size, model=model, train_file=train_file, url=url, out=folder)
                command = parse_command_line(argv, program="cluster_measure", config_name="ppo_trainer")
                train(load_config(PPOConfig, command))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a small model that plays TextCraft")
    parser.add_argument("--train-file", required=True, help="TextCraft items")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    measure(SIZES, model=args.model, train_file=args.train_file, out=args.out, repeats=args.repeats)


if __name__ == "__main__":
    main()
