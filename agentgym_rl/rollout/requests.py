"""Which trajectories a step or an evaluation asks for, and the seed of each."""

from __future__ import annotations

from collections.abc import Sequence

from agentgym_rl.rollout.handler import RolloutRequest
from agentgym_rl.seeds import derive_seed
from agentgym_rl.types import Item


def make_requests(
    items: Sequence[Item], *, n: int, purpose: str, seed: int, with_greedy: bool = False
) -> list[RolloutRequest]:
    """``n`` requests per item, item by item; ``purpose`` (such as ``step7``) tells groups of different steps apart.

    ``with_greedy`` adds one more to each item, that plays without chance.

    Sampling seeds follow from what is sampled and not from where or when: any number of workers draws the same, and so
    does a resumed run.
    """
    return [
        RolloutRequest(
            item=item,
            uid=f"{purpose}/{item.item_id}",
            sample_index=sample,
            seed=derive_seed("sample", seed, purpose, item.item_id, sample),
            greedy=sample == n,
        )
        for item in items
        for sample in range(n + with_greedy)
    ]
