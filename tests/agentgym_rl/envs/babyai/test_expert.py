"""Expert play: a golden episode per level, and what the bot's steps become."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentgym_rl.data.items import load_items
from agentgym_rl.envs.babyai.environment import BabyAI
from agentgym_rl.envs.babyai.expert import plan
from agentgym_rl.envs.babyai.levels import FAMILIES, LEVELS, open_level, place_of

ROOT = Path(__file__).parents[4]
GOLDEN: list[dict[str, Any]] = json.loads((Path(__file__).parent / "golden.json").read_text())


def test_there_is_a_golden_episode_of_every_level() -> None:
    assert [row["level"] for row in GOLDEN] == list(LEVELS)
    assert [place_of(row["item"]).name for row in GOLDEN] == list(LEVELS)


@pytest.mark.parametrize("row", GOLDEN, ids=LEVELS)
def test_the_expert_plays_the_golden_episode(row: dict[str, Any]) -> None:
    environment = BabyAI()
    environment.reset(row["item"])
    assert plan(environment) == row["actions"]
    outcomes = [environment.step(action) for action in row["actions"]]
    total = 1 - 0.9 * row["steps"] / row["max_steps"]
    assert [outcome.reward for outcome in outcomes] == [*[0] * (len(outcomes) - 1), total]
    assert (outcomes[-1].score, outcomes[-1].done) == (row["score"], True)
    assert row["score"] == pytest.approx(total)
    assert (environment.level.step_count, environment.level.max_steps) == (row["steps"], row["max_steps"])


def test_a_plan_leaves_the_environment_as_it_is() -> None:
    environment = BabyAI()
    seen = environment.reset(0).observation
    plan(environment)
    assert environment.observation() == seen and environment.level.step_count == 0


def test_path_finding_actions_stand_for_many_steps_and_never_for_more_than_the_bot_takes() -> None:
    actions = sum(len(row["actions"]) for row in GOLDEN)
    steps = sum(row["steps"] for row in GOLDEN)
    assert actions < steps / 2


def test_where_two_doors_must_be_opened_in_order_nobody_can_reach_the_goal_and_the_expert_says_nothing() -> None:
    """minigrid asks, in the step that opens the first door, whether it was the second, and ends the episode."""
    item = LEVELS.index("OpenDoorsOrderN4Debug")
    assert " after you " in open_level(place_of(item)).mission or ", then " in open_level(place_of(item)).mission
    environment = BabyAI()
    environment.reset(item)
    assert plan(environment) == []


def test_where_the_bot_would_go_on_for_ever_the_expert_gives_up() -> None:
    environment = BabyAI()
    environment.reset(188)  # UnlockToUnlock, seed 4
    assert plan(environment) == []


# ------------------------------------------------------------------------------------------------------- item lists


def listed(path: str) -> list[int]:
    return [item.index for item in load_items(ROOT / path, "babyai")]


def test_training_and_test_items_differ_in_index_and_in_world() -> None:
    train, test = listed("AgentItemId/babyai_train.json"), listed("AgentEval/babyai/babyai_test.json")
    assert (len(train), len(test)) == (20 * len(LEVELS), 4 * len(LEVELS))
    environment, worlds = BabyAI(), set()
    for item in [*train, *test]:
        environment.reset(item)
        worlds.add((environment.level.mission, environment.level.hash(64)))
    assert len(worlds) == len(train) + len(test)


def test_every_level_has_its_share_and_every_family_its_file() -> None:
    train, test = listed("AgentItemId/babyai_train.json"), listed("AgentEval/babyai/babyai_test.json")
    for items, share in ((train, 20), (test, 4)):
        names = [place_of(item).name for item in items]
        assert all(names.count(level) == share for level in LEVELS)
    by_family = {family: listed(f"AgentEval/babyai/{family}.json") for family in FAMILIES}
    assert sorted(item for items in by_family.values() for item in items) == test
    assert all({place_of(item).name for item in by_family[family]} == set(FAMILIES[family]) for family in FAMILIES)
