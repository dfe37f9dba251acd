"""Episodes for tests of what shows them: played in this process, or made up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from agentgym_rl.agent.actions import parse_action
from agentgym_rl.envs.registry import EnvSpec
from agentgym_rl.rollout.handler import RewardRule
from agentgym_rl.types import Item, Message, Role, StopReason, Trajectory, Turn
from agentgym_rl.viewer.episodes import text_turn, untokenized
from agentgym_rl.viewer.panel import Panel

OPENING = (Message(Role.USER, "Do the task."), Message(Role.ASSISTANT, "OK."))


def played(spec: EnvSpec, index: int, actions: Sequence[str], *, whole_turns: bool = False) -> Trajectory:
    """An episode of an environment in this process; ``whole_turns``: it finds the action in the turn itself."""
    environment = spec.environment()
    rule = RewardRule(spec.client.reward_is_cumulative, spec.client.succeeds_from(), spec.client.reward_scale)
    try:
        observation = environment.reset(index).observation
        answers: list[tuple[str, str, float, bool]] = []
        for action in actions:
            text = action if whole_turns or parse_action(action) else f"Thought: so\nAction: {action}"
            step = environment.step(action)
            answers.append((text, step.observation, rule.scale * step.reward, step.done))
    finally:
        environment.close()
    return made_up(spec.name, index, observation, answers, success_score=rule.scale * rule.success_score)


def failing_panel(trajectory: Trajectory) -> Panel:
    """A panel of somebody's that does not take this episode."""
    raise ValueError(f"no panel for {trajectory.item.item_id}")


def made_up(
    task: str,
    index: int,
    observation: str,
    answers: Sequence[tuple[str, str | None, float, bool]],
    *,
    success_score: float = 1.0,
    **changes: Any,
) -> Trajectory:
    """A trajectory of turns ``(text, observation, reward, done)``; ``changes``: fields that differ."""
    turns: list[Turn] = []
    messages = [*OPENING, Message(Role.USER, observation)]
    for text, answer, reward, done in answers:
        turns.append(text_turn(text, answer, reward, done=done, times=(0.2, 0.1)))
        messages.append(Message(Role.ASSISTANT, text))
        if answer is not None and not done:
            messages.append(Message(Role.USER, answer))
    score = sum(turn.reward for turn in turns)
    done = bool(turns) and turns[-1].done
    trajectory = untokenized(
        item=Item(task, index),
        messages=messages,
        turns=turns,
        success=score >= success_score,
        stop_reason=StopReason.DONE if done else StopReason.MAX_ROUNDS,
        max_rounds=max(1, len(turns)),
    )
    return replace(trajectory, **changes)
