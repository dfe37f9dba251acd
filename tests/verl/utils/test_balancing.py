from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.utils.balancing import balanced_partition, pack, restore_order

LENGTHS = st.lists(st.integers(1, 500), max_size=40)


@given(LENGTHS, st.integers(1, 9))
def test_every_sequence_is_in_exactly_one_part(lengths, num_parts):
    parts = balanced_partition(lengths, num_parts)
    assert len(parts) == num_parts
    assert sorted(index for part in parts for index in part) == list(range(len(lengths)))


@given(LENGTHS, st.integers(1, 9))
def test_parts_differ_by_at_most_the_longest_sequence(lengths, num_parts):
    totals = [sum(lengths[index] for index in part) for part in balanced_partition(lengths, num_parts)]
    assert max(totals) - min(totals) <= max(lengths, default=0)


def test_lengths_9_2_7_4_on_two_ranks_and_back():
    rewards = [0, 1, 2, 3]
    parts = balanced_partition([9, 2, 7, 4], 2)
    assert parts == [[0, 1], [2, 3]]
    joined = [rewards[index] for part in parts for index in part]
    assert [joined[place] for place in restore_order(parts)] == rewards


@given(LENGTHS, st.integers(1, 5))
def test_restore_order_undoes_any_partition(lengths, num_parts):
    parts = balanced_partition(lengths, num_parts)
    joined = [index for part in parts for index in part]
    assert [joined[place] for place in restore_order(parts)] == list(range(len(lengths)))


@given(LENGTHS, st.none() | st.integers(1, 700), st.none() | st.integers(1, 6))
def test_micro_batches_keep_both_limits(lengths, max_tokens, max_sequences):
    parts = pack(lengths, max_tokens=max_tokens, max_sequences=max_sequences)
    assert sorted(index for part in parts for index in part) == list(range(len(lengths)))
    for part in parts:
        assert max_sequences is None or len(part) <= max_sequences
        assert max_tokens is None or len(part) == 1 or sum(lengths[index] for index in part) <= max_tokens


def test_a_sequence_above_the_budget_goes_alone():
    assert sorted(pack([30, 5, 5], max_tokens=10)) == [[0], [1, 2]]


def test_no_parts_are_an_error():
    with pytest.raises(ValueError, match="num_parts=0"):
        balanced_partition([1], 0)
