"""Speed of a step by hand: tokens, devices, shares and utilisation."""

from __future__ import annotations

import pytest
import torch
from support.batches import batch_of

from verl.protocol import DataProto
from verl.trainer.performance import Passes, Performance, largest
from verl.utils.flops import ModelSize

SIZE = ModelSize(num_body_weights=100, num_head_weights=0, num_layers=1, attention_width=0, trained_share=1.0)
# 10 tokens: a forward pass is 2 x 100 x 10 = 2000 operations.
BATCH = batch_of([[1, 0, 1, 1], [0, 1, 1, 1]])
PASSES = {"gen": Passes(forward=1), "update": Passes(training=1)}
TIMING = {"timing_s/step": 10.0, "timing_s/gen": 5.0, "timing_s/update": 4.0}


def test_tokens_per_second_and_per_device_and_the_share_of_each_phase() -> None:
    metrics = Performance(SIZE, num_devices=2, peak_flops=None).metrics(BATCH, TIMING, passes=PASSES)
    assert metrics == {
        "perf/tokens_per_s": 1.0,
        "perf/tokens_per_s_per_device": 0.5,
        "perf/share_gen": 0.5,
        "perf/share_update": 0.4,
        "perf/tflops_per_device": pytest.approx((2000 + 6000) / 10 / 2 / 1e12),
    }


def test_utilisation_of_the_step_and_of_its_phases() -> None:
    metrics = Performance(SIZE, num_devices=2, peak_flops=1000.0).metrics(
        BATCH, TIMING, passes=PASSES | {"update": Passes(training=2), "ref": Passes(forward=1)}
    )
    assert metrics["perf/mfu_gen"] == pytest.approx(2000 / 5 / 2 / 1000)
    assert metrics["perf/mfu_update"] == pytest.approx(2 * 6000 / 4 / 2 / 1000)
    assert metrics["perf/mfu"] == pytest.approx((2000 + 2 * 6000) / 10 / 2 / 1000)
    assert "perf/mfu_ref" not in metrics


def test_what_a_phase_does_beside_training_counts_too() -> None:
    """As the reference's pass for each update under the full KL in the loss."""
    passes = {"update": Passes(forward=2, training=2)}
    metrics = Performance(SIZE, num_devices=2, peak_flops=1000.0).metrics(BATCH, TIMING, passes=passes)
    assert metrics["perf/mfu_update"] == pytest.approx(2 * (2000 + 6000) / 4 / 2 / 1000)
    assert "perf/mfu_gen" not in metrics


def test_a_beginning_that_a_group_shares_counts_once_where_the_run_computes_it_once() -> None:
    size = ModelSize(num_body_weights=100, num_head_weights=10, num_layers=1, attention_width=3, trained_share=1.0)
    # Three of 20 + 5 tokens that have the first 20 in common: 60 + 15 tokens become 20 + 15.
    ids = [[*range(20), *range(100 * row, 100 * row + 5)] for row in range(1, 4)]
    masks = [[0] * 20 + [1] * 5] * 3
    batch = DataProto.from_sequences(ids, masks).replace(group_ids_B=torch.zeros(3, dtype=torch.int64))
    attention = 2 * 3 * (3 * 25**2 - 2 * 20**2)
    needed = 2 * 100 * 35 + attention + 2 * 10 * 15
    for shares, expected in ((True, needed), (False, size.forward_flops([25] * 3, 15))):
        performance = Performance(size, num_devices=1, peak_flops=1.0, shares_prefixes=shares)
        metrics = performance.metrics(batch, TIMING, passes=PASSES)
        assert metrics["perf/mfu_gen"] == pytest.approx(expected / 5)
        assert metrics["perf/mfu_update"] == pytest.approx(3 * expected / 4)


def test_the_worker_that_needs_most_memory_counts() -> None:
    assert largest([{"a": 1.0, "b": 5.0}, {"a": 3.0, "b": 4.0}]) == {"a": 3.0, "b": 5.0}
