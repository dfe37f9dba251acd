"""One rank of a training run over gloo: updates an actor on its share of a fixed batch, then saves what came of it.

Usage: ``python -m support.rank_program RANK WORLD PORT MODEL_FOLDER OUT_FOLDER FSDP_SIZE [LOAD_FOLDER]``
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from support.batches import random_batch
from support.ranks import join, leave

from verl.config import ActorConfig, FSDPConfig, ModelConfig, OptimConfig
from verl.trainer.core_algos import BatchTotals
from verl.utils.balancing import balanced_partition
from verl.workers.actor import Actor

LENGTHS = [5, 17, 3, 40, 9, 22]


def main(rank: int, world_size: int, port: int, model: str, out: Path, fsdp_size: int, load: str | None) -> None:
    device = torch.device("cpu")
    join(rank, world_size, port)
    config = ActorConfig(
        ppo_micro_batch_size_per_gpu=2,
        optim=OptimConfig(lr=1e-3),
        loss_agg_mode="seq-mean-token-mean",
        fsdp_config=FSDPConfig(fsdp_size=fsdp_size),
    )
    actor = Actor(
        ModelConfig(path=model), config, device=device, temperature=1.0, total_updates=4, loss_norm_constant=1.0
    )
    if load:
        actor.load(Path(load))
    batch = random_batch(LENGTHS, seed=1 if load else 0)
    # The last rank of three or more gets nothing: it must still take part in every pass.
    shares = balanced_partition(LENGTHS, min(world_size, 2)) + [[]] * (world_size - 2)
    share, totals = batch.select(shares[rank]), BatchTotals.of(batch)
    share = share.replace(old_log_probs_T=actor.log_probs(share))
    metrics = actor.update([share, share], [totals, totals])
    weights = dict(actor.state_dict_items())
    actor.save(out / "actor")
    actor.export_huggingface(out / "huggingface")
    (out / f"metrics_{rank}.json").write_text(json.dumps(metrics))
    if rank == 0:
        torch.save(weights, out / "weights.pt")
    leave()


if __name__ == "__main__":
    main(
        int(sys.argv[1]),
        int(sys.argv[2]),
        int(sys.argv[3]),
        sys.argv[4],
        Path(sys.argv[5]),
        int(sys.argv[6]),
        (sys.argv[7:] or [None])[0],
    )
