"""Episodes in one world of the real simulator: golden paths, ends, scores."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentgym_rl.envs.base import InvalidCall
from agentgym_rl.envs.checking import BAD_ACTIONS
from agentgym_rl.envs.sciworld.environment import MAX_MOVES, SciWorld
from agentgym_rl.envs.sciworld.simulator import SimulatorError

pytestmark = pytest.mark.java

GOLDEN: list[dict[str, Any]] = json.loads(Path(__file__).with_name("golden.json").read_text())
"""The gold actions of each task's first variation, up to the one that ends the episode."""
FIRST_INDICES = {
    "1-1": 0, "1-2": 30, "1-3": 60, "1-4": 90, "2-1": 120, "2-2": 660, "2-3": 1096, "3-1": 1396, "3-2": 1416,
    "3-3": 1436, "3-4": 2336, "4-1": 2936, "4-2": 3236, "4-3": 3536, "4-4": 3836, "6-1": 4136, "6-2": 4168,
    "6-3": 4204, "7-1": 4240, "7-2": 4365, "7-3": 4490, "8-1": 4615, "8-2": 4629,
}  # fmt: skip
SHORT = next(row for row in GOLDEN if row["task"] == "find-non-living-thing")


@pytest.fixture(scope="module")
def world() -> Iterator[SciWorld]:
    environment = SciWorld(2)
    yield environment
    environment.close()


@pytest.fixture(scope="module")
def other(world: SciWorld) -> Iterator[SciWorld]:
    """A second environment in the same Java process."""
    environment = SciWorld(2)
    yield environment
    environment.close()


def test_each_task_begins_at_its_index(world: SciWorld) -> None:
    assert {task.task_id: world._items.indices(task)[0] for task in world._items.tasks} == FIRST_INDICES
    assert len(world._items) == 4639


def test_there_is_a_golden_episode_of_every_task() -> None:
    assert [row["item"] for row in GOLDEN] == list(FIRST_INDICES.values())


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda row: row["task"])
def test_the_golden_actions_complete_the_task_with_a_total_reward_of_a_hundred(
    world: SciWorld, golden: dict[str, Any]
) -> None:
    start = world.reset(golden["item"])
    assert (start.task_name, start.var_num, start.done) == (golden["task"], 0, False)
    steps = [world.step(action) for action in golden["actions"]]
    assert [step.done for step in steps] == [False] * (len(steps) - 1) + [True]
    assert start.score + sum(step.reward for step in steps) == 100
    assert (steps[-1].score, steps[-1].moves) == (100, golden["moves"])
    with pytest.raises(InvalidCall, match="has finished: reset"):
        world.step("look around")


def test_two_worlds_of_one_process_played_in_turn_show_what_each_shows_alone(world: SciWorld, other: SciWorld) -> None:
    def begin(environment: SciWorld, row: dict[str, Any]) -> list[Any]:
        return [environment.reset(row["item"])]

    rows = [next(row for row in GOLDEN if row["task"] == task) for task in ("chemistry-mix", "find-animal")]
    alone = [begin(world, row) + [world.step(action) for action in row["actions"]] for row in rows]
    together = [begin(world, rows[0]), begin(other, rows[1])]
    for number in range(max(len(row["actions"]) for row in rows)):
        for environment, row, seen in zip((world, other), rows, together, strict=True):
            if number < len(row["actions"]):
                environment.available_actions()
                seen.append(environment.step(row["actions"][number]))
    assert together == alone


def test_a_list_of_actions_names_the_same_things_however_often_it_is_made(world: SciWorld, other: SciWorld) -> None:
    """Where several things have the same name, the simulator draws by which words each is called."""
    lists = []
    for environment in (world, other, world):
        environment.reset(2319)
        environment.step("look around")
        lists.append(environment.available_actions())
    assert lists[0] == lists[1] == lists[2]


def test_the_expert_finds_actions_that_complete_the_task(world: SciWorld) -> None:
    world.reset(SHORT["item"])
    assert world.gold_actions()[: len(SHORT["actions"])] == SHORT["actions"]


def test_focusing_on_the_wrong_thing_ends_the_episode_below_zero(world: SciWorld) -> None:
    world.reset(0)
    step = world.step("focus on agent")
    assert (step.score, step.reward, step.done) == (-100, -100, True)


def test_a_task_that_is_fulfilled_in_part_from_the_start_begins_with_that_score(world: SciWorld) -> None:
    start = world.reset(4203)
    assert start.score == 20


def test_the_episode_ends_with_the_first_move_beyond_the_hundredth(world: SciWorld) -> None:
    world.reset(0)
    steps = [world.step("wait")]
    while not steps[-1].done:
        steps.append(world.step("wait"))
    assert steps[-2].moves <= MAX_MOVES < steps[-1].moves
    assert (steps[-1].score, sum(step.reward for step in steps)) == (0, 0)


def test_looking_is_no_move_and_lists_are_made_only_when_asked_for(world: SciWorld, monkeypatch: Any) -> None:
    world.reset(0)
    asked = []
    texts = world._world.texts
    monkeypatch.setattr(world._world, "texts", lambda method: asked.append(method) or texts(method))
    assert world.step("look around").moves == 0
    assert world.step("open door to kitchen").moves == 1
    assert asked == []
    actions = world.available_actions()
    assert "close door to kitchen" in actions
    assert world.available_actions() == actions
    assert asked == ["getValidActionObjectCombinations"]


def test_what_is_no_action_is_told_and_changes_nothing(world: SciWorld) -> None:
    world.reset(0)
    for action in BAD_ACTIONS:
        step = world.step(action)
        assert (step.observation, step.reward, step.done, step.moves) == (
            "No known action matches that input.",
            0,
            False,
            0,
        )


def test_a_simulator_that_died_fails_its_episode_and_a_reset_begins_on_a_fresh_one() -> None:
    environment = SciWorld()
    try:
        seen = environment.reset(SHORT["item"])
        environment._world.simulator.process.kill()
        with pytest.raises(SimulatorError, match="process ended with status -9"):
            environment.step("look around")
        with pytest.raises(SimulatorError, match="reset again"):
            environment.step("look around")
        assert environment.reset(SHORT["item"]) == seen
        process = environment._world.simulator.process
    finally:
        environment.close()
    assert process.poll() is not None
