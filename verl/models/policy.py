"""A causal language model as the learner sees it: from packed tokens to one number per loss token.

Axes: ``T`` tokens of a batch, ``S`` its loss tokens, ``P`` the tokens that this rank computes, ``D`` hidden size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from torch import nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from verl.models.attention import Packing
from verl.models.loading import TRAINED_DTYPE
from verl.models.log_probs import OutputStates, token_kl, token_log_probs
from verl.models.prefixes import Row
from verl.models.sequence_parallel import SequenceParallel
from verl.protocol import DataProto


class ReadOut(NamedTuple):
    """What a module says of each loss token, ``S``, or of each token with 0 at the others, ``T``; float32."""

    numbers: torch.Tensor
    entropy: torch.Tensor | None = None
    kl: torch.Tensor | None = None
    """KL to a reference over the whole vocabulary, nats."""

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> ReadOut:
        """``change`` of each that is there."""
        numbers, entropy, kl = self
        return ReadOut(
            change(numbers), None if entropy is None else change(entropy), None if kl is None else change(kl)
        )


class PackedModule(nn.Module, ABC):
    """One module around backbone and output layer, so that FSDP gathers both for a single call."""

    def __init__(self, model: PreTrainedModel, parallel: SequenceParallel | None = None) -> None:
        """``model`` is loaded with `PACKED_ATTENTION`; the ranks of ``parallel`` get the same batches."""
        super().__init__()
        self.model = model
        self.parallel = parallel
        self.shares_prefixes = False
        """Compute once what sequences of one group begin with; not where ranks share a row."""
        # Dropout would make a token's old and new log-prob differ without any update between them.
        for layer in model.modules():
            if isinstance(layer, nn.Dropout):
                layer.p = 0.0

    @abstractmethod
    def read_out(
        self, hidden_SD: torch.Tensor, ids_S: torch.Tensor, *, with_entropy: bool, reference: OutputStates | None
    ) -> ReadOut:
        """Of the tokens ``ids_S``, from the states that precede them; entropy and KL where asked, if there are any."""

    def forward(self, batch: DataProto, with_entropy: bool = False, reference: OutputStates | None = None) -> ReadOut:
        """`read_out` at the batch's loss tokens, in their order.

        The output layer, a large part of a small model, runs at those positions only. ``reference`` is what another
        module's `PolicyModule.states` gives for the same batch.
        """
        targets_S = batch.loss_mask_T.nonzero()[:, 0]
        ids_S = batch.input_ids_T[targets_S]
        if self.parallel is None:
            return self.read_out(self._states_before(batch), ids_S, with_entropy=with_entropy, reference=reference)
        hidden_SD, own = self._own_states_before(batch, targets_S, self.parallel)
        results = self.read_out(hidden_SD, ids_S[own], with_entropy=with_entropy, reference=reference)
        merge = self.parallel.merge
        return results.map(lambda own_S: merge(own_S.new_zeros(len(targets_S)).index_copy(0, own, own_S)))

    def _states_before(self, batch: DataProto) -> torch.Tensor:
        row = Row.of(batch, shares_prefixes=self.shares_prefixes)
        ids_P, positions_P = batch.input_ids_T[row.tokens_P], batch.position_ids_T[row.tokens_P]
        return self._backbone(ids_P, positions_P, row.packing)[row.before_S]

    def _own_states_before(
        self, batch: DataProto, targets_S: torch.Tensor, parallel: SequenceParallel
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute this rank's stretch of the row; which of the targets follow it comes back too."""
        padding = -batch.num_tokens % parallel.size
        packing = Packing.of(batch.offsets_B1, padding=padding, parallel=parallel)
        stretch = parallel.stretch(batch.num_tokens + padding)
        ids_T, positions_T = (pad(tensor, (0, padding)) for tensor in (batch.input_ids_T, batch.position_ids_T))
        hidden_PD = self._backbone(ids_T[stretch], positions_T[stretch], packing)
        own = ((targets_S > stretch.start) & (targets_S <= stretch.stop)).nonzero()[:, 0]
        return hidden_PD[targets_S[own] - 1 - stretch.start], own

    def _backbone(self, ids_P: torch.Tensor, positions_P: torch.Tensor, packing: Packing) -> torch.Tensor:
        """Last hidden states ``[P, D]``."""
        output = self.model.base_model(
            input_ids=ids_P[None], position_ids=positions_P[None], use_cache=False, packing=packing
        )
        return output.last_hidden_state[0]


class PolicyModule(PackedModule):
    """Log-probs of the loss tokens, float32 nats; entropies and KL to a reference if asked."""

    def __init__(
        self, model: PreTrainedModel, temperature: float = 1.0, parallel: SequenceParallel | None = None
    ) -> None:
        """Log-probs are taken at ``temperature``, that of sampling."""
        super().__init__(model, parallel)
        self.temperature = temperature

    def read_out(
        self, hidden_SD: torch.Tensor, ids_S: torch.Tensor, *, with_entropy: bool, reference: OutputStates | None
    ) -> ReadOut:
        states = self._output_states(hidden_SD)
        log_probs_S, entropy_S = token_log_probs(
            *states, ids_S, temperature=self.temperature, with_entropy=with_entropy
        )
        kl_S = None if reference is None else token_kl(states, reference, temperature=self.temperature)
        return ReadOut(log_probs_S, entropy_S, kl_S)

    def states(self, batch: DataProto) -> OutputStates:
        """What the distributions of the batch's loss tokens follow from; of this rank's stretch, where it has one."""
        if self.parallel is None:
            return self._output_states(self._states_before(batch))
        targets_S = batch.loss_mask_T.nonzero()[:, 0]
        return self._output_states(self._own_states_before(batch, targets_S, self.parallel)[0])

    def _output_states(self, hidden_SD: torch.Tensor) -> OutputStates:
        return OutputStates(hidden_SD, self.model.get_output_embeddings().weight.to(hidden_SD.dtype))


class ValueModule(PackedModule):
    """The value of the state before each loss token: what is expected of it and of what follows."""

    def __init__(self, model: PreTrainedModel, parallel: SequenceParallel | None = None) -> None:
        """Takes the backbone of a causal language model; the value head begins at 0, which is the value everywhere."""
        super().__init__(cast(PreTrainedModel, model.base_model), parallel)
        self.value_head = nn.Linear(model.config.hidden_size, 1, dtype=TRAINED_DTYPE)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def read_out(
        self, hidden_SD: torch.Tensor, ids_S: torch.Tensor, *, with_entropy: bool, reference: OutputStates | None
    ) -> ReadOut:
        return ReadOut(self.value_head(hidden_SD)[:, 0].float())
