"""LanguageModelTrainer: what PPO and SFT share: packing, forward, backward, optimizer step, checkpoint, export.

In a process group of several ranks every public method is collective: all ranks call it, each with its own share of
the batch (which may be empty), and metrics come back the same on all of them. The module is sharded with FSDP2 then,
and on CUDA always, where FSDP also does the mixed precision. One CPU process trains the plain module, which needs no
process group; sharding over itself would cost nothing measurable (7,600 to 8,000 tokens/s either way, 0.8M parameters).
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
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from verl.config import ModelConfig, OptimConfig
from verl.models.loading import compute_dtype, export_huggingface, load_policy
from verl.models.policy import PolicyModule
from verl.protocol import DataProto
from verl.utils import distributed
from verl.utils.balancing import pack


@dataclass(frozen=True)
class MicroBatchLimits:
    """How much one forward and backward pass takes; no effect on results beyond rounding."""

    max_tokens: int | None = None
    """None sets no limit; a longer sequence goes alone."""
    max_sequences: int | None = None


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

    def __call__(self, micro: DataProto, log_probs_S: torch.Tensor, entropy_S: torch.Tensor | None) -> MicroLoss: ...


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
    """A causal language model with its optimizer."""

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
    ) -> None:
        """``total_updates`` is the number of optimizer steps of the whole run, which the learning rate follows;
        ``grad_clip`` 0 turns clipping off; log-probs are taken at ``temperature``.
        Raises `ConfigError` as `load_policy` does.
        """
        self.device = torch.device(device)
        self.module, self.tokenizer = load_policy_module(model_config, self.device, temperature)
        self.num_updates = 0
        """Optimizer steps so far, skipped ones included."""
        self._optim_config, self._limits = optim_config, limits
        self._total_updates, self._grad_clip = total_updates, grad_clip
        self._optimizer = _adamw(self.module, optim_config)

    @property
    def model(self) -> PreTrainedModel:
        return self.module.model

    # ---------------------------------------------------------------------------------------------------------- numbers

    def log_probs(self, batch: DataProto) -> torch.Tensor:
        """Log-probs ``T`` of the batch's loss tokens, 0 elsewhere; float32 nats on the CPU."""
        log_probs_T, _ = packed_log_probs(self.module, batch, self._limits, self.device)
        return log_probs_T

    def log_probs_and_entropy(self, batch: DataProto) -> tuple[torch.Tensor, torch.Tensor]:
        """`log_probs`, and the entropy of the distribution that each of those tokens was drawn from, likewise."""
        log_probs_T, entropy_T = packed_log_probs(self.module, batch, self._limits, self.device, with_entropy=True)
        assert entropy_T is not None
        return log_probs_T, entropy_T

    def train_step(self, batch: DataProto, loss_function: LossFunction) -> UpdateResult:
        """One optimizer step on this rank's share of a mini-batch."""
        self.module.train()
        self._optimizer.zero_grad(set_to_none=True)
        loss, sums_K, maxima_M = self._backward(batch, loss_function)
        grad_norm = self._clip_gradients()
        lr = learning_rate(self._optim_config, self.num_updates, self._total_updates)
        skipped = not (math.isfinite(loss) and math.isfinite(grad_norm))
        if not skipped:
            self._optimizer_step(lr)
        self._optimizer.zero_grad(set_to_none=True)
        self.num_updates += 1
        sums = dict(zip(loss_function.sum_names, sums_K.tolist(), strict=True))
        maxima = dict(zip(loss_function.max_names, maxima_M.tolist(), strict=True))
        return UpdateResult(loss, grad_norm, lr, skipped, sums, maxima)

    def _backward(self, batch: DataProto, loss_function: LossFunction) -> tuple[float, torch.Tensor, torch.Tensor]:
        """Accumulate gradients over all micro-batches; loss and statistics come back combined over ranks."""
        totals = torch.zeros(1 + len(loss_function.sum_names), dtype=torch.float64)
        maxima_M = torch.zeros(len(loss_function.max_names), dtype=torch.float64)
        for indices in micro_batches(batch, self._limits):
            if not indices:
                self._backward_dummy()
                continue
            part = batch.select(indices).to(self.device)
            log_probs_S, entropy_S = self.module(part, with_entropy=loss_function.needs_entropy)
            result = loss_function(part, log_probs_S, entropy_S)
            # FSDP averages gradients over ranks, but parts of the loss are meant to be added.
            (result.loss * distributed.world_size()).backward()
            totals += torch.cat([result.loss.detach()[None], result.sums_K]).double().cpu()
            maxima_M = torch.maximum(maxima_M, result.maxima_M.double().cpu())
        distributed.all_reduce_sum_(totals)
        distributed.all_reduce_max_(maxima_M)
        return float(totals[0]), totals[1:], maxima_M

    def _backward_dummy(self) -> None:
        log_probs_S, _ = self.module(_dummy_batch().to(self.device))
        (log_probs_S.sum() * 0.0).backward()

    def _clip_gradients(self) -> float:
        parameters = [p for p in self.module.parameters() if p.grad is not None]
        if not parameters:
            return 0.0
        norm = nn.utils.clip_grad_norm_(parameters, self._grad_clip if self._grad_clip > 0 else math.inf)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def _optimizer_step(self, lr: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()

    # ---------------------------------------------------------------------------------------------------------- weights

    def state_dict_items(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each weight under its Hugging Face name as a full CPU tensor, tied ones once.

        Under FSDP every rank must run the iterator to its end: each step gathers one tensor. A tensor may share memory
        with the model, so copy what must outlive the next update.
        """
        for name, tensor in _named_weights(self.model):
            tensor = tensor.detach()
            yield name, (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()

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
        weights = dict(self.state_dict_items()) if export_to and distributed.rank() == 0 else {}
        if export_to and distributed.rank() != 0:
            _exhaust(self.state_dict_items())
        state, weights = _copy_to_host({"state": state, "weights": weights}).values()

        def write() -> None:
            with _quiet_without_group():
                dcp.save(state, checkpoint_id=folder, process_group=group, no_dist=group is None)
            if export_to and weights:
                export_huggingface(export_to, self.model, self.tokenizer, weights.items())

        return write

    def load(self, folder: Path) -> None:
        """Go on from what `save` wrote, with this or another number of ranks."""
        state = self._state()
        with _quiet_without_group():
            dcp.load(state, checkpoint_id=folder, no_dist=not _has_group())
        set_model_state_dict(self.module, state["model"])
        set_optimizer_state_dict(self.module, self._optimizer, state["optimizer"])
        self.num_updates = state["schedule"]["num_updates"]

    def _state(self) -> dict[str, Any]:
        return {
            "model": get_model_state_dict(self.module),
            "optimizer": get_optimizer_state_dict(self.module, self._optimizer),
            "schedule": {"num_updates": self.num_updates},
        }

    def export_huggingface(self, folder: Path) -> None:
        """Write the model and its tokenizer for `from_pretrained` and vLLM; rank 0 writes."""
        if distributed.rank() == 0:
            export_huggingface(folder, self.model, self.tokenizer, self.state_dict_items())
        else:
            _exhaust(self.state_dict_items())
        distributed.barrier()


# -------------------------------------------------------------------------------------------------- building blocks


def load_policy_module(config: ModelConfig, device: torch.device, temperature: float) -> tuple[PolicyModule, Any]:
    """The model that ``config`` names, sharded where there is something to gain, and its tokenizer."""
    sharded = device.type == "cuda" or distributed.world_size() > 1
    # Sharded modules are read on the CPU and move layer by layer, so that no device ever holds all of the model.
    model, tokenizer = load_policy(config, "cpu" if sharded else device)
    module = PolicyModule(model, temperature)
    if sharded:
        distributed.init_single_process_group(device)
        _shard(module, device, compute_dtype(config, device))
    return module, tokenizer


def _shard(module: PolicyModule, device: torch.device, dtype: torch.dtype) -> None:
    mesh = init_device_mesh(device.type, (distributed.world_size(),))
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    layer_classes = module.model._no_split_modules or ()
    for layer in module.model.modules():
        if type(layer).__name__ in layer_classes:
            fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(module, mesh=mesh, mp_policy=precision)


def learning_rate(config: OptimConfig, update: int, total_updates: int) -> float:
    """Of update number ``update``, from 0: linear warm-up, then constant, or a cosine that reaches 0 after the last."""
    if update < config.lr_warmup_steps:
        return config.lr * (update + 1) / config.lr_warmup_steps
    if config.lr_schedule == "constant":
        return config.lr
    progress = (update - config.lr_warmup_steps) / max(total_updates - config.lr_warmup_steps, 1)
    return config.lr * 0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0)))


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


def micro_batches(batch: DataProto, limits: MicroBatchLimits) -> list[list[int]]:
    """Indices of the batch's sequences with loss tokens, packed within ``limits``; equally many packs on all ranks.

    An empty pack means that this rank has nothing left while others still run: FSDP needs all ranks in every pass.
    """
    useful = batch.sampled_lengths_B.nonzero()[:, 0].tolist()
    lengths = batch.lengths_B[useful].tolist()
    packs = pack(lengths, max_tokens=limits.max_tokens, max_sequences=limits.max_sequences)
    num_idle = distributed.max_over_ranks(len(packs)) - len(packs)
    return [[useful[place] for place in part] for part in packs] + [[]] * num_idle


def packed_log_probs(
    module: PolicyModule,
    batch: DataProto,
    limits: MicroBatchLimits,
    device: torch.device,
    *,
    with_entropy: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probs ``T`` of the batch's loss tokens, 0 elsewhere, and entropies ``T`` if asked; float32 on the CPU."""
    log_probs_T = torch.zeros(batch.num_tokens)
    entropy_T = torch.zeros(batch.num_tokens) if with_entropy else None
    module.eval()
    with torch.no_grad():
        for indices in micro_batches(batch, limits):
            part = batch.select(indices) if indices else _dummy_batch()
            log_probs_S, entropy_S = module(part.to(device), with_entropy=with_entropy)
            if not indices:
                continue
            targets_S = batch.token_positions(indices)[part.loss_mask_T]
            log_probs_T[targets_S] = log_probs_S.cpu()
            if entropy_T is not None and entropy_S is not None:
                entropy_T[targets_S] = entropy_S.cpu()
    if isinstance(module, FSDPModule):
        # Only a backward pass frees what the root gathered.
        module.reshard()
    return log_probs_T, entropy_T


def _dummy_batch() -> DataProto:
    return DataProto.from_sequences([[0, 0]], [[0, 1]])


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


def _named_weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    persistent = model.state_dict().keys()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in persistent)


@contextmanager
def _quiet_without_group() -> Iterator[None]:
    with warnings.catch_warnings():
        # One process without a group is what we mean, not an oversight.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def _has_group() -> bool:
    return torch.distributed.is_initialized()
