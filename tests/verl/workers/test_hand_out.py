"""Requests go to whoever has room, each to one worker only, and no group is split where that costs something."""

from __future__ import annotations

import asyncio
import itertools
import threading

import pytest
import torch.distributed as dist
from support.rollouts import ScriptedClient, ScriptedEngine, frameless_chat, make_settings

from agentgym_rl.rollout.collector import RolloutRequest, collect
from agentgym_rl.types import Item, StepOutput, Trajectory
from verl.trainer.rollouts import make_requests
from verl.workers.rollout.hand_out import HandOut

STORES = [dist.HashStore, lambda: dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]


def requests_for(num_items: int, *, n: int) -> list[RolloutRequest]:
    return make_requests([Item("toy", index) for index in range(num_items)], n=n, purpose="x", seed=0)


@pytest.mark.parametrize("make_store", STORES, ids=["in process", "over TCP"])
@pytest.mark.parametrize(
    ("num_items", "n", "workers"), [(7, 1, 4), (1, 4, 4), (5, 3, 2), (4, 2, 2), (3, 2, 1), (1, 1, 3), (0, 1, 2)]
)
def test_every_request_goes_to_exactly_one_worker(make_store, num_items: int, n: int, workers: int) -> None:
    requests, store = requests_for(num_items, n=n), make_store()
    hand_outs = [HandOut(requests, store, name="1") for _ in range(workers)]
    rounds = zip(
        *(itertools.chain(hand_out, itertools.repeat(None, n * num_items)) for hand_out in hand_outs), strict=False
    )
    taken = [index for turn in rounds for index in turn if index is not None]
    assert sorted(taken) == list(range(len(requests)))
    assert sorted(index for hand_out in hand_outs for index in hand_out.taken) == sorted(taken)


def test_groups_stay_together_until_none_is_untouched_and_then_single_members_are_taken() -> None:
    requests, store = requests_for(3, n=3), dist.HashStore()
    first, second = (iter(HandOut(requests, store, name="1")) for _ in range(2))
    assert [next(first) for _ in range(3)] == [0, 1, 2]
    assert [next(second), next(first), next(second)] == [3, 6, 4]
    # One member of the second group and two of the third are left: whoever has room helps.
    assert list(second) == [5, 7, 8]
    assert list(first) == []


def test_one_slow_item_holds_up_neither_its_workers_other_items_nor_the_other_worker() -> None:
    """Item 0 does not answer before all others are finished: with fixed shares this would never end."""
    requests, store, chat = requests_for(12, n=1), dist.HashStore(), frameless_chat()
    others_are_done, finished = threading.Event(), []

    def script(item: int, step: int, text: str) -> StepOutput:
        if item == 0 and step == 1:
            assert others_are_done.wait(60)
        return StepOutput("seen", float(step), step == 1)

    def note(trajectory: Trajectory) -> None:
        finished.append(trajectory.item.index)
        if len(finished) == len(requests) - 1:
            others_are_done.set()

    async def work() -> list[HandOut]:
        hand_outs = [HandOut(requests, store, name="1") for _ in range(2)]
        await asyncio.gather(
            *(
                collect(
                    requests,
                    ScriptedEngine(chat),
                    make_client=lambda: ScriptedClient(script),
                    chat=chat,
                    settings=make_settings(max_concurrency=1),
                    picks=hand_out,
                    on_finished=note,
                )
                for hand_out in hand_outs
            )
        )
        return hand_outs

    slow, quick = asyncio.run(work())
    assert finished[-1] == 0 and sorted(finished) == list(range(12))
    assert slow.taken == [0] and quick.taken == list(range(1, 12))


def test_rollouts_on_one_store_do_not_mix_and_leave_nothing_behind() -> None:
    requests, store = requests_for(2, n=2), dist.HashStore()
    pairs = [[HandOut(requests, store, name=name) for _ in range(2)] for name in ("1", "2")]
    before = store.num_keys()
    for pair in pairs:
        assert sorted([*pair[0], *pair[1]]) == [0, 1, 2, 3]
        for hand_out in pair:
            hand_out.forget(num_workers=2)
    assert store.num_keys() == before
