"""Losses over pairs of trajectories: the chosen one against the rejected one.

Axes: ``P`` pairs. Log-ratios are sums over a trajectory's loss tokens of policy minus reference log-probs, in nats.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid

from agentgym_rl.errors import ConfigError
from verl.config import DPOAlgorithmConfig, PreferenceLossType


@dataclass(frozen=True, eq=False)
class PairRatios:
    """How far the policy has moved from the reference on both sides of each pair."""

    chosen_P: torch.Tensor
    rejected_P: torch.Tensor
    chosen_tokens_P: torch.Tensor
    """Loss tokens."""
    rejected_tokens_P: torch.Tensor

    @property
    def gap_P(self) -> torch.Tensor:
        """Log-ratio of the chosen side minus that of the rejected one."""
        return self.chosen_P - self.rejected_P


@dataclass(frozen=True)
class PairKL:
    """Estimated KL of the policy to the reference on each side, over the whole mini-batch; at least 0."""

    chosen: float
    rejected: float


def preference_loss(
    ratios: PairRatios, config: DPOAlgorithmConfig, *, kl: PairKL | None = None, num_pairs: int | None = None
) -> torch.Tensor:
    """Sum of the pairs' losses over ``num_pairs``, those of the whole mini-batch (None: these are all), so that parts
    of a mini-batch add up to it; ``kl`` is needed by ``kto_pair`` alone."""
    return pair_losses(ratios, config, kl=kl).sum() / (len(ratios.chosen_P) if num_pairs is None else num_pairs)


def pair_losses(ratios: PairRatios, config: DPOAlgorithmConfig, *, kl: PairKL | None = None) -> torch.Tensor:
    """``P``: the loss of each pair under ``config.loss_type``."""
    match config.loss_type:
        case PreferenceLossType.SIGMOID:
            return sigmoid_losses(ratios.gap_P, beta=config.beta, label_smoothing=config.label_smoothing)
        case PreferenceLossType.IPO:
            return ipo_losses(ratios, beta=config.beta)
        case PreferenceLossType.HINGE:
            return torch.relu(1.0 - config.beta * ratios.gap_P)  # Zhao et al. 2023, https://arxiv.org/abs/2305.10425
        case PreferenceLossType.KTO_PAIR:
            if kl is None:
                raise ValueError("the loss kto_pair needs the KL of the mini-batch")
            return kto_pair_losses(ratios, kl, beta=config.beta)
        case other:
            raise ConfigError(f"algorithm.loss_type={other!r}: has no loss")


def sigmoid_losses(gap_P: torch.Tensor, *, beta: float, label_smoothing: float = 0.0) -> torch.Tensor:
    """``-log sigmoid(beta * gap)``: DPO, Rafailov et al. 2023, https://arxiv.org/abs/2305.18290.

    With ``label_smoothing`` that share of labels is taken to be wrong (conservative DPO, Mitchell 2023,
    https://ericmitchell.ai/cdpo.pdf).
    """
    right_P, wrong_P = -logsigmoid(beta * gap_P), -logsigmoid(-beta * gap_P)
    return (1.0 - label_smoothing) * right_P + label_smoothing * wrong_P


def ipo_losses(ratios: PairRatios, *, beta: float) -> torch.Tensor:
    """``(gap - 1 / (2 beta))^2``: IPO, Azar et al. 2023, https://arxiv.org/abs/2310.12036.

    Log-ratios are means over a side's loss tokens here, so that one target gap suits trajectories of any length.
    """
    gap_P = ratios.chosen_P / ratios.chosen_tokens_P - ratios.rejected_P / ratios.rejected_tokens_P
    return (gap_P - 1.0 / (2.0 * beta)).square()


def kto_pair_losses(ratios: PairRatios, kl: PairKL, *, beta: float) -> torch.Tensor:
    """KTO on pairs, Ethayarajh et al. 2024, https://arxiv.org/abs/2402.01306: each side by itself, against how far the
    policy has moved on the other side. The mean of both sides' losses; no gradient flows through the KL."""
    desirable_P = 1.0 - torch.sigmoid(beta * (ratios.chosen_P - kl.rejected))
    undesirable_P = 1.0 - torch.sigmoid(beta * (kl.chosen - ratios.rejected_P))
    return 0.5 * (desirable_P + undesirable_P)
