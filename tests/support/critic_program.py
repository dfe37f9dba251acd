"""One rank of short trainings of a critic over gloo on the same data, each under other settings that must not matter.

Usage: ``python -m support.critic_program RANK WORLD PORT MODEL_FOLDER OUT_FOLDER``
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from support.batches import random_batch
from support.ranks import join, leave

from verl.config import CriticConfig, ModelConfig, OptimConfig
from verl.protocol import DataProto
from verl.trainer.core_algos import BatchTotals
from verl.utils.balancing import balanced_partition
from verl.workers.critic import Critic

LENGTHS = [5, 17, 3, 40, 9, 22, 31]
UPDATES = 3
TRAININGS: Mapping[str, tuple[Mapping[str, Any], int]] = {
    "packed": ({"ppo_max_token_len_per_gpu": 50}, 1),
    "one_by_one": ({"ppo_micro_batch_size_per_gpu": 1}, 1),
    "ulysses": ({"ppo_max_token_len_per_gpu": 50}, 2),
}
"""Options of the critic, and the ranks that share a micro-batch."""


def fixed_batch() -> DataProto:
    """What all trainings train on: returns that are neither values nor constant."""
    batch = random_batch(LENGTHS)
    generator = torch.Generator().manual_seed(5)
    returns_T, values_T = (torch.rand(batch.num_tokens, generator=generator) for _ in range(2))
    return batch.replace(returns_T=returns_T * batch.loss_mask_T, values_T=0.1 * values_T)


def make_critic(model: str, options: Mapping[str, Any], sequence_parallel_size: int = 1) -> Critic:
    """The same critic for every test."""
    return Critic(
        ModelConfig(path=model),
        CriticConfig(optim=OptimConfig(lr=1e-3), cliprange_value=0.5, **options),
        device="cpu",
        total_updates=UPDATES,
        loss_norm_constant=1.0,
        sequence_parallel_size=sequence_parallel_size,
    )


def train(critic: Critic, rank: int, world_size: int) -> dict[str, Any]:
    """Three updates; what each reported, and the weights and this rank's values in the end."""
    batch = fixed_batch()
    share = batch.select(balanced_partition(batch.lengths_B.tolist(), world_size)[rank])
    metrics = [critic.update([share], [BatchTotals.of(batch)]) for _ in range(UPDATES)]
    return {"metrics": metrics, "weights": dict(critic.state_dict_items()), "values": critic.values(share)}


def main(rank: int, world_size: int, port: int, model: str, out: Path) -> None:
    join(rank, world_size, port)
    for name, (options, sequence_parallel_size) in TRAININGS.items():
        critic = make_critic(model, options, sequence_parallel_size)
        torch.save(train(critic, rank, world_size), out / f"{name}_{rank}.pt")
    critic.save(out / "critic")
    leave()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], Path(sys.argv[5]))
