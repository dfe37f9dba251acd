"""BabyAI: following instructions in a world of rooms. See `environment` for the rules.

minigrid is imported when an environment is made: clients need none.
"""

from __future__ import annotations

import os
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from agentgym_rl.envs.babyai.client import BabyAIClient
from agentgym_rl.envs.base import Environment, ResetResult
from agentgym_rl.envs.registry import EnvSpec
from agentgym_rl.envs.wire import DIALECT_A
from agentgym_rl.errors import ConfigError

if TYPE_CHECKING:
    from agentgym_rl.envs.babyai.environment import BabyAI, BabyAIStep

# pygame, which minigrid imports, greets on standard output.
os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")

NUM_ITEMS = 1_000_000
"""40 levels of 25,000 seeds each; larger indices go on with further seeds."""


def _data_version() -> str:
    try:
        found = version("minigrid")
    except PackageNotFoundError:
        raise ConfigError("BabyAI needs minigrid: pip install minigrid==3.2.0 (or 'agentgym-rl[envs]')") from None
    # Seconds of imports, which otherwise the first session would wait for.
    import agentgym_rl.envs.babyai.environment  # noqa: F401

    return f"minigrid {found}"


def _environment() -> Environment:
    try:
        from agentgym_rl.envs.babyai.environment import BabyAI
    except ModuleNotFoundError:
        _data_version()  # says how to install what is missing
        raise
    return BabyAI()


def _expert(environment: BabyAI) -> list[str]:
    from agentgym_rl.envs.babyai.expert import plan

    return plan(environment)


def _created(handle: int, start: ResetResult | None) -> dict[str, Any]:
    return {"id": handle}


def _was_reset(handle: int, start: ResetResult) -> dict[str, Any]:
    return {"observation": start.observation, "reward": 0, "score": 0, "deleted": False, "done": False}


def _stepped(step: BabyAIStep) -> dict[str, Any]:
    return {"observation": step.observation, "reward": step.reward, "score": step.score, "done": step.done}


def _observation(environment: BabyAI) -> dict[str, Any]:
    return {
        "observation": environment.observation(),
        "reward": environment.reward,
        "score": environment.score,
        "done": environment.done,
        "deleted": False,
    }


SPEC = EnvSpec(
    name="babyai",
    title="BabyAI",
    environment=_environment,
    client=BabyAIClient,
    num_items=NUM_ITEMS,
    is_endless=True,
    default_port=36002,
    data_version=_data_version,
    wire=replace(DIALECT_A, starts_on_create=False, created=_created, was_reset=_was_reset, stepped=_stepped),
    queries={"observation": _observation},
    panel="agentgym_rl.envs.babyai.panel:panel",
    expert=_expert,
    expert_success=0.9,  # some worlds have no solution, see expert.py
)
