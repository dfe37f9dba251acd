"""TRL's steps on the letters (`trl_letters`), one at a time: its process waits for each, so that others run between.

The two speak in lines: an empty one to the process's input asks for a step, and one that begins with `MARK` on its
output says what the step took. Whatever else the process prints is passed over; its errors go where ours go.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

HERE = Path(__file__).resolve().parent
MARK = "STEP "
START_S, STEP_S, END_S = 300.0, 120.0, 30.0
"""How long the process may take to get ready, for a step, and to end. Importing TRL takes most of a minute."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """What one step took."""

    wall_s: float
    cpu_s: float
    """Of all threads of TRL's process."""


class TRLError(Exception):
    """The process did not answer."""


def python_with_trl(python: str) -> str:
    """``python`` as an option's value, if it has what `trl_letters` imports; TRL itself, which takes long, is not."""
    looks = "import importlib.metadata, agentgym_rl.agent.strategies; importlib.metadata.version('trl')"
    try:
        asked = subprocess.run(
            [python, "-c", looks], cwd=HERE, env=_environment(), capture_output=True, text=True, timeout=START_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise argparse.ArgumentTypeError(f"{python!r}: {error}") from error
    if asked.returncode:
        why = (asked.stderr.strip().splitlines() or [f"status {asked.returncode}"])[-1]
        raise argparse.ArgumentTypeError(
            f"{python!r}: must be an interpreter with TRL and this project ({python} -m pip install trl -e .): {why}"
        )
    return python


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(HERE.parents[1]), "HF_HUB_OFFLINE": "1"}


class TRLLoop:
    """TRL's trainer in a process of its own; a context manager, inside which `step` makes it train."""

    def __init__(self, command: Sequence[str], *, start_s: float = START_S, step_s: float = STEP_S) -> None:
        """``command`` starts the process. Raises `TRLError` when it ends, or is not ready after ``start_s``."""
        self._step_s = step_s
        self._process = subprocess.Popen(
            list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=_environment()
        )
        try:
            self._answer(start_s, "starting")
        except BaseException:
            self.close()
            raise

    @classmethod
    def of(cls, python: str, model_folder: Path, *, steps: int) -> TRLLoop:
        """At most ``steps`` steps from a model's folder, by an interpreter that `python_with_trl` takes."""
        return cls([python, str(HERE / "trl_letters.py"), str(model_folder), str(steps)])

    def step(self) -> StepTimes:
        """Train one step. Raises `TRLError` when the process ends, or does not answer in time."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise TRLError(f"TRL's process ended with status {self._process.wait()} before a step") from None
        return StepTimes(**self._answer(self._step_s, "a step"))

    def _answer(self, within_s: float, doing: str) -> dict[str, Any]:
        """The next answer; a process that is too slow is killed, which ends its output."""
        assert self._process.stdout is not None
        late = threading.Event()

        def give_up() -> None:
            late.set()
            self._process.kill()

        timer = threading.Timer(within_s, give_up)
        timer.start()
        try:
            for line in self._process.stdout:
                if line.startswith(MARK):
                    answer: dict[str, Any] = json.loads(line.removeprefix(MARK))
                    return answer
        finally:
            timer.cancel()
            timer.join()
        status = self._process.wait()
        if late.is_set():
            raise TRLError(f"TRL's process did not answer within {within_s:g} s: {doing}")
        raise TRLError(f"TRL's process ended with status {status} in place of an answer: {doing}")

    def close(self) -> None:
        """End the process: it ends by itself when its input does, and is killed when it does not."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it had ended, with a request on its way
            self._process.stdin.close()
        self._process.stdout.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
