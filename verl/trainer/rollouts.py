"""The driver's side of a rollout: requests with their seeds, shared out over the workers."""

from __future__ import annotations

from collections.abc import Sequence

from tqdm import tqdm

from agentgym_rl.rollout.collector import RolloutRequest
from agentgym_rl.types import Item, Trajectory
from verl.single_controller.base import WorkerGroup
from verl.utils.balancing import restore_order
from verl.utils.seeding import derive_seed
from verl.workers.setup import RolloutOrder


def make_requests(items: Sequence[Item], *, n: int, purpose: str, seed: int) -> list[RolloutRequest]:
    """``n`` requests per item, item by item; ``purpose`` (such as ``step7``) tells groups of different steps apart.

    Sampling seeds follow from what is sampled and not from where or when: any number of workers draws the same, and so
    does a resumed run.
    """
    return [
        RolloutRequest(
            item=item,
            uid=f"{purpose}/{item.item_id}",
            sample_index=sample,
            seed=derive_seed("sample", seed, purpose, item.item_id, sample),
        )
        for item in items
        for sample in range(n)
    ]


def generate(workers: WorkerGroup, requests: Sequence[RolloutRequest], order: RolloutOrder) -> list[Trajectory]:
    """Trajectories in the requests' order, made by all workers, with a progress bar on a terminal."""
    shares = share_out(requests, workers.world_size)
    calls = [([requests[index] for index in share], order) for share in shares]
    with tqdm(total=len(requests), desc=order.log_name, unit=" trajectories", leave=False, disable=None) as bar:
        results = workers.call_each("generate", calls, on_progress=bar.update)
    joined = [trajectory for result in results for trajectory in result]
    return [joined[place] for place in restore_order(shares)]


def share_out(requests: Sequence[RolloutRequest], num_workers: int) -> list[list[int]]:
    """Indices of ``requests`` for each worker, rising.

    Groups stay together, so that an engine computes their common prompt once, and go round; the members of the last
    groups, which do not make a whole round, go round one by one, so that no worker has a group more than another.
    """
    groups: dict[str, list[int]] = {}
    for index, request in enumerate(requests):
        groups.setdefault(request.uid, []).append(index)
    members = list(groups.values())
    whole = len(members) // num_workers * num_workers
    shares: list[list[int]] = [[] for _ in range(num_workers)]
    for turn, group in enumerate(members[:whole]):
        shares[turn % num_workers] += group
    for turn, index in enumerate(index for group in members[whole:] for index in group):
        shares[turn % num_workers].append(index)
    return [sorted(share) for share in shares]
