"""One rank that saves while it trains, or loads; and writes down, whole, the state that a checkpoint should hold.

Usage: ``python -m support.checkpoint_program RANK WORLD PORT MODEL_FOLDER OUT_FOLDER [LOAD_FOLDER]``
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import torch
from support.batches import random_batch
from support.ranks import join, leave
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

from verl.config import ActorConfig, ModelConfig, OptimConfig
from verl.trainer.core_algos import BatchTotals
from verl.utils import distributed
from verl.utils.balancing import balanced_partition
from verl.workers.actor import Actor

LENGTHS = [5, 17, 3, 40]


def main(rank: int, world_size: int, port: int, model: str, out: Path, load: str | None) -> None:
    device = torch.device("cpu")
    join(rank, world_size, port)
    actor = Actor(
        ModelConfig(path=model),
        ActorConfig(optim=OptimConfig(lr=1e-2)),
        device=device,
        temperature=1.0,
        total_updates=8,
        loss_norm_constant=1.0,
    )
    if load:
        actor.load(Path(load))
        write_down(actor, out / "state.pt")
    else:
        train(actor, world_size, rank, updates=2)
        write_down(actor, out / "state.pt")
        save_while_training(actor, out, lambda: train(actor, world_size, rank, updates=2))
    leave()


def train(actor: Actor, world_size: int, rank: int, *, updates: int) -> None:
    batch = random_batch(LENGTHS)
    share = batch.select(balanced_partition(LENGTHS, world_size)[rank])
    for _ in range(updates):
        actor.update([share], [BatchTotals.of(batch)])


def save_while_training(actor: Actor, out: Path, go_on) -> None:
    """Updates, with collectives of their own, run before the copy is written and while it is."""
    write = actor.prepare_save(out / "actor", export_to=out / "huggingface")
    go_on()
    writing = threading.Thread(target=write)
    writing.start()
    go_on()
    writing.join()


def write_down(actor: Actor, path: Path) -> None:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = {
        "model": get_model_state_dict(actor.module, options=options),
        "optimizer": get_optimizer_state_dict(actor.module, actor._optimizer, options=options),
        "num_updates": actor.num_updates,
    }
    if distributed.rank() == 0:
        torch.save(state, path)


if __name__ == "__main__":
    rank, world_size, port, model, out, *load = sys.argv[1:]
    main(int(rank), int(world_size), int(port), model, Path(out), load[0] if load else None)
