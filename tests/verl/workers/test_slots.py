"""The hf engine's slots: which one a sequence gets, what it finds there, and copies between them."""

from __future__ import annotations

import random

import numpy as np
import torch

from verl.workers.rollout.slot_cache import PrefixCopies, SlotCache
from verl.workers.rollout.slot_table import SlotTable


def _ids(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.int64)


def _take(table: SlotTable, trajectory: str, prompt: np.ndarray) -> tuple[int, int, int] | None:
    """A whole turn's slot: the prompt is in it afterwards and the slot idle."""
    place = table.acquire(trajectory, prompt)
    if place is not None:
        table.extend(place[0], prompt[place[2] :])
        table.set_idle(place[0])
    return place


def test_the_longest_prefix_is_found_and_the_first_slot_of_several_that_have_it():
    table = SlotTable(8)
    _take(table, "short", _ids(1, 2, 9, 9))
    _take(table, "long", _ids(1, 2, 3, 4, 5))
    _take(table, "as long", _ids(1, 2, 3, 4, 6))
    assert table.acquire("new", _ids(1, 2, 3, 4, 7, 8)) == (3, 1, 4)
    assert table.acquire("other", _ids(7, 7)) == (4, 0, 0)


def test_one_token_of_a_prompt_that_is_cached_whole_is_left_to_compute():
    table = SlotTable(8)
    _take(table, "a", _ids(1, 2, 3))
    assert table.acquire("a", _ids(1, 2, 3)) == (0, 0, 2)
    assert table.acquire("b", _ids(1, 2, 3)) == (1, 0, 2)


def test_an_owner_finds_its_own_tokens_up_to_where_they_differ():
    table = SlotTable(8)
    _take(table, "a", _ids(1, 2, 3, 4))
    assert table.acquire("a", _ids(1, 2, 3, 4, 5, 6)) == (0, 0, 4)
    table.set_idle(0)
    assert table.acquire("a", _ids(1, 9, 3, 4, 5)) == (0, 0, 1)


def test_a_slot_is_taken_that_nobody_owns_then_a_new_one_then_the_idle_one_unused_for_longest():
    table = SlotTable(3)
    for trajectory in ("a", "b"):
        _take(table, trajectory, _ids(1, 2))
    table.release("b")
    table.release("a")  # its slot has been unused for longer than b's, whenever it was given back
    assert [_take(table, name, _ids(5))[0] for name in ("c", "d", "e")] == [0, 1, 2]
    _take(table, "c", _ids(5))
    assert table.acquire("f", _ids(6))[0] == 1  # d's
    assert not table.owns("d") and table.owns("c")
    assert [table.acquire(name, _ids(6)) is None for name in ("g", "h", "i")] == [False, False, True]


def test_a_slot_given_back_during_a_turn_is_free_when_the_turn_ends():
    table = SlotTable(1)
    slot, _, _ = table.acquire("a", _ids(1, 2))
    table.release("a")
    assert table.acquire("b", _ids(1)) is None
    table.set_idle(slot)
    assert table.acquire("b", _ids(1))[0] == slot


def test_more_slots_and_longer_sequences_than_there_was_room_for_keep_what_is_cached():
    table = SlotTable(100)
    prompts = [np.arange(number, number + 10 * (number + 1)) for number in range(40)]
    for number, prompt in enumerate(prompts):
        assert _take(table, str(number), prompt)[0] == number
    for number, prompt in enumerate(prompts):
        assert table.acquire(str(number), np.append(prompt, -1))[2] == len(prompt)


def test_copies_put_off_leave_what_copies_made_at_once_would():
    """Slots are sources and targets in any order, as where a group's slot is another's to fill."""
    draw = random.Random(0)
    for _ in range(50):
        content = torch.rand(4, 2, 8, 3)
        cache = SlotCache()
        cache.reserve(4, 8)
        keys, values = cache.layer(0, torch.zeros(1, 2, 1, 3))
        keys[:4, :, :8], values[:4, :, :8] = content, -content
        copies, expected = PrefixCopies(cache), content.clone()
        for _ in range(6):
            (source, target), length = draw.sample(range(4), 2), draw.randrange(1, 9)
            copies.add(source, target, length)
            expected[target, :, :length] = expected[source, :, :length]
        copies.flush()
        assert torch.equal(keys[:4, :, :8], expected) and torch.equal(values[:4, :, :8], -expected)


def test_a_copy_to_a_slot_beyond_those_so_far_makes_room_for_it():
    cache = SlotCache()
    cache.reserve(1, 5)
    keys, _ = cache.layer(0, torch.zeros(1, 2, 1, 3))
    keys[0, :, :5] = torch.rand(2, 5, 3)
    copies = PrefixCopies(cache)
    copies.add(0, 300, 5)
    copies.flush()
    assert torch.equal(cache.layer(0, keys[:1])[0][300, :, :5], keys[0, :, :5])
