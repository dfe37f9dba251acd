"""Speed of a step by hand: tokens, devices, shares and utilisation."""

from __future__ import annotations

import pytest
from support.batches import batch_of

from verl.trainer.performance import Performance, largest
from verl.utils.flops import ModelSize

SIZE = ModelSize(num_body_weights=100, num_head_weights=0, num_layers=1, attention_width=0, trained_share=1.0)
# 10 tokens: a forward pass is 2 x 100 x 10 = 2000 operations.
BATCH = batch_of([[1, 0, 1, 1], [0, 1, 1, 1]])
TIMING = {"timing_s/step": 10.0, "timing_s/gen": 5.0, "timing_s/update": 4.0}


def test_tokens_per_second_and_per_device_and_the_share_of_each_phase() -> None:
    metrics = Performance(SIZE, num_devices=2, peak_flops=None).metrics(BATCH, TIMING, epochs={"update": 1})
    assert metrics == {
        "perf/tokens_per_s": 1.0,
        "perf/tokens_per_s_per_device": 0.5,
        "perf/share_gen": 0.5,
        "perf/share_update": 0.4,
        "perf/tflops_per_device": pytest.approx((2000 + 6000) / 10 / 2 / 1e12),
    }


def test_utilisation_of_the_step_and_of_its_phases() -> None:
    metrics = Performance(SIZE, num_devices=2, peak_flops=1000.0).metrics(BATCH, TIMING, epochs={"update": 2})
    assert metrics["perf/mfu_gen"] == pytest.approx(2000 / 5 / 2 / 1000)
    assert metrics["perf/mfu_update"] == pytest.approx(2 * 6000 / 4 / 2 / 1000)
    assert metrics["perf/mfu"] == pytest.approx((2000 + 2 * 6000) / 10 / 2 / 1000)
    assert "perf/mfu_ref" not in metrics


def test_the_worker_that_needs_most_memory_counts() -> None:
    assert largest([{"a": 1.0, "b": 5.0}, {"a": 3.0, "b": 4.0}]) == {"a": 3.0, "b": 5.0}
