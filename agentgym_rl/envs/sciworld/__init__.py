"""SciWorld: experiments of school science in text. See `environment` for the rules, `simulator` for the Java part."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from agentgym_rl.envs.registry import EnvSpec, Isolation
from agentgym_rl.envs.sciworld.client import SciWorldClient
from agentgym_rl.envs.sciworld.environment import SciWorld, SciWorldStart, SciWorldStep
from agentgym_rl.envs.sciworld.items import NUM_ITEMS, PACKAGE_VERSION, package_folder
from agentgym_rl.envs.sciworld.simulator import java_command
from agentgym_rl.envs.wire import DIALECT_A
from agentgym_rl.errors import ConfigError


@dataclass(frozen=True)
class SciWorldSettings:
    """What may be chosen when SciWorld is served."""

    sessions_per_simulator: int = field(
        default=4, metadata={"help": "sessions that share a Java process: more take less memory and wait longer"}
    )
    expose_grader: bool = field(
        default=False, metadata={"help": "serve /goals, which tells the subgoals that make up the score"}
    )

    def __post_init__(self) -> None:
        if self.sessions_per_simulator < 1:
            raise ConfigError(f"sessions_per_simulator={self.sessions_per_simulator}: must be at least 1")


def _data_version() -> str:
    package_folder()
    java_command()
    return f"scienceworld {PACKAGE_VERSION}"


def _was_reset(handle: int, start: SciWorldStart) -> dict[str, Any]:
    return {
        "id": handle,
        "task_name": start.task_name,
        "var_num": start.var_num,
        "task_description": start.task_description,
        "observation": start.room,
        "reward": start.score,
        "score": start.score,
        "deleted": False,
        "done": start.done,
    }


def _stepped(step: SciWorldStep) -> dict[str, Any]:
    return {"observation": step.observation, "reward": step.reward, "score": step.score, "done": step.done}


def _step_visual(environment: SciWorld, step: SciWorldStep) -> dict[str, Any]:
    start = environment.start
    return _stepped(step) | {
        "info": {"task_name": start.task_name, "var_num": start.var_num, "task_description": start.task_description},
        "object_tree": environment.object_tree(),
        "inventory": environment.inventory(),
        "moves": step.moves,
    }


_QUERIES: Mapping[str, Callable[[SciWorld], Any]] = {
    "observation": lambda environment: environment.last_seen,
    "action_hint": SciWorld.action_hint,
    "detail": SciWorld.detail,
    "task_description": lambda environment: {"task_description": environment.start.task_description},
    "object_tree": lambda environment: {"object_tree": environment.object_tree()},
    "state": SciWorld.state,
}
_GRADER_QUERIES: Mapping[str, Callable[[SciWorld], Any]] = {"goals": lambda environment: {"goals": environment.goals()}}


def _configure(settings: SciWorldSettings) -> EnvSpec:
    together = settings.sessions_per_simulator
    return replace(
        _BASE,
        settings=settings,
        environment=functools.partial(SciWorld, together),
        queries={**_QUERIES, **(_GRADER_QUERIES if settings.expose_grader else {})},
        isolation=Isolation(sessions_per_child=together, reuse=True),
    )


_BASE = EnvSpec(
    name="sciworld",
    title="SciWorld",
    environment=SciWorld,
    client=SciWorldClient,
    num_items=NUM_ITEMS,
    default_port=36003,
    data_version=_data_version,
    wire=replace(
        DIALECT_A,
        starts_on_create=False,
        created=lambda handle, start: {"id": handle},
        was_reset=_was_reset,
        stepped=_stepped,
    ),
    step_views={"step_visual": _step_visual},
    settings=SciWorldSettings(),
    configure=_configure,
    expert=SciWorld.gold_actions,
    expert_success=0.9,  # the package's gold actions stop at a part of the score in some variations
    panel="agentgym_rl.envs.sciworld.panel:panel",
)
SPEC = _configure(SciWorldSettings())
