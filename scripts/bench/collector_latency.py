"""Wall time of a rollout under heavy-tailed environment latencies, over the least possible; at most 1.15 is wanted.

32 trajectories of 8 turns; a step takes about 20 ms, one in twenty takes 1 s; a turn takes the engine a fixed time. The
least possible is the slowest single trajectory: its latencies plus its engine time. What a loop needs in which every
round waits for its slowest step is measured on the same draw.

``python scripts/bench/collector_latency.py [--seed N]``
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import bench
import numpy as np
from bench import Result
from toy_chat import TEXT, make_chat

from agentgym_rl.agent.chat import ChatTemplate
from agentgym_rl.client.base import EnvClient
from agentgym_rl.rollout.collector import RolloutRequest, RolloutSettings, TokenLimits, collect
from agentgym_rl.types import FinishReason, Generation, Item, SamplingParams, StepOutput

TRAJECTORIES, TURNS = 32, 8
ENGINE_S = 0.03
LARGEST_RATIO = 1.15


def draw_latencies(seed: int) -> np.ndarray:
    """Seconds of every step, ``[trajectories, turns]``."""
    rng = np.random.default_rng(seed)
    latencies = rng.uniform(0.01, 0.031, (TRAJECTORIES, TURNS))
    slow = rng.choice(latencies.size, round(0.05 * latencies.size), replace=False)
    latencies.flat[slow] = 1.0
    return latencies


class SleepingClient(EnvClient):
    """An environment without rules: a step takes the time that was drawn for it."""

    task = "bench"
    task_description = "Do anything."
    example_action = "go"

    def __init__(self, latencies: np.ndarray) -> None:
        self._latencies = latencies
        self.env_server_base = "none"

    def reset(self, idx: int) -> str:
        self._item, self._step = idx, 0
        return TEXT

    def observe(self) -> str:
        return TEXT

    def step(self, text: str) -> StepOutput:
        assert self._item is not None
        time.sleep(self._latencies[self._item, self._step])
        self._step += 1
        return StepOutput(TEXT, 0.0, self._step == TURNS)

    def close(self) -> None:
        """Nothing to close."""


class FixedEngine:
    """Answers any number of requests at once, each in `ENGINE_S`."""

    def __init__(self, chat: ChatTemplate) -> None:
        ids = chat.encode_answer("Action: go")
        self._generation = Generation(ids, (-0.5,) * len(ids), FinishReason.STOP, 0)

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams, *, trajectory_id: str) -> Generation:
        await asyncio.sleep(ENGINE_S)
        return self._generation

    def release(self, trajectory_id: str) -> None:
        """Nothing is kept."""


def collector_seconds(latencies: np.ndarray) -> float:
    chat = make_chat()
    limits = TokenLimits(max_prompt_length=10**4, max_response_length=10**5, max_tokens=100, max_model_len=10**6)
    settings = RolloutSettings(max_rounds=TURNS, limits=limits, sampling=SamplingParams(max_tokens=100))
    requests = [RolloutRequest(Item("bench", index), f"bench_{index}") for index in range(TRAJECTORIES)]
    rollout = collect(
        requests, FixedEngine(chat), make_client=lambda: SleepingClient(latencies), chat=chat, settings=settings
    )
    start = time.perf_counter()
    trajectories = asyncio.run(rollout)
    seconds = time.perf_counter() - start
    assert all(len(trajectory.turns) == TURNS for trajectory in trajectories)
    return seconds


def round_by_round_seconds(latencies: np.ndarray) -> float:
    start = time.perf_counter()
    with ThreadPoolExecutor(TRAJECTORIES) as executor:
        for turn in range(TURNS):
            time.sleep(ENGINE_S)
            list(executor.map(time.sleep, latencies[:, turn]))
    return time.perf_counter() - start


def measure(options: argparse.Namespace) -> Iterator[Result]:
    latencies = draw_latencies(options.seed)
    least = float(latencies.sum(axis=1).max()) + TURNS * ENGINE_S
    print(f"latencies: median {np.median(latencies) * 1e3:.1f} ms, {np.mean(latencies >= 1):.1%} at 1 s")
    print(f"slowest single trajectory plus its engine time: {least:.2f} s")
    yield Result(
        "collector",
        f"{TRAJECTORIES} trajectories of {TURNS} turns, 5% of steps at 1 s, over the slowest one alone",
        collector_seconds(latencies) / least,
        "x",
        LARGEST_RATIO,
    )
    yield Result("rounds", "the same, round by round", round_by_round_seconds(latencies) / least, "x")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Rollout time under heavy-tailed environment latencies")
    parser.add_argument("--seed", type=int, default=0)
    return bench.run("collector_latency", measure, parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
