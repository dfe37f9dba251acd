"""Fits the trajectories that a run has in flight to the room that the environment servers have."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from agentgym_rl.client.capacity import read_capacity
from agentgym_rl.errors import ConfigError, EnvError
from verl.config import AgentGymConfig


def hold_to_capacity(config: AgentGymConfig, *, num_workers: int, at_once: int) -> None:
    """Lower ``config.max_concurrency``, in place, to a worker's share of the servers' places, and say so.

    A worker keeps its sessions from trajectory to trajectory. If those of one could fill the servers, another would
    wait for a place until its requests time out, which would look like faults of the environment. Of several tasks, the
    one with the fewest places decides, since all trajectories may happen to be of one task.
    ``at_once``: most trajectories that the run would have in flight. Raises `ConfigError` when the servers have fewer
    places than the run has workers or one does not answer, and warns when others hold too many of them.
    """
    for addresses in config.servers.values():
        _hold_to_capacity(config, addresses, num_workers=num_workers, at_once=at_once)


def _hold_to_capacity(config: AgentGymConfig, addresses: Sequence[str], *, num_workers: int, at_once: int) -> None:
    where = f"agentgym.env_addr={','.join(addresses)}"
    try:
        capacity = read_capacity(addresses)
    except EnvError as error:
        raise ConfigError(f"{where}: {error}") from error
    if capacity is None:
        return
    if capacity.total < num_workers:
        raise ConfigError(
            f"{where}: room for {capacity.total} sessions for {num_workers} workers, each of which needs at least one; "
            f"start the server with --max-sessions {max(at_once, num_workers)}"
        )
    wanted = min(at_once, num_workers * config.max_concurrency)
    if capacity.total < wanted:
        config.max_concurrency = capacity.total // num_workers
        _warn(
            f"{where}: room for {capacity.total} sessions, where {wanted} trajectories could run at once: "
            f"agentgym.max_concurrency is {config.max_concurrency} for each of {num_workers} workers; "
            f"start the server with --max-sessions {wanted} to run them all"
        )
    elif capacity.total - capacity.taken < wanted:
        _warn(
            f"{where}: others hold {capacity.taken} of its {capacity.total} sessions, which leaves fewer than the "
            f"{wanted} trajectories that could run at once; those of a killed run go after the server's --session-ttl"
        )


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)
