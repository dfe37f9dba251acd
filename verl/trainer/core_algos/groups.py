"""Statistics within groups; float64, so that scores which agree do not seem to differ.

Axis ``B``: sequences of a batch, or other things that have a score and a group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from verl.protocol import DataProto


@dataclass(frozen=True, eq=False)
class GroupStatistics:
    """Per member, over the unmasked members of its group; float64."""

    size_B: torch.Tensor
    """Members; 0 for a masked one."""
    centred_B: torch.Tensor
    """Score minus group mean; exactly 0 for masked, for lone members, and where scores agree to float precision."""
    std_B: torch.Tensor
    """Sample standard deviation; 0 where ``centred_B`` is 0 for one of the reasons above."""

    @classmethod
    def of(cls, batch: DataProto) -> GroupStatistics:
        """The batch's scores by its groups."""
        return cls.of_scores(batch.scores_B, batch.group_ids_B, ~batch.masked_B)

    @classmethod
    def of_scores(cls, scores_B: torch.Tensor, group_ids_B: torch.Tensor, live_B: torch.Tensor) -> GroupStatistics:
        """``group_ids_B``: any ints; ``live_B``: False for members that count nowhere."""
        codes, group_B = group_ids_B.unique(return_inverse=True)
        scores_B = torch.where(live_B, scores_B.double(), 0.0)

        def group_sums(values_B: torch.Tensor) -> torch.Tensor:
            totals = torch.zeros(len(codes), dtype=torch.float64, device=values_B.device)
            return totals.index_add_(0, group_B, values_B)[group_B]

        size_B = group_sums(live_B.double())
        centred_B = scores_B - group_sums(scores_B) / size_B.clamp(min=1)
        # Scores such as eight times 0.35 leave a residue of rounding, which dividing by their std would blow up.
        has_signal_B = live_B & (size_B > 1) & _spread_is_real(scores_B, live_B, group_B, len(codes))
        centred_B = torch.where(has_signal_B, centred_B, 0.0)
        std_B = (group_sums(centred_B.square()) / (size_B - 1).clamp(min=1)).sqrt()
        return cls(torch.where(live_B, size_B, 0.0), centred_B, torch.where(has_signal_B, std_B, 0.0))

    @property
    def standardised_B(self) -> torch.Tensor:
        """``centred_B`` divided by the standard deviation + 1e-6."""
        return self.centred_B / (self.std_B + 1e-6)


def _spread_is_real(
    scores_B: torch.Tensor, live_B: torch.Tensor, group_B: torch.Tensor, num_groups: int
) -> torch.Tensor:
    """bool ``B``: the group's scores differ by more than 1e-6 of their size, i.e. by more than float32 rounding."""

    def extreme(values_B: torch.Tensor) -> torch.Tensor:
        start = torch.full((num_groups,), -torch.inf, dtype=torch.float64, device=values_B.device)
        return start.scatter_reduce_(0, group_B, values_B.masked_fill(~live_B, -torch.inf), "amax")[group_B]

    spread_B = extreme(scores_B) + extreme(-scores_B)
    return spread_B > 1e-6 * extreme(scores_B.abs())
