"""Avg@k and Pass@k, worked by hand."""

from __future__ import annotations

import dataclasses
import math
import random
from pathlib import Path

import pytest
from support.rollouts import make_trajectory

from agentgym_rl.evaluation.report import DEFINITIONS, Report, finished_samples, make_report, one_per_sample
from agentgym_rl.rollout.log import TrajectoryLog, read_trajectories
from agentgym_rl.types import Item, StopReason


def item(index: int, category: str = "") -> Item:
    return Item("toy", index, category)


def report_files(folder: Path) -> Report:
    contents = read_trajectories(folder)
    return make_report(one_per_sample(contents.trajectories), torn_files=contents.torn)


def test_four_items_that_share_their_opening_text_are_four_items():
    scores = (1.0, 0.0, 0.0, 0.0)
    report = make_report([make_trajectory(item(i), score=s, success=s == 1) for i, s in enumerate(scores)])
    assert report.overall.num_items == 4
    assert report.overall.pass_rate == 0.25
    assert report.k == 1


def test_seven_items_from_four_workers_are_seven_results_each_once(tmp_path):
    for index in range(7):
        with TrajectoryLog(tmp_path / f"{index % 4}.jsonl") as log:
            log.write(make_trajectory(item(index), score=index / 7))
    report = report_files(tmp_path)
    assert (report.overall.num_items, report.num_trajectories) == (7, 7)
    assert report.overall.avg == pytest.approx(sum(range(7)) / 49)
    assert finished_samples(tmp_path) == {(f"toy_{index}", 0) for index in range(7)}


def test_a_partial_score_counts_in_avg_and_not_in_pass_and_both_are_defined():
    report = make_report([make_trajectory(item(0), score=0.7)])
    assert (report.overall.avg, report.overall.pass_rate) == (0.7, 0.0)
    table = report.table()
    assert "0.700" in table
    assert "0.000" in table
    assert all(definition in table for definition in DEFINITIONS)
    assert "Avg@1" in table
    assert "Pass@1" in table


def test_samples_of_an_item_are_averaged_and_one_success_passes():
    trajectories = [
        make_trajectory(item(0, "easy"), score=1.0, success=True, sample_index=0, turns=2),
        make_trajectory(item(0, "easy"), score=0.0, sample_index=1, turns=4),
        make_trajectory(item(1, "hard"), score=0.2, sample_index=0, turns=5),
        make_trajectory(item(1, "hard"), score=0.4, sample_index=1, turns=5, stop_reason=StopReason.MAX_ROUNDS),
    ]
    report = make_report(trajectories)
    assert report.k == 2
    assert report.overall.avg == pytest.approx(0.4)  # mean of .5 and .3
    assert report.overall.pass_rate == 0.5
    assert report.overall.turns_mean == 4
    easy, hard = report.categories
    assert (easy.name, easy.num_items, easy.avg, easy.pass_rate, easy.turns_mean) == ("easy", 1, 0.5, 1.0, 3)
    assert (hard.name, hard.avg, hard.pass_rate) == ("hard", pytest.approx(0.3), 0.0)
    assert {ending.reason: ending.share for ending in report.endings}[StopReason.DONE] == 0.75
    assert "stop reasons of 4 trajectories: done 75.0%, max_rounds 25.0%" in report.table()


def test_the_order_of_results_does_not_change_a_digit():
    trajectories = [
        make_trajectory(item(i), score=random.Random(i * 10 + s).random(), sample_index=s)
        for i in range(9)
        for s in (0, 1, 2)
    ]
    shuffled = random.Random(0).sample(trajectories, len(trajectories))
    assert make_report(shuffled) == make_report(trajectories)


def test_faults_are_counted_and_in_no_average():
    fault = make_trajectory(item(0), sample_index=1, stop_reason=StopReason.ENV_ERROR, error="EnvTimeout: toy_0")
    lost = make_trajectory(item(1), stop_reason=StopReason.DEADLINE, error="DeadlineExceeded: toy_1")
    report = make_report([make_trajectory(item(0), score=1.0, success=True), fault, lost])
    assert (report.overall.num_items, report.overall.avg, report.overall.pass_rate) == (1, 1.0, 1.0)
    assert report.num_faults == 2
    assert report.faults_by_type == {"EnvTimeout": 1, "DeadlineExceeded": 1}
    assert "faults: 2 (EnvTimeout 1, DeadlineExceeded 1)" in report.table()


def test_an_evaluation_that_was_killed_knows_what_is_already_there(tmp_path):
    path = tmp_path / "0.jsonl"
    with TrajectoryLog(path) as log:
        for index in range(6):
            log.write(make_trajectory(item(index)))
    path.write_bytes(path.read_bytes()[:-30])  # the sixth row is torn
    there = finished_samples(tmp_path)
    assert there == {(f"toy_{index}", 0) for index in range(5)}
    assert "its last row is torn" in report_files(tmp_path).table()
    with TrajectoryLog(path) as log:
        for index in range(10):
            if (f"toy_{index}", 0) not in there:
                log.write(make_trajectory(item(index)))
    report = report_files(tmp_path)
    assert (report.num_trajectories, report.overall.num_items, report.torn_files) == (10, 10, ())


def test_a_fault_is_done_again_and_gives_way_to_the_result(tmp_path):
    fault = make_trajectory(item(1), stop_reason=StopReason.ENV_ERROR, error="EnvTimeout: toy_1")
    with TrajectoryLog(tmp_path / "0.jsonl") as log:
        for trajectory in (make_trajectory(item(0), score=1.0), fault):
            log.write(trajectory)
    assert finished_samples(tmp_path) == {("toy_0", 0)}
    with TrajectoryLog(tmp_path / "1.jsonl") as log:
        log.write(fault)
    assert (report_files(tmp_path).num_trajectories, report_files(tmp_path).num_faults) == (2, 1)
    with TrajectoryLog(tmp_path / "1.jsonl") as log:
        log.write(make_trajectory(item(1), score=0.5))
    report = report_files(tmp_path)
    assert (report.k, report.num_trajectories, report.num_faults, report.overall.avg) == (1, 2, 0, 0.75)


def test_an_evaluation_of_nothing_has_no_averages():
    report = make_report([])
    assert report.overall.num_items == 0
    assert math.isnan(report.overall.avg)
    assert "none" in report.table()


def test_what_came_of_each_stop_reason_is_told():
    report = make_report(
        [
            make_trajectory(item(0), score=1.0, success=True, turns=2),
            make_trajectory(item(1), score=0.5, turns=4, stop_reason=StopReason.MAX_ROUNDS),
            make_trajectory(item(2), score=0.0, turns=6, stop_reason=StopReason.MAX_ROUNDS),
            make_trajectory(item(3), turns=1, stop_reason=StopReason.DEADLINE, error="DeadlineExceeded: toy_3"),
        ]
    )
    done, cut, late = report.endings
    assert (done.reason, done.count, done.avg, done.success_share) == (StopReason.DONE, 1, 1.0, 1.0)
    assert (cut.reason, cut.count, cut.share, cut.avg, cut.success_share, cut.turns_mean) == (
        *(StopReason.MAX_ROUNDS, 2, 0.5, 0.25, 0.0, 5.0),
    )
    assert math.isnan(late.avg) and late.turns_mean == 1


def test_several_tasks_have_scores_of_their_own_and_categories_under_their_names():
    trajectories = [
        make_trajectory(Item(task, index, "other"), score=score, success=score == 1)
        for task, index, score in (("maze", 0, 1.0), ("maze", 1, 0.0), ("toy", 0, 0.5))
    ]
    report = make_report(trajectories)
    assert [(scores.name, scores.num_items, scores.avg) for scores in report.tasks] == [
        ("maze", 2, 0.5),
        ("toy", 1, 0.5),
    ]
    assert [scores.name for scores in report.categories] == ["maze/other", "toy/other"]
    assert make_report(trajectories[:2]).tasks == ()


def test_intervals_stand_beside_the_averages():
    report = make_report([make_trajectory(item(i), score=float(i < 5), success=i < 5) for i in range(20)])
    scores = report.overall
    assert scores.pass_interval is not None and scores.avg_interval is not None
    assert (scores.pass_interval.low, scores.pass_interval.high) == pytest.approx((0.1119, 0.4687), abs=1e-4)
    assert scores.avg_interval.low == pytest.approx(0.05, abs=0.051) and scores.avg_interval.high < 0.5
    assert str(scores.pass_interval) in report.table()


def test_of_a_sample_with_several_trials_the_last_one_counts(tmp_path):
    first, last = (
        dataclasses.replace(make_trajectory(item(0), score=score, success=score == 1), trial=trial, num_trials=2)
        for trial, score in ((1, 0.0), (2, 1.0))
    )
    with TrajectoryLog(tmp_path / "0.jsonl") as log:
        log.write(first)
    assert finished_samples(tmp_path) == set()
    with TrajectoryLog(tmp_path / "0.jsonl") as log:
        log.write(last)
    report = report_files(tmp_path)
    assert (report.num_trajectories, report.overall.avg, report.overall.pass_rate) == (1, 1.0, 1.0)
