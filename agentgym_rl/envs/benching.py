"""How fast an environment is served, what a session costs, and what simple policies score."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentgym_rl.client.connection import Connection
from agentgym_rl.envs.base import Environment, StepResult
from agentgym_rl.envs.checking import child_processes, random_actions, score_of
from agentgym_rl.envs.registry import EnvSpec
from agentgym_rl.errors import EnvServerError

_START_S = 120.0
_NO_OP = ""
"""An action that no environment understands: what a model scores that never acts."""


@dataclass(frozen=True)
class CallTimes:
    """Latencies of one kind of call, in seconds."""

    name: str
    count: int
    p50_s: float
    p99_s: float


@dataclass(frozen=True)
class LoadResult:
    """What clients achieved together."""

    clients: int
    steps: int
    seconds: float
    calls: tuple[CallTimes, ...]
    bytes_per_session: float | None
    """Growth of the server's memory, its child processes' included; None where the system does not tell."""

    @property
    def steps_per_s(self) -> float:
        return self.steps / self.seconds


@dataclass(frozen=True)
class PolicyScore:
    """What a policy scored in process."""

    policy: str
    episodes: int
    mean_score: float
    success: float
    """Share of episodes that reached the goal."""
    mean_steps: float


@contextmanager
def served(task: str, options: Sequence[str] = ()) -> Iterator[tuple[str, int]]:
    """URL and process id of a server in a process of its own, ended with the block."""
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "url"
        command = [sys.executable, "-m", "agentgym_rl.cli", "serve", task, "--port", "0", "--ready-file", str(ready)]
        process = subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL)
        try:
            yield _wait_for(ready, process), process.pid
        finally:
            process.terminate()
            process.wait()


def _wait_for(ready: Path, process: subprocess.Popen[bytes]) -> str:
    end = time.monotonic() + _START_S
    while not ready.exists():
        if process.poll() is not None or time.monotonic() >= end:
            raise EnvServerError(f"the server did not start within {_START_S:g} s (status {process.returncode})")
        time.sleep(0.02)
    return ready.read_text().strip()


def load(spec: EnvSpec, url: str, *, clients: int, seconds: float, pid: int | None = None) -> LoadResult:
    """Play with ``clients`` sessions at once for ``seconds``: each resets, steps with its example action, and so on;
    longer where it takes longer to make a step.

    Their memory is that of sessions in an episode which has just begun.
    """
    times: dict[str, list[float]] = defaultdict(list)
    before = None if pid is None else memory_bytes(pid)
    sessions = _each(clients, lambda number: _Session(spec, url, times))
    _each(clients, lambda number: sessions[number].reset(number))
    grown = None if before is None or pid is None else (memory_bytes(pid) - before) / clients
    end = time.perf_counter() + seconds
    started = time.perf_counter()
    steps = sum(_each(clients, lambda number: sessions[number].play(number, end)))
    took_s = time.perf_counter() - started
    _each(clients, lambda number: sessions[number].close())
    calls = tuple(_call_times(name, values) for name, values in times.items())
    return LoadResult(clients, steps, took_s, calls, grown)


def _each(count: int, work: Callable[[int], Any]) -> list[Any]:
    """What ``work`` returns for 0..count-1, each in a thread of its own; the first exception is raised."""
    results: list[Any] = [None] * count
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            results[number] = work(number)
        except Exception as error:  # noqa: BLE001 - raised again by the thread that waits
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


class _Session:
    """One session over HTTP whose calls are timed."""

    def __init__(self, spec: EnvSpec, url: str, times: dict[str, list[float]]) -> None:
        self._spec = spec
        self._times = times
        self._connection = Connection(url, timeout_s=300, max_retries=3)
        content = self._timed("create", {})
        handle_field = spec.wire.handle_field
        self._handle = content[handle_field] if isinstance(content, dict) else content

    def play(self, number: int, end: float) -> int:
        """Episodes until the clock says ``end``, at least a step; returns the steps made."""
        steps, item = 0, number
        self.reset(item)
        while True:
            content = self._timed("step", {"action": self._spec.client.example_action})
            steps += 1
            if time.perf_counter() >= end:
                return steps
            if any(content.get(field) for field in ("done", "terminated", "truncated")) or steps % 10 == 0:
                item += 1
                self.reset(item)

    def close(self) -> None:
        self._timed("close", {})
        self._connection.close()

    def reset(self, item: int) -> None:
        self._timed("reset", {self._spec.wire.index_field: item % self._spec.num_items})

    def _timed(self, path: str, fields: dict[str, Any]) -> Any:
        handle = {} if path == "create" else {self._spec.wire.handle_field: self._handle}
        started = time.perf_counter()
        reply = self._connection.post(path, handle | fields)
        self._times[path].append(time.perf_counter() - started)
        refused = isinstance(reply.content, dict) and "error" in reply.content
        if reply.status != 200 or refused:
            raise EnvServerError(f"{self._spec.name}: /{path}: HTTP {reply.status}: {reply.content!r}")
        return reply.content


def _call_times(name: str, values: list[float]) -> CallTimes:
    ordered = sorted(values)
    return CallTimes(name, len(ordered), _quantile(ordered, 0.5), _quantile(ordered, 0.99))


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def memory_bytes(pid: int) -> int:
    """Memory of a process and all that it started, shared pages counted once each; 0 where there is no /proc."""
    return sum(_proportional_bytes(each) for each in (pid, *child_processes(pid)))


def _proportional_bytes(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")), 0)


def policy_scores(spec: EnvSpec, items: Sequence[int], *, steps: int) -> list[PolicyScore]:
    """Scores of doing nothing, of random actions and, where there is one, of the expert, on ``items`` in process."""
    policies: dict[str, Callable[[Environment, int], Iterator[str]]] = {
        "no-op": lambda environment, item: iter([_NO_OP] * steps),
        "random": lambda environment, item: random_actions(environment, spec.client.example_action, item),
    }
    if (expert := spec.expert) is not None:
        policies["expert"] = lambda environment, item: iter(expert(environment))
    environment = spec.environment()
    try:
        return [_policy_score(name, spec, environment, items, policy, steps) for name, policy in policies.items()]
    finally:
        environment.close()


def _policy_score(
    name: str,
    spec: EnvSpec,
    environment: Environment,
    items: Sequence[int],
    policy: Callable[[Environment, int], Iterator[str]],
    steps: int,
) -> PolicyScore:
    scores, lengths = [], []
    for item in items:
        environment.reset(item)
        results: list[StepResult] = []
        for action in policy(environment, item):
            results.append(environment.step(action))
            # An expert may need more steps than others get.
            if results[-1].done or (name != "expert" and len(results) >= steps):
                break
        scores.append(score_of(spec, results))
        lengths.append(len(results))
    reached = sum(score >= spec.success_score - 1e-6 for score in scores)
    return PolicyScore(name, len(items), sum(scores) / len(items), reached / len(items), sum(lengths) / len(items))
