"""Many short trajectories over HTTP, step after step: sessions, threads, file handles and memory must stay flat.

As a training run does, it collects step by step, each in an event loop of its own, and writes trajectory files. One
item in a hundred breaks its environment (HTTP 500), one in a thousand hangs until its deadline; both are tried twice.
No more may be held at the end of the run than after its first quarter.

``python scripts/bench/soak.py [--trajectories 20000] [--steps 40] [--concurrency 64]``
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import bench
import psutil
import requests
from bench import Result
from toy_chat import make_chat
from toy_engine import InstantEngine
from toy_server import Pace, ToyClient, ToyServer, toy_server

from agentgym_rl.agent.chat import ChatTemplate
from agentgym_rl.rollout.collector import RolloutRequest, RolloutSettings, TokenLimits, collect, count_errors
from agentgym_rl.rollout.log import TrajectoryLog
from agentgym_rl.types import Item, SamplingParams, StepOutput, Trajectory

TURNS = 2
FAILS_EVERY, HANGS_EVERY = 100, 1000
DEADLINE_S, HANG_S = 3.0, 4.0
SETTLE_S = 15.0
"""Longest wait, before a reading, for hanging calls to end."""
MOST_GROWTH_MIB = 8.0
"""Memory that a process may gain after the first quarter: half a kilobyte for each of 15,000 trajectories."""
LIMITS = TokenLimits(max_prompt_length=10**4, max_response_length=10**5, max_tokens=100, max_model_len=10**6)


class HangingClient(ToyClient):
    """Does not return from the first step of every so many-th item until after the deadline."""

    def step(self, text: str) -> StepOutput:
        if self._item is not None and self._item % HANGS_EVERY == 2 and self._step == 0:
            time.sleep(HANG_S)
        return super().step(text)


@dataclass(frozen=True, slots=True)
class Held:
    """What one process holds."""

    threads: int
    handles: int
    memory_mib: float

    @classmethod
    def by(cls, pid: int) -> Held:
        process = psutil.Process(pid)
        return cls(process.num_threads(), process.num_fds(), process.memory_info().rss / 2**20)


@dataclass(frozen=True, slots=True)
class Reading:
    """The state between two steps."""

    trajectories: int
    sessions: int
    """Open on the server."""
    here: Held
    server: Held

    @classmethod
    def take(cls, trajectories: int, server: ToyServer) -> Reading:
        gc.collect()
        here, there = Held.by(os.getpid()), Held.by(server.pid)
        sessions = requests.get(f"{server.url}/health", timeout=30).json()["sessions"]  # a handle of its own
        return cls(trajectories, sessions, here, there)

    def row(self) -> str:
        cells = (self.trajectories, self.sessions, self.here.threads, self.here.handles, self.here.memory_mib)
        cells += (self.server.threads, self.server.handles, self.server.memory_mib)
        return "".join(f"{cell:>12.1f}" if isinstance(cell, float) else f"{cell:>12}" for cell in cells)


HEADER = "".join(
    f"{name:>12}" for name in ("done", "sessions", "threads", "handles", "MiB", "srv threads", "srv handles", "srv MiB")
)


def growth(before: Reading, after: Reading) -> Iterator[str]:
    """What ``after`` holds beyond ``before``, in words."""
    if after.sessions:
        yield f"{after.sessions} sessions are open on the server"
    for name, old, new in (("here", before.here, after.here), ("server", before.server, after.server)):
        for what in ("threads", "handles"):
            if getattr(new, what) > getattr(old, what):
                yield f"{name}: {what} grew from {getattr(old, what)} to {getattr(new, what)}"
        if new.memory_mib > old.memory_mib + MOST_GROWTH_MIB:
            yield f"{name}: memory grew from {old.memory_mib:.1f} to {new.memory_mib:.1f} MiB"


def settled_reading(done: int, server: ToyServer, before: Reading) -> Reading:
    """A reading once no more is held than before, or when that has had time enough."""
    end = time.monotonic() + SETTLE_S
    while True:
        reading = Reading.take(done, server)
        if not any(growth(before, reading)) or time.monotonic() >= end:
            return reading
        time.sleep(0.2)


@contextmanager
def printed_progress(total: int) -> Iterator[Counter[str]]:
    """Counts of how trajectories ended, printed with the time they took."""
    started, ends = time.monotonic(), Counter[str]()
    yield ends
    seconds = time.monotonic() - started
    print(f"{total} trajectories in {seconds:.0f} s: {', '.join(f'{k} {n}' for k, n in ends.most_common())}")


def run_step(items: Sequence[int], chat: ChatTemplate, url: str, log_file: Path, concurrency: int) -> list[Trajectory]:
    """One rollout of a training step, in an event loop of its own."""
    settings = RolloutSettings(
        max_rounds=TURNS,
        limits=LIMITS,
        sampling=SamplingParams(max_tokens=100),
        timeout_s=DEADLINE_S,
        max_concurrency=concurrency,
    )
    with TrajectoryLog(log_file) as log:
        rollout = collect(
            [RolloutRequest(Item(ToyClient.task, item), f"item {item}") for item in items],
            InstantEngine(chat),
            make_client=lambda: HangingClient(url, timeout=60),
            chat=chat,
            settings=settings,
            on_finished=log.write,
        )
        return asyncio.run(rollout)


def soak(trajectories: int, steps: int, concurrency: int) -> tuple[Reading, Reading]:
    """Run it and print the readings; returns those after the first quarter and at the end."""
    per_step, quarter = trajectories // steps, steps // 4
    pace, chat = Pace(turns=TURNS, fails_every=FAILS_EVERY), make_chat()
    with toy_server(pace) as server, tempfile.TemporaryDirectory() as folder:
        log_file = Path(folder) / "0.jsonl"
        run_step(range(3, 3 + concurrency), chat, server.url, log_file, concurrency)  # starts what starts once
        readings = [Reading.take(0, server)]
        print(HEADER, readings[0].row(), sep="\n", flush=True)
        with printed_progress(per_step * steps) as ends:
            for step in range(1, steps + 1):
                items = range((step - 1) * per_step, step * per_step)
                made = run_step(items, chat, server.url, log_file, concurrency)
                ends.update([str(t.stop_reason) for t in made if not t.masked])
                ends.update(count_errors(made))
                del made
                if step % quarter == 0:
                    readings.append(settled_reading(step * per_step, server, readings[0]))
                    print(readings[-1].row(), flush=True)
        return readings[1], readings[-1]


def measure(options: argparse.Namespace) -> Iterator[Result]:
    before, after = soak(options.trajectories, options.steps, options.concurrency)
    yield from held_results(options.trajectories, before, after)


def held_results(trajectories: int, before: Reading, after: Reading) -> Iterator[Result]:
    """What ``after`` holds beyond ``before``."""
    yield Result("sessions", f"{trajectories:,} trajectories with faults: sessions left open", after.sessions, "", 0)
    for name, old, new in (("worker", before.here, after.here), ("server", before.server, after.server)):
        threads, handles, memory = (
            getattr(new, field) - getattr(old, field) for field in ("threads", "handles", "memory_mib")
        )
        what = f"the same: threads and file handles more than after the first quarter, {name}"
        yield Result(f"{name}_handles", what, max(0, threads) + max(0, handles), "", 0)
        yield Result(f"{name}_memory", f"the same: memory gained, {name}", memory, "MiB", MOST_GROWTH_MIB)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Does anything grow over many short trajectories?")
    parser.add_argument("--trajectories", type=int, default=20_000)
    parser.add_argument("--steps", type=int, default=40, help="rollouts, four or more")
    parser.add_argument("--concurrency", type=int, default=64)
    return bench.run("soak", measure, parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
