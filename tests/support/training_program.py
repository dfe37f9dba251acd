"""One rank of several short trainings over gloo on the same data, each under other settings that must not matter.

Usage: ``python -m support.training_program RANK WORLD PORT MODEL_FOLDER OUT_FOLDER``
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from support.batches import random_batch
from support.ranks import join, leave

from verl.config import ActorConfig, ModelConfig, OptimConfig, RefConfig
from verl.protocol import DataProto
from verl.trainer.core_algos import BatchTotals
from verl.utils.balancing import balanced_partition
from verl.workers import packed_model
from verl.workers.actor import Actor
from verl.workers.reference import make_reference

LENGTHS = [5, 17, 3, 40, 22, 31, 9]
RELATED, IN_COMMON = (3, 4, 5), 18
"""The members of a group, and the number of their first tokens that are the same."""
UPDATES = 3
TEMPERATURE = 0.8


@dataclass(frozen=True)
class Training:
    """Settings of one training."""

    actor: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)


_FULL_KL = {"kl_loss_type": "full"}
_LORA = {"lora_rank": 4, "lora_alpha": 8.0}
_FROZEN = {"freeze": ["model.embed_tokens.*", "*.bias"]}
_BFLOAT16 = {"dtype": "bfloat16"}
_ULYSSES = {"ulysses_sequence_parallel_size": 2}
TRAININGS = {
    "micro_1": Training({"ppo_micro_batch_size_per_gpu": 1}),
    "micro_2": Training({"ppo_micro_batch_size_per_gpu": 2}),
    "micro_4": Training({"ppo_micro_batch_size_per_gpu": 4}),
    "packed": Training({"ppo_max_token_len_per_gpu": 50}),
    "all_at_once": Training({"ppo_max_token_len_per_gpu": 1000}),
    "ulysses": Training({"ppo_max_token_len_per_gpu": 50, **_ULYSSES}),
    "ulysses_recomputing": Training(
        {"ppo_micro_batch_size_per_gpu": 3, **_ULYSSES}, {"enable_gradient_checkpointing": True}
    ),
    "full_kl": Training({"ppo_max_token_len_per_gpu": 50, **_FULL_KL}),
    "full_kl_ulysses": Training({"ppo_micro_batch_size_per_gpu": 2, **_FULL_KL, **_ULYSSES}),
    "full_kl_lora": Training({"ppo_max_token_len_per_gpu": 50, **_FULL_KL}, _LORA),
    "lora": Training({"ppo_max_token_len_per_gpu": 50}, _LORA),
    "lora_ulysses": Training({"ppo_micro_batch_size_per_gpu": 2, **_ULYSSES}, _LORA),
    "frozen": Training({"ppo_max_token_len_per_gpu": 50}, _FROZEN),
    "frozen_ulysses": Training({"ppo_micro_batch_size_per_gpu": 2, **_ULYSSES}, _FROZEN),
    "bfloat16": Training({"ppo_max_token_len_per_gpu": 50}, _BFLOAT16),
    "bfloat16_lora": Training({"ppo_max_token_len_per_gpu": 50}, _BFLOAT16 | _LORA),
    "bfloat16_frozen": Training({"ppo_max_token_len_per_gpu": 50}, _BFLOAT16 | _FROZEN),
}


BROKEN = (1e30, math.inf)
"""Of these the first leaves the loss finite: its gradient is not."""


def fixed_batch() -> DataProto:
    """What all trainings train on."""
    batch = random_batch(LENGTHS)
    for member in RELATED:
        start = batch.offsets_B1[member]
        batch.input_ids_T[start : start + IN_COMMON] = torch.arange(IN_COMMON)
        batch.group_ids_B[member] = RELATED[0]
    generator = torch.Generator().manual_seed(5)
    return batch.replace(old_log_probs_T=-4 + torch.rand(batch.num_tokens, generator=generator))


def make_actor(training: Training, model: str) -> tuple[Actor, ModelConfig, ActorConfig]:
    model_config = ModelConfig(path=model, **training.model)
    actor_config = ActorConfig(
        optim=OptimConfig(lr=1e-3, lr_schedule="cosine", lr_warmup_steps=1),
        use_kl_loss=True,
        kl_loss_coef=0.1,
        entropy_coeff=0.01,
        loss_agg_mode="seq-mean-token-mean",
        **training.actor,
    )
    actor = Actor(
        model_config, actor_config, device="cpu", temperature=TEMPERATURE, total_updates=UPDATES, loss_norm_constant=1.0
    )
    return actor, model_config, actor_config


def train(training: Training, model: str, batch: DataProto, rank: int, world_size: int) -> dict[str, Any]:
    """Three updates; what each reported, and the weights and log-probs in the end."""
    actor, model_config, actor_config = make_actor(training, model)
    reference = make_reference(model_config, actor_config, RefConfig(), actor, temperature=TEMPERATURE)
    share = batch.select(balanced_partition(batch.lengths_B.tolist(), world_size)[rank])
    share, totals = share.replace(ref_log_probs_T=reference.log_probs(share)), BatchTotals.of(batch)
    with reference.states() if actor_config.has_full_kl_loss else nullcontext() as states:
        metrics = [actor.update([share], [totals], reference=states) for _ in range(UPDATES)]
        full_kl = actor.full_kl(share, states) if states else None
    base_change = reference.log_probs(share) - share.ref_log_probs_T
    return {
        "metrics": metrics,
        "weights": dict(actor.state_dict_items()),
        "log_probs": actor.log_probs(share),
        "full_kl": full_kl,
        "reference_moved": float(base_change.abs().max()),
    }


def train_past_a_broken_update(model: str, factor: float, rank: int, world_size: int) -> dict[str, Any]:
    """An update in which the last rank alone has advantages ``factor`` times as large, then a sound one."""
    actor, *_ = make_actor(TRAININGS["packed"], model)
    batch = fixed_batch()
    share = batch.select(balanced_partition(batch.lengths_B.tolist(), world_size)[rank])
    sound = share.replace(ref_log_probs_T=share.old_log_probs_T)
    broken = sound.replace(advantages_T=sound.advantages_T * (factor if rank == world_size - 1 else 1.0))
    skipped, weights = [], []
    for each in (broken, sound):
        skipped.append(actor.update([each], [BatchTotals.of(batch)])["actor/skipped_updates"])
        weights.append({name: tensor.clone() for name, tensor in actor.state_dict_items()})
    return {"skipped": skipped, "weights": weights}


def _refuse_to_read(*_: object) -> NoReturn:
    raise AssertionError("a rank other than 0 reads the model: eight of them would hold it eight times")


def main(rank: int, world_size: int, port: int, model: str, out: Path) -> None:
    join(rank, world_size, port)
    if rank > 0:
        packed_model.read_model = _refuse_to_read
    for name, training in TRAININGS.items():
        result = train(training, model, fixed_batch(), rank, world_size)
        torch.save(result, out / f"{name}_{rank}.pt")
    for factor in BROKEN:
        torch.save(train_past_a_broken_update(model, factor, rank, world_size), out / f"broken_{factor:g}_{rank}.pt")
    leave()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], Path(sys.argv[5]))
