"""Evaluations in this process: every sample once, whatever was done before."""

from __future__ import annotations

import itertools
import json
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from support.environments import Script
from support.parity import TASK, parity_spec
from support.servers import serve

from agentgym_rl.envs.registry import register
from agentgym_rl.envs.server import build_app
from agentgym_rl.errors import ConfigError, EngineError, TooManyFailures
from agentgym_rl.evaluation.report import Report
from agentgym_rl.evaluation.results import REPORT_FILE, SETTINGS_FILE, report_on
from agentgym_rl.evaluation.versions import fingerprint
from agentgym_rl.types import Item
from verl.agent_trainer.loading import load_config, parse_command_line
from verl.agent_trainer.main_eval import main as main_eval
from verl.config import GenerationConfig
from verl.trainer.generation import run_generation
from verl.utils.model_folder import find_model
from verl.workers.rollout.hf_engine import HFEngine

pytestmark = pytest.mark.server

Evaluate = Callable[..., Report]


@pytest.fixture
def script() -> Script:
    return Script(turns=2)


@pytest.fixture
def evaluate(model: Path, tmp_path: Path, script: Script) -> Iterator[Evaluate]:
    """Evaluates the first ``items`` items into the test's folder."""
    spec = parity_spec(script)
    register(spec)
    with serve(build_app(spec)) as url:

        def run(*overrides: str, items: int = 7) -> Report:
            argv = [
                "data.path=unused",
                "data.n_samples=2",
                "data.batch_size=3",
                f"model.path={model}",
                f"agentgym.task_name={TASK}",
                f"agentgym.env_addr={url}",
                "rollout.max_tokens=8",
                f"rollout.rollout_log_dir={tmp_path}",
                "trainer.device=cpu",
                "trainer.worker_group=local",
                *overrides,
            ]
            command_line = parse_command_line(argv, program="test", config_name="generation")
            rows = [Item(TASK, index, "odd" if index % 2 else "even") for index in range(items)]
            return run_generation(load_config(GenerationConfig, command_line), rows)

        yield run


def rows_in(folder: Path) -> list[dict]:
    lines = [line for path in sorted(folder.rglob("*.jsonl")) for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines]


def test_every_sample_is_made_once_and_the_report_is_written(
    evaluate: Evaluate, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = evaluate()
    counts = Counter((row["item_id"], row["sample_index"]) for row in rows_in(tmp_path))
    assert len(counts) == 14 and set(counts.values()) == {1}
    assert report.overall.num_items == 7 and [scores.name for scores in report.categories] == ["even", "odd"]
    written = json.loads((tmp_path / "report.json").read_text())
    assert written["overall"]["avg"] == report.overall.avg and written["num_trajectories"] == 14
    printed = capsys.readouterr().out
    assert "7 items x 2 samples = 14 trajectories" in printed and "Avg@2" in printed and "Pass@k:" in printed


def test_a_killed_evaluation_goes_on_and_makes_nothing_twice(
    evaluate: Evaluate, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = evaluate()
    [path] = tmp_path.rglob("*.jsonl")
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:5]) + lines[5][:40])
    assert evaluate() == whole
    assert "14 trajectories of at most 10 rounds, 5 of them done already" in capsys.readouterr().out
    counts = Counter((row["item_id"], row["sample_index"]) for row in rows_in(tmp_path))
    assert len(counts) == 14 and set(counts.values()) == {1}


def test_samples_that_a_fault_took_are_made_by_the_next_run(evaluate: Evaluate, tmp_path: Path, script: Script) -> None:
    script.fails_at, script.fails_times = {5: 1}, 4  # both samples of item 5, each tried twice
    report = evaluate()
    assert (report.num_faults, report.overall.num_items) == (2, 6)
    report = evaluate()
    assert (report.num_faults, report.overall.num_items, report.num_trajectories, report.k) == (0, 7, 14, 2)
    assert len(rows_in(tmp_path)) == 16


def test_more_samples_and_items_add_to_what_is_there(evaluate: Evaluate, tmp_path: Path) -> None:
    first = evaluate(items=3)
    more = evaluate("data.n_samples=3", items=5)
    assert (first.num_trajectories, more.num_trajectories, more.k) == (6, 15, 3)
    assert len(rows_in(tmp_path)) == 15
    assert evaluate(items=3) == first


def test_results_of_other_settings_are_not_mixed_in(evaluate: Evaluate) -> None:
    evaluate(items=1)
    with pytest.raises(ConfigError, match=r"rollout\.temperature=0\.5: .* holds results made with 1\.0"):
        evaluate("rollout.temperature=0.5", items=1)


def test_sessions_are_spread_over_several_servers(evaluate: Evaluate, tmp_path: Path) -> None:
    scripts = [Script(turns=2), Script(turns=2)]
    with serve(build_app(parity_spec(scripts[0]))) as first, serve(build_app(parity_spec(scripts[1]))) as second:
        report = evaluate(f"agentgym.env_addr=[{first},{second}]", "data.batch_size=6", items=6)
    assert report.overall.num_items == 6
    assert [len(script.executed) > 0 for script in scripts] == [True, True]
    assert [script.open for script in scripts] == [0, 0]
    steps = Counter((item, step) for script in scripts for item, step, _ in script.executed)
    assert steps == {(item, step): 2 for item in range(6) for step in (1, 2)}


def test_an_evaluation_of_which_too_much_fails_stops_in_its_midst(
    evaluate: Evaluate, tmp_path: Path, script: Script
) -> None:
    """Items 20 to 99 fail; of the latest 3 x 2 samples, more than half are faults long before the end.

    What is in flight by then, 3 x 2 samples at most, may end before it is told to.
    """
    script.fails_at = {item: 1 for item in range(20, 100)}
    with pytest.raises(TooManyFailures, match=r"[456] of 6 trajectories failed twice \(EnvServerError [456]\)"):
        evaluate(items=100)
    rows = rows_in(tmp_path)
    assert 40 < len(rows) < 60 and 4 <= sum(row["stop_reason"] == "env_error" for row in rows) <= 12


def test_an_engine_that_breaks_ends_the_run_before_it_uses_up_what_others_could_make(
    evaluate: Evaluate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, passes = HFEngine._forward, itertools.count()

    def breaks(self: HFEngine, *arguments: Any) -> None:
        if next(passes) == 20:
            raise RuntimeError("no memory is left")
        forward(self, *arguments)

    monkeypatch.setattr(HFEngine, "_forward", breaks)
    with pytest.raises(EngineError, match="the engine broke: RuntimeError: no memory is left"):
        evaluate(items=100)
    # None but the 3 x 2 that were in flight.
    assert 1 <= [row["stop_reason"] for row in rows_in(tmp_path)].count("engine_error") <= 6


def test_no_item_waits_for_one_that_is_slow(evaluate: Evaluate, tmp_path: Path, script: Script) -> None:
    """Item 0 does not answer before all others are written: with rounds of 3 items this would never end."""
    script.hangs_at = {0: 1}

    def release_when_others_are_done() -> None:
        while sum(path.read_text().count("\n") for path in tmp_path.rglob("*.jsonl")) < 6:
            time.sleep(0.02)
        script.release.set()

    watcher = threading.Thread(target=release_when_others_are_done)
    watcher.start()
    report = evaluate("data.n_samples=1", "data.batch_size=2")
    watcher.join()
    assert report.num_trajectories == 7
    assert [row["item_id"] for row in rows_in(tmp_path)][-1] == f"{TASK}_0"


def test_figures_are_computed_again_from_the_files(
    evaluate: Evaluate, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = evaluate()
    written = (tmp_path / REPORT_FILE).read_text()
    (tmp_path / REPORT_FILE).unlink()
    capsys.readouterr()
    assert main_eval([str(tmp_path)]) == 0
    assert report.table() in capsys.readouterr().out
    assert (tmp_path / REPORT_FILE).read_text() == written
    assert main_eval([str(tmp_path / "elsewhere")]) == 2
    assert "no results of an evaluation are there" in capsys.readouterr().err


def test_an_evaluation_that_did_not_come_to_its_end_says_what_is_missing(evaluate: Evaluate, tmp_path: Path) -> None:
    evaluate()
    [path] = tmp_path.rglob("*.jsonl")
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:5]))
    report = report_on(tmp_path)
    assert (report.num_trajectories, report.num_missing) == (5, 9)
    assert "not yet done: 9 samples" in report.table()


def test_versions_of_model_and_server_are_kept_and_results_of_others_are_not_mixed_in(
    evaluate: Evaluate, tmp_path: Path, model: Path
) -> None:
    evaluate(items=1)
    content = json.loads((tmp_path / SETTINGS_FILE).read_text())
    assert content["settings"]["model.weights"] == fingerprint(model)
    assert content["settings"]["servers"] == {TASK: {"version": version("agentgym-rl"), "data": "none"}}
    assert content["runs"][0]["versions"]["agentgym-rl"] == version("agentgym-rl")
    other = tmp_path / "model"
    shutil.copytree(model, other)
    weights = other / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    assert fingerprint(other) != fingerprint(model)
    with pytest.raises(ConfigError, match=r"model\.path=.*/model': .* holds results made with"):
        evaluate(f"model.path={other}", items=1)


def test_a_checkpoint_and_a_runs_folder_lead_to_the_model_in_them(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (5, 10):
        folder = run / f"global_step_{step}" / "actor" / "huggingface"
        folder.mkdir(parents=True)
        (folder / "config.json").touch()
    assert find_model(str(run / "global_step_5")) == str(run / "global_step_5" / "actor" / "huggingface")
    assert find_model(str(run)) == str(run)  # which of the two is complete, only the pointer says
    (run / "latest_checkpointed_iteration.txt").write_text("10")
    assert find_model(str(run)) == str(run / "global_step_10" / "actor" / "huggingface")
    assert find_model(str(run / "global_step_5" / "actor" / "huggingface")).endswith("global_step_5/actor/huggingface")
    assert find_model("Qwen/Qwen2.5-7B-Instruct") == "Qwen/Qwen2.5-7B-Instruct"
