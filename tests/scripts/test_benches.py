"""What the benches share: results, reports, the tables of the documentation, and the program that runs them all."""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentgym_rl.threads import thread_environment

PROJECT = Path(__file__).parents[2]
BENCH = PROJECT / "scripts" / "bench"
PARTS = {"all", "bench", "curves", "tables"} | {"letters", "plain_loop", "toy_chat", "toy_engine", "toy_server"}
PARTS |= {"trl_letters", "trl_loop"}
"""Files that measure nothing themselves; `trl_letters` is run by another interpreter."""


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[argparse.Namespace]:
    """The benches' own modules by name; they are forgotten afterwards, for `all` and `bench` are common names."""
    monkeypatch.syspath_prepend(str(BENCH))
    names = ("bench", "curves", "tables", "all", "trl_loop")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name, value in thread_environment(1).items():  # which importing `bench` sets for good
        monkeypatch.setenv(name, value)
    yield argparse.Namespace(**{name: __import__(name) for name in names})
    for name in names:
        sys.modules.pop(name, None)


def report_of(modules, *results, bench="rollout", date="2026-01-02", is_complete=True):
    machine = modules.bench.Machine("a processor", 2, 8, "Linux", "3.11.0", {"torch": "2.0"})
    return modules.bench.Report(bench, machine, date, 0.04, 90.0, is_complete, list(results))


def test_every_bench_is_known_to_all_sh(modules):
    files = {file.stem for file in BENCH.glob("*.py")} - PARTS
    assert files == {each.name for each in modules.all.BENCHES}


def test_a_target_is_met_at_its_bound_and_missed_beyond(modules):
    def missed(measured, at_least):
        return modules.bench.Result("a", "a", measured, "x", 2.0, at_least).is_missed

    assert [missed(value, at_least=True) for value in (1.99, 2.0, math.nan)] == [True, False, True]
    assert [missed(value, at_least=False) for value in (2.01, 2.0, math.nan)] == [True, False, True]
    assert not modules.bench.Result("a", "a", 5.0, "x").is_missed


@pytest.mark.parametrize(
    ("value", "text"), [(16.84, "16.8"), (112345, "112,000"), (0.01234, "0.0123"), (0, "0"), (99.96, "100"), (2, "2")]
)
def test_numbers_have_three_digits_that_count(modules, value, text):
    assert modules.bench.number(value) == text


def test_the_exponent_is_the_power_that_cost_grows_with(modules):
    def curve(*points):
        return modules.bench.Curve("f", "all", "tokens", "time, s", points)

    assert curve((1, 3), (10, 300), (100, 30_000)).exponent == pytest.approx(2)
    assert curve((1, 1), (10, 1), (100, 10)).last_exponent == pytest.approx(1)
    assert curve((1, 0), (10, 5), (20, 10)).exponent == pytest.approx(1)  # 0 is below what the clock tells
    assert math.isnan(curve((1, 3)).exponent)


def test_a_report_is_the_same_after_a_file(modules, tmp_path):
    result = modules.bench.Result("busy", "engine busy", 99.0, "%", 90.0, at_least=True, note="a note")
    report = report_of(modules, result)
    report.add(modules.bench.Curve("turns", "whole step", "turns", "time, s", ((1.0, 2.0), (2.0, 4.0))))
    modules.tables.write_reports(tmp_path / "a" / "results.json", [report])
    assert modules.tables.read_reports(tmp_path / "a" / "results.json") == [report]
    plain = json.loads((tmp_path / "a" / "results.json").read_text())["reports"][0]
    assert plain["results"][0]["is_missed"] is False and plain["curves"][0]["exponent"] == 1


def test_a_bench_that_breaks_leaves_what_it_had_measured(modules, tmp_path, capsys):
    def measure(_):
        yield modules.bench.Result("a", "first", 3.0, "x", 2.0)
        raise RuntimeError("broken")

    file, parser = tmp_path / "report.json", argparse.ArgumentParser()
    with pytest.raises(RuntimeError, match="broken"):
        modules.bench.run("some", measure, parser, ["--json", str(file)])
    report = modules.bench.Report.from_json(json.loads(file.read_text()))
    assert [each.name for each in report.missed] == ["a"] and not report.is_complete
    assert "MISSED" in capsys.readouterr().out


def test_the_table_tells_results_targets_and_what_they_were_measured_on(modules):
    good = modules.bench.Result("busy", "engine busy", 99.0, "%", 90.0, at_least=True)
    bad = modules.bench.Result("cpu", "CPU time", 3.0, "ms", 2.0, note="a note")
    table = modules.tables.results_table(
        [report_of(modules, good, bad), report_of(modules, bench="soak", is_complete=False)]
    )
    assert table.splitlines()[2:5] == [
        "| `rollout` | engine busy | 99% | at least 90% | met |",
        "|  | CPU time | 3 ms (a note) | at most 2 ms | **missed** |",
        "| `soak` | ended by an error | | | **failed** |",
    ]
    assert "Measured on 2026-01-02: a processor, 2 cores" in table and "at most 4% of the cores" in table


def test_a_new_report_replaces_that_of_its_bench_alone(modules):
    old = [report_of(modules, bench=name) for name in ("soak", "rollout")]
    new = [report_of(modules, bench="soak", date="2026-01-03")]
    merged = modules.tables.merged(old, new, ["rollout", "soak", "viewer"])
    assert [(each.bench, each.date) for each in merged] == [("rollout", "2026-01-02"), ("soak", "2026-01-03")]


def test_only_what_stands_between_the_markers_is_replaced(modules):
    text = "a\n<!-- x: written by scripts/bench/all.sh -->\nold\n<!-- end of x -->\nb\n"
    once = modules.tables.replaced(text, "x", "new")
    assert "old" not in once and once.startswith("a\n") and once.endswith("-->\nb\n")
    assert modules.tables.replaced(once, "x", "new") == once
    with pytest.raises(ValueError, match="no <!-- y"):
        modules.tables.replaced(text, "y", "new")


def test_the_documents_hold_what_was_measured(modules):
    reports = modules.tables.read_reports(PROJECT / "docs" / "performance" / "results.json")
    curves = [curve for report in reports for curve in report.curves]
    for file, name, block in (
        (PROJECT / "docs" / "performance.md", "results", modules.tables.results_table(reports)),
        (PROJECT / "docs" / "performance.md", "curves", modules.tables.curves_table(curves)),
        (PROJECT / "README.md", "speed", modules.tables.headline_table(reports)),
    ):
        text = file.read_text()
        assert modules.tables.replaced(text, name, block) == text, f"{file.name}: {name}"
    drawn = {f"scaling-{curve.figure}.svg" for curve in curves}
    assert {file.name for file in (PROJECT / "docs" / "performance").glob("*.svg")} == drawn
    whole = {(report.bench, result.name): result.what for report in reports for result in report.results}
    assert not [key for key in modules.tables.HEADLINES if whole.get(key, "").startswith("the same")]


def test_the_benches_that_are_named_run_and_a_broken_one_holds_up_no_other(tmp_path):
    command = [
        sys.executable,
        "scripts/bench/all.py",
        "--quick",
        "--out",
        str(tmp_path),
        "handler_append",
        "advantages",
    ]
    run = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=200, check=False)
    assert run.returncode in (0, 1), run.stderr
    reports = json.loads((tmp_path / "results.json").read_text())["reports"]
    assert [(each["bench"], each["is_complete"]) for each in reports] == [
        ("handler_append", True),
        ("advantages", True),
    ]
    assert "targets missed, 0 failed" in run.stdout


TRAINER = """
import sys

print("a line of metrics")
print('STEP {}', flush=True)
for number, _ in enumerate(sys.stdin):
    print("another line")
    print('STEP {"wall_s": %d, "cpu_s": 0.5}' % number, flush=True)
"""


def test_another_trainer_makes_a_step_whenever_it_is_asked_to_and_ends_with_its_input(modules):
    with modules.trl_loop.TRLLoop([sys.executable, "-c", TRAINER]) as trl:
        assert [trl.step() for _ in range(2)] == [modules.trl_loop.StepTimes(float(wall), 0.5) for wall in (0, 1)]
    assert trl._process.returncode == 0


@pytest.mark.parametrize(
    ("program", "limits", "complaint"),
    [
        ("raise SystemExit(3)", {}, "ended with status 3 in place of an answer: starting"),
        ("input()", {"start_s": 0.1}, "did not answer within 0.1 s: starting"),
        ("print('STEP {}', flush=True); input(); exit(4)", {}, "ended with status 4 in place of an answer: a step"),
        ("print('STEP {}', flush=True); input(); input()", {"step_s": 0.1}, "did not answer within 0.1 s: a step"),
    ],
)
def test_another_trainer_that_does_not_answer_is_an_error(modules, program, limits, complaint):
    with (
        pytest.raises(modules.trl_loop.TRLError, match=complaint),
        modules.trl_loop.TRLLoop([sys.executable, "-c", program], **limits) as trl,
    ):
        trl.step()


@pytest.mark.parametrize(
    ("python", "complaint"),
    [("no/such/python", "No such file"), (sys.executable, "must be an interpreter with TRL and this project .*trl")],
)
def test_an_interpreter_without_trl_is_refused_before_anything_is_measured(modules, python, complaint):
    with pytest.raises(argparse.ArgumentTypeError, match=complaint):
        modules.trl_loop.python_with_trl(python)


def test_an_unknown_bench_is_refused_with_the_list_of_those_that_are(modules, capsys):
    with pytest.raises(SystemExit):
        modules.all.parse(["rolout"])
    assert "no bench named rolout: choose among quickstart, startup, " in capsys.readouterr().err
