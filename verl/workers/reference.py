"""Reference: the frozen policy that KL terms are taken to."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch

from verl.config import ActorConfig, ModelConfig, RefConfig
from verl.models.policy import PolicyModule
from verl.protocol import DataProto
from verl.workers.actor import Actor
from verl.workers.packed_model import MicroBatchLimits, PackedModel, Placement, StatesOf


class ReferencePolicy(Protocol):
    """Log-probs under weights that never change; in a process group of several ranks its methods are collective."""

    def log_probs(self, batch: DataProto) -> torch.Tensor:
        """Log-probs ``T`` of the batch's loss tokens, 0 elsewhere; float32 nats on the CPU."""
        ...

    def states(self) -> AbstractContextManager[StatesOf]:
        """See `PackedModel.states`; for micro-batches of the actor, which shares them out over ranks likewise."""
        ...


class Reference:
    """A second model; see `ReferencePolicy`."""

    def __init__(
        self,
        model_config: ModelConfig,
        ref_config: RefConfig,
        *,
        device: torch.device | str,
        temperature: float,
        sequence_parallel_size: int = 1,
    ) -> None:
        """``temperature`` is that of sampling. Raises `ConfigError` as `PackedModel`."""
        self._packed = PackedModel(
            model_config,
            MicroBatchLimits(max_tokens=ref_config.log_prob_max_token_len_per_gpu),
            Placement(torch.device(device), ref_config.fsdp_config, sequence_parallel_size),
            lambda model, parallel: PolicyModule(model, temperature, parallel),
            trainable=False,
        )

    def log_probs(self, batch: DataProto) -> torch.Tensor:
        return self._packed.numbers(batch).numbers

    def states(self) -> AbstractContextManager[StatesOf]:
        return self._packed.states()


class AdapterlessReference:
    """The actor without its adapter: the reference of LoRA costs no memory."""

    def __init__(self, actor: Actor) -> None:
        self._actor = actor

    def log_probs(self, batch: DataProto) -> torch.Tensor:
        return self._actor.base_log_probs(batch)

    def states(self) -> AbstractContextManager[StatesOf]:
        return self._actor.base_states()


def make_reference(
    model_config: ModelConfig, actor_config: ActorConfig, ref_config: RefConfig, actor: Actor, *, temperature: float
) -> ReferencePolicy:
    """The policy that ``actor`` began with, shared with it where that is possible."""
    if model_config.lora_rank > 0:
        return AdapterlessReference(actor)
    return Reference(
        model_config,
        ref_config,
        device=actor.device,
        temperature=temperature,
        sequence_parallel_size=actor_config.ulysses_sequence_parallel_size,
    )
