"""Speed of rollouts, everything in one run.

* share of the time that the engine has turns to work on, while environments take heavy-tailed times over HTTP; the
  last tenth of the time, when trajectories run out, apart
* CPU time of the whole worker process per turn, with an engine that costs nothing and a server in another process
* tokenising and masking turn 50 over the same for turn 2
* time of a weight update into vLLM, by what it goes into

``python scripts/bench/rollout.py [--trajectories 192] [--sessions 512] [--turns 20]``
"""

from __future__ import annotations

import os

os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")  # it calls the end of its process an error

import argparse
import asyncio
import importlib.util
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bench
import torch
from bench import Result
from handler_append import append_turn, make_handler
from toy_chat import make_chat, make_tokenizer
from toy_engine import InstantEngine
from toy_server import Pace, ToyClient, ToyEnvironment, toy_server
from transformers import Qwen2Config, Qwen2ForCausalLM

from agentgym_rl.agent.chat import ChatTemplate
from agentgym_rl.client.base import EnvClient
from agentgym_rl.rollout.collector import RolloutRequest, RolloutSettings, TokenLimits, collect
from agentgym_rl.rollout.handler import RolloutHandler
from agentgym_rl.types import Item, SamplingParams, StepOutput, TokenGenerator, Trajectory
from verl.workers.rollout.engine import Engine
from verl.workers.rollout.hf_engine import HFEngine

LEAST_BUSY = 90.0
MOST_CPU_MS = 2.0
MOST_TURN_RATIO = 1.2
"""What "the same" may be on a machine that does other things as well."""
LIMITS = TokenLimits(max_prompt_length=10**4, max_response_length=10**5, max_tokens=24, max_model_len=10**6)
HEAVY_TAIL = Pace(turns=5, mean_s=0.2, max_s=4.0)
IN_FLIGHT = 64
SAMPLE_S = 0.02
EARLY_TURN, LATE_TURN = 2, 50
REPEATS = 60
UPDATES = 5
ANSWER = "Action: get 1 oak log " * 5
_numbers = itertools.count()


def roll_out(
    engine: TokenGenerator, chat: ChatTemplate, make_client: Callable[[], EnvClient], count: int, in_flight: int
) -> Coroutine[Any, Any, list[Trajectory]]:
    """A rollout of ``count`` trajectories, to be awaited."""
    return collect(
        [RolloutRequest(Item(ToyClient.task, index), f"item {index}", seed=index) for index in range(count)],
        engine,
        make_client=make_client,
        chat=chat,
        settings=RolloutSettings(
            max_rounds=10**3, limits=LIMITS, sampling=SamplingParams(max_tokens=1), max_concurrency=in_flight
        ),
    )


# ----------------------------------------------------------------------------------------------------- engine busy


class VerbatimClient(ToyClient):
    """Sends the whole text: a random model writes no action."""

    def step(self, text: str) -> StepOutput:
        self._step += 1
        return self._execute(text)


def tiny_model(vocab_size: int) -> Qwen2ForCausalLM:
    """A random float32 Qwen2 of about 0.4M parameters."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
    )
    return Qwen2ForCausalLM(config).float().eval()


@dataclass(frozen=True, slots=True)
class BusyTime:
    """A reading: seconds since the start of the rollout, and how many of them the engine was busy."""

    at_s: float
    busy_s: float


async def watched(
    rollout: Coroutine[Any, Any, list[Trajectory]], engine: Engine
) -> tuple[list[Trajectory], list[BusyTime]]:
    """The rollout's trajectories, and the engine's busy time read all along."""
    start, first, readings = time.perf_counter(), engine.usage(), [BusyTime(0.0, 0.0)]
    task = asyncio.ensure_future(rollout)
    while not task.done():
        await asyncio.wait([task], timeout=SAMPLE_S)
        readings.append(BusyTime(time.perf_counter() - start, (engine.usage() - first).busy_s))
    return await task, readings


def busy_results(trajectories: int) -> Iterator[Result]:
    chat = make_chat()
    engine = HFEngine(tiny_model(len(make_tokenizer())), max_num_seqs=IN_FLIGHT)
    try:
        with toy_server(HEAVY_TAIL) as server:
            rollout = roll_out(engine, chat, lambda: VerbatimClient(server.url), trajectories, IN_FLIGHT)
            made, readings = asyncio.run(watched(rollout, engine))
        usage = engine.usage()
    finally:
        engine.close()
    whole = readings[-1]
    bulk = max((r for r in readings if r.at_s <= 0.9 * whole.at_s), key=lambda r: r.at_s)
    tail_share = (whole.busy_s - bulk.busy_s) / (whole.at_s - bulk.at_s)
    steps_s = [turn.env_s for trajectory in made for turn in trajectory.turns]
    tail = f"steps of {statistics.median(steps_s):.2f} s in the median, {max(steps_s):.1f} s at most"
    what = f"hf engine busy, {trajectories} trajectories, heavy-tailed steps, first nine tenths of the time"
    yield Result("busy", what, 100 * bulk.busy_s / bulk.at_s, "%", LEAST_BUSY, at_least=True, note=tail)
    yield Result("busy_tail", "the same in the last tenth, when trajectories run out", 100 * tail_share, "%")
    yield Result("tokens", "the same: sampled tokens", usage.num_tokens / whole.at_s, "tokens/s")


# ------------------------------------------------------------------------------------------------ CPU time per turn


class LocalClient(ToyClient):
    """Plays in this process, without HTTP."""

    def __init__(self, pace: Pace) -> None:
        self.env_server_base = "this process"
        self._environment = ToyEnvironment(pace)

    def reset(self, idx: int) -> str:
        return self._environment.reset(idx).observation

    def observe(self) -> str:
        return self._environment.observation()

    def step(self, text: str) -> StepOutput:
        result = self._environment.step(text)
        return StepOutput(result.observation, result.reward, result.done)

    def close(self) -> None:
        """Nothing to close."""


def cpu_results(sessions: int, turns: int) -> Iterator[Result]:
    """Everything that the process does between the start and the end of a rollout counts: sessions are opened, reset
    and closed, observations tokenised, texts decoded."""
    pace = Pace(turns=turns)
    with toy_server(pace) as server:
        over_http = cpu_ms_per_turn(sessions, turns, lambda: ToyClient(server.url, timeout=120))
    what = f"{sessions} sessions of {turns} turns over HTTP: CPU time of the worker per turn"
    yield Result("cpu", what, over_http, "ms", MOST_CPU_MS)
    local = cpu_ms_per_turn(sessions, turns, lambda: LocalClient(pace))
    yield Result("cpu_local", "the same without HTTP: tokens, record, a thread per session", local, "ms")


def cpu_ms_per_turn(sessions: int, turns: int, make_client: Callable[[], EnvClient]) -> float:
    return 1e3 * cpu_seconds(sessions, turns, make_client) / (sessions * turns)


def cpu_seconds(sessions: int, turns: int, make_client: Callable[[], EnvClient]) -> float:
    """CPU time of this process for a rollout of so many concurrent sessions."""
    chat = make_chat()
    rollout = roll_out(InstantEngine(chat), chat, make_client, sessions, sessions)
    start_s = time.process_time()
    made = asyncio.run(rollout)
    used_s = time.process_time() - start_s
    num_turns = sum(len(trajectory.turns) for trajectory in made)
    if num_turns != sessions * turns:
        raise SystemExit(f"{num_turns} turns instead of {sessions * turns}: {made[0].error or made[0]}")
    return used_s


# ---------------------------------------------------------------------------------------------------- cost of a turn


def turn_cost_results() -> Iterator[Result]:
    """Tokenising, masking and recording a late turn against an early one, in turns so that noise hits both."""
    chat = make_chat()
    seconds: dict[int, list[float]] = {EARLY_TURN: [], LATE_TURN: []}
    for repeat in range(REPEATS):
        handlers = [(turn, handler_before(chat, turn)) for turn in seconds]
        seconds_of_turn(chat, handler_before(chat, EARLY_TURN))  # whoever comes first would pay for cold caches
        for turn, handler in handlers[:: 1 if repeat % 2 else -1]:
            seconds[turn].append(seconds_of_turn(chat, handler))
    early, late = (statistics.median(samples) for samples in seconds.values())
    what = f"tokenising, masking and recording turn {LATE_TURN} over turn {EARLY_TURN}"
    yield Result("turn", what, late / early, "x", MOST_TURN_RATIO, note=f"{late * 1e6:.0f} us of the CPU")


def handler_before(chat: ChatTemplate, turn: int) -> RolloutHandler:
    """A record whose next turn is number ``turn``."""
    handler = make_handler(chat)
    for _ in range(turn - 1):
        append_turn(handler, chat.encode_answer(ANSWER), "You see a door and a chest.\n" * 8)
    return handler


def seconds_of_turn(chat: ChatTemplate, handler: RolloutHandler) -> float:
    """CPU seconds of one more turn."""
    ids = chat.encode_answer(ANSWER)
    observation = f"You see door {next(_numbers)} and a chest.\n" * 8  # a new one: earlier ones are remembered
    start = time.thread_time()
    append_turn(handler, ids, observation)
    return time.thread_time() - start


# ------------------------------------------------------------------------------------------------------ weight update


def weight_update_results() -> Iterator[Result]:
    if importlib.util.find_spec("vllm") is None:
        print("weight update into vLLM: not measured, vllm is not installed")
        return
    from verl.config import ModelConfig, RolloutConfig
    from verl.workers.rollout.vllm_engine import VLLMEngine, VLLMPlace

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    place = VLLMPlace(device, torch.float32, num_threads=1, num_engines=1)
    model = tiny_model(len(make_tokenizer()))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(Path(folder))
        make_tokenizer().save_pretrained(Path(folder))
        engine = VLLMEngine(ModelConfig(path=folder), RolloutConfig(name="vllm"), place, max_model_len=512)
    try:
        times = [
            engine.load_weights(model.to(device).state_dict().items(), version) for version in range(1, 1 + UPDATES)
        ]
    finally:
        engine.close()
    count = sum(parameter.numel() for parameter in model.parameters())
    for part in ("gather_s", "transfer_s", "load_s"):
        value = statistics.median(getattr(time, part) for time in times)
        what = f"weight update into vLLM, {count / 1e6:.2f}M parameters: {part[:-2]}"
        yield Result(part[:-2], what, 1e3 * value, "ms")


def measure(options: argparse.Namespace) -> Iterator[Result]:
    yield from busy_results(options.trajectories)
    yield from cpu_results(options.sessions, options.turns)
    yield from turn_cost_results()
    yield from weight_update_results()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Speed of rollouts")
    parser.add_argument("--trajectories", type=int, default=192, help="for the share of time that the engine is busy")
    parser.add_argument("--sessions", type=int, default=512, help="for the CPU time per turn")
    parser.add_argument("--turns", type=int, default=20, help="for the CPU time per turn")
    return bench.run("rollout", measure, parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
