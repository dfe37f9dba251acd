"""The rules of TextCraft."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from agentgym_rl.envs.base import InvalidCall
from agentgym_rl.envs.textcraft import NUM_GOALS
from agentgym_rl.envs.textcraft.environment import MAX_DISTRACTORS, TextCraft, commands_for, recipe_book

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())


def index_of(goal: str) -> int:
    return recipe_book().goals.index(goal)


def started(goal: str) -> TextCraft:
    environment = TextCraft()
    environment.reset(index_of(goal))
    return environment


def replies(environment: TextCraft, *actions: str) -> list[str]:
    return [environment.step(action).observation for action in actions]


def test_the_book_has_the_published_totals() -> None:
    book = recipe_book()
    assert len(book.recipes) == 613
    assert len(book.goals) == NUM_GOALS == 544
    assert Counter(book.depth[goal] for goal in book.goals) == {1: 125, 2: 291, 3: 117, 4: 11}


def test_goals_are_sorted_by_depth_then_name() -> None:
    book = recipe_book()
    assert list(book.goals) == sorted(book.goals, key=lambda goal: (book.depth[goal], goal))
    assert (book.goals[0], book.goals[-1]) == ("acacia planks", "purple banner")


@pytest.mark.parametrize("episode", GOLDEN, ids=lambda episode: f"depth{episode['depth']}")
def test_golden_episode(episode: dict[str, Any]) -> None:
    environment = TextCraft()
    assert environment.reset(episode["data_idx"]).observation == episode["observation"]
    assert environment.goal == episode["goal"]
    for step in episode["steps"]:
        result = environment.step(step["action"])
        assert {"action": step["action"], **dataclasses.asdict(result)} == step


def test_an_observation_is_commands_an_empty_line_and_the_goal() -> None:
    lines = TextCraft().reset(index_of("torch")).observation.split("\n")
    assert lines[0] == "Crafting commands:"
    assert all(line.startswith("craft ") and " using " in line for line in lines[1:-2])
    assert lines[-2:] == ["", "Goal: craft torch."]


def test_every_recipe_of_the_tree_is_shown_and_at_most_ten_more() -> None:
    book = recipe_book()
    for index, goal in enumerate(book.goals):
        needed = {recipe.command for recipe in book.tree(goal)}
        shown = commands_for(goal, index)
        assert needed <= set(shown)
        assert len(shown) == len(set(shown)) <= len(needed) + MAX_DISTRACTORS


def test_the_same_index_gives_the_same_text_in_every_process() -> None:
    code = (
        "import hashlib, random; random.seed(); from agentgym_rl.envs.textcraft.environment import TextCraft\n"
        "e = TextCraft(); text = ''.join(e.reset(i).observation for i in range(0, 600, 7))\n"
        "print(hashlib.sha256(text.encode()).hexdigest())"
    )
    digests = set()
    for hash_seed in ("1", "2"):
        environ = {**os.environ, "PYTHONHASHSEED": hash_seed}
        digests.add(subprocess.check_output([sys.executable, "-c", code], env=environ, text=True))
    environment = TextCraft()
    text = "".join(environment.reset(index).observation for index in range(0, 600, 7))
    assert digests == {hashlib.sha256(text.encode()).hexdigest() + "\n"}


def test_an_index_beyond_the_goals_wraps_around() -> None:
    environment = TextCraft()
    environment.reset(NUM_GOALS + 3)
    assert environment.goal == recipe_book().goals[3]


def test_a_negative_index_is_refused() -> None:
    with pytest.raises(InvalidCall, match="data_idx -1"):
        TextCraft().reset(-1)


def test_get_gives_only_what_no_recipe_makes() -> None:
    assert replies(started("torch"), "get 2 coal", "get 1 stick", "get 1 planks", "get 1 unicorn", "get 0 coal") == [
        "Got 2 coal",
        "Could not get stick: it must be crafted.",
        "Could not get planks: it names a group of items, not one.",
        "Could not get unicorn: there is no such item.",
        "Could not get 0 coal: get at least 1.",
    ]


def test_craft_takes_the_exact_ingredients_of_one_recipe() -> None:
    environment = started("torch")
    assert replies(
        environment,
        "get 9 coal",
        "get 9 bamboo",
        "craft 1 stick using 3 bamboo",
        "craft 1 stick using 2 bamboo, 1 coal",
        "craft 1 stick using bamboo",
        "craft 1 stick using 2 bamboo",
        "craft 1 unicorn using 1 coal",
        "inventory",
    )[2:] == [
        "Could not craft stick: no recipe makes it from 3 bamboo.",
        "Could not craft stick: no recipe makes it from 2 bamboo, 1 coal.",
        "Could not read the ingredient 'bamboo': write <n> <item>.",
        "Crafted 1 minecraft:stick",
        "Could not craft unicorn: no recipe makes it.",
        "Inventory: [coal] (9) [bamboo] (7) [stick] (1)",
    ]


def test_a_concrete_item_stands_for_its_tag_and_the_tag_itself_does_not() -> None:
    environment = started("torch")
    assert replies(
        environment,
        "get 1 oak logs",
        "craft 4 oak planks using 1 oak logs",
        "craft 4 stick using 2 planks",
        "craft 4 stick using 1 oak planks, 1 birch planks",
        "craft 4 stick using 2 oak planks",
    )[1:] == [
        "Crafted 4 minecraft:oak_planks",
        "Could not craft stick: no recipe makes it from 2 planks.",
        "Could not craft stick: no recipe makes it from 1 oak planks, 1 birch planks.",
        "Crafted 4 minecraft:stick",
    ]


def test_a_failed_craft_takes_nothing() -> None:
    environment = started("torch")
    refused = "Could not craft stick: it takes 2 bamboo, you have 1."
    assert replies(environment, "get 1 bamboo", "craft 1 stick using 2 bamboo", "inventory")[1:] == [
        refused,
        "Inventory: [bamboo] (1)",
    ]


def test_the_same_action_means_the_same_in_every_episode_and_takes_from_its_own_inventory() -> None:
    craft, without = (
        "craft 4 oak planks using 1 oak logs",
        "Could not craft oak planks: it takes 1 oak logs, you have 0.",
    )
    one, other = started("stick"), started("stick")
    assert replies(one, "get 1 oak logs", craft, craft) == ["Got 1 oak logs", "Crafted 4 minecraft:oak_planks", without]
    assert replies(other, craft, "inventory") == [without, "Inventory: nothing yet."]
    # Too long to be remembered.
    assert replies(other, "get 1 oak logs" + "." * 500, craft) == ["Got 1 oak logs", "Crafted 4 minecraft:oak_planks"]


def test_spelling_is_forgiven_where_the_meaning_is_plain() -> None:
    environment = started("torch")
    assert replies(environment, "Get 2 Bamboo.", "craft stick using 2 minecraft:bamboo", "  GET 1   coal ")[1:] == [
        "Crafted 1 minecraft:stick",
        "Got 1 coal",
    ]


def test_reward_and_done_come_exactly_with_the_goal() -> None:
    environment = started("torch")
    results = [environment.step(a) for a in ("get 1 coal", "get 2 bamboo", "craft 1 stick using 2 bamboo")]
    assert [(result.reward, result.done) for result in results] == [(0, False)] * 3
    last = environment.step("craft 4 torch using 1 stick, 1 coal")
    assert (last.reward, last.done) == (1, True)
    assert isinstance(last.reward, int)


def test_a_finished_episode_takes_no_further_step() -> None:
    environment = started("acacia planks")
    replies(environment, "get 1 acacia logs", "craft 4 acacia planks using 1 acacia logs")
    with pytest.raises(InvalidCall, match="has finished"):
        environment.step("inventory")
    environment.reset(0)
    assert environment.step("inventory").observation == "Inventory: nothing yet."


def test_a_long_text_is_repeated_in_short() -> None:
    (reply,) = replies(started("torch"), "sing " * 1000)
    assert len(reply) < 250


def test_available_actions_can_all_be_executed() -> None:
    goal = "torch"
    for prefix in ([], ["get 4 oak logs", "craft 4 oak planks using 1 oak logs"]):
        environment = started(goal)
        replies(environment, *prefix)
        actions = environment.available_actions()
        assert "inventory" in actions
        for action in actions:
            fresh = started(goal)
            replies(fresh, *prefix)
            assert not fresh.step(action).observation.startswith("Could not"), action
