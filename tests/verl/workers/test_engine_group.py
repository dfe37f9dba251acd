from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import torch
from support.ranks import run_ranks

from agentgym_rl.errors import EngineError
from agentgym_rl.types import SamplingParams
from verl.workers.rollout.engine import EngineUsage
from verl.workers.rollout.engine_group import EngineGroup, Follower


def test_consecutive_ranks_form_groups_that_know_all_their_devices() -> None:
    run_ranks("support.engine_group_program", 4, 2)


def test_an_engine_of_one_device_asks_nobody() -> None:
    group = EngineGroup.join(1, torch.device("cuda"))
    assert group == EngineGroup() and group.leads
    assert group.exchange("x") == ["x"]


def test_a_follower_takes_part_in_updates_and_samples_nothing() -> None:
    seen: list[str] = []

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name in ("a", "b"):
            seen.append(name)
            yield name, torch.zeros(1)

    follower = Follower(list)
    times = follower.load_weights(weights(), 3)
    assert seen == ["a", "b"] and follower.policy_version == 3
    assert times.gather_s > 0 and times.transfer_s == times.load_s == 0
    with pytest.raises(EngineError, match="t: this rank has no engine"):
        asyncio.run(follower.generate([1], SamplingParams(4), trajectory_id="t"))
    assert follower.usage() == EngineUsage()
