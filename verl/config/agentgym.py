"""``agentgym``: which environments are played, where, and how the agent thinks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from agentgym_rl.agent.strategies import AgentChoice
from agentgym_rl.client.addresses import addresses_by_task
from verl.config.rules import above, at_least, names_of


@dataclass
class AgentGymConfig:
    """Which environment is stepped, and where."""

    task_name: Any = "???"
    """A registered environment: ``textcraft`` or the user's own; of several, a list: ``[textcraft,babyai]``."""
    env_addr: Any = "???"
    """Base URL of the environment server; of several, a list, or with commas between: sessions are spread over them.

    With a list of tasks, a list with an entry for each task in turn, which may itself be a list."""
    timeout: float = 600.0
    """Seconds one trajectory may take (stop reason ``deadline``)."""
    request_timeout: float = 60.0
    """Seconds to wait for the answer to one HTTP request."""
    connect_timeout: float = 5.0
    """Seconds that one try to connect to a server may take."""
    max_retries: int = 10
    """Tries to reach the server at the start of a run, and for requests that cannot have run twice."""
    agent: str = "react"
    """The agent's way of thinking: ``react`` (thought, then action), ``act`` (action only), ``plan`` (a plan first,
    kept in view), ``reflect`` (after a failure, what to do differently, and another trial), or a class of your own
    as ``package.module:Class``."""
    action_format: str = "react"
    """How an action is written: ``react`` (a line ``Action: ...``), ``function_calling`` (in the model's own format
    where its chat template has one) or ``code_as_action`` (one call, as in Python; it is read, never run)."""
    max_trials: int = 3
    """Trials of an item by one sample, for agents that try again, such as ``reflect``."""
    max_concurrency: int = 256
    """Trajectories in flight per rollout worker, and so its threads and connections to the server."""

    def __post_init__(self) -> None:
        above("agentgym.timeout", self.timeout, 0)
        above("agentgym.request_timeout", self.request_timeout, 0)
        above("agentgym.connect_timeout", self.connect_timeout, 0)
        at_least("agentgym.max_retries", self.max_retries, 0)
        at_least("agentgym.max_concurrency", self.max_concurrency, 1)
        _ = self.agent_choice
        if self.task_name != "???" and self.env_addr not in ("???", ""):
            _ = self.servers

    @property
    def agent_choice(self) -> AgentChoice:
        """Way of thinking and form of actions; raises `ConfigError` when there is none of that name."""
        return AgentChoice(self.agent, self.action_format, self.max_trials)

    @property
    def tasks(self) -> tuple[str, ...]:
        """The names of all tasks."""
        return names_of("agentgym.task_name", self.task_name)

    @property
    def servers(self) -> dict[str, tuple[str, ...]]:
        """Addresses of each task's servers; none in a run that needs none."""
        if self.env_addr == "":
            return {}
        return addresses_by_task(self.tasks, self.env_addr, is_list=not isinstance(self.task_name, str))


@dataclass
class GenerationAgentGymConfig(AgentGymConfig):
    max_rounds: int = 10
    """Assistant turns per trajectory."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("agentgym.max_rounds", self.max_rounds, 1)


@dataclass
class ValidationAgentGymConfig(GenerationAgentGymConfig):
    """The environment that the model is validated in during training; nothing else needs one."""

    task_name: Any = ""
    """A registered environment, or a list of several; empty where nothing is validated."""
    env_addr: Any = ""
    """As in ``main_ppo``; empty where nothing is validated."""
