"""A causal language model as the learner sees it: from packed tokens to one number per loss token.

Axes: ``T`` tokens of a batch, ``S`` its loss tokens, ``P`` the tokens that this rank computes, ``D`` hidden size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import cast

import torch
from torch import nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from verl.models.attention import Packing
from verl.models.log_probs import token_log_probs
from verl.models.sequence_parallel import SequenceParallel
from verl.protocol import DataProto


class PackedModule(nn.Module, ABC):
    """One module around backbone and output layer, so that FSDP gathers both for a single call."""

    def __init__(self, model: PreTrainedModel, parallel: SequenceParallel | None = None) -> None:
        """``model`` is loaded with `PACKED_ATTENTION`; the ranks of ``parallel`` get the same batches."""
        super().__init__()
        self.model = model
        self.parallel = parallel
        # Dropout would make a token's old and new log-prob differ without any update between them.
        for layer in model.modules():
            if isinstance(layer, nn.Dropout):
                layer.p = 0.0

    @abstractmethod
    def read_out(
        self, hidden_SD: torch.Tensor, ids_S: torch.Tensor, *, with_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Float32 ``[S]`` of the states that precede the tokens ``ids_S``; an entropy ``[S]`` where there is one."""

    def forward(self, batch: DataProto, with_entropy: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`read_out` at the batch's loss tokens, in their order.

        The output layer, a large part of a small model, runs at those positions only.
        """
        # A loss token is never its sequence's first, so the state before it belongs to the same sequence.
        targets_S = batch.loss_mask_T.nonzero()[:, 0]
        if self.parallel is None:
            hidden_TD = self._backbone(batch.input_ids_T, batch.position_ids_T, Packing.of(batch.offsets_B1))
            return self.read_out(hidden_TD[targets_S - 1], batch.input_ids_T[targets_S], with_entropy=with_entropy)
        return self._forward_stretch(batch, targets_S, with_entropy, self.parallel)

    def _forward_stretch(
        self, batch: DataProto, targets_S: torch.Tensor, with_entropy: bool, parallel: SequenceParallel
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute this rank's stretch of the row; the numbers of all stretches come back."""
        padding = -batch.num_tokens % parallel.size
        packing = Packing.of(batch.offsets_B1, padding=padding, parallel=parallel)
        stretch = parallel.stretch(batch.num_tokens + padding)
        ids_T, positions_T = (pad(tensor, (0, padding)) for tensor in (batch.input_ids_T, batch.position_ids_T))
        hidden_PD = self._backbone(ids_T[stretch], positions_T[stretch], packing)
        own = ((targets_S > stretch.start) & (targets_S <= stretch.stop)).nonzero()[:, 0]
        results = self.read_out(
            hidden_PD[targets_S[own] - 1 - stretch.start], ids_T[targets_S[own]], with_entropy=with_entropy
        )
        first, second = (
            None if result is None else parallel.merge(result.new_zeros(len(targets_S)).index_copy(0, own, result))
            for result in results
        )
        assert first is not None
        return first, second

    def _backbone(self, ids_P: torch.Tensor, positions_P: torch.Tensor, packing: Packing) -> torch.Tensor:
        """Last hidden states ``[P, D]``."""
        output = self.model.base_model(
            input_ids=ids_P[None], position_ids=positions_P[None], use_cache=False, packing=packing
        )
        return output.last_hidden_state[0]


class PolicyModule(PackedModule):
    """Log-probs of the loss tokens, float32 nats, and entropies if asked."""

    def __init__(
        self, model: PreTrainedModel, temperature: float = 1.0, parallel: SequenceParallel | None = None
    ) -> None:
        """Log-probs are taken at ``temperature``, that of sampling."""
        super().__init__(model, parallel)
        self.temperature = temperature

    def read_out(
        self, hidden_SD: torch.Tensor, ids_S: torch.Tensor, *, with_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        head = self.model.get_output_embeddings()
        return token_log_probs(
            hidden_SD,
            head.weight.to(hidden_SD.dtype),
            ids_S,
            temperature=self.temperature,
            with_entropy=with_entropy,
        )


class ValueModule(PackedModule):
    """The value of the state before each loss token: what is expected of it and of what follows."""

    def __init__(self, model: PreTrainedModel, parallel: SequenceParallel | None = None) -> None:
        """Takes the backbone of a causal language model; the value head begins at 0, which is the value everywhere."""
        super().__init__(cast(PreTrainedModel, model.base_model), parallel)
        self.value_head = nn.Linear(model.config.hidden_size, 1, dtype=model.dtype)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def read_out(
        self, hidden_SD: torch.Tensor, ids_S: torch.Tensor, *, with_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.value_head(hidden_SD)[:, 0].float(), None
