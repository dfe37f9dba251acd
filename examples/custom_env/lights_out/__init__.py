"""Lights out: press lamps until all are dark. See `environment` for the rules."""

from __future__ import annotations

from importlib.metadata import version

from agentgym_rl.envs.registry import EnvSpec
from lights_out.client import LightsClient
from lights_out.environment import PUZZLES, Lights

SPEC = EnvSpec(
    name="lights",
    title="Lights out",
    environment=Lights,
    client=LightsClient,
    num_items=len(PUZZLES),
    default_port=36050,
    data_version=lambda: f"lights-out {version('lights-out')}",
    runs_inline=True,
    expert=lambda environment: environment.solution(),
    panel="lights_out.panel:panel",
)
