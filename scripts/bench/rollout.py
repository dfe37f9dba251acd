"""Speed of rollouts, everything in one run: a table of what was measured and what is wanted; fails when one is missed.

* share of the time that the engine has turns to work on, while environments take heavy-tailed times over HTTP; the
  last tenth of the time, when trajectories run out, apart
* CPU time of the whole worker process per turn, with an engine that costs nothing and a server in another process
* tokenising and masking turn 50 over the same for turn 2
* time of a weight update into vLLM, by what it goes into

``python scripts/bench/rollout.py [--trajectories 192] [--sessions 512] [--turns 20]``
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported; a worker beside others has one as well
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
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

import torch
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

LEAST_BUSY = 0.9
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


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    name: str
    measured: str
    wanted: str = ""
    met: bool = True

    def __str__(self) -> str:
        verdict = "" if not self.wanted else "yes" if self.met else "NO"
        return f"{self.name:<66}{self.measured:>12}{self.wanted:>12}{verdict:>6}"


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


def busy_rows(trajectories: int) -> Iterator[Row]:
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
    yield Row(f"environment step, {len(steps_s)} of them: median, s", f"{statistics.median(steps_s):.3f}")
    yield Row("environment step: longest, s", f"{max(steps_s):.3f}")
    yield Row("engine: sampled tokens per second", f"{usage.num_tokens / whole.at_s:.0f}")
    share = bulk.busy_s / bulk.at_s
    yield Row("engine busy, first nine tenths of the time", f"{share:.1%}", f">= {LEAST_BUSY:.0%}", share >= LEAST_BUSY)
    yield Row("engine busy, last tenth", f"{tail_share:.1%}")


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


def cpu_rows(sessions: int, turns: int) -> Iterator[Row]:
    """Everything that the process does between the start and the end of a rollout counts: sessions are opened, reset
    and closed, observations tokenised, texts decoded."""
    pace = Pace(turns=turns)
    with toy_server(pace) as server:
        over_http = cpu_ms_per_turn(sessions, turns, lambda: ToyClient(server.url, timeout=120))
    name = f"{sessions} sessions of {turns} turns: CPU of the worker per turn, ms"
    yield Row(name, f"{over_http:.2f}", f"<= {MOST_CPU_MS:g}", over_http <= MOST_CPU_MS)
    local = cpu_ms_per_turn(sessions, turns, lambda: LocalClient(pace))
    yield Row("the same without HTTP: tokens, record, a thread per session", f"{local:.2f}")


def cpu_ms_per_turn(sessions: int, turns: int, make_client: Callable[[], EnvClient]) -> float:
    chat = make_chat()
    rollout = roll_out(InstantEngine(chat), chat, make_client, sessions, sessions)
    start_s = time.process_time()
    made = asyncio.run(rollout)
    used_ms = 1e3 * (time.process_time() - start_s)
    num_turns = sum(len(trajectory.turns) for trajectory in made)
    if num_turns != sessions * turns:
        raise SystemExit(f"{num_turns} turns instead of {sessions * turns}: {made[0].error or made[0]}")
    return used_ms / num_turns


# ---------------------------------------------------------------------------------------------------- cost of a turn


def turn_cost_rows() -> Iterator[Row]:
    """Tokenising, masking and recording a late turn against an early one, in turns so that noise hits both."""
    chat = make_chat()
    seconds: dict[int, list[float]] = {EARLY_TURN: [], LATE_TURN: []}
    for repeat in range(REPEATS):
        handlers = [(turn, handler_before(chat, turn)) for turn in seconds]
        seconds_of_turn(chat, handler_before(chat, EARLY_TURN))  # whoever comes first would pay for cold caches
        for turn, handler in handlers[:: 1 if repeat % 2 else -1]:
            seconds[turn].append(seconds_of_turn(chat, handler))
    early, late = (statistics.median(samples) for samples in seconds.values())
    ratio = late / early
    yield Row(f"turn {EARLY_TURN}: tokenise, mask and record, us of CPU", f"{early * 1e6:.0f}")
    name = f"turn {LATE_TURN} over turn {EARLY_TURN}"
    yield Row(name, f"{ratio:.2f}", f"<= {MOST_TURN_RATIO:g}", ratio <= MOST_TURN_RATIO)


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


def weight_update_rows() -> Iterator[Row]:
    if importlib.util.find_spec("vllm") is None:
        yield Row("weight update into vLLM", "not measured: vllm is not installed")
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
        yield Row(f"weight update into vLLM, {count / 1e6:.2f}M parameters: {part[:-2]}, ms", f"{1e3 * value:.1f}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Speed of rollouts")
    parser.add_argument("--trajectories", type=int, default=192, help="for the share of time that the engine is busy")
    parser.add_argument("--sessions", type=int, default=512, help="for the CPU time per turn")
    parser.add_argument("--turns", type=int, default=20, help="for the CPU time per turn")
    options = parser.parse_args(arguments)
    parts = (
        busy_rows(options.trajectories),
        cpu_rows(options.sessions, options.turns),
        turn_cost_rows(),
        weight_update_rows(),
    )
    print(f"{'what':<66}{'measured':>12}{'wanted':>12}{'met':>6}")
    all_met = True
    for part in parts:
        for row in part:
            print(row, flush=True)
            all_met &= row.met
    return int(not all_met)


if __name__ == "__main__":
    sys.exit(main())
