"""A short fault run: servers, network, training processes and disk are struck while a real run trains, and what it
wrote is proved against what the servers did. Then faults are planted in copies of its files: the proof finds them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

EXPERIMENTS = Path(__file__).parents[2] / "scripts" / "experiments"

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

INJECTED = (
    *("SERVER_KILLED", "BROKEN_NETWORK", "DRIVER_KILLED", "BAD_ANSWERS", "DISK_FULL", "SERVER_HUNG_BRIEFLY"),
    "ENGINE_RAISES",
)


@dataclass(frozen=True)
class Finished:
    """A fault run that is over."""

    folder: Path
    outcome: Any
    items: dict[str, list[str]]

    def verify(self, run: Path) -> Any:
        """The findings about a run's folder, by this run's ledger."""
        from fault_run.ledger import read_ledger
        from fault_run.verify import verify

        ledger = read_ledger(self.folder / "ledger.jsonl")
        return verify(run, self.outcome.plan, self.items, ledger, steps=self.outcome.findings.steps)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finished]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXPERIMENTS))
        patch.setenv("OMP_NUM_THREADS", "1")
        from fault_run.conduct import Conductor
        from fault_run.plan import FaultKind, RunPlan

        plan = RunPlan(
            seed=0,
            training_s=0,
            least_steps=3,
            faults=tuple(FaultKind[name] for name in INJECTED),
            env_gap_s=0.5,
            run_gap_s=0.5,
            items_per_task=4,
            items_per_step=4,
            warm_up_steps=40,
            weather_s=(1.0, 2.0),
            disk_full_s=(3.0, 4.0),
            samples=4,
            save_freq=1,
            session_ttl_s=10,
            servers_per_task=1,
            num_workers=1,
            worker_group="local",
        )
        folder = tmp_path_factory.mktemp("faults") / "run"
        conductor = Conductor(plan, folder)
        outcome = conductor.run()
        items = {task: json.loads(file.read_text()) for task, file in conductor.inputs.item_files.items()}
        yield Finished(folder, outcome, items)


def test_nothing_is_lost_or_wrongly_rewarded_under_faults(finished: Finished) -> None:
    from fault_run.report import as_json, as_markdown

    report = as_json(finished.outcome)
    findings = report["final_history"]
    assert (findings["lost"], findings["wrongly_rewarded"], findings["other"]) == ([], [], [])
    assert report["replay"] == "the same weights to the last bit"
    assert (report["processes_left"], report["sessions_left"]) == ([], 0)
    assert {kind for kind, count in report["faults"].items() if count} == set(INJECTED)
    assert findings["rewarded"] > 0, "nothing was earned, so that no reward could be wrong"
    assert report["starts"] > 1 and findings["trajectories"] == findings["steps"] * 16
    assert "| **lost** | **0** |" in as_markdown(report)


# ----------------------------------------------------------------------------------------------------- planted faults

Rows = list[dict[str, Any]]


def _changed(rows: Rows, **fields: Any) -> None:
    """Change a sound trajectory that earned something."""
    row = next(row for row in rows if row["score"])
    row |= fields


def _drop(rows: Rows) -> None:
    rows.pop()


def _drop_best(rows: Rows) -> None:
    rows.remove(max(rows, key=lambda row: row["score"] or 0))


def _repeat(rows: Rows) -> None:
    rows.append(rows[0])


def _fault_as_zero(rows: Rows) -> None:
    """As if the server's fault in the last turn had been a reward of 0."""
    row = next(row for row in rows if row["score"])
    row["turns"][-1] |= {"reward": 0.0, "done": False, "observation": ""}
    row |= {"score": 0.0, "reward": 0.0, "success": False, "token_rewards": [], "stop_reason": "max_rounds"}


def _masked_with_score(rows: Rows) -> None:
    rows[0] |= {
        "stop_reason": "deadline",
        "error": "DeadlineExceeded: planted",
        "attempt": 2,
        "score": 0.0,
        "reward": 0.0,
    }


def _of_another(rows: Rows) -> None:
    """Reward and ending of one trajectory are another's: a late answer that was credited to the wrong one."""
    row = next(row for row in rows if row["score"])
    other = next(other for other in rows if other["item_id"] != row["item_id"])
    row |= {name: other[name] for name in ("turns", "score", "reward", "success", "stop_reason")}


def _reward_moved(rows: Rows) -> None:
    row = next(row for row in rows if row["score"])
    row["token_rewards"] = [[position - 1, reward] for position, reward in row["token_rewards"]]


LOST: dict[str, Callable[[Rows], None]] = {
    "the last one is gone": _drop,
    "the best one is gone": _drop_best,
    "one is there twice": _repeat,
}
WRONG: dict[str, Callable[[Rows], None]] = {
    "another score": lambda rows: _changed(rows, score=0.25, reward=0.25),
    "a score that no turn has": lambda rows: _changed(rows, reward=1.5),
    "a fault as a reward of 0": _fault_as_zero,
    "a masked one with a score": _masked_with_score,
    "what another one did": _of_another,
    "on another token": _reward_moved,
    "not a success": lambda rows: _changed(rows, success=False),
}


def _planted(finished: Finished, into: Path, change: Callable[[Rows], None]) -> tuple[Path, Path]:
    """A copy of the run, and the file in it that is changed: the first with a reward."""
    run = into / "run"
    shutil.copytree(finished.folder / "run", run)
    for file in sorted((run / "trajectories").rglob("*.jsonl")):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        if any(row["score"] for row in rows):
            change(rows)
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
            return run, file
    raise AssertionError("no trajectory has a reward")


def _step_of(file: Path) -> str:
    return f"step {file.parent.name.removeprefix('step')}"


@pytest.mark.parametrize("name", LOST)
def test_a_planted_loss_is_found(finished: Finished, tmp_path: Path, name: str) -> None:
    run, file = _planted(finished, tmp_path, LOST[name])
    findings = finished.verify(run)
    assert len(findings.lost) == 1 and findings.lost[0].startswith(f"{_step_of(file)}: ")


@pytest.mark.parametrize("name", WRONG)
def test_a_planted_reward_is_found(finished: Finished, tmp_path: Path, name: str) -> None:
    run, file = _planted(finished, tmp_path, WRONG[name])
    findings = finished.verify(run)
    assert findings.wrongly_rewarded and not findings.lost
    assert all(what.startswith(f"{_step_of(file)} ") for what in findings.wrongly_rewarded)


def test_a_step_trained_twice_is_found_by_its_metrics(finished: Finished, tmp_path: Path) -> None:
    run, _ = _planted(finished, tmp_path, lambda rows: None)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join([*lines[:2], *lines[1:]]))
    assert any("steps twice or out of order" in what for what in finished.verify(run).other)


def test_a_torn_row_is_found(finished: Finished, tmp_path: Path) -> None:
    run, file = _planted(finished, tmp_path, lambda rows: None)
    file.write_bytes(file.read_bytes()[:-100])
    findings = finished.verify(run)
    assert findings.lost and any("torn" in what for what in findings.other)


def test_a_checkpoint_that_is_half_written_is_found(finished: Finished, tmp_path: Path) -> None:
    from fault_run.checkpoints import CheckpointChecks

    run, _ = _planted(finished, tmp_path, lambda rows: None)
    checks = CheckpointChecks(run)
    checks.look()
    assert checks.num_checked and checks.problems == []
    shard = max(run.glob("global_step_*/actor/__0_0.distcp"), key=lambda path: path.stat().st_mtime)
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    checks = CheckpointChecks(run)
    checks.look()
    assert len(checks.problems) == 1
