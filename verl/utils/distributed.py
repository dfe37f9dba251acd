"""Process groups and the few collectives that training needs; without a group, a world of one."""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist


def init_process_group(store: dist.Store, *, rank: int, world_size: int, device: torch.device) -> None:
    """Join the group that meets at ``store``; blocks until all ``world_size`` ranks are there.

    Collectives take CPU tensors over gloo and CUDA ones over nccl.
    """
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)


def init_single_process_group(device: torch.device) -> None:
    """A group of this process alone, unless there is a group already; opens no port."""
    if not dist.is_initialized():
        init_process_group(dist.HashStore(), rank=0, world_size=1, device=device)


_background: list[dist.ProcessGroup] = []
# A rank may wait for all the others to write their share of a checkpoint to slow storage.
_BACKGROUND_TIMEOUT = datetime.timedelta(hours=2)


def background_group() -> dist.ProcessGroup:
    """A gloo group of all ranks for a second thread, whose collectives must not mix with training's.

    All ranks must ask for it the first time together.
    """
    if not _background:
        _background.append(dist.new_group(backend="gloo", timeout=_BACKGROUND_TIMEOUT))
    return _background[0]


_neighbours: dict[int, dist.ProcessGroup] = {}


def neighbours(size: int) -> dist.ProcessGroup:
    """The group of this rank among those of ``size`` consecutive ranks; `size` must divide the number of ranks.

    All ranks must ask for it the first time together. Raises `ValueError` for a size that does not fit.
    """
    if world_size() % size:
        raise ValueError(f"{world_size()} ranks do not make groups of {size}")
    if size not in _neighbours:
        own, _ = dist.new_subgroups(size)
        _neighbours[size] = own
    return _neighbours[size]


def destroy_process_group() -> None:
    """Leave the group, if there is one."""
    _neighbours.clear()
    _background.clear()
    if dist.is_initialized():
        dist.destroy_process_group()


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def barrier() -> None:
    """Wait for all ranks."""
    if world_size() > 1:
        dist.barrier()


def max_over_ranks(value: int) -> int:
    """The largest ``value`` of all ranks."""
    return int(all_reduce_max_(torch.tensor(value)))


def all_reduce_sum_(tensor: torch.Tensor) -> torch.Tensor:
    """Add ``tensor`` over all ranks, in place; returns it."""
    if world_size() > 1:
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
    return tensor


def all_reduce_max_(tensor: torch.Tensor) -> torch.Tensor:
    """Take the largest of each element over all ranks, in place; returns it."""
    if world_size() > 1:
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor
