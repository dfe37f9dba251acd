"""Rows of trajectory files as trajectories, whoever wrote them."""

from __future__ import annotations

from typing import Any

import pytest

from agentgym_rl.viewer.episodes import read_episode

SAID = [{"from": "human", "value": "Go."}, {"from": "gpt", "value": "Action: north"}]


@pytest.mark.parametrize(
    ("fields", "task", "item_id"),
    [
        ({"item_id": "maze_3"}, "maze", "maze_3"),
        ({"item_id": "maze_3", "task": "maze"}, "maze", "maze_3"),
        ({"item_id": "train/look_at_1/trial_2", "task": "alfworld"}, "alfworld", "train/look_at_1/trial_2"),
        ({"item_id": 7, "task": "maze"}, "maze", "7"),
        ({"item_id": "maze_3", "task": 5}, "maze", "maze_3"),
        ({"item_id": "maze_x"}, "maze", "maze_x"),
        ({"item_id": "loose"}, "loose", "loose"),
    ],
)
def test_a_bare_conversation_has_the_task_that_it_names_and_keeps_its_item(
    fields: dict[str, Any], task: str, item_id: str
) -> None:
    episode = read_episode({"conversations": SAID, **fields}, "row")
    assert (episode.item.task, episode.item.item_id) == (task, item_id)
