"""Trajectory files of one's own making, for tests of the viewer. Imports nothing of models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agentgym_rl.rollout.log import to_row
from agentgym_rl.types import FinishReason, Item, Message, Part, PartKind, Role, StopReason, Trajectory, Turn

INSTRUCTION = "Craft what is asked for.\nAnswer with:\nThought: <reason>\nAction: <one action>"


def make_trajectory(
    index: int = 0,
    *,
    task: str = "textcraft",
    step: int = 1,
    sample: int = 0,
    turns: Sequence[tuple[str, str, str]] = (("I look.", "inventory", "Inventory: nothing"),),
    score: float = 0.0,
    success: bool = False,
    stop_reason: StopReason = StopReason.MAX_ROUNDS,
    opening: str = "Goal: craft a stick.",
    **fields: Any,
) -> Trajectory:
    """A trajectory with turns ``(thought, action, observation)``; a message has a token for each of its words."""
    messages = [Message(Role.USER, INSTRUCTION), Message(Role.ASSISTANT, "OK."), Message(Role.USER, opening)]
    kinds: list[list[Part]] = [
        [Part(PartKind.INSTRUCTION, 0, len(INSTRUCTION))],
        [Part(PartKind.ACKNOWLEDGEMENT, 0, 3)],
        [Part(PartKind.OBSERVATION, 0, len(opening))],
    ]
    for number, (thought, action, observation) in enumerate(turns):
        start = len("Thought: ")
        acts = start + len(thought) + len("\nAction: ")
        messages.append(Message(Role.ASSISTANT, f"Thought: {thought}\nAction: {action}"))
        kinds.append(
            [Part(PartKind.THOUGHT, start, start + len(thought)), Part(PartKind.ACTION, acts, acts + len(action))]
        )
        if number + 1 < len(turns):
            messages.append(Message(Role.USER, observation))
            kinds.append([Part(PartKind.OBSERVATION, 0, len(observation))])
    lengths = [max(1, len(message.content.split())) for message in messages]
    sequence_ids = np.repeat(np.arange(len(messages)), lengths)
    mask = np.array([int(i > 2 and messages[i].role == Role.ASSISTANT) for i in sequence_ids], np.int8)
    rewards = np.zeros(len(mask), np.float32)
    if len(turns):
        rewards[np.flatnonzero(mask)[-1]] = score
    return Trajectory(
        **{
            "item": Item(task, index),
            "uid": f"step{step}/{task}_{index}",
            "sample_index": sample,
            "attempt": 1,
            "messages": tuple(messages),
            "turns": tuple(
                Turn(
                    f"Thought: {thought}\nAction: {action}",
                    observation,
                    score if number + 1 == len(turns) else 0.0,
                    number + 1 == len(turns),
                    FinishReason.STOP,
                    lengths[3 + 2 * number],
                    0.5,
                    0.01,
                )
                for number, (thought, action, observation) in enumerate(turns)
            ),
            "input_ids": np.arange(len(mask), dtype=np.int32) % 50,
            "loss_mask": mask,
            "sequence_ids": sequence_ids.astype(np.int32),
            "rollout_log_probs": np.where(mask, -0.25, 0.0).astype(np.float32),
            "token_rewards": rewards,
            "prompt_length": int(np.flatnonzero(mask)[0]) if mask.any() else len(mask),
            "score": score,
            "success": success,
            "stop_reason": stop_reason,
            "policy_version": step - 1,
            "max_rounds": 5,
            "duration_s": 1.5,
            "parts": tuple(tuple(parts) for parts in kinds),
            **fields,
        }
    )


def write_rows(path: Path, rows: Sequence[Trajectory | dict[str, Any]], *, mode: str = "w") -> Path:
    """Write trajectories, or rows as they are, as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(to_row(row) if isinstance(row, Trajectory) else row, ensure_ascii=False) for row in rows]
    with path.open(mode, encoding="utf-8") as file:
        file.write("".join(line + "\n" for line in lines))
    return path
