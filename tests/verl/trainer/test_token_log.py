"""What a training writes of each sampled token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.small_run import train_small_run

from agentgym_rl.rollout.log import read_trajectories
from agentgym_rl.rollout.token_values import read_token_values, token_values_file
from verl.utils.tracking import read_metrics

pytestmark = pytest.mark.server


def columns_of(run: Path, step: int) -> list[tuple[np.ndarray, dict[str, np.ndarray]]]:
    """For each trajectory of a step, the engine's log-probs of its sampled tokens and what training made of them."""
    return [
        (
            t.rollout_log_probs[t.loss_mask == 1],
            read_token_values(token_values_file(run, step), uid=t.uid, sample_index=t.sample_index, trial=t.trial),
        )
        for t in read_trajectories(run / "trajectories" / f"step{step}").trajectories
    ]


def test_all_values_are_those_of_the_tokens_they_stand_at(tmp_path: Path) -> None:
    run = train_small_run(tmp_path)
    for step in (1, 2):
        rows = columns_of(run, step)
        assert len(rows) == 4
        for engine, columns in rows:
            assert columns.keys() == {"advantages", "log_probs", "ref_log_probs", "entropies"}
            np.testing.assert_allclose(columns["log_probs"], engine, atol=1e-4)
            assert (columns["entropies"] > 0).all()
        if step == 1:  # no update was made yet
            np.testing.assert_array_equal(rows[0][1]["log_probs"], rows[0][1]["ref_log_probs"])
    entropy = np.concatenate([columns["entropies"] for _, columns in columns_of(run, 1)]).mean()
    assert read_metrics(run / "metrics.jsonl")[0]["actor/entropy"] == pytest.approx(entropy, rel=1e-4)
    assert (run / "token_values/tokenizer.json").read_bytes() == (tmp_path / "model/tokenizer.json").read_bytes()


@pytest.mark.parametrize(("kept", "names"), [("computed", {"advantages", "ref_log_probs"}), ("none", set())])
def test_by_default_only_what_the_step_computes_is_kept_and_nothing_if_so_chosen(
    tmp_path: Path, kept: str, names: set[str]
) -> None:
    run = train_small_run(tmp_path, f"trainer.token_values={kept}", "trainer.total_training_steps=1")
    assert set().union(*(columns.keys() for _, columns in columns_of(run, 1))) == names
    assert (run / "token_values").exists() == (kept != "none")
