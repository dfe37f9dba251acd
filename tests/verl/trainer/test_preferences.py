"""Losses over pairs: numbers worked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from agentgym_rl.errors import ConfigError
from verl.config import DPOAlgorithmConfig
from verl.trainer.core_algos import PairKL, PairRatios, pair_losses, preference_loss


def ratios(chosen: list[float], rejected: list[float], *, tokens: tuple[int, int] = (4, 2)) -> PairRatios:
    counts = [torch.full((len(chosen),), count) for count in tokens]
    return PairRatios(torch.tensor(chosen), torch.tensor(rejected), *counts)


# The chosen side has become likelier by 2 nats, the rejected one less likely by 1: a gap of 3.
PAIR = ratios([2.0], [-1.0])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"beta": 0.5}, math.log(1 + math.exp(-1.5))),  # 0.2014
        ({"beta": 0.5, "label_smoothing": 0.1}, 0.9 * 0.2014133 + 0.1 * 1.7014133),
        ({"loss_type": "hinge", "beta": 0.1}, 0.7),
        ({"loss_type": "hinge", "beta": 0.5}, 0.0),  # a gap of 3 is beyond the margin of 2
        ({"loss_type": "ipo", "beta": 0.5}, 0.0),  # 2/4 - (-1/2) = 1, the very target 1 / (2 * 0.5)
        ({"loss_type": "ipo", "beta": 0.1}, 16.0),  # (1 - 5)^2
        # 1 - sigmoid(0.5 (2 - 0)) = 0.2689 and 1 - sigmoid(0.5 (0.5 + 1)) = 0.3208
        ({"loss_type": "kto_pair", "beta": 0.5}, (0.2689414 + 0.3208213) / 2),
    ],
)
def test_a_pairs_loss_is_what_the_formula_gives_by_hand(options, expected):
    kl = PairKL(chosen=0.5, rejected=0.0)
    losses_P = pair_losses(PAIR, DPOAlgorithmConfig(**options), kl=kl)
    assert losses_P.tolist() == pytest.approx([expected], abs=1e-6)


@pytest.mark.parametrize("loss_type", ["sigmoid", "hinge", "kto_pair"])
def test_an_update_pulls_both_sides_the_right_way(loss_type):
    chosen_P, rejected_P = torch.tensor([0.0], requires_grad=True), torch.tensor([0.0], requires_grad=True)
    pair = PairRatios(chosen_P, rejected_P, torch.tensor([3]), torch.tensor([3]))
    config = DPOAlgorithmConfig(loss_type=loss_type, beta=0.2)
    preference_loss(pair, config, kl=PairKL(0.0, 0.0)).backward()
    # At the reference the slopes of -log sigmoid and hinge are -beta/2 and -beta; KTO's two sides have beta/4 halved.
    slope = {"sigmoid": 0.1, "hinge": 0.2, "kto_pair": 0.025}[loss_type]
    assert chosen_P.grad.item() == pytest.approx(-slope)
    assert rejected_P.grad.item() == pytest.approx(slope)


def test_parts_of_a_mini_batch_add_up_to_it():
    config = DPOAlgorithmConfig()
    whole = preference_loss(ratios([2.0, 0.5, -1.0], [0.0, 0.7, 1.0]), config)
    parts = [
        preference_loss(ratios([2.0], [0.0]), config, num_pairs=3),
        preference_loss(ratios([0.5, -1.0], [0.7, 1.0]), config, num_pairs=3),
    ]
    assert sum(parts).item() == pytest.approx(whole.item())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_type": "dpo"}, r"algorithm\.loss_type='dpo': must be one of sigmoid, ipo, hinge, kto_pair"),
        ({"beta": 0.0}, r"algorithm\.beta=0\.0: must be above 0"),
        ({"label_smoothing": 0.5}, r"algorithm\.label_smoothing=0\.5: must be in \[0, 0\.5\)"),
        ({"loss_type": "ipo", "label_smoothing": 0.1}, "with algorithm.loss_type=ipo: must be 0"),
    ],
)
def test_impossible_settings_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        DPOAlgorithmConfig(**options)
