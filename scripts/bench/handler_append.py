"""Cost of appending to a RolloutHandler at 32,000 tokens over that at 1,000; fails above 1.2.

``python scripts/bench/handler_append.py``
"""

from __future__ import annotations

import itertools
import sys
import time

from toy_chat import TEXT, make_chat

from agentgym_rl.agent.chat import ChatTemplate
from agentgym_rl.rollout.handler import RolloutHandler, RolloutRequest, TokenLimits
from agentgym_rl.types import FinishReason, Generation, Item, Message, Role, StepOutput

SIZES = (1_000, 32_000)
LARGEST_RATIO = 1.2
TURNS = 10
REPEATS = 60
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


def main() -> int:
    chat = make_chat()
    best = dict.fromkeys(SIZES, float("inf"))
    for _ in range(REPEATS):  # sizes take turns, so that a busy machine slows both
        for size in SIZES:
            best[size] = min(best[size], seconds_per_turn(chat, size))
    ratio = best[SIZES[1]] / best[SIZES[0]]
    for size, seconds in best.items():
        print(f"one turn appended at {size:>6} tokens: {seconds * 1e6:7.1f} us")
    print(f"ratio {ratio:.3f} (at most {LARGEST_RATIO})")
    return int(ratio > LARGEST_RATIO)


if __name__ == "__main__":
    sys.exit(main())
