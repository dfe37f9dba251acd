"""Runs environment servers for tests, on free ports of the loopback interface.

``with serve(app) as url`` runs an ASGI application in a thread; ``with serve_process("textcraft") as server`` starts
the real command in a process of its own. `serve_logged` is one that tests kill in the middle of a step.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from agentgym_rl.envs.serving import running

_START_S = 60.0


serve = running
"""The URL of an application, which runs in a thread of this process until the block ends."""


@dataclass(frozen=True)
class ServerProcess:
    url: str
    process: subprocess.Popen[str]

    def stop(self) -> int:
        """Terminate the server; returns its exit status."""
        self.process.terminate()
        return self.process.wait(_START_S)

    def kill(self) -> None:
        """End it without warning, as a crash would."""
        self.process.kill()
        self.process.wait(_START_S)


@contextmanager
def serve_process(task: str, *options: str, port: int = 0) -> Iterator[ServerProcess]:
    """``agentgym-rl serve <task>`` in its own process, ended with the block."""
    with _started("-m", "agentgym_rl.cli", "serve", task, "--port", str(port), *options) as server:
        yield server


@contextmanager
def serve_logged(log: Path, gate: Path, *, turns: int, port: int = 0) -> Iterator[ServerProcess]:
    """`support.logged_server` in its own process, ended with the block."""
    program = Path(__file__).with_name("logged_server.py")
    options = ("--log", str(log), "--gate", str(gate), "--turns", str(turns), "--port", str(port))
    with _started(str(program), *options) as server:
        yield server


@contextmanager
def _started(*arguments: str) -> Iterator[ServerProcess]:
    """A Python process that writes its URL to ``--ready-file``."""
    with tempfile.TemporaryDirectory() as folder:
        ready_file = Path(folder) / "url"
        command = [sys.executable, *arguments, "--ready-file", str(ready_file)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, text=True)
        server = ServerProcess("", process)
        try:
            yield ServerProcess(_wait_for_url(process, ready_file), process)
        finally:
            if process.poll() is None:
                server.kill()


def _wait_for_url(process: subprocess.Popen[str], ready_file: Path) -> str:
    end = time.monotonic() + _START_S
    while not ready_file.exists():
        assert process.poll() is None, f"the server ended with status {process.returncode}"
        assert time.monotonic() < end, "the server did not start"
        time.sleep(0.02)
    return ready_file.read_text().strip()
