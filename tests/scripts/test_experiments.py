"""The experiments' commands fit the programs, their runner keeps what is done, and the page shows what was measured."""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest

from verl.agent_trainer.loading import load_config, parse_command_line
from verl.config import AgentEvolConfig, DPOConfig, GenerationConfig, PPOConfig, SFTConfig

ROOT = Path(__file__).parents[2]
EXPERIMENTS = ROOT / "scripts" / "experiments"
MODULES = ("suites", "results", "run", "report", "figures")
PROGRAMS = {
    "verl.agent_trainer.main_ppo": (PPOConfig, "ppo_trainer"),
    "verl.agent_trainer.main_generation": (GenerationConfig, "generation"),
    "verl.agent_trainer.main_sft": (SFTConfig, "sft_trainer"),
    "verl.agent_trainer.main_dpo": (DPOConfig, "dpo_trainer"),
    "verl.agent_trainer.main_agentevol": (AgentEvolConfig, "agentevol"),
}


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[type]:
    """Modules of the experiments, which import each other by name from their own folder."""
    monkeypatch.syspath_prepend(str(EXPERIMENTS))

    class Loaded:
        def __class_getitem__(cls, name: str) -> ModuleType:
            return importlib.import_module(name)

    yield Loaded
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("task", ["textcraft", "babyai", "smollm2"])
def test_every_command_has_keys_that_its_program_knows(load, task: str) -> None:
    suites = load["suites"]
    commands = [command.argv for run in suites.runs(suites.SUITES[task], Path("out"), [1]) for command in run.commands]
    modules = [argv for argv in commands if argv[1] == "-m"]
    assert modules
    for argv in modules:
        root, name = PROGRAMS[argv[2]]
        keys = [part.replace("{url}", "http://127.0.0.1:1") for part in argv[3:]]
        load_config(root, parse_command_line(keys, program=argv[2], config_name=name))
    for argv in (argv for argv in commands if argv[1] != "-m"):
        assert argv[0] == "agentgym-rl" or (ROOT / argv[1]).is_file(), argv


def test_runs_of_a_seed_differ_from_the_growing_horizon_in_what_is_compared_alone(load) -> None:
    suites = load["suites"]
    runs = {run.name: run for run in suites.runs(suites.SUITES["textcraft"], Path("out"), [0])}

    def keys(name: str) -> set[str]:
        return {part for part in runs[name].commands[0].argv if "default_local_dir" not in part}

    assert {part.split("=")[0] for part in keys("grpo") ^ keys("rloo")} == {"algorithm.adv_estimator"}
    assert {part.split("=")[0] for part in keys("grpo") ^ keys("grpo, short horizon")} == {
        "algorithm.rounds_ctrl.type",
        "algorithm.rounds_ctrl.rounds",
    }


def test_no_held_out_babyai_world_is_trained_on(load) -> None:
    from agentgym_rl.envs.babyai.levels import place_of

    items = load["babyai_items"]
    trained = list(items.rows(items.SHORT + items.LONG, range(3)))
    held_out = list(items.rows(items.SHORT + items.LONG, range(3, 5)))
    assert not {row["item_id"] for row in trained} & {row["item_id"] for row in held_out}
    for row in trained:
        assert place_of(int(row["item_id"].split("_")[1])).name == row["level"]
    sys.modules.pop("babyai_items")


def test_a_run_that_was_stopped_goes_on_with_the_command_that_was_not_finished(load, tmp_path: Path) -> None:
    run, suites = load["run"], load["suites"]
    marks = tmp_path / "marks"
    note = f"open({str(marks)!r}, 'a').write"

    def command(code: str):
        return suites.Command(suites.Kind.TRAIN, (sys.executable, "-c", code))

    def planned(second: str):
        return suites.Run("grpo", 0, tmp_path / "run", (command(f"{note}('1')"), command(second)), tmp_path)

    programs = run.Programs()
    with pytest.raises(run.RunFailedError, match=r"status 3: .*\n.*log.txt"):
        run.perform(planned("print('why'); raise SystemExit(3)"), "textcraft", programs)
    assert (tmp_path / "run" / "log.txt").read_text() == "why\n"
    assert not (tmp_path / "run" / "done.json").exists()
    run.perform(planned(f"{note}('{{url}}'[:4])"), "textcraft", programs)
    run.perform(planned("raise SystemExit(3)"), "textcraft", programs)  # done: nothing runs
    assert marks.read_text() == "1http"
    rows = json.loads((tmp_path / "run" / "done.json").read_text())
    assert [(row["kind"], row["status"]) for row in rows] == [("train", 0), ("train", 3), ("train", 0)]
    assert all(row["cpu_s"] >= 0 and row["wall_s"] >= 0 for row in rows)


def test_a_stop_of_the_runner_ends_its_programs_and_begins_no_other(load, tmp_path: Path) -> None:
    run = load["run"]
    programs, ready = run.Programs(), tmp_path / "ready"
    waits = f"open({str(ready)!r}, 'w').close(); import time; time.sleep(600)"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(programs.timed, [sys.executable, "-c", waits], tmp_path / "log")
        while not ready.exists():
            time.sleep(0.01)
        programs.stop()
        assert waiting.result().status == -15
    with pytest.raises(run.RunFailedError, match="stopped before it began"):
        programs.timed([sys.executable, "-c", "raise SystemExit(0)"], tmp_path / "log")


def test_an_evaluation_that_lost_trajectories_is_no_result(load, tmp_path: Path) -> None:
    results, suites = load["results"], load["suites"]
    run = suites.Run("grpo", 0, tmp_path, (), tmp_path / "eval")
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "report.json").write_text(json.dumps({"num_faults": 25, "num_missing": 0}))
    with pytest.raises(results.IncompleteEvaluationError, match="eval: 25 trajectories ended by faults, 0 are missing"):
        results.collect(run)


def result(load, name: str, seed: int, avg: float, steps: int = 0):
    results = load["results"]
    evaluation = results.Evaluation(8, avg, avg - 0.1, avg + 0.1, avg, 5.0, {"depth1": avg})
    curves = {key: [0.5 + step / 10 for step in range(steps)] for key in results.CURVES}
    curves = curves | {"step": list(range(1, steps + 1))} if steps else {}
    validation = {"step": [0, steps], "success": [0.2, avg]} if steps else {}
    return results.Result(name, seed, evaluation, {"train": 90.0}, {"train": 100.0}, curves, validation)


def test_a_table_tells_means_each_seed_and_the_gain_over_its_own_warm_up(load, tmp_path: Path) -> None:
    report, results = load["report"], load["results"]
    rows = [
        *(result(load, "warm-up", seed, avg) for seed, avg in ((0, 0.2), (1, 0.3))),
        *(result(load, "grpo", seed, avg, 6) for seed, avg in ((0, 0.5), (1, 0.4))),
    ]
    results.write_results("textcraft", rows, tmp_path)
    assert results.read_results("textcraft", tmp_path) == rows
    tables = report.tables("textcraft", rows)
    assert list(tables) == ["textcraft-horizons"]  # one algorithm is no comparison
    lines = tables["textcraft-horizons"].splitlines()
    assert "| 0.250 (0.200, 0.300) | 0.250 |  | 5.0 | 1.5 |" in lines[2]
    assert "| 0.450 (0.500, 0.400) | 0.450 | +20.0 (+30.0, +10.0) | 5.0 | 1.5 |" in lines[3]


def test_a_table_is_put_in_its_place_and_nowhere_else(load) -> None:
    fill = load["report"].fill
    page = "a\n<!-- table: x -->\nold\n<!-- end -->\nb\n<!-- table: y -->\nold\n<!-- end -->\n"
    assert fill(page, "x", r"new \1") == page.replace("old", r"new \1", 1)
    assert fill(page, "z", "new") == page


def test_figures_are_drawn_the_same_each_time(load, tmp_path: Path) -> None:
    names = ("warm-up", "grpo", "grpo, short horizon", "grpo, long horizon", "rloo")
    rows = [result(load, name, seed, 0.4, 6) for name in names for seed in (0, 1)]
    texts = []
    for folder in (tmp_path / "one", tmp_path / "two"):
        folder.mkdir()
        texts.append([path.read_text() for path in load["figures"].draw("textcraft", rows, folder)])
    assert len(texts[0]) == 2 and texts[0] == texts[1]
    assert "held-out success" in texts[0][0] and "rloo" in texts[0][1]


@pytest.mark.parametrize("task", ["textcraft", "babyai", "smollm2"])
def test_the_page_shows_the_tables_of_the_results_that_are_kept(load, task: str) -> None:
    results, report = load["results"], load["report"]
    if not (results.RESULTS / f"{task}.json").exists():
        pytest.skip(f"no results of {task} yet")
    page = report.PAGE.read_text()
    for name, text in report.tables(task, results.read_results(task)).items():
        assert report.fill(page, name, text) == page
        assert f"<!-- table: {name} -->" in page
