"""Spreading a model, or copies of it, over ranks with FSDP2, read by rank 0 alone.

The other ranks begin with a skeleton on the meta device. Layer by layer they get rank 0's tensors and keep their shard,
so that the host of eight ranks holds one whole model, not eight.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from verl.utils import distributed


def shard_module(
    skeleton: nn.Module,
    source: nn.Module | None,
    *,
    layer_classes: tuple[str, ...],
    device: torch.device,
    dtype: torch.dtype,
    num_shards: int,
) -> None:
    """Give ``skeleton``, all of it on the meta device, the tensors of ``source`` and shard it over the ranks, in place.

    Every ``num_shards`` neighbours, which must divide the ranks, hold a copy of the model; gradients are averaged over
    all ranks. ``source`` is a module of the same structure on rank 0, None elsewhere. Modules whose class is named in
    ``layer_classes`` become units of their own. Matrix products run in ``dtype``, gradients are added in float32.
    """
    mesh = _mesh(device, num_shards)
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    filler = _Filler(source, device)
    for prefix, layer in _layers(skeleton, layer_classes):
        filler.fill(layer, prefix)
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    filler.fill(skeleton, "")
    fully_shard(skeleton, mesh=mesh, mp_policy=precision)


def _mesh(device: torch.device, num_shards: int) -> DeviceMesh:
    """All ranks in a line, or where there are copies in a row for each, which FSDP takes for hybrid sharding."""
    world_size = distributed.world_size()
    if num_shards == world_size:
        return init_device_mesh(device.type, (world_size,))
    return init_device_mesh(device.type, (world_size // num_shards, num_shards), mesh_dim_names=("copies", "shards"))


def _layers(module: nn.Module, classes: tuple[str, ...]) -> Iterator[tuple[str, nn.Module]]:
    yield from [(f"{name}.", layer) for name, layer in module.named_modules() if type(layer).__name__ in classes]


class _Filler:
    """Puts rank 0's tensors in the place of meta tensors; parameters that were one object stay one."""

    def __init__(self, source: nn.Module | None, device: torch.device) -> None:
        self._source = _tensors_by_name(source) if source is not None else None
        self._device = device
        self._filled: dict[int, nn.Parameter] = {}

    @torch.no_grad()
    def fill(self, module: nn.Module, prefix: str) -> None:
        """Fill what is still meta in ``module``, which the whole model knows by ``prefix``; collective."""
        for path, owner in module.named_modules():
            for name, parameter in list(owner.named_parameters(recurse=False)):
                if parameter.is_meta:
                    setattr(owner, name, self._parameter(_join(prefix, path, name), parameter))
            for name, buffer in list(owner.named_buffers(recurse=False)):
                if buffer.is_meta:
                    # Not assigned by name: that would make a buffer persistent that was not.
                    owner._buffers[name] = self._fetch(_join(prefix, path, name), buffer)

    def _parameter(self, name: str, meta: nn.Parameter) -> nn.Parameter:
        if id(meta) not in self._filled:
            self._filled[id(meta)] = nn.Parameter(self._fetch(name, meta), requires_grad=meta.requires_grad)
        return self._filled[id(meta)]

    def _fetch(self, name: str, meta: torch.Tensor) -> torch.Tensor:
        if self._source is None:
            tensor = torch.empty_like(meta, device=self._device, requires_grad=False)
        else:
            tensor = self._source[name].detach().to(self._device, copy=True).contiguous()
        if distributed.world_size() > 1:
            dist.broadcast(tensor, src=0)
        return tensor


def _tensors_by_name(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))


def _join(prefix: str, path: str, name: str) -> str:
    return f"{prefix}{path}.{name}" if path else f"{prefix}{name}"
