"""Preference pairs as tokens and as conversations, for tests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agentgym_rl.data.conversations import Conversation
from agentgym_rl.data.pairs import Pair
from agentgym_rl.types import Message, Role
from verl.trainer.dpo import PairExample
from verl.trainer.examples import Example


@dataclass(frozen=True)
class TokenPair:
    """A prompt and two completions that differ in their first token."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]

    @property
    def example(self) -> PairExample:
        return PairExample(self._side(self.chosen), self._side(self.rejected))

    def _side(self, completion: list[int]) -> Example:
        mask = [0] * len(self.prompt) + [1] * len(completion)
        return Example(np.array([*self.prompt, *completion], np.int32), np.array(mask, np.int8))


def token_pairs(lengths: Sequence[tuple[int, int]], *, prompt_length: int = 5, vocab_size: int = 64) -> list[TokenPair]:
    """Random pairs with completions of these lengths."""
    dice = random.Random(3)

    def some(count: int) -> list[int]:
        return [dice.randrange(8, vocab_size) for _ in range(count)]

    return [
        TokenPair(some(prompt_length), [6, *some(chosen - 1)], [7, *some(rejected - 1)]) for chosen, rejected in lengths
    ]


def played(*turns: str, item_id: str = "textcraft_1", goal: str = "Craft a stick.") -> Conversation:
    """A conversation of answers with an observation after each but the last."""
    messages, flags = [Message(Role.USER, goal)], [None]
    for number, turn in enumerate(turns):
        if number:
            messages.append(Message(Role.USER, f"Seen {number}."))
            flags.append(None)
        messages.append(Message(Role.ASSISTANT, turn))
        flags.append(True)
    return Conversation(item_id, tuple(messages), tuple(flags))


def pair(chosen: Sequence[str], rejected: Sequence[str], *, item_id: str = "textcraft_1") -> Pair:
    """A pair of two such conversations, of scores 1 and 0."""
    return Pair(played(*chosen, item_id=item_id), played(*rejected, item_id=item_id), 1.0, 0.0)
