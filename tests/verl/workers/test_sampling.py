"""Inverse-CDF sampling: right frequencies, right cuts, right log-probs."""

from __future__ import annotations

import math

import pytest
import torch

from agentgym_rl.types import SamplingParams
from verl.workers.rollout.sampling import sample_tokens

PROBS = torch.tensor([0.1, 0.0, 0.4, 0.3, 0.2])


def _draw(params: SamplingParams, uniforms: torch.Tensor) -> torch.Tensor:
    logits = PROBS.log().expand(len(uniforms), -1)
    return sample_tokens(logits, [params] * len(uniforms), uniforms)[0]


def _frequencies(params: SamplingParams) -> list[float]:
    grid = (torch.arange(10_000) + 0.5) / 10_000
    return (torch.bincount(_draw(params, grid), minlength=5) / 10_000).tolist()


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(1), [0.1, 0.0, 0.4, 0.3, 0.2]),
        (SamplingParams(1, top_k=2), [0.0, 0.0, 4 / 7, 3 / 7, 0.0]),
        (SamplingParams(1, top_p=0.75), [0.0, 0.0, 4 / 9, 3 / 9, 2 / 9]),
        (SamplingParams(1, top_p=1e-6), [0.0, 0.0, 1.0, 0.0, 0.0]),
        (SamplingParams(1, temperature=0), [0.0, 0.0, 1.0, 0.0, 0.0]),
        (SamplingParams(1, temperature=0.5), [0.01 / 0.3, 0.0, 0.16 / 0.3, 0.09 / 0.3, 0.04 / 0.3]),
    ],
)
def test_ids_come_with_their_probabilities(params, expected):
    assert _frequencies(params) == pytest.approx(expected, abs=2e-3)


def test_extreme_draws_stay_on_possible_ids():
    assert _draw(SamplingParams(1), torch.tensor([0.0, 1.0 - 2**-24])).tolist() == [0, 4]


def test_log_probs_ignore_the_cut_and_rows_keep_their_own_settings():
    params = [SamplingParams(1, top_k=1), SamplingParams(1, temperature=0.5), SamplingParams(1)]
    ids, log_probs = sample_tokens(PROBS.log().expand(3, -1), params, torch.full((3,), 0.9))
    assert ids.tolist() == [2, 4, 4]
    assert log_probs.tolist() == pytest.approx([math.log(0.4), math.log(0.04 / 0.3), math.log(0.2)], abs=1e-6)


def test_logits_of_16_bit_are_divided_by_the_temperature_as_the_trainer_does_it():
    generator = torch.Generator().manual_seed(0)
    logits = (6 * torch.randn(50, 400, generator=generator)).bfloat16()
    uniforms = torch.rand(50, generator=generator)
    ids, log_probs = sample_tokens(logits, [SamplingParams(1, temperature=0.7)] * 50, uniforms)
    expected = (logits.float() / 0.7).log_softmax(-1)
    assert torch.allclose(log_probs, expected.gather(1, ids[:, None])[:, 0], atol=1e-5)
    # The id at which the summed probabilities pass the draw.
    assert ids.tolist() == (expected.exp().double().cumsum(-1) <= uniforms[:, None]).sum(-1).tolist()
