"""PolicyModule: a causal language model as the learner sees it, from packed tokens to log-probs of the sampled ones."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from verl.models.attention import Packing
from verl.models.log_probs import token_log_probs
from verl.protocol import DataProto


class PolicyModule(nn.Module):
    """One module around backbone and output layer, so that FSDP gathers both for a single call."""

    def __init__(self, model: PreTrainedModel, temperature: float = 1.0) -> None:
        """``model`` is loaded with `PACKED_ATTENTION`; log-probs are taken at ``temperature``, that of sampling."""
        super().__init__()
        self.model = model
        self.temperature = temperature
        # Dropout would make a token's old and new log-prob differ without any update between them.
        for layer in model.modules():
            if isinstance(layer, nn.Dropout):
                layer.p = 0.0

    def forward(self, batch: DataProto, with_entropy: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probs of the batch's loss tokens, float32 nats ``[S]`` in their order, and entropies ``[S]`` if asked.

        The output layer, a large part of a small model, runs at those positions only.
        """
        output = self.model.base_model(
            input_ids=batch.input_ids_T[None],
            position_ids=batch.position_ids_T[None],
            use_cache=False,
            packing=Packing.of(batch.offsets_B1),
        )
        # A loss token is never its sequence's first, so the state before it belongs to the same sequence.
        targets_S = batch.loss_mask_T.nonzero()[:, 0]
        hidden_SD = output.last_hidden_state[0].index_select(0, targets_S - 1)
        head = self.model.get_output_embeddings()
        return token_log_probs(
            hidden_SD,
            head.weight.to(hidden_SD.dtype),
            batch.input_ids_T[targets_S],
            temperature=self.temperature,
            with_entropy=with_entropy,
        )
