"""An environment for benchmarks, its client, and a server of it in a process of its own.

An episode takes so many steps and then pays 1. A step takes as long as was drawn for it: the times are
Pareto-distributed, so that a few steps take many times as long as most.

``python scripts/bench/toy_server.py --ready-file url [--pace '{"turns": 8, "mean_s": 0.02}']``
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from agentgym_rl.client.base import EnvClient
from agentgym_rl.envs.base import Environment, InvalidCall, ResetResult, StepResult
from agentgym_rl.envs.registry import EnvSpec
from agentgym_rl.envs.server import build_app
from agentgym_rl.envs.serving import Server, bind, url_of

PARETO_SHAPE = 1.5
"""Shape of the step times: below 2 their variance is unbounded."""
OBSERVATION = (
    "Crafted {item} minecraft:oak_planks. Inventory: [oak log] ({step}) [oak planks] ({item}) [stick] (2)\n"
    "You are in front of a door. There is a chest to the left and a table behind you.\n"
)
"""Differs from step to step, so that nobody gets by with remembering it."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How long episodes and steps of the environment are."""

    turns: int = 8
    mean_s: float = 0.0
    """Mean seconds of a step; 0 answers at once."""
    max_s: float = 2.0
    """Longest step."""
    fails_every: int = 0
    """Every so many-th item breaks at its first step, with HTTP 500; 0: none does."""

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
        return ResetResult(self.observation())

    def step(self, action: str) -> StepResult:
        if self._step >= self._pace.turns:
            raise InvalidCall("the episode has finished")
        self._step += 1
        if self._pace.fails_every and self._item % self._pace.fails_every == 1:
            raise RuntimeError(f"item {self._item} is one of those that break")
        if seconds := self._pace.step_s(self._item, self._step):
            time.sleep(seconds)
        done = self._step == self._pace.turns
        return StepResult(self.observation(), float(done), done)

    def observation(self) -> str:
        return OBSERVATION.format(item=self._item, step=self._step)


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


@dataclass(frozen=True, slots=True)
class ToyServer:
    url: str
    pid: int


@contextmanager
def toy_server(pace: Pace) -> Iterator[ToyServer]:
    """A server in a process of its own, which ends with the block; what it says of scripted faults is dropped."""
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "url"
        command = [sys.executable, __file__, "--ready-file", str(ready), "--pace", json.dumps(asdict(pace))]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL if pace.fails_every else None)
        try:
            while not ready.exists():
                if process.poll() is not None:
                    raise SystemExit(f"the server ended with status {process.returncode}")
                time.sleep(0.05)
            yield ToyServer(ready.read_text(), process.pid)
        finally:
            process.terminate()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve the benchmarks' environment")
    parser.add_argument("--ready-file", type=Path, required=True)
    parser.add_argument("--pace", type=lambda text: Pace(**json.loads(text)), default=Pace(), help="JSON of a Pace")
    options = parser.parse_args()
    listener = bind("127.0.0.1", 0)

    def announce() -> None:
        aside = options.ready_file.with_suffix(".part")
        aside.write_text(url_of(listener))
        aside.replace(options.ready_file)

    app = build_app(toy_spec(options.pace), max_sessions=2048)
    Server(app, on_ready=announce).run(sockets=[listener])


if __name__ == "__main__":
    main()
