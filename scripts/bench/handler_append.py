"""Cost of appending to a RolloutHandler at 32,000 tokens over that at 1,000; at most 1.2 is wanted.

``python scripts/bench/handler_append.py``
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator, Sequence

import bench
from bench import Result
from toy_chat import TEXT, make_chat

from agentgym_rl.agent.chat import ChatTemplate
from agentgym_rl.rollout.handler import RolloutHandler, RolloutRequest, TokenLimits
from agentgym_rl.types import FinishReason, Generation, Item, Message, Role, StepOutput

SIZES = (1_000, 32_000)
LARGEST_RATIO = 1.2
TURNS = 10
_numbers = itertools.count()
"""Makes every observation a new one: ids of earlier texts are remembered."""
LIMITS = TokenLimits(max_prompt_length=1_000, max_response_length=10**6, max_tokens=10**6, max_model_len=10**6)


def make_handler(chat: ChatTemplate) -> RolloutHandler:
    """A record of an opening prompt."""
    request = RolloutRequest(Item("bench", 0), "bench_0")
    return RolloutHandler(request, (Message(Role.USER, TEXT),), chat, LIMITS, max_rounds=10**6)


def append_turn(handler: RolloutHandler, ids: tuple[int, ...], observation: str) -> None:
    handler.append_generation(Generation(ids, (-0.5,) * len(ids), FinishReason.LENGTH, 0))
    handler.append_step(StepOutput(observation, 0.1, False))
    handler.append_observation(observation)


def seconds_per_turn(chat: ChatTemplate, num_tokens: int) -> float:
    handler = make_handler(chat)
    append_turn(handler, (5,) * (num_tokens - handler.num_tokens), "")
    ids, observations = (5,) * 40, [f"{next(_numbers)} {TEXT * 4}" for _ in range(TURNS)]
    start = time.perf_counter()
    for observation in observations:
        append_turn(handler, ids, observation)
    return (time.perf_counter() - start) / TURNS


def measure(options: argparse.Namespace) -> Iterator[Result]:
    chat = make_chat()
    best = dict.fromkeys(SIZES, float("inf"))
    for _ in range(options.repeats):  # sizes take turns, so that a busy machine slows both
        for size in SIZES:
            best[size] = min(best[size], seconds_per_turn(chat, size))
    ratio = best[SIZES[1]] / best[SIZES[0]]
    what = f"appending a turn at {SIZES[1]:,} tokens over the same at {SIZES[0]:,}"
    yield Result("ratio", what, ratio, "x", LARGEST_RATIO, note=f"{best[SIZES[1]] * 1e6:.0f} us")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=60)
    return bench.run("handler_append", measure, parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
