"""Observations, actions and rewards, in small worlds made by hand and in all levels."""

from __future__ import annotations

import base64
import json
import random

import pytest
from minigrid.core.actions import Actions
from minigrid.core.world_object import Ball, Box, Door, Key
from minigrid.envs.babyai.core.verifier import ObjDesc, PickupInstr
from support.babyai_worlds import DOWN, LEFT, RIGHT, UP, begin, stands

from agentgym_rl.envs.babyai.actions import Verb
from agentgym_rl.envs.babyai.environment import BabyAI
from agentgym_rl.envs.babyai.levels import LEVELS, NUM_LEVELS, open_level, place_of
from agentgym_rl.envs.base import InvalidCall

NOT_A_STEP = "check available actions"


def level_index(name: str, seed: int = 0) -> int:
    return seed * NUM_LEVELS + LEVELS.index(name)


def restarted(name: str, seed: int = 0) -> BabyAI:
    environment = BabyAI()
    environment.reset(level_index(name, seed))
    return environment


# ------------------------------------------------------------------------------------------------------- indices


def test_an_index_names_a_level_and_a_seed() -> None:
    assert [(place_of(index).level, place_of(index).seed) for index in (0, 39, 40, 85)] == [
        (1, 0),
        (40, 0),
        (1, 1),
        (6, 2),
    ]
    names = [place_of(index).name for index in range(40)]
    assert (names[0], names[3], names[25], names[39]) == (
        "GoToRedBallGrey",
        "GoToObjS6",
        "KeyInBox",
        "BossLevelNoUnlock",
    )
    families = [place_of(index).family for index in range(40)]
    assert [families.count(each) for each in ("goto", "open", "pickup", "putnext", "unlock", "other", "synth")] == [
        *(11, 5, 5, 2, 6, 5, 6)
    ]


def test_every_level_begins_with_its_mission_word_for_word() -> None:
    environment, missions = BabyAI(), []
    for index in range(3 * NUM_LEVELS):
        first_line = environment.reset(index).observation.partition("\n")[0]
        missions.append(open_level(place_of(index)).surface)
        assert first_line == f"Your goal: {missions[-1]}"
    assert any(", then " in mission for mission in missions)
    assert any(" after you " in mission for mission in missions)


def test_an_index_below_zero_is_refused() -> None:
    with pytest.raises(InvalidCall, match="data_idx -1: must be at least 0"):
        BabyAI().reset(-1)


# --------------------------------------------------------------------------------------------------- observations


def test_an_observation_tells_what_is_in_view_ahead_and_carried_and_what_can_be_done(monkeypatch) -> None:
    things = {(3, 3): Key("blue"), (3, 2): Ball("grey"), (5, 4): Ball("grey"), (7, 5): Door("green")}
    environment = begin(monkeypatch, things)
    assert environment.observation() == (
        "Your goal: go to the red ball\n"
        "In view: blue key 1 (2 steps forward); grey ball 1 (2 steps forward, 1 step left); "
        "grey ball 2 (4 steps forward, 1 step right); green closed door 1 (6 steps forward, 2 steps right).\n"
        "Ahead: blue key 1, 2 steps away.\n"
        "You carry nothing.\n"
        'Available actions: ["turn left", "turn right", "move forward", "check available actions", '
        '"go to blue key 1", "pickup blue key 1", "go to grey ball 1", "pickup grey ball 1", '
        '"go to grey ball 2", "pickup grey ball 2", '
        '"go to green closed door 1", "toggle and go through green closed door 1"]'
    )


def test_after_the_first_observation_the_goal_is_not_repeated(monkeypatch) -> None:
    assert "Your goal" not in begin(monkeypatch, {}).step("turn left").observation


def test_what_lies_behind_a_wall_or_a_closed_door_is_not_in_view(monkeypatch) -> None:
    hidden = {(9, 3): Ball("blue")}
    assert "blue ball" not in begin(monkeypatch, hidden, agent=(5, 3)).observation()
    assert "blue ball" not in begin(monkeypatch, {**hidden, (7, 3): Door("grey")}, agent=(5, 3)).observation()
    assert "blue ball" in begin(monkeypatch, {**hidden, (7, 3): Door("grey", is_open=True)}, agent=(5, 3)).observation()


@pytest.mark.parametrize(
    ("facing", "bearing"),
    [(RIGHT, "2 steps forward, 1 step right"), (DOWN, "1 step forward, 2 steps left"), (LEFT, None), (UP, None)],
)
def test_bearings_are_seen_from_the_agent(monkeypatch, facing, bearing) -> None:
    seen = begin(monkeypatch, {(5, 4): Ball("blue")}, agent=(3, 3), facing=facing).observation()
    assert ("blue ball" not in seen) if bearing is None else (f"blue ball 1 ({bearing})" in seen)


def test_equal_things_are_counted_from_near_to_far_and_doors_by_their_state(monkeypatch) -> None:
    things = {(5, 3): Ball("blue"), (3, 4): Ball("blue"), (7, 2): Door("red"), (7, 4): Door("red", is_open=True)}
    environment = begin(monkeypatch, things)
    assert "blue ball 1 (2 steps forward, 1 step right); blue ball 2 (4 steps forward)" in environment.observation()
    environment.step("go to blue ball 2")
    assert stands(environment) == ((4, 3), RIGHT)
    assert {"go to red closed door 1", "go to red open door 1"} <= set(environment.available_actions())


def test_a_wall_ahead_and_nothing_ahead_are_told_apart(monkeypatch) -> None:
    assert "Ahead: wall, 6 steps away." in begin(monkeypatch, {}).observation()
    far = begin(monkeypatch, {(7, 3): Door("grey", is_open=True)}, agent=(6, 3))
    far.step("move forward")
    assert "Ahead: nothing within 6 steps." in far.observation()


# --------------------------------------------------------------------------------------------------------- actions


@pytest.mark.parametrize(
    "spelling",
    [
        *("pickup blue ball 2", "pick up blue ball 2", "Pickup Blue  Ball 2", "pickup_blue_ball_2"),
        *("pick up the blue ball 2", " pickup blue ball 2 "),
    ],
)
def test_case_spaces_underscores_and_articles_do_not_matter(monkeypatch, spelling) -> None:
    environment = begin(monkeypatch, {(2, 2): Ball("blue"), (5, 3): (wanted := Ball("blue"))})
    environment.step(spelling)
    assert environment.level.carrying is wanted


def test_without_a_number_the_nearest_is_meant_and_without_a_state_any_door(monkeypatch) -> None:
    things = {(2, 5): Ball("blue"), (5, 3): Ball("blue"), (7, 3): Door("red", is_open=True)}
    environment = begin(monkeypatch, things)
    environment.step("go to blue ball")
    assert environment.faced().name == "blue ball 1" and stands(environment)[0] in ((1, 5), (2, 4))
    again = begin(monkeypatch, things)
    again.step("go to red door 1")
    assert again.faced().name == "red open door 1"


@pytest.mark.parametrize(
    ("action", "reply"),
    [
        ("dance", "Could not understand 'dance'. Actions: turn left; "),
        ("", "Could not understand ''."),
        ("x" * 200, f"Could not understand '{'x' * 80}...'."),
        ("go to pink ball 1", "Could not understand"),
        ("go to blue ball 0", "There is no blue ball 0 in view."),
        ("go to blue ball 2", "There is no blue ball 2 in view."),
        ("go to red locked door 1", "There is no red locked door 1 in view."),
        ("move forward", "Could not move forward: a blue ball is in the way."),
        ("drop", "Could not drop anything: you carry nothing."),
        ("toggle", "Could not toggle: neither a door nor a box is right ahead of you."),
        ("pickup red door 1", "Could not pick up the red closed door 1: doors stay where they are."),
        ("go through blue ball 1", "Could not go through the blue ball 1: it is no door."),
        ("go through red door 1", "Could not go through the red closed door 1: toggle and go through it."),
        ("toggle and go through grey door 1", "Could not toggle and go through the grey open door 1: go through it."),
        ("toggle and go through green door 1", "Could not open the green locked door 1: carry a green key."),
        ("go to yellow key 1", "There is no way to the yellow key 1 through what you have seen."),
    ],
)
def test_what_is_not_understood_or_not_possible_says_why_and_takes_no_step(monkeypatch, action, reply) -> None:
    things = {
        **{(2, 3): Ball("blue"), (7, 2): Door("red"), (7, 4): Door("green", is_locked=True)},
        **{(4, 0): Door("grey", is_open=True), (4, 1): Key("yellow"), (3, 1): Box("grey"), (5, 1): Box("purple")},
        (4, 2): Box("blue"),
    }
    environment = begin(monkeypatch, things)
    before = stands(environment)
    outcome = environment.step(action)
    assert outcome.observation.startswith(reply)
    assert "\nIn view: blue ball 1" in outcome.observation
    assert (outcome.reward, outcome.score, outcome.done, environment.level.step_count) == (0, 0, False, 0)
    assert stands(environment) == before


def test_checking_the_available_actions_takes_no_step(monkeypatch) -> None:
    environment = begin(monkeypatch, {})
    outcome = environment.step(NOT_A_STEP)
    assert json.loads(outcome.observation.partition("Available actions: ")[2]) == environment.available_actions()
    assert environment.level.step_count == 0


def test_walking_takes_the_fewest_steps_round_what_is_in_the_way(monkeypatch) -> None:
    """From (1, 3) to beside the ball at (6, 3) with a box between: turn, 1 step, turn, 5 steps, turn."""
    environment = begin(monkeypatch, {(3, 3): Box("grey"), (6, 3): Ball("blue")})
    environment.step("go to blue ball 1")
    assert environment.faced().name == "blue ball 1" and stands(environment)[0] in ((6, 2), (6, 4))
    assert environment.level.step_count == 9


def test_ways_lead_over_seen_cells_only(monkeypatch) -> None:
    """A wall of boxes with a gap at (3, 6), which is out of view from (1, 1)."""
    things = {(3, y): Box("grey") for y in range(1, 6)} | {(5, 3): Ball("blue")}
    environment = begin(monkeypatch, things, agent=(1, 1))
    assert "blue ball 1" in environment.observation()
    assert "go to blue ball 1" not in environment.available_actions()
    for action in ("turn right", *["move forward"] * 4, "turn left"):
        environment.step(action)
    environment.step("go to blue ball 1")
    assert environment.faced().name == "blue ball 1"


def test_going_to_what_is_right_ahead_takes_one_step_that_counts(monkeypatch) -> None:
    environment = begin(monkeypatch, {(2, 3): Ball("red")})
    outcome = environment.step("go to red ball 1")
    assert environment.level.step_count == 1
    assert outcome.done and outcome.reward == 1 - 0.9 / environment.level.max_steps


def test_picking_up_walks_there_and_one_thing_at_a_time_is_carried(monkeypatch) -> None:
    environment = begin(monkeypatch, {(5, 3): Ball("blue"), (5, 5): Key("grey")})
    assert "You carry a blue ball." in environment.step("pickup blue ball 1").observation
    assert not any(action.startswith("pickup") for action in environment.available_actions())
    refused = environment.step("pickup grey key 1")
    assert refused.observation.startswith("Could not pick up the grey key 1: drop the blue ball that you carry first.")
    assert "You carry nothing." in environment.step("drop").observation
    assert environment.faced().name == "blue ball 1"


def test_dropping_needs_an_empty_cell_ahead(monkeypatch) -> None:
    environment = begin(monkeypatch, {(2, 3): Ball("blue"), (3, 3): Box("grey")})
    environment.step("pickup blue ball 1")
    environment.step("move forward")
    assert "drop" not in environment.available_actions()
    refused = environment.step("drop").observation
    assert refused.startswith("Could not drop the blue ball: a grey box is where it would go.")


def test_going_through_ends_behind_the_door(monkeypatch) -> None:
    environment = begin(monkeypatch, {(7, 4): Door("red", is_open=True)})
    environment.step("go through red open door 1")
    assert stands(environment) == ((8, 4), RIGHT)


def test_toggling_and_going_through_opens_the_door_first(monkeypatch) -> None:
    environment = begin(monkeypatch, {(7, 4): (door := Door("red"))})
    environment.step("toggle and go through red closed door 1")
    assert door.is_open and stands(environment) == ((8, 4), RIGHT)


def test_going_through_ends_in_the_doorway_where_something_stands_behind_it(monkeypatch) -> None:
    environment = begin(monkeypatch, {(7, 4): Door("red"), (8, 4): Ball("blue")})
    environment.step("toggle and go through red closed door 1")
    assert stands(environment) == ((7, 4), RIGHT)
    assert "Ahead: blue ball 1, 1 step away." in environment.observation()


def test_a_locked_door_opens_for_its_key_only(monkeypatch) -> None:
    through = "toggle and go through green locked door 1"
    things = {(7, 4): Door("green", is_locked=True), (3, 3): Key("green"), (3, 5): Key("red")}
    environment = begin(monkeypatch, things)
    assert through not in environment.available_actions()
    environment.step("pickup red key 1")
    assert through not in environment.available_actions()
    environment = begin(monkeypatch, things | {(7, 4): Door("green", is_locked=True), (3, 3): Key("green")})
    environment.step("pickup green key 1")
    assert through in environment.available_actions()
    environment.step(through)
    assert stands(environment) == ((8, 4), RIGHT)


def test_toggling_opens_and_closes_a_door_and_opens_a_box(monkeypatch) -> None:
    environment = begin(monkeypatch, {(7, 3): (door := Door("red")), (5, 5): Box("grey", Key("blue"))})
    environment.step("go to red closed door 1")
    states = []
    for _ in range(2):
        environment.step("toggle")
        states.append(door.is_open)
    assert states == [True, False]
    environment = begin(monkeypatch, {(5, 5): Box("grey", Key("blue"))})
    assert "blue key" not in environment.observation()
    environment.step("go to grey box 1")
    assert "Ahead: blue key 1, 1 step away." in environment.step("toggle").observation


def test_exactly_the_listed_actions_are_possible_wherever_one_comes() -> None:
    """Random play in every level: what is listed takes steps, what could be said and is not listed takes none."""
    dice, environment, looked_at = random.Random(0), BabyAI(), 0
    for index in range(NUM_LEVELS):
        environment.reset(index)
        for _ in range(6):
            listed = environment.available_actions()
            names = [sighting.name for sighting in environment._view.sightings]
            sayable = [f"{verb} {name}" for verb in Verb if verb.has_target for name in names]
            sayable += [str(verb) for verb in Verb if not verb.has_target]
            possible = {action for action in sayable if environment.primitives(action)} | {NOT_A_STEP}
            assert set(listed) == possible and len(listed) == len(possible), index
            looked_at += len(sayable)
            if environment.step(dice.choice(listed)).done:
                break
    assert looked_at > 2000


def test_what_an_action_is_said_to_take_it_takes(monkeypatch) -> None:
    environment = begin(monkeypatch, {(7, 4): Door("red"), (5, 5): Ball("blue")})
    for action in ("pickup blue ball 1", "toggle and go through red closed door 1"):
        steps, before = environment.primitives(action), environment.level.step_count
        environment.step(action)
        assert environment.level.step_count - before == len(steps)
        deeds = [step for step in steps if step in (Actions.pickup, Actions.toggle)]
        assert len(deeds) == 1


# ------------------------------------------------------------------------------------------------ rewards and ends


def turn(environment: BabyAI, count: int) -> None:
    for _ in range(count):
        assert not environment.step("turn left").done


def test_success_is_rewarded_once_by_minigrids_rule_and_ends_the_episode(monkeypatch) -> None:
    """The world allows 8 x 8 x 2 steps; from (1, 3) it is 3 to stand before the ball at (5, 3)."""
    environment = begin(monkeypatch, {(5, 3): Ball("red")})
    assert environment.level.max_steps == 128
    assert environment.step("dance").reward == 0
    outcome = environment.step("go to red ball 1")
    assert (outcome.reward, outcome.score, outcome.done) == (1 - 0.9 * 3 / 128, 1 - 0.9 * 3 / 128, True)
    assert outcome.observation.startswith("The goal is reached.\n")
    assert "Available actions" not in outcome.observation and environment.available_actions() == []


def test_after_the_end_no_action_is_executed_and_nothing_paid_again(monkeypatch) -> None:
    environment = begin(monkeypatch, {(5, 3): Ball("red")})
    score = environment.step("go to red ball 1").score
    for action in ("go to red ball 1", "dance", "turn left"):
        with pytest.raises(InvalidCall, match="has finished: reset before the next step"):
            environment.step(action)
    assert environment.score == score


def test_a_success_worth_less_than_half_ends_the_episode_too(monkeypatch) -> None:
    environment = begin(monkeypatch, {(5, 3): Ball("red")})
    turn(environment, 100)
    outcome = environment.step("go to red ball 1")
    assert (outcome.reward, outcome.done) == (1 - 0.9 * 103 / 128, True)
    assert outcome.reward < 0.5


def test_a_success_in_the_very_last_step_is_paid(monkeypatch) -> None:
    environment = begin(monkeypatch, {(4, 4): Ball("red")}, facing=DOWN)
    turn(environment, 124)
    assert environment.primitives("go to red ball 1") == (
        Actions.forward,
        Actions.left,
        Actions.forward,
        Actions.forward,
    )
    outcome = environment.step("go to red ball 1")
    assert environment.level.step_count == 128
    assert (outcome.reward, outcome.done) == (pytest.approx(0.1), True)


def test_when_the_steps_are_used_the_episode_ends_with_reward_0_and_no_less(monkeypatch) -> None:
    environment = begin(monkeypatch, {})
    turn(environment, 127)
    outcome = environment.step("turn left")
    assert (outcome.reward, outcome.score, outcome.done) == (0, 0, True)
    assert outcome.observation.startswith("The goal is missed: all 128 steps are used.\n")
    with pytest.raises(InvalidCall):
        environment.step("turn left")


def test_an_action_of_many_steps_breaks_off_when_the_steps_are_used(monkeypatch) -> None:
    environment = begin(monkeypatch, {(5, 3): Ball("red")})
    turn(environment, 124)
    environment.step("turn left")
    environment.step("turn right")
    outcome = environment.step("go to red ball 1")
    assert (outcome.reward, outcome.done, environment.level.step_count) == (0, True, 128)


def test_doing_what_the_goal_forbids_ends_the_episode_with_reward_0(monkeypatch) -> None:
    strict = lambda: PickupInstr(ObjDesc("ball", "red"), strict=True)  # noqa: E731
    environment = begin(monkeypatch, {(5, 3): Key("blue")}, goal=strict)
    outcome = environment.step("pickup blue key 1")
    assert (outcome.reward, outcome.score, outcome.done) == (0, 0, True)
    assert outcome.observation.startswith("The goal is missed: this was not what it asks for.")


def test_what_the_agent_has_in_its_hands_at_the_start_is_not_seen_where_it_lay() -> None:
    environment = restarted("PutNextS7N4Carrying")
    carried = environment.level.carrying
    assert carried is not None
    assert f"You carry a {carried.color} {carried.type}." in environment.observation()
    assert all(sighting.thing is not None for sighting in environment._view.sightings)


def test_rendering_gives_a_png_of_the_whole_world(monkeypatch) -> None:
    head, _, data = begin(monkeypatch, {}).render().partition(",")
    assert head == "data:image/png;base64"
    png = base64.b64decode(data, validate=True)
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")
    assert (width, height) == (15 * 32, 8 * 32)
