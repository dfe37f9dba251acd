"""Real environment servers behind gates, which can be killed, hung and started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import requests

from fault_run.gate import Gate
from fault_run.ledger import Ledger
from fault_run.prepare import ROOT, child_environment

_START_LIMIT_S = 120.0
_END_LIMIT_S = 30.0


class EnvServer:
    """One server process after another, under one address."""

    def __init__(
        self, task: str, number: int, folder: Path, ledger: Ledger, *, session_ttl_s: float, seed: int
    ) -> None:
        self.task, self.name = task, f"{task}-{number}"
        self.gate = Gate(self.name, ledger, seed)
        self._folder, self._session_ttl_s = folder, session_ttl_s
        self._process: subprocess.Popen[bytes] | None = None
        self._num_starts = 0

    def start(self) -> None:
        """Return once it listens."""
        self._num_starts += 1
        ready, log = (self._folder / f"{self.name}.{self._num_starts}.{kind}" for kind in ("url", "log"))
        command = [sys.executable, "-m", "agentgym_rl.cli", "serve", self.task, "--port", "0"]
        command += ["--ready-file", str(ready), "--session-ttl", str(self._session_ttl_s)]
        with log.open("wb") as file:
            # A session of its own: Ctrl-C in a terminal is for the conductor alone, who ends everything in order.
            self._process = subprocess.Popen(
                command, stdout=file, stderr=file, env=child_environment(), cwd=ROOT, start_new_session=True
            )
        end = time.monotonic() + _START_LIMIT_S
        while not ready.exists():
            if self._process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the server {self.name} did not start: {log.read_text()[-2000:]}")
            time.sleep(0.02)
        self._url = ready.read_text().strip()
        self.gate.open(urlsplit(self._url).netloc)

    def kill(self) -> None:
        """SIGKILL; its address refuses connections from then on."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self.gate.shut()

    def hang(self) -> None:
        self._signal(signal.SIGSTOP)

    def wake(self) -> None:
        self._signal(signal.SIGCONT)

    def sessions(self) -> int:
        """Open now, as the server itself says."""
        return int(requests.get(f"{self._url}/health", timeout=30).json()["sessions"])

    def end(self) -> None:
        """In order, or for certain."""
        if self._process is None or self._process.poll() is not None:
            return
        self.wake()
        self._process.terminate()
        try:
            self._process.wait(_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self.gate.shut()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)
