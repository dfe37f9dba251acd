"""LanguageModelTrainer: what PPO and SFT share: packing, forward, backward, optimizer step, checkpoint, export.

In a process group of several ranks every public method is collective, see `verl.workers.packed_model`: all ranks call
it, each with its own share of the batch (which may be empty), and metrics come back the same on all of them.
Axes: ``T`` tokens of a batch, ``S`` its loss tokens, ``K`` and ``M`` statistics of a loss.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentgym_rl.errors import TrainingDiverged
from verl.config import FSDPConfig, ModelConfig, OptimConfig
from verl.models.loading import export_huggingface
from verl.models.lora import adapter_weights, merged_weights, save_adapter, without_adapter
from verl.models.policy import PackedModule, PolicyModule, ReadOut
from verl.models.sequence_parallel import SequenceParallel
from verl.protocol import DataProto
from verl.utils import distributed
from verl.workers.offload import move_optimizer, optimizer_on_device
from verl.workers.packed_model import MergedBatch, MicroBatchLimits, PackedModel, Placement, StatesOf, dummy_batch

ADAPTER_FOLDER = "lora_adapter"
"""Beside an exported model: the adapter alone."""


@dataclass(frozen=True, eq=False)
class MicroLoss:
    """What a loss function makes of one micro-batch."""

    loss: torch.Tensor
    """Scalar: this part of the mini-batch's loss; parts are added over micro-batches and ranks."""
    sums_K: torch.Tensor
    """Statistics that are added over micro-batches and ranks; detached."""
    maxima_M: torch.Tensor
    """Statistics of which the largest counts; detached, at least 0."""


class LossFunction(Protocol):
    """A loss over one mini-batch, called for each of its micro-batches."""

    sum_names: ClassVar[tuple[str, ...]]
    max_names: ClassVar[tuple[str, ...]]
    needs_entropy: ClassVar[bool]

    def __call__(self, micro: DataProto, read_out: ReadOut, /) -> MicroLoss: ...


@dataclass(frozen=True)
class UpdateResult:
    """One optimizer step, over all ranks."""

    loss: float
    grad_norm: float
    """Before clipping."""
    lr: float
    skipped: bool
    """Loss or gradient was not finite, and the weights stayed as they were."""
    sums: dict[str, float]
    maxima: dict[str, float]


class LanguageModelTrainer:
    """A causal language model with its optimizer. What it computes per loss token, by default log-probs, is what
    `make_module` says."""

    def __init__(
        self,
        model_config: ModelConfig,
        optim_config: OptimConfig,
        limits: MicroBatchLimits,
        *,
        device: torch.device | str,
        total_updates: int,
        grad_clip: float = 1.0,
        temperature: float = 1.0,
        fsdp: FSDPConfig | None = None,
        sequence_parallel_size: int = 1,
    ) -> None:
        """``total_updates`` is the number of optimizer steps of the whole run, which the learning rate follows;
        ``grad_clip`` 0 turns clipping off; log-probs are taken at ``temperature``; so many neighbouring ranks as
        ``sequence_parallel_size`` says share each micro-batch.
        Raises `ConfigError` as `PackedModel` does.
        """
        self._temperature = temperature
        fsdp = fsdp or FSDPConfig()
        placement = Placement(torch.device(device), fsdp, sequence_parallel_size)
        self.packed = PackedModel(model_config, limits, placement, self.make_module, trainable=True)
        self.num_updates = 0
        """Optimizer steps so far, skipped ones included."""
        self._model_config, self._optim_config = model_config, optim_config
        self._total_updates, self._grad_clip = total_updates, grad_clip
        self._offloads_optimizer = fsdp.optimizer_offload
        self._skipped_in_a_row = 0
        self._optimizer = _adamw(self.module, optim_config)

    def make_module(self, model: PreTrainedModel, parallel: SequenceParallel | None) -> PackedModule:
        """The module around the model that was loaded."""
        return PolicyModule(model, self._temperature, parallel)

    @property
    def device(self) -> torch.device:
        return self.packed.device

    @property
    def module(self) -> PackedModule:
        return self.packed.module

    @property
    def model(self) -> PreTrainedModel:
        return self.module.model

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.packed.tokenizer

    # ---------------------------------------------------------------------------------------------------------- numbers

    def log_probs(self, batch: DataProto) -> torch.Tensor:
        """Log-probs ``T`` of the batch's loss tokens, 0 elsewhere; float32 nats on the CPU."""
        return self.packed.numbers(batch).numbers

    def log_probs_and_entropy(self, batch: DataProto) -> tuple[torch.Tensor, torch.Tensor]:
        """`log_probs`, and the entropy of the distribution that each of those tokens was drawn from, likewise."""
        log_probs_T, entropy_T, _ = self.packed.numbers(batch, with_entropy=True)
        assert entropy_T is not None
        return log_probs_T, entropy_T

    def base_log_probs(self, batch: DataProto) -> torch.Tensor:
        """`log_probs` of the model without its adapter, which is the model that training began with."""
        with without_adapter(self.module):
            return self.log_probs(batch)

    @contextmanager
    def base_states(self) -> Iterator[StatesOf]:
        """`PackedModel.states` of the model without its adapter."""
        with self.packed.states() as states_of:
            yield without_adapter(self.module)(states_of)

    def full_kl(self, batch: DataProto, reference: StatesOf) -> torch.Tensor:
        """KL ``T`` to the reference over the whole vocabulary at the batch's loss tokens, 0 elsewhere; nats."""
        kl_T = self.packed.numbers(batch, reference=reference).kl
        assert kl_T is not None
        return kl_T

    def train_step(
        self, batch: DataProto, loss_function: LossFunction, *, reference: StatesOf | None = None
    ) -> UpdateResult:
        """One optimizer step on this rank's share of a mini-batch; with ``reference`` the loss sees the KL to it.

        A step whose loss or gradient is not finite is skipped; `TrainingDiverged` when that happens
        ``optim.max_skipped_updates`` times in a row.
        """
        with self.packed.residence.module_on_device():
            self.module.train()
            self._optimizer.zero_grad(set_to_none=True)
            loss, sums_K, maxima_M = self._backward(batch, loss_function, reference)
            grad_norm = self._clip_gradients()
            lr = learning_rate(self._optim_config, self.num_updates, self._total_updates)
            skipped = not (math.isfinite(loss) and math.isfinite(grad_norm))
            if not skipped:
                self._optimizer_step(lr)
            self._optimizer.zero_grad(set_to_none=True)
        self.num_updates += 1
        self._guard(skipped, loss, grad_norm)
        sums = dict(zip(loss_function.sum_names, sums_K.tolist(), strict=True))
        maxima = dict(zip(loss_function.max_names, maxima_M.tolist(), strict=True))
        return UpdateResult(loss, grad_norm, lr, skipped, sums, maxima)

    def _backward(
        self, batch: DataProto, loss_function: LossFunction, reference: StatesOf | None
    ) -> tuple[float, torch.Tensor, torch.Tensor]:
        """Accumulate gradients over all micro-batches; loss and statistics come back combined over ranks."""
        merged = MergedBatch.of(batch, self.packed.parallel).batch
        totals = torch.zeros(1 + len(loss_function.sum_names), dtype=torch.float64, device=self.device)
        maxima_M = torch.zeros(len(loss_function.max_names), dtype=torch.float64, device=self.device)
        packs = self.packed.micro_batches(merged)
        for place, indices in enumerate(packs):
            self._sum_over_copies(at_end=place == len(packs) - 1)
            part = (merged.select(indices) if indices else dummy_batch()).to(self.device)
            read_out = self.packed.read_out(part, with_entropy=loss_function.needs_entropy, reference=reference)
            if not indices:
                (read_out.numbers.sum() * 0.0).backward()
                continue
            result = loss_function(part, read_out)
            # FSDP averages gradients over ranks, but parts of the loss are meant to be added.
            (result.loss * distributed.world_size()).backward()
            totals += torch.cat([result.loss.detach()[None], result.sums_K]).double()
            maxima_M = torch.maximum(maxima_M, result.maxima_M.double())
        if self.packed.parallel is not None and self.packed.parallel.rank > 0:
            totals.zero_()  # The first of the ranks that computed this together speaks for all of them.
        totals, maxima_M = totals.cpu(), maxima_M.cpu()
        distributed.all_reduce_sum_(totals)
        distributed.all_reduce_max_(maxima_M)
        return float(totals[0]), totals[1:], maxima_M

    def _sum_over_copies(self, *, at_end: bool) -> None:
        """Where ranks hold copies of the model, gradients pass between the copies once, after the last micro-batch."""
        if isinstance(self.module, FSDPModule):
            self.module.set_requires_all_reduce(at_end)

    def _guard(self, skipped: bool, loss: float, grad_norm: float) -> None:
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        if self._skipped_in_a_row >= self._optim_config.max_skipped_updates:
            raise TrainingDiverged(
                f"{self._skipped_in_a_row} updates in a row were not finite and skipped, the last one with loss "
                f"{loss:g} and gradient norm {grad_norm:g}: lower optim.lr={self._optim_config.lr:g}, or allow more by "
                f"optim.max_skipped_updates={self._optim_config.max_skipped_updates}"
            )

    def _clip_gradients(self) -> float:
        parameters = [p for p in self.module.parameters() if p.grad is not None]
        if not parameters:
            return 0.0
        norm = nn.utils.clip_grad_norm_(parameters, self._grad_clip if self._grad_clip > 0 else math.inf)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def _optimizer_step(self, lr: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        with optimizer_on_device(self._optimizer, self.device, offload=self._offloads_optimizer):
            self._optimizer.step()

    # ---------------------------------------------------------------------------------------------------------- weights

    def state_dict_items(self, *, on_device: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Each weight under its Hugging Face name as a full tensor, tied ones once; an adapter is merged into them.

        Tensors are on the CPU, or with ``on_device`` where they were gathered.
        Under FSDP every rank must run the iterator to its end: each step gathers one tensor. A tensor may share memory
        with the model, so copy what must outlive the next update.
        """
        with self.packed.residence.module_on_device(), torch.no_grad():
            for name, tensor in _merged_weights(self.model):
                yield name, tensor if on_device else tensor.cpu()

    def save(self, folder: Path) -> None:
        """Write model, optimizer and schedule into ``folder``, each rank its shard."""
        self.prepare_save(folder)()

    def prepare_save(self, folder: Path, *, export_to: Path | None = None) -> Callable[[], None]:
        """Copy what `save` writes to host memory; what is returned writes the copy, while training goes on.

        With ``export_to``, rank 0 also copies and writes what `export_huggingface` does. Writing is collective, and may
        happen in a second thread. Tensors that the two share are copied once.
        """
        group = distributed.background_group() if _has_group() else None
        state = self._state()
        export = self._export() if export_to else {}
        state, export = _copy_to_host({"state": state, "export": export}).values()

        def write() -> None:
            with _quiet_without_group():
                dcp.save(state, checkpoint_id=folder, process_group=group, no_dist=group is None)
            if export_to and export:
                self._write_export(export_to, export)

        return write

    def load(self, folder: Path) -> None:
        """Go on from what `save` wrote, with this or another number of ranks.

        Learning rate, weight decay and betas are those of this trainer's own configuration.
        """
        state = self._state()
        with _quiet_without_group():
            # Into the tensors of the optimizer itself. To set its state by what was read would take over its options
            # too, and would put it where the weights are now, which need not be where it rests.
            dcp.load(state, checkpoint_id=folder, no_dist=not _has_group())
        set_model_state_dict(self.module, state["model"])
        self.num_updates = state["schedule"]["num_updates"]

    def _state(self) -> dict[str, Any]:
        if not self._optimizer.state:
            self._begin_optimizer()
        return {
            "model": get_model_state_dict(self.module),
            "optimizer": get_optimizer_state_dict(self.module, self._optimizer),
            "schedule": {"num_updates": self.num_updates},
        }

    def _begin_optimizer(self) -> None:
        """Give the optimizer the state that its first step begins with, where that rests."""
        # torch makes it by a step without gradients, which leaves zeros everywhere but counts as a step.
        get_optimizer_state_dict(self.module, self._optimizer)
        for tensors in self._optimizer.state.values():
            tensors["step"].zero_()
        move_optimizer(self._optimizer, torch.device("cpu") if self._offloads_optimizer else self.device)

    def export_huggingface(self, folder: Path) -> None:
        """Write the model and its tokenizer for `from_pretrained` and vLLM; rank 0 writes.

        An adapter is merged into the model, and also written by itself, to `ADAPTER_FOLDER` beside ``folder``.
        """
        export = self._export()
        if export:
            self._write_export(folder, export)
        distributed.barrier()

    def _export(self) -> dict[str, dict[str, torch.Tensor]]:
        """All that an export holds, on rank 0; nothing elsewhere. Collective."""
        writes = distributed.rank() == 0
        # Only what is written is brought to the host.
        weights, adapter = self.state_dict_items(on_device=not writes), self._adapter_items()
        if writes:
            return {"weights": dict(weights), "adapter": dict(adapter)}
        _exhaust(weights)
        _exhaust(adapter)
        return {}

    def _adapter_items(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self._model_config.lora_rank == 0:
            return
        with self.packed.residence.module_on_device(), torch.no_grad():
            for name, tensor in adapter_weights(self.model, _whole):
                yield name, tensor.cpu()

    def _write_export(self, folder: Path, export: dict[str, dict[str, torch.Tensor]]) -> None:
        export_huggingface(folder, self.model, self.tokenizer, export["weights"].items())
        if export["adapter"]:
            save_adapter(folder.parent / ADAPTER_FOLDER, self._model_config, export["adapter"])


# -------------------------------------------------------------------------------------------------- building blocks


def learning_rate(config: OptimConfig, update: int, total_updates: int) -> float:
    """Of update number ``update``, from 0: linear warm-up, then constant, or a cosine that reaches its least after the
    last of ``total_updates``."""
    if update < config.lr_warmup_steps:
        return config.lr * (update + 1) / config.lr_warmup_steps
    if config.lr_schedule == "constant":
        return config.lr
    progress = (update - config.lr_warmup_steps) / max(total_updates - config.lr_warmup_steps, 1)
    share = 0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0)))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * share)


def _adamw(module: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """Weight decay on matrices only: norms and biases have no direction to shrink towards."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [g for g in groups if g["params"]], lr=config.lr, betas=(config.betas[0], config.betas[1]), fused=True
    )


def _copy_to_host(state: dict[str, Any]) -> dict[str, Any]:
    """A copy of a nested state in host memory; tensors on one storage stay on one."""
    stager = DefaultStager(StagingOptions(False, False, False, False))
    try:
        return stager.stage(state)  # type: ignore[return-value]  # a future only where staging is asynchronous
    finally:
        stager.close()


def _exhaust(items: Iterator[object]) -> None:
    for _ in items:
        pass


def _merged_weights(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    yield from merged_weights(model, _whole)
    persistent = model.state_dict().keys()
    yield from ((name, _whole(buffer)) for name, buffer in model.named_buffers() if name in persistent)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@contextmanager
def _quiet_without_group() -> Iterator[None]:
    with warnings.catch_warnings():
        # One process without a group is what we mean, not an oversight.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def _has_group() -> bool:
    return torch.distributed.is_initialized()
