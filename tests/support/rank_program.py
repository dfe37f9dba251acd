"""One rank of a training run over gloo: updates an actor on its share of a fixed batch, then saves what came of it.

Usage: ``python -m support.rank_program RANK WORLD PORT MODEL_FOLDER OUT_FOLDER FSDP_SIZE [LOAD_FOLDER]``
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from support.batches import random_batch

from verl.config import ActorConfig, FSDPConfig, ModelConfig, OptimConfig
from verl.trainer.core_algos import BatchTotals
from verl.utils import distributed
from verl.utils.balancing import balanced_partition
from verl.workers.actor import Actor

LENGTHS = [5, 17, 3, 40, 9, 22]


def main(rank: int, world_size: int, port: int, model: str, out: Path, fsdp_size: int, load: str | None) -> None:
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if world_size > 1:
        store = dist.TCPStore("127.0.0.1", port, world_size, is_master=rank == 0)
        distributed.init_process_group(store, rank=rank, world_size=world_size, device=device)
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
    distributed.destroy_process_group()


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
