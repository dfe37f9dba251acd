"""Goals as panels show them, held against results; and the list of items that tells them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from support.episodes import played
from support.viewer import make_trajectory, write_rows

from agentgym_rl.envs.textcraft import SPEC as TEXTCRAFT
from agentgym_rl.types import StopReason, Trajectory
from agentgym_rl.viewer import goals as goals_module
from agentgym_rl.viewer.app import build_app
from agentgym_rl.viewer.goals import GoalFilter
from agentgym_rl.viewer.library import Library
from agentgym_rl.viewer.query import Query, Searches, select_within

CRAFTS = [
    "get 4 bamboo",
    "craft 1 stick using 2 bamboo",
    "craft 1 stick using 2 bamboo",
    "get 1 dark oak logs",
    "craft 4 dark oak planks using 1 dark oak logs",
    "craft 3 dark oak fence using 2 stick, 4 dark oak planks",
]
UNLIMITED = float("inf")
PAID, UNPAID, SHORT, UNEARNED, FAULT, UNKNOWN = range(1, 7)
"""The lines of the file."""


@pytest.fixture(scope="module")
def fence() -> Trajectory:
    """Item 200, a dark oak fence, solved in six turns."""
    return replace(played(TEXTCRAFT, 200, CRAFTS), success=True, score=1.0, stop_reason=StopReason.DONE)


def unpaid(trajectory: Trajectory) -> Trajectory:
    turns = tuple(replace(turn, reward=0.0, done=False) for turn in trajectory.turns)
    return replace(trajectory, turns=turns, score=0.0, success=False, stop_reason=StopReason.MAX_ROUNDS)


@pytest.fixture
def folder(fence: Trajectory, tmp_path: Path) -> Path:
    short = unpaid(played(TEXTCRAFT, 200, CRAFTS[:3]))
    fault = replace(unpaid(fence), stop_reason=StopReason.ENV_ERROR)
    members = [fence, unpaid(fence), short, replace(short, success=True, score=1.0), fault]
    rows = [replace(each, uid="step1/textcraft_200", sample_index=index) for index, each in enumerate(members)]
    write_rows(tmp_path / "trajectories/step1/0.jsonl", [*rows, make_trajectory(7, task="alfworld", success=True)])
    return tmp_path


def client(folder: Path) -> TestClient:
    return TestClient(build_app(Library(folder)), base_url="http://127.0.0.1")


def lines(folder: Path, wanted: str) -> set[int]:
    """Lines of the trajectories that pass, by repeated calls as the page makes them."""
    asked = client(folder)
    answer: dict[str, Any] = {"unchecked": 1}
    while answer["unchecked"]:
        answer = asked.get("/api/trajectories", params={"goal": wanted}).json()
    return {int(row["id"].rpartition("-")[2]) + 1 for row in answer["rows"]}


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (GoalFilter.REACHED, {PAID, UNPAID, FAULT}),
        (GoalFilter.UNREACHED, {SHORT, UNEARNED}),
        (GoalFilter.CONTRADICTED, {UNPAID, UNEARNED}),  # of a fault nothing is claimed
    ],
)
def test_trajectories_are_found_by_what_their_panel_says_of_the_goal(
    folder: Path, wanted: GoalFilter, found: set[int]
) -> None:
    assert lines(folder, wanted) == found


def test_a_trajectory_tells_the_turn_after_which_its_goal_is_reached(folder: Path) -> None:
    asked = client(folder)
    rows = asked.get("/api/trajectories", params={"sort": "item_id"}).json()["rows"]
    told = {row["item_id"]: asked.get(f"/api/trajectories/{row['id']}").json()["goal"] for row in reversed(rows)}
    assert told["textcraft_200"] == {"label": "dark oak fence", "is_followed": True, "reached_at": 6}
    assert told["alfworld_7"] == {"label": "", "is_followed": False, "reached_at": None}


def test_panels_are_made_as_far_as_time_allows_and_each_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    real = goals_module._goal_of
    monkeypatch.setattr(goals_module, "_goal_of", lambda summary, row: made.append(summary.id) or real(summary, row))
    library, searches = Library(folder), Searches()
    library.refresh()
    query = Query(goal=GoalFilter.CONTRADICTED)
    unchecked = [select_within(library, query, searches, 0.0).unchecked for _ in range(5)]
    assert unchecked == [4, 3, 2, 1, 0]  # a task without a panel need not be looked at
    assert len(select_within(library, query, searches, UNLIMITED).rows) == 2
    assert len(made) == len(set(made)) == 5


def test_a_file_that_was_written_anew_is_judged_anew(folder: Path, fence: Trajectory) -> None:
    library, searches = Library(folder), Searches()
    query = Query(goal=GoalFilter.CONTRADICTED)
    library.refresh()
    assert len(select_within(library, query, searches, UNLIMITED).rows) == 2
    write_rows(folder / "trajectories/step1/0.jsonl", [fence, fence])
    library.refresh()
    assert select_within(library, query, searches, UNLIMITED).rows == []


def test_a_panel_that_fails_and_a_row_that_is_no_episode_say_nothing_of_the_goal(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(trajectory: Trajectory) -> None:
        raise RuntimeError("no panel")

    monkeypatch.setattr("agentgym_rl.envs.textcraft.panel.panel", fail)
    spoiled = {"item_id": "textcraft_1", "conversations": [{"from": "human"}], "turns": 3}
    write_rows(folder / "trajectories/step2/0.jsonl", [{**spoiled, "turns": []}])
    assert lines(folder, GoalFilter.REACHED) == set()


def test_items_tell_goal_tries_successes_and_groups_without_a_signal(folder: Path) -> None:
    alike = [make_trajectory(9, step=2, sample=sample, opening="Goal: craft a torch.") for sample in (0, 1)]
    alone = make_trajectory(11, step=2, score=1.0, success=True)
    write_rows(folder / "trajectories/step2/0.jsonl", [*alike, alone])
    answer = client(folder).get("/api/items", params={"task": "textcraft", "sort": "success_mean"}).json()
    told = ("item_id", "goal", "tries", "faults", "success_mean", "score_mean", "groups", "groups_alike")
    assert [[row[name] for name in told] for row in answer["rows"]] == [
        ["textcraft_9", "a torch", 2, 0, 0.0, 0.0, 1, 1],
        ["textcraft_200", "dark oak fence", 5, 1, 0.5, 0.5, 1, 0],
        ["textcraft_11", "a stick", 1, 0, 1.0, 1.0, 0, 0],  # one is no group
    ]
    assert answer["unchecked"] == 0
    reverse = client(folder).get("/api/items", params={"sort": "tries", "descending": True, "limit": 1}).json()
    assert reverse["total"] == 4
    assert [row["item_id"] for row in reverse["rows"]] == ["textcraft_200"]


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"step": 3}, "step: no such parameter; there are step_min and step_max"),
        ({"colour": "red"}, "colour: no such parameter; there are descending, goal, "),
    ],
)
def test_a_parameter_that_there_is_not_is_answered_with_those_that_there_are(
    folder: Path, parameters: dict[str, Any], said: str
) -> None:
    answer = client(folder).get("/api/trajectories", params=parameters)
    assert answer.status_code == 422
    assert said in answer.json()["detail"][0]["msg"]


def test_a_run_tells_its_last_step_apart_from_the_whole(tmp_path: Path) -> None:
    for step, score in ((1, 1.0), (2, 0.0)):
        write_rows(tmp_path / f"trajectories/step{step}/0.jsonl", [make_trajectory(1, step=step, score=score)])
    write_rows(tmp_path / "trajectories/val_step2/0.jsonl", [make_trajectory(1, step=2, score=1.0)])
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "rollout/score_mean": 1}\n{"step": 2, "rollout/score_mean": 0}\n'
    )
    [run] = client(tmp_path).get("/api/runs").json()["runs"]
    assert (run["last_score_mean"], run["score_mean"]) == (0, 0.5)
