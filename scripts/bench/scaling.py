"""Cost against size: a curve for each of trajectories, turns, tokens, sessions and ranks, with its exponent.

* ``trajectories``, ``turns``, ``tokens``: CPU time of a whole training step of a small model in one process, split into
  generation, update and everything else, as one of the three grows and the others stay.
* ``driver``: what the driver does for a step with its trajectories, part by part.
* ``sessions``: CPU time of worker and server for a rollout over HTTP, with an engine that costs nothing.
* ``ranks``: the same training step on one and on two Ray workers against one TextCraft server.

``python scripts/bench/scaling.py [--only PART ...] [--quick]``. One thread for each process.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar
from unittest.mock import patch

import bench
import letters
import psutil
import torch
from bench import PROJECT, Curve, Result
from rollout import cpu_seconds
from toy_server import Pace, ToyClient, toy_server
from train import make_trajectory
from transformers import Qwen2Config, Qwen2ForCausalLM

from agentgym_rl.client.base import EnvClient
from agentgym_rl.envs.base import Environment
from agentgym_rl.envs.benching import served
from agentgym_rl.envs.registry import EnvSpec, register
from agentgym_rl.rollout.log import TrajectoryLog
from agentgym_rl.types import Item, StepOutput, Trajectory
from verl.agent_trainer.loading import load_config, parse_command_line
from verl.config import AlgorithmConfig, PPOConfig
from verl.protocol import DataProto
from verl.trainer import metrics, ppo
from verl.trainer.core_algos import compute_advantages
from verl.trainer.mini_batches import share_mini_batch
from verl.utils.tracking import read_metrics

TASK = "growing"
GROUP = 8
ANSWER_TOKENS = 8
STEPS = 3
"""Training steps for a point; the first warms up, and the median of the others counts."""
LONGEST, LONGEST_PROMPT = 16_384, 4096
SECONDS = ", s"


@dataclass(frozen=True, slots=True)
class Size:
    """Of one training step."""

    trajectories: int = 16
    turns: int = 4
    observation_tokens: int = 48


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of one training step, and tokens of one of its trajectories in the mean."""

    tokens: float
    step_s: float
    generation_s: float
    update_s: float

    @property
    def rest_s(self) -> float:
        return self.step_s - self.generation_s - self.update_s

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, float]], trajectories: int) -> Cost:
        """The medians of a run's metrics without its first step."""

        def median(name: str) -> float:
            return statistics.median(row[name] for row in rows[1:])

        return cls(
            tokens=median("training/tokens") / trajectories,
            step_s=median("timing_s/step"),
            generation_s=median("timing_s/gen"),
            update_s=median("timing_s/update"),
        )


class GrowingClient(EnvClient):
    """Plays in this process; as many turns, and observations as long, as the size in `size` says."""

    task = TASK
    task_description = "Say anything."
    example_action = "a"
    runs_inline = True
    size: ClassVar[Size] = Size()

    def __init__(self, env_server_base: str, **_: object) -> None:
        self.env_server_base = env_server_base

    def reset(self, idx: int) -> str:
        self._item, self._turn = idx, 0
        return self.observe()

    def observe(self) -> str:
        return f"{self._item} {self._turn} ".ljust(self.size.observation_tokens, "x")

    def step(self, text: str) -> StepOutput:
        self._turn += 1
        return StepOutput(self.observe(), float(len(text) % 3), self._turn == self.size.turns)

    def close(self) -> None:
        """Nothing to close."""


# ------------------------------------------------------------------------------------------------------ training steps


def cost_of_step(model: Path, size: Size) -> Cost:
    """Of a step in this process."""
    GrowingClient.size = size
    with tempfile.TemporaryDirectory() as out:
        overrides = [
            *common_overrides(model, Path(out), size.trajectories),
            f"actor_rollout_ref.agentgym.task_name={TASK}",
            "actor_rollout_ref.agentgym.env_addr=http://127.0.0.1:9",  # nobody calls it
            f"algorithm.rounds_ctrl.rounds={size.turns}",
            "trainer.worker_group=local",
        ]
        config = load_config(PPOConfig, parse_command_line(overrides, program="bench", config_name="ppo_trainer"))
        # The trainer's own measurements, in CPU time, which other programs hardly change.
        clock = patch.object(metrics, "time", SimpleNamespace(perf_counter=time.process_time))
        with contextlib.redirect_stdout(io.StringIO()), clock:
            ppo.run_ppo(config, train_items=[Item(TASK, index) for index in range(10_000)], val_items=[])
        return Cost.of(read_metrics(Path(out) / "metrics.jsonl"), size.trajectories)


def common_overrides(model: Path, out: Path, trajectories: int) -> list[str]:
    items = trajectories // GROUP
    return [
        "data.train_file=unused",
        f"data.train_batch_size={items}",
        f"data.max_prompt_length={LONGEST_PROMPT}",
        f"data.max_response_length={LONGEST - LONGEST_PROMPT}",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.agentgym.agent=act",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={items}",
        "actor_rollout_ref.actor.optim.lr=1e-5",
        # A random model may earn nothing that differs within a group.
        "actor_rollout_ref.actor.entropy_coeff=0.01",
        "actor_rollout_ref.rollout.name=hf",
        f"actor_rollout_ref.rollout.max_tokens={ANSWER_TOKENS}",
        f"actor_rollout_ref.rollout.n={GROUP}",
        "trainer.logger=[jsonl]",
        "trainer.device=cpu",
        "trainer.num_threads=1",
        f"trainer.total_training_steps={STEPS}",
        f"trainer.default_local_dir={out}",
    ]


def save_model(folder: Path) -> Path:
    """A random Qwen2 of about 100,000 parameters that seldom ends its answer early; returns ``folder``."""
    tokenizer = letters.make_tokenizer()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LONGEST,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    Qwen2ForCausalLM(config).float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def step_curves(
    figure: str, size_name: str, sizes: Sequence[Size], size_of: Callable[[Size, Cost], float]
) -> Iterator[Curve]:
    """How the parts of a step grow over ``sizes``."""
    with tempfile.TemporaryDirectory() as folder:
        model = save_model(Path(folder) / "model")
        costs = [(size, cost_of_step(model, size)) for size in sizes]
    parts: dict[str, Callable[[Cost], float]] = {
        "whole step": lambda cost: cost.step_s,
        "generation": lambda cost: cost.generation_s,
        "update": lambda cost: cost.update_s,
        "everything else": lambda cost: cost.rest_s,
    }
    for label, part in parts.items():
        points = tuple((size_of(size, cost), part(cost)) for size, cost in costs)
        yield Curve(figure, label, size_name, f"CPU time of a step{SECONDS}", points)


def trajectories(quick: bool) -> Iterator[Curve]:
    counts = (16, 32) if quick else (16, 32, 64, 128, 256, 512)
    sizes = [Size(trajectories=count) for count in counts]
    yield from step_curves("trajectories", "trajectories of a step", sizes, lambda size, _: size.trajectories)


def turns(quick: bool) -> Iterator[Curve]:
    sizes = [Size(turns=count) for count in ((2, 4) if quick else (2, 4, 8, 16, 32))]
    yield from step_curves("turns", "turns of a trajectory", sizes, lambda size, _: size.turns)


def tokens(quick: bool) -> Iterator[Curve]:
    """Observations grow, so that only attention, and what reads or writes them, does more."""
    lengths = (32, 64) if quick else (64, 128, 256, 512, 1024)
    sizes = [Size(trajectories=GROUP, observation_tokens=length) for length in lengths]
    yield from step_curves("tokens", "tokens of a trajectory", sizes, lambda _, cost: round(cost.tokens))


# -------------------------------------------------------------------------------------------------------------- driver


def driver(quick: bool) -> Iterator[Curve]:
    """What the driver does for a step, by its trajectories, of the quickstart's size each."""
    counts = (64, 128) if quick else (256, 512, 1024, 2048, 4096)
    times = [driver_times([make_trajectory(index) for index in range(count)]) for count in counts]
    for part in times[0]:
        points = tuple((float(count), each[part]) for count, each in zip(counts, times, strict=True))
        yield Curve("driver", part, "trajectories of a step", f"CPU time of the driver{SECONDS}", points)


def driver_times(made: Sequence[Trajectory]) -> dict[str, float]:
    """CPU seconds of each part."""
    times: dict[str, float] = {}

    @contextlib.contextmanager
    def measured(part: str) -> Iterator[None]:
        start = time.thread_time()
        yield
        times[part] = time.thread_time() - start

    with (
        tempfile.TemporaryDirectory() as folder,
        measured("trajectory file"),
        TrajectoryLog(Path(folder) / "0.jsonl") as log,
    ):
        for trajectory in made:
            log.write(trajectory)
    with measured("batch"):
        batch = DataProto.from_trajectories(made)
    with measured("advantages"):
        batch = compute_advantages(batch, AlgorithmConfig())
    with measured("shares of two ranks"):
        share_mini_batch(batch, 2)
    return times


# ------------------------------------------------------------------------------------------------------------ sessions


def sessions(quick: bool) -> Iterator[Curve]:
    """CPU time of the two processes of a rollout, by its concurrent sessions of ten turns."""
    counts, pace = (4, 8) if quick else (16, 32, 64, 128, 256, 512, 1024), Pace(turns=2 if quick else 10)
    points: dict[str, list[tuple[float, float]]] = {"worker": [], "server": []}
    with toy_server(pace) as server:

        def make_client() -> EnvClient:
            return ToyClient(server.url, timeout=120)

        cpu_seconds(counts[0], pace.turns, make_client)  # starts what starts once
        for count in counts:
            before = _cpu_s(server.pid)
            points["worker"].append((count, cpu_seconds(count, pace.turns, make_client)))
            points["server"].append((count, _cpu_s(server.pid) - before))
    for label, own in points.items():
        yield Curve("sessions", label, "concurrent sessions", f"CPU time of a rollout{SECONDS}", tuple(own))


def _cpu_s(pid: int) -> float:
    return sum(psutil.Process(pid).cpu_times()[:2])


# --------------------------------------------------------------------------------------------------------------- ranks


def ranks(quick: bool) -> Iterator[Result | Curve]:
    """The same step on one and two Ray workers, beside a TextCraft server and the driver."""
    count = 16 if quick else 128
    with tempfile.TemporaryDirectory() as name, served("textcraft") as (url, _):
        folder = Path(name)
        model = save_model(folder / "model")
        (folder / "items.json").write_text(json.dumps([{"item_id": f"textcraft_{index}"} for index in range(64)]))
        costs = {number: cost_on_ranks(model, folder, url, number, count) for number in (1, 2)}
    figure, size, cost = "ranks", "Ray workers", f"time of a step{SECONDS}"
    yield Curve(figure, "whole step", size, cost, tuple((number, each.step_s) for number, each in costs.items()))
    yield Curve(figure, "generation", size, cost, tuple((number, each.generation_s) for number, each in costs.items()))
    yield Curve(figure, "update", size, cost, tuple((number, each.update_s) for number, each in costs.items()))
    what = f"a training step of {count} trajectories on one Ray worker over the same on two, {psutil.cpu_count()} cores"
    times = f"{costs[1].step_s:.1f} against {costs[2].step_s:.1f} s"
    yield Result("ranks", what, costs[1].step_s / costs[2].step_s, "x", note=times)


def cost_on_ranks(model: Path, folder: Path, url: str, number: int, count: int) -> Cost:
    out = folder / f"ranks{number}"
    overrides = [
        *common_overrides(model, out, count)[1:],
        f"data.train_file={folder / 'items.json'}",
        "actor_rollout_ref.agentgym.task_name=textcraft",
        f"actor_rollout_ref.agentgym.env_addr={url}",
        "algorithm.rounds_ctrl.rounds=4",
        f"trainer.n_gpus_per_node={number}",
        "trainer.worker_group=ray",
    ]
    command = [sys.executable, "-m", "verl.agent_trainer.main_ppo", *overrides]
    subprocess.run(command, cwd=PROJECT, check=True, stdout=subprocess.DEVNULL)
    return Cost.of(read_metrics(out / "metrics.jsonl"), count)


# --------------------------------------------------------------------------------------------------------- the program

PARTS: dict[str, Callable[[bool], Iterator[Result | Curve]]] = {
    "trajectories": trajectories,
    "turns": turns,
    "tokens": tokens,
    "driver": driver,
    "sessions": sessions,
    "ranks": ranks,
}


def measure(options: argparse.Namespace) -> Iterator[Result | Curve]:
    torch.set_num_threads(1)
    register(EnvSpec(TASK, "Growing", Environment, GrowingClient, 10**6, 36998, lambda: "1"))
    for name in options.only:
        yield from PARTS[name](options.quick)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--quick", action="store_true", help="two small sizes each")
    return bench.run("scaling", measure, parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
