"""New weights for a vLLM engine, by vLLM's own weight-transfer interface: what the owner sends, what the engine reads.

On CUDA, actor and engine share devices: vLLM's ``ipc`` backend maps a buffer of the rank on each device (CUDA IPC),
chunk by chunk. On the CPU, `SharedMemoryTransfer` maps a file that exists in memory alone.
Both run inside ``start_weight_update`` and ``finish_weight_update``, where vLLM rebuilds its layers one by one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace

import torch
from vllm.distributed.weight_transfer.base import (
    VLLMWeightSyncClient,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferUpdateInfo
from vllm.distributed.weight_transfer.packed_tensor import (
    DEFAULT_PACKED_BUFFER_SIZE_BYTES,
    PackedIpcChunk,
    packed_ipc_producer,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from verl.workers.rollout.engine_group import EngineGroup

SHARED_MEMORY = "shared_memory"
CUDA_IPC = "ipc"

_ALIGNMENT = 64


@dataclass
class SharedMemoryInitInfo(WeightTransferInitInfo):
    """Nothing has to be agreed on before the first update."""


@dataclass
class SharedMemoryUpdateInfo(WeightTransferUpdateInfo):
    """Where the tensors of an update lie; lists of equal length."""

    path: str
    num_bytes: int
    names: list[str] = field(default_factory=list)
    dtype_names: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)


class SharedMemoryTransfer(WeightTransferEngine[SharedMemoryInitInfo, SharedMemoryUpdateInfo]):
    """The engine's side on the CPU: one update holds all weights."""

    init_info_cls = SharedMemoryInitInfo
    update_info_cls = SharedMemoryUpdateInfo

    def init_transfer_engine(self, init_info: SharedMemoryInitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, object]) -> None:
        # The base class waits for an accelerator, which is not there.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: SharedMemoryUpdateInfo) -> None:
        """Load views of the mapped file. vLLM may keep them until the update is finished; the mapping stays as long."""
        data = torch.from_file(update_info.path, shared=False, size=update_info.num_bytes, dtype=torch.uint8)
        self.model.load_weights(  # type: ignore[operator]  # every model of vLLM has it
            (name, _view(data, dtype_name, shape, offset))
            for name, dtype_name, shape, offset in zip(
                update_info.names, update_info.dtype_names, update_info.shapes, update_info.offsets, strict=True
            )
        )

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        # An output layer that shares the embedding's weight gets none of its own, so vLLM leaves it alone: on a CPU it
        # would go on with the copy that it packed of the old weight.
        for layer in self.model.modules():
            if isinstance(layer, ParallelLMHead):
                layer.quant_method.process_weights_after_loading(layer)

    def shutdown(self) -> None:
        pass


def _view(data: torch.Tensor, dtype_name: str, shape: list[int], offset: int) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, dtype_name)
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    return data[offset : offset + num_bytes].view(dtype).view(shape)


WeightTransferEngineFactory.register_engine(SHARED_MEMORY, SharedMemoryTransfer)


def send_by_shared_memory(weights: Iterable[tuple[str, torch.Tensor]], client: VLLMWeightSyncClient) -> None:
    """Write all weights into a file in memory, then have the engine of ``client`` load them.

    The file has no name, so the kernel frees it with its last user, and the size of ``/dev/shm`` does not bound it.
    """
    descriptor = os.memfd_create("weights")
    try:
        info = SharedMemoryUpdateInfo(path=f"/proc/{os.getpid()}/fd/{descriptor}", num_bytes=0)
        for name, tensor in weights:
            _append(descriptor, info, name, tensor)
        client.start_weight_update()
        client.update_weights(asdict(info))
        client.finish_weight_update()
    finally:
        os.close(descriptor)


def _append(descriptor: int, info: SharedMemoryUpdateInfo, name: str, tensor: torch.Tensor) -> None:
    data = tensor.detach().cpu().contiguous()
    offset = -(-info.num_bytes // _ALIGNMENT) * _ALIGNMENT
    rest = data.view(-1).view(torch.uint8).numpy().data
    info.num_bytes = offset + len(rest)
    info.names.append(name)
    info.dtype_names.append(_name_of(data.dtype))
    info.shapes.append(list(data.shape))
    info.offsets.append(offset)
    while rest:  # One call writes 2 GiB at most.
        written = os.pwrite(descriptor, rest, info.num_bytes - len(rest))
        rest = rest[written:]


def send_by_cuda_ipc(
    weights: Iterable[tuple[str, torch.Tensor]],
    client: VLLMWeightSyncClient,
    *,
    device: torch.device,
    dtype: torch.dtype,
    largest_bytes: int,
    group: EngineGroup,
) -> None:
    """Have the engine of ``client`` read the weights from buffers of the group's ranks, chunk by chunk.

    They are sent as ``dtype``, the engine's own; ``largest_bytes`` of it is the largest weight, which must fit.
    The other ranks of the group call `share_by_cuda_ipc` meanwhile.
    """
    client.start_weight_update()
    for chunk in _shared_chunks(weights, device, dtype, largest_bytes, group):
        info = IPCWeightTransferUpdateInfo(
            names=chunk.names,
            dtype_names=chunk.dtype_names,
            shapes=chunk.shapes,
            ipc_handles=chunk.ipc_handle,
            tensor_sizes=chunk.tensor_sizes,
        )
        client.update_weights(asdict(info))
    client.finish_weight_update()
    _reclaim(group)


def share_by_cuda_ipc(
    weights: Iterable[tuple[str, torch.Tensor]], *, device: torch.device, dtype: torch.dtype, group: EngineGroup
) -> None:
    """Show this rank's copy of the weights to the part of its leader's engine that runs on ``device``."""
    for _ in _shared_chunks(weights, device, dtype, 0, group):
        pass
    _reclaim(group)


def _shared_chunks(
    weights: Iterable[tuple[str, torch.Tensor]],
    device: torch.device,
    dtype: torch.dtype,
    largest_bytes: int,
    group: EngineGroup,
) -> Iterator[PackedIpcChunk]:
    """The weights in a buffer on ``device``, with handles of all the group's buffers; collective.

    All ranks have the same weights and buffers of the same size, so that their chunks are the same too.
    """
    chunks = packed_ipc_producer(
        iterator=((name, tensor.detach().to(device, dtype)) for name, tensor in weights),
        gpu_uuid=str(torch.cuda.get_device_properties(device).uuid),
        post_iter_func=lambda item: item[1],
        buffer_size_bytes=max(DEFAULT_PACKED_BUFFER_SIZE_BYTES, *group.exchange(largest_bytes)),
    )
    for chunk in chunks:
        handles = {uuid: handle for each in group.exchange(chunk.ipc_handle) for uuid, handle in each.items()}
        yield replace(chunk, ipc_handle=handles)
        # The next chunk overwrites the buffers, which the engine has copied from when the leader comes here.
        group.wait()


def _reclaim(group: EngineGroup) -> None:
    """Free this rank's buffer once the engine maps it no more."""
    group.wait()
    torch.cuda.ipc_collect()


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
