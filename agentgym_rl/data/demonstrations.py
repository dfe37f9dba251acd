"""Demonstrations: an expert's episodes as conversations to train on."""

from __future__ import annotations

from collections.abc import Iterable

from agentgym_rl.agent.formats import TaskView
from agentgym_rl.agent.strategies import AgentChoice
from agentgym_rl.data.conversations import Conversation
from agentgym_rl.envs.base import Environment
from agentgym_rl.envs.registry import EnvSpec
from agentgym_rl.errors import ConfigError, EnvError
from agentgym_rl.types import Item, Message, Role


def demonstrate(items: Iterable[Item], spec: EnvSpec, agent: str) -> list[Conversation]:
    """One conversation per item, in which the environment's expert reaches the goal by ``agent``'s way of thinking.

    The opening is the one that a rollout has; its acknowledgement is not trained on. Raises `ConfigError` when the
    environment has no expert, and `EnvError` naming the item when the expert fails.
    """
    if spec.expert is None:
        raise ConfigError(f"task {spec.name!r} has no expert to demonstrate it")
    choice, environment = AgentChoice(agent), spec.environment()
    try:
        return [_demonstration(item, spec, environment, choice) for item in items]
    finally:
        environment.close()


def _demonstration(item: Item, spec: EnvSpec, environment: Environment, choice: AgentChoice) -> Conversation:
    assert spec.expert is not None
    agent = choice.make(TaskView.of(spec.client))
    opening = agent.opening(environment.reset(item.index).observation)
    messages = [Message(role, text.content) for role, text in opening]
    actions, done = spec.expert(environment), False
    preface = agent.preface(actions)
    if preface is not None:
        answer = agent.read(preface).answer
        messages += [Message(Role.ASSISTANT, preface), Message(Role.USER, answer.content if answer else "")]
    for action in actions:
        text = agent.write(action)
        agent.read(text)
        result = environment.step(action)
        messages += [Message(Role.ASSISTANT, text), Message(Role.USER, agent.observe(result.observation).content)]
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
