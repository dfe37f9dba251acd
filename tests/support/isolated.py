"""An environment for child processes that does what its actions say: dies, hangs, raises, leaves a process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

from agentgym_rl.client.base import EnvClient
from agentgym_rl.envs.base import Environment, InvalidCall, ResetResult, StepResult
from agentgym_rl.envs.registry import EnvSpec, Isolation
from agentgym_rl.envs.wire import DIALECT_A


@dataclass(frozen=True)
class Settings:
    greeting: str = "hello"


class Isolated(Environment):
    def __init__(self, settings: Settings | None = None) -> None:
        self._greeting = (settings or Settings()).greeting
        self._made_by = threading.get_ident()
        # What a simulator or browser is to a real one.
        self._simulator = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        self._seen = ""

    def reset(self, data_idx: int) -> ResetResult:
        if not 0 <= data_idx < 100:
            raise InvalidCall(f"data_idx {data_idx}: must be in 0..99")
        self._seen = f"{self._greeting} {data_idx}"
        return ResetResult(self._seen)

    def step(self, action: str) -> StepResult:
        if action == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if action == "hang":
            time.sleep(600)
        if action == "raise":
            raise RuntimeError("as told")
        if action == "tuple":
            return "observation", 0.0, False  # type: ignore[return-value]
        if action.startswith("wait"):
            time.sleep(float(action.split()[1]))
        assert threading.get_ident() == self._made_by
        self._seen = action
        return StepResult(self._seen, 0, False)

    def observation(self) -> str:
        return self._seen

    @property
    def pids(self) -> list[int]:
        return [os.getpid(), self._simulator.pid]

    def close(self) -> None:
        self._simulator.kill()
        self._simulator.wait()


class IsolatedClient(EnvClient):
    task = "isolated"
    task_description = "Do anything."
    example_action = "go"


def isolated_spec(settings: Settings | None = None) -> EnvSpec:
    chosen = settings or Settings()
    return EnvSpec(
        name="isolated",
        title="Isolated",
        environment=lambda: Isolated(chosen),
        client=IsolatedClient,
        num_items=100,
        default_port=0,
        data_version=lambda: "none",
        wire=replace(DIALECT_A, starts_on_create=False, created=lambda handle, start: {"id": handle}),
        queries={"pids": lambda environment: environment.pids},
        isolation=Isolation(source="support.isolated:SPEC", call_timeout_s=30, started_ahead=1),
        settings=chosen,
        configure=isolated_spec,
    )


SPEC = isolated_spec()


def isolated(spec: EnvSpec = SPEC, **changes: object) -> EnvSpec:
    """The spec with other fields of its `Isolation`."""
    assert spec.isolation is not None
    return replace(spec, isolation=replace(spec.isolation, **changes))  # type: ignore[arg-type]


class ShortLived(Isolated):
    """Ends its process as soon as it is made, while the file exists that ``SHORT_LIVED`` names; notes each start."""

    def __init__(self) -> None:
        if (notes := Path(os.environ["SHORT_LIVED"])).exists():
            with notes.open("a") as file:
                file.write("started\n")
            os._exit(1)
        super().__init__()


SHORT_LIVED = replace(SPEC, environment=ShortLived, settings=None, configure=None)
