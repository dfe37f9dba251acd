"""How many sessions the environment servers of a run have room for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentgym_rl.client.addresses import parse_addresses
from agentgym_rl.client.health import read_health


@dataclass(frozen=True, slots=True)
class Capacity:
    """Places for sessions, over all servers."""

    total: int
    """Of sessions spread evenly: so many times the places of the smallest server."""
    taken: int


def read_capacity(env_addr: str | Sequence[str]) -> Capacity | None:
    """What the servers say of themselves in ``/health``; None when one of them does not, as AgentGym's do not.

    Raises `EnvError` when a server does not answer.
    """
    healths = [read_health(address) for address in parse_addresses(env_addr)]
    places = [health.get("capacity") for health in healths]
    taken = [health.get("sessions") for health in healths]
    counts = [count for count in places + taken if isinstance(count, int)]
    if len(counts) < 2 * len(healths):
        return None
    return Capacity(total=min(counts[: len(healths)]) * len(healths), taken=sum(counts[len(healths) :]))
