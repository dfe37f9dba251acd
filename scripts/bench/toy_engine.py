"""An engine without a model, for benchmarks of everything around it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from agentgym_rl.agent.chat import ChatTemplate
from agentgym_rl.types import FinishReason, Generation, SamplingParams


class InstantEngine:
    """Answers every turn at the next turn of the event loop, always the same."""

    def __init__(self, chat: ChatTemplate, text: str = "Thought: I need a log.\nAction: get 1 oak log") -> None:
        ids = chat.encode_answer(text)
        self._generation = Generation(ids, (-0.5,) * len(ids), FinishReason.STOP, 0)

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams, *, trajectory_id: str) -> Generation:
        await asyncio.sleep(0)
        return self._generation

    def release(self, trajectory_id: str) -> None:
        """Nothing is kept."""
