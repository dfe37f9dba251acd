"""Demonstrations: an expert's episodes as conversations to train on."""

from __future__ import annotations

from collections.abc import Iterable

from agentgym_rl.agent.strategies import Strategy, conversation_start, format_action, parse_strategy
from agentgym_rl.data.conversations import Conversation
from agentgym_rl.envs.base import Environment
from agentgym_rl.envs.registry import EnvSpec
from agentgym_rl.errors import ConfigError, EnvError
from agentgym_rl.types import Item, Message, Role


def demonstrate(items: Iterable[Item], spec: EnvSpec, strategy: Strategy | str) -> list[Conversation]:
    """One conversation per item, in which the environment's expert reaches the goal in ``strategy``'s form.

    The opening is the one that a rollout has; its acknowledgement is not trained on. Raises `ConfigError` when the
    environment has no expert, and `EnvError` naming the item when the expert fails.
    """
    if spec.expert is None:
        raise ConfigError(f"task {spec.name!r} has no expert to demonstrate it")
    opening = conversation_start(spec.client.task_description, parse_strategy(strategy))
    environment = spec.environment()
    try:
        return [_demonstration(item, spec, environment, opening, strategy) for item in items]
    finally:
        environment.close()


def _demonstration(
    item: Item, spec: EnvSpec, environment: Environment, opening: tuple[Message, ...], strategy: Strategy | str
) -> Conversation:
    assert spec.expert is not None
    messages = [*opening, Message(Role.USER, environment.reset(item.index).observation)]
    done = False
    for action in spec.expert(environment):
        messages.append(Message(Role.ASSISTANT, format_action(action, "", strategy)))
        result = environment.step(action)
        messages.append(Message(Role.USER, result.observation))
        done = result.done
        if done:
            break
    if not done:
        raise EnvError(f"{item.item_id}: the expert did not end the episode")
    # What the environment says after the end is read by no turn.
    messages.pop()
    flags = [
        None if message.role != Role.ASSISTANT else index >= len(opening) for index, message in enumerate(messages)
    ]
    return Conversation(item.item_id, tuple(messages), tuple(flags))
