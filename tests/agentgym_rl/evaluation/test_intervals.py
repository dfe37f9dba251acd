"""Intervals and paired tests against numbers worked by hand or taken from the literature."""

from __future__ import annotations

import random
import statistics

import pytest

from agentgym_rl.evaluation.intervals import Interval, bootstrap_mean, mcnemar_p, sign_flip_p, wilson


def test_wilsons_interval_of_the_textbook_cases() -> None:
    """Newcombe 1998, table 1: 81 of 263, 15 of 148, 0 of 20, 1 of 29."""
    cases = {(81, 263): (0.2553, 0.3662), (15, 148): (0.0624, 0.1605), (0, 20): (0, 0.1611), (1, 29): (0.0061, 0.1718)}
    for (successes, trials), expected in cases.items():
        interval = wilson(successes, trials)
        assert interval is not None
        assert (interval.low, interval.high) == pytest.approx(expected, abs=5e-5)


def test_the_bootstrap_of_many_items_is_near_the_normal_interval() -> None:
    generator = random.Random(0)
    values = [generator.random() for _ in range(400)]
    interval = bootstrap_mean(values)
    reach = 1.96 * statistics.pstdev(values) / 400**0.5
    assert interval is not None
    assert interval.low == pytest.approx(statistics.mean(values) - reach, abs=0.002)
    assert interval.high == pytest.approx(statistics.mean(values) + reach, abs=0.002)
    assert interval == bootstrap_mean(values)


def test_items_that_agree_have_no_width_and_no_items_have_no_interval() -> None:
    assert bootstrap_mean([0.5] * 9) == Interval(0.5, 0.5)
    assert (bootstrap_mean([]), wilson(0, 0)) == (None, None)


def test_signs_of_few_differences_are_gone_through() -> None:
    """Of +1, +1, +1 the 8 sign patterns have two as far from 0; of +3, -1, +1 six reach |3|, and 0 tells nothing."""
    assert sign_flip_p([1, 1, 1]) == 2 / 8
    assert sign_flip_p([3, -1, 1, 0, 0]) == 6 / 8
    assert sign_flip_p([]) == sign_flip_p([0.0, 0.0]) == 1.0


def test_drawn_signs_agree_with_all_signs() -> None:
    generator = random.Random(3)
    few = [generator.gauss(0.2, 0.4) for _ in range(12)]
    tiny = [1e-9] * 3  # makes 15 items, for which patterns are drawn, and changes nothing
    assert sign_flip_p(few + tiny) == pytest.approx(sign_flip_p(few), abs=0.015)
    assert 0 < sign_flip_p([1.0] * 40) < 0.001


def test_mcnemars_exact_test() -> None:
    assert mcnemar_p(0, 5) == mcnemar_p(5, 0) == 2 / 32
    assert mcnemar_p(1, 4) == pytest.approx(2 * 6 / 32)
    assert (mcnemar_p(3, 3), mcnemar_p(0, 0)) == (1.0, 1.0)
