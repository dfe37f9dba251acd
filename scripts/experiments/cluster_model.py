"""What the parts of a training step cost: devices and networks as published, assumptions beside them, and formulas.

All sizes are bytes, all times seconds, all rates per second, unless a name says otherwise.
Letters: ``P`` weights of a model, ``D`` devices, ``L H A K V`` as in `verl.models.shapes`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from verl.models.shapes import ModelShape
from verl.utils.flops import ModelSize, peak_flops

BF16, FLOAT32 = 2, 4
_GIB = 2**30
_ACTIVATION_BYTES = 4 * _GIB
"""What an engine takes beside weights and cache."""
_ADAM_ACCESSES = 7
"""float32 numbers that an optimizer step moves per weight: weight, gradient and two moments in, all but the gradient
out."""
_WEIGHT_COPIES = 4
"""Passes over 16-bit weights in device memory while an engine gets them: into the buffer that is shared, out of it
into the engine's own, a read and a write each."""
_TENSORS_PER_LAYER = 12
"""Weight tensors, which are gathered one by one: 7 matrices, 2 norms, 3 biases."""


class NoRoom(ValueError):
    """Memory does not suffice."""


@dataclass(frozen=True)
class Device:
    """An accelerator's published figures; links count one direction."""

    name: str
    peak_flops: float
    """Dense bfloat16."""
    memory_bytes: float
    memory_bandwidth: float
    link_bandwidth: float
    """To the other devices of its machine."""
    host_bandwidth: float
    """To main memory."""


def _gpu(name: str, *, memory_gb: float, memory_tb_s: float, nvlink_gb_s: float, pcie_gb_s: float) -> Device:
    """``nvlink_gb_s`` as data sheets give it, both directions together."""
    peak = peak_flops(name)
    assert peak is not None
    return Device(name, peak, memory_gb * 1e9, memory_tb_s * 1e12, nvlink_gb_s / 2 * 1e9, pcie_gb_s * 1e9)


DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        _gpu("A100", memory_gb=80, memory_tb_s=2.039, nvlink_gb_s=600, pcie_gb_s=32),
        _gpu("H100", memory_gb=80, memory_tb_s=3.35, nvlink_gb_s=900, pcie_gb_s=64),
        _gpu("H200", memory_gb=141, memory_tb_s=4.8, nvlink_gb_s=900, pcie_gb_s=64),
    )
}
"""NVIDIA's data sheets of the SXM modules (A100 80GB, H100, H200): memory, its bandwidth, NVLink of generation 3 and 4,
PCIe x16 of generation 4 and 5. Nothing of this was measured here."""

NETWORKS: Mapping[str, float] = {"8x400G": 400e9, "8x200G": 200e9, "1x100G": 12.5e9}
"""Bytes per second that leave a machine of 8 devices: NICs x their rate. A DGX H100 has 8 NICs of 400 Gb/s for its
GPUs, a DGX A100 8 of 200 Gb/s (NVIDIA's user guides); the last is a machine with ordinary Ethernet."""


@dataclass(frozen=True)
class Assumptions:
    """What no data sheet tells. Shares are of published peaks; each is varied by 2 in the sensitivity table."""

    training_share: float = 0.45
    """Of peak FLOP/s, in training passes apart from attention; recomputed activations count as work."""
    attention_share: float = 0.35
    """Of peak FLOP/s, in attention of training passes: of FlashAttention-2 on an H100 (Shah et al. 2024,
    https://arxiv.org/abs/2407.08608)."""
    engine_share: float = 0.5
    """Of peak FLOP/s, in the engine."""
    memory_share: float = 0.7
    """Of memory bandwidth."""
    link_share: float = 0.75
    """Of the bandwidth of links and networks."""
    host_share: float = 0.6
    """Of the bandwidth to main memory."""
    collective_s: float = 30e-6
    """Of one collective operation, before any byte."""
    hop_s: float = 3e-6
    """Of each device that a ring passes."""
    engine_iteration_s: float = 3e-3
    """Of an iteration of the engine: scheduler, launches, sampling."""
    engine_row_s: float = 20e-6
    """Of each sequence in an iteration."""
    collector_turn_s: float = 1.4e-3
    """CPU time of a worker's collector per turn; measured here by ``scripts/bench/rollout.py``."""
    pass_s: float = 0.03
    """Of a micro-batch's forward pass, of the backward pass as well: launches that computing does not hide."""
    sequence_s: float = 0.0
    """Of each sequence in such a pass."""
    update_s: float = 0.02
    """Of an optimizer step, beside moving the optimizer's state."""
    driver_token_s: float = 1e-6
    """Of each token in the driver, which is one process: batch, shares, advantages, logs."""
    driver_s: float = 0.2
    """Of a step in the driver: calls to the workers."""
    tensor_s: float = 1e-3
    """Of each weight tensor that is handed to the engine."""
    wake_s: float = 0.5
    """Of putting the engine to sleep and waking it, beside copying weights."""
    disk_bandwidth: float = 2e9
    """To storage, of the whole cluster."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value >= 0 or (field.name.endswith("_share") and not 0 < value <= 1):
                wanted = "in (0, 1]" if field.name.endswith("_share") else "at least 0"
                raise ValueError(f"{field.name}={value!r}: must be {wanted}")

    def scaled(self, name: str, factor: float) -> Assumptions:
        """With one of them changed; a share is at most 1."""
        value = getattr(self, name) * factor
        return replace(self, **{name: min(value, 1.0) if name.endswith("_share") else value})


@dataclass(frozen=True)
class Cluster:
    """Devices, and what joins them."""

    device: Device
    num_devices: int
    devices_per_node: int = 8
    node_bandwidth: float = NETWORKS["8x400G"]
    """That leaves a machine, in one direction."""
    tensor_parallel: int = 1
    """Devices of one engine."""
    fsdp_size: int = -1
    """Devices that hold one copy of the model; -1: all."""

    def __post_init__(self) -> None:
        for name in ("tensor_parallel", "num_shards"):
            size = getattr(self, name)
            if self.num_devices < 1 or size < 1 or self.num_devices % size:
                raise ValueError(f"num_devices={self.num_devices}, {name}={size}: the first must be a multiple")

    @property
    def num_shards(self) -> int:
        """Of a copy of the model."""
        return self.num_devices if self.fsdp_size == -1 else self.fsdp_size

    @property
    def num_engines(self) -> int:
        return self.num_devices // self.tensor_parallel

    @property
    def num_nodes(self) -> int:
        return -(-self.num_devices // self.devices_per_node)

    def ring_bandwidth(self, num_devices: int) -> float:
        """That a device gets in a ring over so many neighbours: NVLink's, or where it leaves machines their network's,
        since as many rings run as there are NICs."""
        link = self.device.link_bandwidth
        return link if num_devices <= self.devices_per_node else min(link, self.node_bandwidth)

    @property
    def copies_bandwidth(self) -> float:
        """That a device gets in a ring over the holders of the same shard, while its neighbours have such rings, too:
        their part of the machine's network, since the next holder is on another machine unless several copies fit."""
        link = self.device.link_bandwidth
        per_node = min(self.num_shards, self.devices_per_node)
        return link if self.num_nodes == 1 else min(link, self.node_bandwidth / per_node)


@dataclass(frozen=True)
class Design:
    """Which of the framework's means are in use."""

    one_by_one: bool = True
    """Workers take trajectories as they have room; otherwise each gets its part at the start."""
    prefix_reuse: bool = True
    """A turn computes only what is new, and a group's prompt once; otherwise every turn computes its whole prompt."""
    packing: bool = True
    """Micro-batches are packed by a token budget; otherwise rows are padded to the longest of the step."""
    prefix_sharing: bool = True
    """Training computes what a group begins with once."""
    sleep: bool = True
    """The engine gives its memory up while training runs; otherwise its cache gets what training leaves."""


def model_size(shape: ModelShape) -> ModelSize:
    """What passes through a model of this shape cost; weights of matrices only."""
    hidden, attention, kv = shape.hidden_size, shape.attention_width, shape.kv_width
    matrices = 2 * hidden * (attention + kv) + 3 * hidden * shape.intermediate_size
    return ModelSize(
        num_body_weights=shape.num_layers * matrices,
        num_head_weights=shape.vocab_size * hidden,
        num_layers=shape.num_layers,
        attention_width=attention,
        trained_share=1.0,
    )


# ------------------------------------------------------------------------------------------------------------ engine


@dataclass(frozen=True)
class EngineCost:
    """What an iteration of one engine costs: ``fixed + row x rows + max(operations, bytes) + communication``."""

    fixed_s: float
    row_s: float
    token_flops: float
    """Through the body, per token."""
    pair_flops: float
    """Of attention, per token and token that it looks at."""
    head_flops: float
    """Of the output layer, per row."""
    flops: float
    """That the engine does per second."""
    weight_bytes: float
    """Read once per iteration."""
    cache_bytes: float
    """Keys and values of a token, over all devices of the engine."""
    bandwidth: float
    communication_s: float
    """Per iteration, between the devices of the engine."""
    communication_token_s: float
    cache_tokens: float
    """That fit the engine's memory."""

    @classmethod
    def of(cls, shape: ModelShape, cluster: Cluster, assumed: Assumptions, *, cache_tokens: float) -> EngineCost:
        """An engine that holds 16-bit weights and cache on ``tensor_parallel`` devices.

        Tensor parallelism adds two all-reduces per layer of ``H`` numbers a token (Shoeybi et al. 2019,
        https://arxiv.org/abs/1909.08053), each of which moves ``2 (t-1)/t`` of them over the links.
        """
        size, parallel, device = model_size(shape), cluster.tensor_parallel, cluster.device
        reduces, moved = 2 * shape.num_layers, 2 * (parallel - 1) / parallel * shape.hidden_size * BF16
        return cls(
            fixed_s=assumed.engine_iteration_s,
            row_s=assumed.engine_row_s,
            token_flops=2.0 * size.num_body_weights,
            pair_flops=4.0 * size.num_layers * size.attention_width,
            head_flops=2.0 * size.num_head_weights,
            flops=device.peak_flops * assumed.engine_share * parallel,
            weight_bytes=float(BF16 * (size.num_body_weights + size.num_head_weights)),
            cache_bytes=2.0 * shape.num_layers * shape.kv_width * BF16,
            bandwidth=device.memory_bandwidth * assumed.memory_share * parallel,
            communication_s=reduces * assumed.collective_s if parallel > 1 else 0.0,
            communication_token_s=reduces * moved / (device.link_bandwidth * assumed.link_share),
            cache_tokens=cache_tokens,
        )

    def iteration_s(self, tokens: float, rows: int, pairs: float, context: float) -> float:
        """One iteration over ``tokens`` new tokens that samples in ``rows`` sequences; ``pairs`` counts what the new
        tokens look at, ``context`` the cached tokens that are read."""
        operations = self.operations(tokens, rows, pairs)
        moved = self.weight_bytes + context * self.cache_bytes
        communication = self.communication_s + tokens * self.communication_token_s
        return self.fixed_s + self.row_s * rows + max(operations / self.flops, moved / self.bandwidth) + communication

    def operations(self, tokens: float, rows: float, pairs: float) -> float:
        return tokens * self.token_flops + pairs * self.pair_flops + rows * self.head_flops

    def decode_ends(self, rows: int, context: float, steps: int) -> np.ndarray:
        """When each of ``steps`` iterations ends in which ``rows`` sequences get a token each, counted from their
        start; ``context`` is read in the first, and grows by ``rows``."""
        contexts = context + rows * np.arange(steps, dtype=float)
        operations = rows * (self.token_flops + self.head_flops) + contexts * self.pair_flops
        moved = self.weight_bytes + contexts * self.cache_bytes
        fixed = self.fixed_s + self.row_s * rows + self.communication_s + rows * self.communication_token_s
        return (fixed + np.maximum(operations / self.flops, moved / self.bandwidth)).cumsum()


def cache_tokens(
    shape: ModelShape, cluster: Cluster, design: Design, *, memory_share: float, training_bytes: float
) -> float:
    """Tokens whose keys and values fit an engine: ``memory_share`` of its devices' memory less weights and activations.

    Without sleep, what training holds on a device, ``training_bytes``, is not there for it. Raises `NoRoom` where no
    memory is left.
    """
    device = cluster.device
    share = device.memory_bytes * memory_share
    if not design.sleep:
        share = min(share, device.memory_bytes - training_bytes)
    left = (share - _ACTIVATION_BYTES) * cluster.tensor_parallel - BF16 * shape.num_weights
    if left <= 0:
        raise NoRoom(
            f"{shape.num_weights / 1e9:.1f}B weights on {cluster.tensor_parallel} x {device.name}: no memory is left "
            f"for the engine's cache ({'beside what training holds' if not design.sleep else 'even alone'})"
        )
    return left / (2.0 * shape.num_layers * shape.kv_width * BF16)


# ---------------------------------------------------------------------------------------------------------- training


@dataclass(frozen=True)
class Links:
    """Collective operations of devices in a ring."""

    num_devices: int
    bandwidth: float
    fixed_s: float
    hop_s: float

    @classmethod
    def of_shards(cls, cluster: Cluster, assumed: Assumptions) -> Links:
        """Of the devices that hold one copy of the model."""
        bandwidth = cluster.ring_bandwidth(cluster.num_shards)
        return cls(cluster.num_shards, bandwidth * assumed.link_share, assumed.collective_s, assumed.hop_s)

    @classmethod
    def of_copies(cls, cluster: Cluster, assumed: Assumptions) -> Links:
        """Of the devices that hold the same shard."""
        copies = cluster.num_devices // cluster.num_shards
        return cls(copies, cluster.copies_bandwidth * assumed.link_share, assumed.collective_s, assumed.hop_s)

    def gather_s(self, num_bytes: float) -> float:
        """Of an all-gather, or reduce-scatter, of ``num_bytes`` in all: ``(D-1)/D`` of them pass each link."""
        others = self.num_devices - 1
        if not others:
            return 0.0
        return self.fixed_s + others * self.hop_s + num_bytes * others / self.num_devices / self.bandwidth

    def reduce_s(self, num_bytes: float) -> float:
        """Of adding up ``num_bytes`` that each device has: a reduce-scatter and an all-gather."""
        return 2 * self.gather_s(num_bytes)


@dataclass(frozen=True)
class Work:
    """What one device computes at once: operations of the forward pass."""

    flops: float
    """Apart from attention."""
    attention_flops: float
    num_sequences: int

    @classmethod
    def of(cls, size: ModelSize, lengths: Sequence[int], prefix: int, num_sampled: int) -> Work:
        """Of sequences whose first ``prefix`` tokens are computed once."""
        flops = size.forward_flops(lengths, num_sampled)
        attention = _attention_flops(size, lengths)
        if prefix:
            spared = len(lengths) - 1
            flops -= spared * size.forward_flops([prefix], 0)
            attention -= spared * _attention_flops(size, [prefix])
        return cls(flops - attention, attention, len(lengths))

    def __add__(self, other: Work) -> Work:
        return Work(
            self.flops + other.flops,
            self.attention_flops + other.attention_flops,
            self.num_sequences + other.num_sequences,
        )

    @property
    def all_flops(self) -> float:
        return self.flops + self.attention_flops


NO_WORK = Work(0.0, 0.0, 0)


def _attention_flops(size: ModelSize, lengths: Sequence[int]) -> float:
    """The part of `ModelSize.forward_flops`."""
    return 2.0 * size.num_layers * size.attention_width * sum(length**2 for length in lengths)


@dataclass(frozen=True)
class TrainingCost:
    """Passes of an FSDP model: each micro-batch gathers every layer, and in training again, and scatters gradients."""

    shape: ModelShape
    size: ModelSize
    links: Links
    """Of a copy of the model."""
    copies: Links
    flops: float
    attention_flops: float
    """That attention does per second."""
    memory_bandwidth: float
    assumed: Assumptions
    recomputes: bool
    """Activations are computed again in the backward pass (gradient checkpointing)."""

    @classmethod
    def of(cls, shape: ModelShape, cluster: Cluster, assumed: Assumptions, *, recomputes: bool) -> TrainingCost:
        return cls(
            shape,
            model_size(shape),
            Links.of_shards(cluster, assumed),
            Links.of_copies(cluster, assumed),
            cluster.device.peak_flops * assumed.training_share,
            cluster.device.peak_flops * assumed.attention_share,
            cluster.device.memory_bandwidth * assumed.memory_share,
            assumed,
            recomputes,
        )

    def compute_s(self, work: Work, *, trains: bool) -> float:
        """One device's work on a micro-batch; 0 without any sequence."""
        if not work.num_sequences:
            return 0.0
        fixed = self.assumed.pass_s + self.assumed.sequence_s * work.num_sequences
        computing = work.flops / self.flops + work.attention_flops / self.attention_flops
        return self.times(trains=trains) * computing + (2.0 if trains else 1.0) * fixed

    def times(self, *, trains: bool) -> float:
        """What a micro-batch costs, in forward passes."""
        return (4.0 if self.recomputes else 3.0) if trains else 1.0

    def communication_s(self, *, trains: bool) -> tuple[float, float]:
        """Of a micro-batch: what runs beside computing, and what nothing hides.

        Parameters travel in 16 bits, gradients in 32. What belongs to no layer is gathered before the first, once a
        pass. Of the layers, the first gather of a pass and the last scatter of gradients have nothing to hide behind.
        """
        shape = self.shape
        apart = shape.num_weights - shape.num_layers * shape.layer_weights
        gather = self.links.gather_s(BF16 * shape.layer_weights)
        first = self.links.gather_s(BF16 * apart) + gather
        hidden = (shape.num_layers - 1) * gather
        if not trains:
            return hidden, first
        scatter = self.links.gather_s(FLOAT32 * shape.layer_weights)
        hidden += shape.num_layers * gather + (shape.num_layers - 1) * scatter
        return hidden, first + scatter + self.links.gather_s(FLOAT32 * apart)

    def micro_batch_s(self, busiest_s: float, *, trains: bool) -> float:
        """All devices go through a micro-batch together, layer by layer, at the pace of the busiest."""
        hidden, exposed = self.communication_s(trains=trains)
        return max(busiest_s, hidden) + exposed

    def optimizer_s(self) -> float:
        """One AdamW step over this device's shard in float32, after copies of the model have added up its gradients,
        layer by layer. That is taken as if no computing hid it."""
        shape, shards = self.shape, self.links.num_devices
        apart = shape.num_weights - shape.num_layers * shape.layer_weights
        added = shape.num_layers * self.copies.reduce_s(FLOAT32 * shape.layer_weights / shards)
        added += self.copies.reduce_s(FLOAT32 * apart / shards)
        moved = _ADAM_ACCESSES * FLOAT32 * shape.num_weights / shards
        return added + self.assumed.update_s + moved / self.memory_bandwidth


def training_bytes(shape: ModelShape, num_shards: int) -> float:
    """What training holds on a device: float32 weights, gradients and two moments of its shard, the gathered
    embeddings, output and two layers in 16 bits, and activations, for which an eighth as much again is taken."""
    shard = 4 * FLOAT32 * shape.num_weights / num_shards
    gathered = BF16 * (shape.head_weights + 2 * shape.layer_weights)
    return 9 / 8 * (shard + gathered) + _ACTIVATION_BYTES


# -------------------------------------------------------------------------------------------------- between the phases


def sync_s(shape: ModelShape, cluster: Cluster, assumed: Assumptions, design: Design) -> float:
    """Of giving the actor's weights to the engines: devices gather all weights in float32, one by one, and copy them
    as 16-bit numbers. A sleeping engine first brings its old weights back."""
    links = Links.of_shards(cluster, assumed)
    num_tensors = _TENSORS_PER_LAYER * shape.num_layers + 2
    gather = num_tensors * links.gather_s(FLOAT32 * shape.num_weights / num_tensors)
    copied = _WEIGHT_COPIES * BF16 * shape.num_weights / cluster.tensor_parallel
    load = num_tensors * assumed.tensor_s + copied / (cluster.device.memory_bandwidth * assumed.memory_share)
    return gather + load + (_host_copy_s(shape, cluster, assumed) if design.sleep else 0.0)


def sleep_s(shape: ModelShape, cluster: Cluster, assumed: Assumptions, design: Design) -> float:
    """Of putting the engine to sleep after a rollout, its weights copied to main memory, and waking its cache."""
    return _host_copy_s(shape, cluster, assumed) + assumed.wake_s if design.sleep else 0.0


def _host_copy_s(shape: ModelShape, cluster: Cluster, assumed: Assumptions) -> float:
    engine_bytes = BF16 * shape.num_weights / cluster.tensor_parallel
    return engine_bytes / (cluster.device.host_bandwidth * assumed.host_share)


def save_s(
    shape: ModelShape, cluster: Cluster, assumed: Assumptions, *, steps_between: int, step_s: float, is_async: bool
) -> float:
    """Of checkpoints, per step: shards with two moments and every device's view of the whole model go to main memory
    while training waits; the disk's part runs beside it, as far as ``steps_between`` steps of ``step_s`` last."""
    if not steps_between:
        return 0.0
    state, export = 3 * FLOAT32 * shape.num_weights, FLOAT32 * shape.num_weights
    gather = Links.of_shards(cluster, assumed).gather_s(export)
    copy = (state / cluster.num_shards + export) / (cluster.device.host_bandwidth * assumed.host_share)
    write = (state + export) / assumed.disk_bandwidth
    waits = max(0.0, write - steps_between * step_s) if is_async else write
    return (gather + copy + waits) / steps_between
