"""One rank of short trainings on given data over gloo, each under other settings that must not matter.

Usage: ``python -m support.data_training_program RANK WORLD PORT MODEL_FOLDER OUT_FOLDER``
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from support.batches import random_batch
from support.pairs import token_pairs
from support.ranks import join, leave

from verl.config import DPOAlgorithmConfig, ModelConfig, OptimConfig
from verl.protocol import DataProto
from verl.trainer.core_algos import BatchTotals
from verl.trainer.dpo import batch_of_pairs, share_pairs
from verl.utils.balancing import balanced_partition
from verl.workers.dpo import PreferenceTrainer
from verl.workers.packed_model import MicroBatchLimits
from verl.workers.sft import SupervisedTrainer

UPDATES = 3
OPTIM = OptimConfig(lr=1e-3)
PACKINGS = {"one_by_one": 1, "packed": 60}
"""Token budgets of a micro-batch."""
LOSSES = ("sigmoid", "kto_pair")
"""One that looks at a pair alone, and the one that looks at the whole mini-batch."""
LORA = {"lora_rank": 4}


def conversations() -> DataProto:
    """What supervised training reads."""
    return random_batch([5, 17, 3, 40, 9, 22, 31])


def pairs() -> DataProto:
    """What preference training reads: reference log-probs that are not the model's own."""
    batch = batch_of_pairs([p.example for p in token_pairs([(9, 4), (5, 11), (7, 7), (20, 3), (2, 16)])])
    generator = torch.Generator().manual_seed(5)
    return batch.replace(ref_log_probs_T=-5 + torch.rand(batch.num_tokens, generator=generator))


def train_supervised(model: str, max_tokens: int, rank: int, world: int, **options: Any) -> dict[str, Any]:
    """Three updates; what each reported, and the weights in the end."""
    trainer = SupervisedTrainer(
        ModelConfig(path=model, **options),
        OPTIM,
        MicroBatchLimits(max_tokens=max_tokens),
        device="cpu",
        total_updates=UPDATES,
    )
    batch = conversations()
    share = batch.select(balanced_partition(batch.lengths_B.tolist(), world)[rank])
    metrics = [trainer.update(share, BatchTotals.of(batch)) for _ in range(UPDATES)]
    return {"metrics": metrics, "weights": _weights(trainer)}


def train_preferences(model: str, max_tokens: int, loss: str, rank: int, world: int, **options: Any) -> dict[str, Any]:
    """The same on pairs."""
    trainer = PreferenceTrainer(
        ModelConfig(path=model, **options),
        OPTIM,
        DPOAlgorithmConfig(loss_type=loss, beta=0.2),
        device="cpu",
        total_updates=UPDATES,
        grad_clip=1.0,
        max_token_len=max_tokens,
    )
    batch = pairs()
    share = share_pairs(batch, world)[rank]
    metrics = [trainer.update(share, len(batch) // 2) for _ in range(UPDATES)]
    return {"metrics": metrics, "weights": _weights(trainer)}


def _weights(trainer: SupervisedTrainer | PreferenceTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.state_dict_items()}


def all_trainings(model: str, rank: int, world: int) -> Mapping[str, dict[str, Any]]:
    """Results by kind of training and packing."""
    results = {}
    for packing, max_tokens in PACKINGS.items():
        results[f"sft/{packing}"] = train_supervised(model, max_tokens, rank, world)
        for loss in LOSSES:
            results[f"{loss}/{packing}"] = train_preferences(model, max_tokens, loss, rank, world)
    results["sft_lora/packed"] = train_supervised(model, PACKINGS["packed"], rank, world, **LORA)
    results["dpo_lora/packed"] = train_preferences(model, PACKINGS["packed"], "sigmoid", rank, world, **LORA)
    return results


def main(rank: int, world: int, port: int, model: str, out: Path) -> None:
    join(rank, world, port)
    torch.manual_seed(0)
    results = all_trainings(model, rank, world)
    if rank == 0:
        torch.save(results, out / "results.pt")
    leave()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], Path(sys.argv[5]))
