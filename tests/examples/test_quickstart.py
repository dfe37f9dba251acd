"""The quickstart as a user runs it, cut down to a few steps."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import psutil
import pytest

PROJECT = Path(__file__).resolve().parents[2]
FEW_STEPS = {"SFT_STEPS": "3", "STEPS": "3", "SAMPLES": "1"}
SMALL_BATCHES = (
    "data.train_batch_size=2",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.optim.lr=1e-5",
    # A model that has hardly trained never succeeds: the entropy term is what there is to learn from.
    "actor_rollout_ref.actor.entropy_coeff=0.001",
    "algorithm.adv_estimator=rloo",
)


def _quickstart(folder: Path, *overrides: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "examples/quickstart.sh", *overrides],
        cwd=PROJECT,
        env=os.environ | variables | {"OUT": str(folder)},
        capture_output=True,
        text=True,
    )


def _of_this_run(folder: Path) -> list[str]:
    """Command lines of processes that name the run's folder."""
    return [
        " ".join(process.info["cmdline"])
        for process in psutil.process_iter(["cmdline"])
        if any(str(folder) in argument for argument in process.info["cmdline"] or ())
    ]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.server
@pytest.mark.timeout(900)
def test_the_quickstart_trains_evaluates_and_leaves_nothing_running(tmp_path):
    folder = tmp_path / "run of mine"
    done = _quickstart(folder, *SMALL_BATCHES, **FEW_STEPS)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "held-out Avg@1 changed by" in done.stdout
    assert "2 items x n 2 = 4 trajectories" in done.stdout
    metrics = [json.loads(line) for line in (folder / "rl" / "metrics.jsonl").read_text().splitlines()]
    assert [row["rounds/max_rounds"] for row in metrics] == [4, 6, 8]
    assert metrics[-1]["actor/lr"] == 1e-5
    assert (folder / "rl" / "global_step_3" / "actor" / "huggingface" / "config.json").is_file()
    for name in ("eval_before", "eval_after"):
        report = json.loads((folder / name / "report.json").read_text())
        assert (report["overall"]["num_items"], report["num_faults"]) == (25, 0)
    assert _of_this_run(folder) == []


def test_wrong_variables_are_answered_at_once(tmp_path):
    unknown = _quickstart(tmp_path / "new", MODEL="gpt5")
    assert (unknown.returncode, unknown.stderr) == (2, "MODEL=gpt5: must be small or smollm2\n")
    (tmp_path / "old" / "sft").mkdir(parents=True)
    occupied = _quickstart(tmp_path / "old")
    assert occupied.returncode == 2
    assert "holds an earlier run" in occupied.stderr
