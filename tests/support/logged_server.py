"""A server process whose environment writes down every step that it runs, for tests that kill it.

``python logged_server.py --port P --ready-file URL --log LOG --gate GATE --turns N``: each step appends a line
``<episode> <step>`` to LOG, then waits while the file GATE exists. An episode has a name of its own, which its
observations begin with, and ends with reward 1 at step N.
"""

from __future__ import annotations

import argparse
import os
import time
import uuid
from pathlib import Path

from agentgym_rl.client.base import EnvClient
from agentgym_rl.envs.base import Environment, ResetResult, StepResult
from agentgym_rl.envs.registry import EnvSpec
from agentgym_rl.envs.server import build_app
from agentgym_rl.envs.serving import Server, bind, url_of

_POLL_S = 0.01


class LoggedEnvironment(Environment):
    def __init__(self, log: Path, gate: Path, turns: int) -> None:
        self._log, self._gate, self._turns = log, gate, turns
        self._episode, self._step = "", 0

    def reset(self, data_idx: int) -> ResetResult:
        self._episode, self._step = uuid.uuid4().hex, 0
        return ResetResult(self.observation())

    def step(self, action: str) -> StepResult:
        self._step += 1
        _append(self._log, f"{self._episode} {self._step}\n")
        while self._gate.exists():
            time.sleep(_POLL_S)
        done = self._step >= self._turns
        return StepResult(self.observation(), 1.0 if done else 0.0, done)

    def observation(self) -> str:
        return f"{self._episode} {self._step}"


class LoggedClient(EnvClient):
    task = "logged"
    task_description = "Do anything."
    example_action = "go"


def _append(path: Path, line: str) -> None:
    """One write, so that no line is torn by another thread or by the process's end."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--turns", type=int, required=True)
    for name in ("--ready-file", "--log", "--gate"):
        parser.add_argument(name, type=Path, required=True)
    options = parser.parse_args()
    spec = EnvSpec(
        name="logged",
        title="Logged",
        environment=lambda: LoggedEnvironment(options.log, options.gate, options.turns),
        client=LoggedClient,
        num_items=1000,
        default_port=0,
        data_version=lambda: "none",
    )
    listener = bind("127.0.0.1", options.port)

    def announce() -> None:
        aside = options.ready_file.with_suffix(".part")
        aside.write_text(url_of(listener))
        aside.replace(options.ready_file)

    Server(build_app(spec), on_ready=announce).run(sockets=[listener])


if __name__ == "__main__":
    main()
