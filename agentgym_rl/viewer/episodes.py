"""Rows of trajectory files as trajectories: those of this project, and bare conversations that other programs wrote."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from agentgym_rl.data.conversations import Conversation, parse_conversation
from agentgym_rl.errors import ConfigError
from agentgym_rl.rollout.log import from_row
from agentgym_rl.types import FinishReason, Item, Message, Role, StopReason, Trajectory, Turn


def read_episode(row: Any, where: str) -> Trajectory:
    """The trajectory in a row; of a bare conversation one without tokens, whose reward is that of its last turn.

    Raises `ConfigError` naming ``where`` for what is neither.
    """
    if isinstance(row, dict) and "turns" in row:
        return from_row(row, where)
    conversation = parse_conversation(row, where)
    score = _number(row.get("reward", row.get("score")))
    turns = _turns(conversation, score or 0.0)
    return untokenized(
        item=_item(conversation.item_id, row.get("task")),
        messages=conversation.messages,
        turns=turns,
        success=score is not None and score >= 1.0,
        stop_reason=StopReason.DONE,
    )


def _item(item_id: str, task: Any) -> Item:
    """Of what other programs wrote: the task that the row names, or else that of the item; any text is an item."""
    named, _, index = item_id.rpartition("_")
    if isinstance(task, str) and task not in ("", named):
        return Item(task, 0, game=item_id)
    if named and index.isascii() and index.isdecimal():
        return Item(named, int(index))
    return Item(named or item_id, 0, game=item_id)


def untokenized(
    *,
    item: Item,
    messages: Sequence[Message],
    turns: Sequence[Turn],
    success: bool,
    stop_reason: StopReason,
    uid: str = "",
    max_rounds: int = 0,
    duration_s: float = 0.0,
    error: str = "",
    extra: dict[str, Any] | None = None,
) -> Trajectory:
    """A trajectory of which texts and rewards are known, but no tokens."""
    none = np.zeros(0)
    return Trajectory(
        item=item,
        uid=uid or item.item_id,
        sample_index=0,
        attempt=1,
        messages=tuple(messages),
        turns=tuple(turns),
        input_ids=none.astype(np.int32),
        loss_mask=none.astype(np.int8),
        sequence_ids=none.astype(np.int32),
        rollout_log_probs=none.astype(np.float32),
        token_rewards=none.astype(np.float32),
        prompt_length=0,
        score=sum(turn.reward for turn in turns),
        success=success,
        stop_reason=stop_reason,
        policy_version=0,
        max_rounds=max_rounds,
        duration_s=duration_s,
        error=error,
        extra=extra or {},
    )


def text_turn(text: str, observation: str | None, reward: float, *, done: bool, times: tuple[float, float]) -> Turn:
    """A turn whose tokens are not known; ``times``: seconds of writing it, and of the environment's step."""
    return Turn(text, observation, reward, done, FinishReason.STOP, 0, *times)


def _turns(conversation: Conversation, score: float) -> list[Turn]:
    """Assistant messages that are not marked as untrained, each with the message that follows it."""
    messages, flags = conversation.messages, conversation.train_flags
    spoken = [i for i, m in enumerate(messages) if m.role == Role.ASSISTANT and flags[i] is not False]
    turns = []
    for index in spoken:
        answer = messages[index + 1].content if index + 1 < len(messages) else None
        is_last = index == spoken[-1]
        reward = score if is_last else 0.0
        turns.append(text_turn(messages[index].content, answer, reward, done=is_last, times=(0.0, 0.0)))
    return turns


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number else None


def decoded(line: bytes, where: str) -> Any:
    """A row's JSON, also Python's dialect of it, which knows NaN (read as null); raises `ConfigError`."""
    try:
        return json.loads(line, parse_constant=lambda name: None)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error
