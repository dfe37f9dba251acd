"""An environment for benchmarks, its client, and a server of it in a process of its own.

An episode takes ``--turns`` steps and then pays 1. A step takes as long as was drawn for it: with ``--mean-s`` above 0
the times are Pareto-distributed, so that a few steps take many times as long as most.

``python scripts/bench/toy_server.py --ready-file url [--turns 8] [--mean-s 0.02] [--max-s 2]``
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from agentgym_rl.client.base import EnvClient
from agentgym_rl.envs.base import Environment, InvalidCall, ResetResult, StepResult
from agentgym_rl.envs.registry import EnvSpec
from agentgym_rl.envs.server import build_app
from agentgym_rl.envs.serving import Server, bind, url_of

PARETO_SHAPE = 1.5
"""Shape of the step times: below 2 their variance is unbounded."""
OBSERVATION = (
    "Crafted 4 minecraft:oak_planks. Inventory: [oak log] (1) [oak planks] (4) [stick] (2)\n"
    "You are in front of a door. There is a chest to the left and a table behind you.\n"
)


@dataclass(frozen=True, slots=True)
class Pace:
    """How long episodes and steps of the environment are."""

    turns: int = 8
    mean_s: float = 0.0
    """Mean seconds of a step; 0 answers at once."""
    max_s: float = 2.0
    """Longest step."""

    def step_s(self, item: int, step: int) -> float:
        """Seconds that this step takes, the same at every call."""
        if not self.mean_s:
            return 0.0
        drawn = random.Random(item * 1_000_003 + step).paretovariate(PARETO_SHAPE)
        return min(self.max_s, drawn * self.mean_s * (PARETO_SHAPE - 1) / PARETO_SHAPE)


class ToyEnvironment(Environment):
    def __init__(self, pace: Pace) -> None:
        self._pace, self._item, self._step = pace, 0, 0

    def reset(self, data_idx: int) -> ResetResult:
        self._item, self._step = data_idx, 0
        return ResetResult(OBSERVATION)

    def step(self, action: str) -> StepResult:
        if self._step >= self._pace.turns:
            raise InvalidCall("the episode has finished")
        self._step += 1
        if seconds := self._pace.step_s(self._item, self._step):
            time.sleep(seconds)
        done = self._step == self._pace.turns
        return StepResult(OBSERVATION, float(done), done)

    def observation(self) -> str:
        return OBSERVATION


class ToyClient(EnvClient):
    task = "bench"
    task_description = "Do anything."
    action_forms = ("anything",)
    example_action = "go"


def toy_spec(pace: Pace) -> EnvSpec:
    return EnvSpec(
        name=ToyClient.task,
        title="Bench",
        environment=lambda: ToyEnvironment(pace),
        client=ToyClient,
        num_items=10**6,
        default_port=0,
        data_version=lambda: "none",
        runs_inline=not pace.mean_s,
    )


@contextmanager
def toy_server(pace: Pace) -> Iterator[str]:
    """The URL of a server in a process of its own, which ends with the block."""
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "url"
        options = ["--turns", str(pace.turns), "--mean-s", str(pace.mean_s), "--max-s", str(pace.max_s)]
        process = subprocess.Popen([sys.executable, __file__, "--ready-file", str(ready), *options])
        try:
            while not ready.exists():
                if process.poll() is not None:
                    raise SystemExit(f"the server ended with status {process.returncode}")
                time.sleep(0.05)
            yield ready.read_text()
        finally:
            process.terminate()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve the benchmarks' environment")
    parser.add_argument("--ready-file", type=Path, required=True)
    parser.add_argument("--turns", type=int, default=Pace().turns)
    parser.add_argument("--mean-s", type=float, default=Pace().mean_s)
    parser.add_argument("--max-s", type=float, default=Pace().max_s)
    options = parser.parse_args()
    listener = bind("127.0.0.1", 0)

    def announce() -> None:
        aside = options.ready_file.with_suffix(".part")
        aside.write_text(url_of(listener))
        aside.replace(options.ready_file)

    app = build_app(toy_spec(Pace(options.turns, options.mean_s, options.max_s)), max_sessions=2048)
    Server(app, on_ready=announce).run(sockets=[listener])


if __name__ == "__main__":
    main()
