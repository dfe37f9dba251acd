"""A critic on two ranks, for any micro-batch, rows whole or shared: the same as on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.critic_program import TRAININGS, fixed_batch, make_critic, train
from support.models import save_tiny_model
from support.ranks import run_ranks

from verl.utils.balancing import balanced_partition


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def two_ranks(model, tmp_path_factory) -> Path:
    """The results of both ranks, ``<training>_<rank>.pt``, and the last critic's checkpoint."""
    out = tmp_path_factory.mktemp("two")
    run_ranks("support.critic_program", 2, model, out)
    return out


@pytest.fixture(scope="module")
def one_rank(model) -> dict[str, Any]:
    return train(make_critic(str(model), {"ppo_max_token_len_per_gpu": 50}), 0, 1)


@pytest.mark.parametrize("name", TRAININGS)
def test_two_ranks_train_a_critic_as_one_does(two_ranks, one_rank, name):
    for rank in (0, 1):
        result = torch.load(two_ranks / f"{name}_{rank}.pt")
        for metrics, expected in zip(result["metrics"], one_rank["metrics"], strict=True):
            assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-5)
        assert result["weights"].keys() == one_rank["weights"].keys()
        for weight, tensor in result["weights"].items():
            assert torch.allclose(tensor, one_rank["weights"][weight], atol=1e-5), weight


def test_values_come_back_to_the_rank_whose_share_they_are(two_ranks, one_rank):
    batch = fixed_batch()
    shares = balanced_partition(batch.lengths_B.tolist(), 2)
    joined = torch.cat([torch.load(two_ranks / f"packed_{rank}.pt")["values"] for rank in (0, 1)])
    places = [batch.token_positions(share) for share in shares]
    restored = torch.zeros(batch.num_tokens).index_copy(0, torch.cat(places), joined)
    assert torch.allclose(restored, one_rank["values"], atol=1e-5) and restored.abs().max() > 0


def test_the_checkpoint_of_two_ranks_goes_on_with_one(two_ranks, one_rank, model):
    critic = make_critic(str(model), {})
    critic.load(two_ranks / "critic")
    assert torch.allclose(critic.values(fixed_batch()), one_rank["values"], atol=1e-5)
    assert critic.num_updates == 3
