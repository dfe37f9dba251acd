"""Every goal can be reached, over the real server and client."""

from __future__ import annotations

import pytest
from support.servers import serve

from agentgym_rl.envs.server import build_app
from agentgym_rl.envs.textcraft import SPEC, TextCraftClient
from agentgym_rl.envs.textcraft.environment import commands_for, recipe_book
from agentgym_rl.envs.textcraft.planner import plan


@pytest.mark.server
def test_all_goals_are_solved_over_http() -> None:
    goals = recipe_book().goals
    with serve(build_app(SPEC)) as url, TextCraftClient(url, data_len=len(goals)) as client:
        for index, goal in enumerate(goals):
            assert client.reset(index).endswith(f"Goal: craft {goal}.")
            outcomes = [client.step(f"Action: {action}") for action in plan(goal)]
            assert [(o.reward, o.done) for o in outcomes] == [(0.0, False)] * (len(outcomes) - 1) + [(1.0, True)], goal


def test_a_plan_gets_each_raw_item_once_and_first() -> None:
    for goal in recipe_book().goals:
        actions = plan(goal)
        gets = [action.split(" ", 2)[2] for action in actions if action.startswith("get ")]
        assert len(gets) == len(set(gets))
        assert all(action.startswith("get ") for action in actions[: len(gets)])


def test_a_plan_needs_no_recipe_that_is_not_shown() -> None:
    book = recipe_book()
    for index, goal in enumerate(book.goals):
        shown = {command.split(" using ")[0] for command in commands_for(goal, index)}
        assert {a.split(" using ")[0] for a in plan(goal) if a.startswith("craft ")} <= shown


def test_a_plan_shares_intermediate_products() -> None:
    assert plan("bookshelf") == [
        "get 2 acacia logs",
        "get 9 sugar cane",
        "get 12 rabbit hide",
        *["craft 1 leather using 4 rabbit hide"] * 3,
        *["craft 3 paper using 3 sugar cane"] * 3,
        *["craft 4 acacia planks using 1 acacia logs"] * 2,
        *["craft 1 book using 3 paper, 1 leather"] * 3,
        "craft 1 bookshelf using 6 acacia planks, 3 book",
    ]


def test_a_goal_that_no_recipe_makes_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        plan("unicorn")
