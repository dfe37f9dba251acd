import pytest
from lights_out import SPEC
from lights_out.environment import MAX_PRESSES, PUZZLES, Lights
from lights_out.panel import panel

from agentgym_rl.envs.base import InvalidCall
from agentgym_rl.types import Item, Message, Role, StopReason
from agentgym_rl.viewer.episodes import text_turn, untokenized


def test_pressing_a_lamp_switches_it_and_its_neighbours() -> None:
    lights = Lights()
    lights.reset(PUZZLES.index(("A1", "C3")))
    assert lights.observation() == "  A B C\n1 * * .\n2 * . *\n3 . * *\nLit: A1, B1, A2, C2, B3, C3"
    assert lights.step("press A1").observation == "  A B C\n1 . . .\n2 . . *\n3 . * *\nLit: C2, B3, C3"
    assert lights.step("press C3").reward == 1


@pytest.mark.parametrize("item", range(0, len(PUZZLES), 10))
def test_the_expert_solves_every_item(item: int) -> None:
    lights = Lights()
    lights.reset(item)
    steps = [lights.step(action) for action in SPEC.expert(lights)]
    assert [step.reward for step in steps] == [0.0] * (len(steps) - 1) + [1.0]
    assert steps[-1].done


def test_twelve_presses_end_an_episode_and_what_is_no_press_does_not_count() -> None:
    lights = Lights()
    lights.reset(len(PUZZLES) - 1)
    assert "no such lamp" in lights.step("press D4").observation
    steps = [lights.step("press A1") for _ in range(MAX_PRESSES)]
    assert steps[-1].done and not any(step.done or step.reward for step in steps[:-1])
    with pytest.raises(InvalidCall, match="reset it first"):
        lights.step("press A1")


@pytest.mark.parametrize("item", [-1, len(PUZZLES)])
def test_an_item_outside_the_data_is_refused(item: int) -> None:
    with pytest.raises(InvalidCall, match=r"0\.\.510"):
        Lights().reset(item)


def test_the_panel_draws_the_lamps_as_they_were_after_each_turn() -> None:
    lights = Lights()
    opening = lights.reset(0).observation
    presses = ["press D4", "press A1"]
    turns = [text_turn(press, lights.step(press).observation, 0.0, done=False, times=(0.0, 0.0)) for press in presses]
    messages = [Message(Role.USER, opening), *(Message(Role.ASSISTANT, press) for press in presses)]
    episode = untokenized(
        item=Item("lights", 0), messages=messages, turns=turns, success=True, stop_reason=StopReason.DONE
    )
    shown = [{thing.label for thing in grid.things if thing.colour == "yellow"} for (grid,) in panel(episode).frames]
    assert shown == [{"A1", "B1", "A2"}, {"A1", "B1", "A2"}, set()]
