"""PackedModel: a model on this rank's device that turns batches into one number per loss token, pack by pack.

In a process group of several ranks every public method is collective: all ranks call it, each with its own share of
the batch (which may be empty). The module is sharded with FSDP2 then, and on CUDA always, where FSDP also does the
mixed precision. One CPU process runs the plain module, which needs no process group, unless it trains in mixed
precision; sharding over itself would cost nothing measurable (7,600 to 8,000 tokens/s either way, 0.8M parameters).
Axes: ``T`` tokens of a batch, ``S`` its loss tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from verl.config import ModelConfig, RefFSDPConfig
from verl.models.loading import (
    TRAINED_DTYPE,
    compute_dtype,
    load_tokenizer,
    model_skeleton,
    prepare_for_training,
    read_model,
)
from verl.models.log_probs import OutputStates
from verl.models.policy import PackedModule, PolicyModule, ReadOut
from verl.models.sequence_parallel import SequenceParallel, check_heads
from verl.models.sharding import shard_module
from verl.protocol import DataProto
from verl.utils import distributed
from verl.utils.balancing import pack
from verl.utils.families import Family, find_families
from verl.workers.offload import Residence


@dataclass(frozen=True)
class MicroBatchLimits:
    """How much one forward and backward pass takes; no effect on results beyond rounding."""

    max_tokens: int | None = None
    """None sets no limit; a longer sequence goes alone. Ranks that share a row may hold as many each."""
    max_sequences: int | None = None
    keeps_groups: bool = False
    """Neighbours of one group, such as the two sides of a pair, go together and count as one sequence."""


@dataclass(frozen=True)
class Placement:
    """How a model lies on the devices; no effect on results beyond rounding."""

    device: torch.device
    fsdp: RefFSDPConfig
    sequence_parallel_size: int = 1
    """Ranks that share each micro-batch."""


MakeModule = Callable[[PreTrainedModel, SequenceParallel | None], PackedModule]
StatesOf = Callable[[DataProto], OutputStates]
"""`PolicyModule.states` of a micro-batch on the device, without gradients; collective."""


class PackedModel:
    """A module, its tokenizer, and how batches are fed to it."""

    def __init__(
        self,
        config: ModelConfig,
        limits: MicroBatchLimits,
        placement: Placement,
        make_module: MakeModule,
        *,
        trainable: bool,
    ) -> None:
        """``make_module`` wraps the causal language model that ``config`` names. Raises `ConfigError` as `load_policy`,
        and when the ranks cannot share out the model's heads. Without ``trainable`` the model is frozen as it is."""
        self.device = placement.device
        self.limits = limits
        self.parallel = sequence_parallel(placement.sequence_parallel_size)
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(config)
        self.module = self._load(config, placement.fsdp, make_module, trainable)
        self.residence = Residence(self.module, self.device, offload_module=placement.fsdp.param_offload)

    def _load(self, config: ModelConfig, fsdp: RefFSDPConfig, make_module: MakeModule, trainable: bool) -> PackedModule:
        """The module with its weights: whole on a single CPU that computes in their type, else a shard of what rank 0
        reads."""

        def build(model: PreTrainedModel) -> PackedModule:
            if trainable:
                prepare_for_training(model, config)
            if self.parallel is not None:
                check_heads(model.config, self.parallel.size)
            module = make_module(model, self.parallel)
            module.shares_prefixes = config.share_prefixes and self.parallel is None
            return module if trainable else module.requires_grad_(False)

        dtype = compute_dtype(config, self.device)
        is_mixed = trainable and dtype != TRAINED_DTYPE
        if self.device.type == "cpu" and distributed.world_size() == 1 and not is_mixed:
            return build(read_model(config))
        distributed.init_single_process_group(self.device)
        source = build(read_model(config)) if distributed.rank() == 0 else None
        with torch.device("meta"):
            module = build(model_skeleton(config))
        shard_module(
            module,
            source,
            layer_classes=tuple(module.model._no_split_modules or ()),
            device=self.device,
            dtype=dtype,
            num_shards=fsdp.num_shards(distributed.world_size()),
        )
        if source is not None and source.model.can_generate():  # as the bare backbone of a critic cannot
            module.model.generation_config = source.model.generation_config
        if isinstance(module, PolicyModule):
            register_fsdp_forward_method(module, "states")
        return module

    def numbers(self, batch: DataProto, *, with_entropy: bool = False, reference: StatesOf | None = None) -> ReadOut:
        """What the module says ``T`` of each of the batch's loss tokens, 0 elsewhere; without gradients, on the CPU.

        With ``reference``, the `states` of another model, also the KL to that model.
        """
        merged = MergedBatch.of(batch, self.parallel)
        zeros_T = torch.zeros(merged.batch.num_tokens)
        results_T = ReadOut(
            zeros_T, zeros_T.clone() if with_entropy else None, None if reference is None else zeros_T.clone()
        )
        self.module.eval()
        with torch.no_grad(), self.residence.module_on_device():
            for indices in self.micro_batches(merged.batch):
                part = merged.batch.select(indices) if indices else dummy_batch()
                read_out = self.read_out(part.to(self.device), with_entropy=with_entropy, reference=reference)
                if not indices:
                    continue
                targets_S = merged.batch.token_positions(indices)[part.loss_mask_T]
                for result_T, result_S in zip(results_T, read_out, strict=True):
                    if result_T is not None and result_S is not None:
                        result_T[targets_S] = result_S.cpu()
            self._reshard()
        return results_T.map(merged.own)

    def read_out(self, part: DataProto, *, with_entropy: bool, reference: StatesOf | None) -> ReadOut:
        """What the module says of one micro-batch on the device; collective."""
        return self.module(part, with_entropy=with_entropy, reference=None if reference is None else reference(part))

    @contextmanager
    def states(self) -> Iterator[StatesOf]:
        """What the KL to this model, a policy, is computed from; valid inside."""
        assert isinstance(self.module, PolicyModule)
        self.module.eval()
        with self.residence.module_on_device():
            yield torch.no_grad()(self.module.states)
            self._reshard()

    def _reshard(self) -> None:
        if isinstance(self.module, FSDPModule):
            # Only a backward pass frees what the root gathered.
            self.module.reshard()

    def micro_batches(self, batch: DataProto) -> list[list[int]]:
        """Indices of the batch's sequences with loss tokens, packed within limits; equally many packs on all ranks.

        An empty pack means that this rank has nothing left while others still run: FSDP needs all ranks in every pass.
        """
        max_tokens = self.limits.max_tokens
        if max_tokens is not None and self.parallel is not None:
            max_tokens *= self.parallel.size
        families = self._families(batch, max_tokens)
        row_lengths: list[int] = batch.lengths_B.tolist()
        costs = [family.cost(row_lengths) for family in families]
        packs = pack(costs, max_tokens=max_tokens, max_sequences=self.limits.max_sequences)
        num_idle = distributed.max_over_ranks(len(packs)) - len(packs)
        return [[index for place in part for index in families[place].members] for part in packs] + [[]] * num_idle

    def _families(self, batch: DataProto, max_tokens: int | None) -> list[Family]:
        """The sequences with loss tokens, those together that go into one micro-batch."""
        useful: list[int] = batch.sampled_lengths_B.nonzero()[:, 0].tolist()
        if self.limits.keeps_groups:
            groups = batch.group_ids_B.tolist()
            return [Family(list(unit), 0) for _, unit in groupby(useful, key=groups.__getitem__)]
        if self.limits.max_sequences is None and self.module.shares_prefixes:
            return find_families(batch, useful, max_tokens=max_tokens)
        return [Family([index], 0) for index in useful]


@dataclass(frozen=True, eq=False)
class MergedBatch:
    """The shares of all ranks that compute together, which all of them see, and where this rank's own is in it."""

    batch: DataProto
    start: int
    """Where the tokens of this rank's own share begin."""
    num_tokens: int

    @classmethod
    def of(cls, share: DataProto, parallel: SequenceParallel | None) -> MergedBatch:
        """Collective within the group of ``parallel``."""
        if parallel is None:
            return cls(share, 0, share.num_tokens)
        shares: list[DataProto] = [share] * parallel.size
        dist.all_gather_object(shares, share, group=parallel.group)
        start = sum(each.num_tokens for each in shares[: parallel.rank])
        return cls(DataProto.concat(shares), start, share.num_tokens)

    def own(self, values_T: torch.Tensor) -> torch.Tensor:
        """This rank's part of values of the merged batch's tokens."""
        return values_T[self.start : self.start + self.num_tokens]


def sequence_parallel(size: int) -> SequenceParallel | None:
    """This rank's group of ``size`` neighbours; None for 1. All ranks must ask together, in the same order."""
    if size == 1:
        return None
    return SequenceParallel(distributed.neighbours(size), size, distributed.rank() % size)


def dummy_batch() -> DataProto:
    """The least that a pass can be run on."""
    return DataProto.from_sequences([[0, 0]], [[0, 1]])
