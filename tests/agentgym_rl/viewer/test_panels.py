"""Panels of the five environments: what they tell of episodes that were really played, and of those that were not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.episodes import made_up, played

from agentgym_rl.agent.formats import FormatName, TaskView, make_format
from agentgym_rl.envs.babyai import SPEC as BABYAI
from agentgym_rl.envs.registry import get_spec
from agentgym_rl.envs.searchqa.factbook import _folder
from agentgym_rl.envs.searchqa.files import cache_folder
from agentgym_rl.envs.textcraft import SPEC as TEXTCRAFT
from agentgym_rl.types import Item, Trajectory
from agentgym_rl.viewer.goals import Goal, goal_in
from agentgym_rl.viewer.panel import Grid, Panel, Shape, Table, Tone, Tree, panel_json, panel_of

TASKS = ("textcraft", "babyai", "sciworld", "searchqa", "webarena")


def shown(panel: Panel | None, frame: int, kind: type) -> Any:
    """The block of that kind in a frame."""
    assert panel is not None
    [block] = [block for block in panel.frames[frame] if isinstance(block, kind)]
    return block


def told(trajectory: Trajectory) -> Any:
    """The panel as the page gets it."""
    return json.loads(json.dumps(panel_json(panel_of(trajectory))))


# ----------------------------------------------------------------------------------------------------------- TextCraft


@pytest.fixture(scope="module")
def fence() -> Trajectory:
    """Item 200: a dark oak fence, of two sticks and four planks."""
    actions = [
        "get 4 bamboo",
        "craft 1 stick using 2 bamboo",
        "craft 1 stick using 3 bamboo",
        "craft 1 stick using 2 bamboo",
        "get 1 dark oak logs",
        "craft 4 dark oak planks using 1 dark oak logs",
        "craft 3 dark oak fence using 2 stick, 4 dark oak planks",
    ]
    return played(TEXTCRAFT, 200, actions)


def test_textcraft_inventory_follows_what_was_fetched_crafted_and_used_up(fence: Trajectory) -> None:
    panel = panel_of(fence)
    held = [dict(row[:2] for row in shown(panel, frame, Table).rows) for frame in range(len(fence.turns) + 1)]
    assert held[0] == {}
    assert held[1] == {"bamboo": "4"}
    assert held[2] == held[3] == {"bamboo": "2", "stick": "1"}  # the second craft was refused
    assert held[4] == {"bamboo": "0", "stick": "2"}
    assert held[7]["dark oak fence"] == "3"
    assert shown(panel, 4, Table).tones == (Tone.BAD, Tone.GOOD)


def test_textcraft_tree_tells_what_is_done_and_what_comes_next(fence: Trajectory) -> None:
    panel = panel_of(fence)
    [start] = shown(panel, 0, Tree).roots
    sticks, planks = start.children
    assert (start.label, sticks.label, planks.label) == ("1 dark oak fence", "2 stick", "4 dark oak planks")
    assert [child.label for child in sticks.children] == ["4 bamboo"]
    assert sticks.children[0].tone == Tone.NEXT
    [middle] = shown(panel, 2, Tree).roots
    assert middle.children[0].note.startswith("1 of 2")
    [before_last] = shown(panel, 6, Tree).roots
    assert [child.tone for child in before_last.children] == [Tone.GOOD, Tone.GOOD]
    assert before_last.tone == Tone.NEXT
    assert shown(panel, 7, Tree).roots[0].tone == Tone.GOOD


def test_textcraft_reads_actions_that_are_calls_of_functions_or_code() -> None:
    opening = "Crafting commands:\ncraft 1 lamp using 2 glass\n\nGoal: craft lamp."
    view = TaskView.of(TEXTCRAFT.client)
    written = [make_format(name, view).write("craft 1 lamp using 2 glass") for name in FormatName]
    for text in written:
        answers = [("Action: get 2 glass", "Got 2 glass", 0.0, False), (text, "Crafted 1 minecraft:lamp", 1.0, True)]
        panel = panel_of(made_up("textcraft", 0, opening, answers))
        assert dict(row[:2] for row in shown(panel, 2, Table).rows) == {"glass": "0", "lamp": "1"}, text


def test_textcraft_commands_tell_how_often_each_was_used(fence: Trajectory) -> None:
    panel = panel_of(fence)
    assert panel is not None
    [table] = panel.always
    assert isinstance(table, Table)
    used = {command: times for command, _, times in table.rows}
    assert used["craft 1 stick using 2 bamboo"] == "2"
    assert used["craft 4 stick using 2 planks"] == ""
    assert [row[1] for row in table.rows[:3]] == ["yes"] * 3


def test_an_inventory_that_was_listed_counts_more_than_what_was_reckoned() -> None:
    opening = "Crafting commands:\ncraft 1 lamp using 1 glass\n\nGoal: craft lamp."
    answers = [
        ("Action: get 2 glass", "Got 2 glass", 0.0, False),
        ("Action: inventory", "Inventory: [glass] (5)", 0.0, False),
    ]
    panel = panel_of(made_up("textcraft", 0, opening, answers))
    assert shown(panel, 2, Table).rows == (("glass", "5", "+3"),)


# -------------------------------------------------------------------------------------------------------------- BabyAI


@pytest.fixture(scope="module")
def errand() -> Trajectory:
    """Level 8 and the bot's way through it."""
    environment = BABYAI.environment()
    environment.reset(7)
    assert BABYAI.expert is not None
    return played(BABYAI, 7, BABYAI.expert(environment))


def test_babyai_world_is_played_again_from_the_seed(errand: Trajectory) -> None:
    panel = panel_of(errand)
    assert panel is not None
    assert "Played again" in panel.note
    assert goal_in(panel) == Goal(panel.goal, is_followed=True, reached_at=len(errand.turns))
    assert panel.goal and f"Your goal: {panel.goal}" in errand.messages[2].content
    assert len(panel.frames) == len(errand.turns) + 1
    grids = [shown(panel, frame, Grid) for frame in range(len(panel.frames))]
    environment = BABYAI.environment()
    environment.reset(7)
    assert where_is_the_agent(grids[0]) == tuple(environment.level.agent_pos)
    assert len({where_is_the_agent(grid) for grid in grids}) > 1
    assert len(grids[0].walls) == len(grids[0].lit) == grids[0].width * grids[0].height
    assert grids[0].lit[grids[0].width * where_is_the_agent(grids[0])[1] + where_is_the_agent(grids[0])[0]] == "1"


def where_is_the_agent(grid: Grid) -> tuple[int, int]:
    [agent] = [thing for thing in grid.things if thing.shape == Shape.AGENT]
    return agent.x, agent.y


def test_babyai_is_drawn_from_the_agents_words_from_where_the_world_would_have_said_other(errand: Trajectory) -> None:
    words = "In view: red ball 1 (2 steps forward, 1 step left); grey locked door 2 (1 step right).\nYou carry a key."
    answers = [(turn.text, turn.observation, turn.reward, turn.done) for turn in errand.turns]
    answers[1] = (answers[1][0], words, 0.0, False)
    other = made_up("babyai", 7, errand.messages[2].content, answers)
    panel = panel_of(other)
    assert panel is not None
    assert "From turn 2 on" in panel.note
    assert not goal_in(panel).is_followed  # from the words alone nobody knows
    assert shown(panel, 1, Grid).width == 9
    drawn = shown(panel, 2, Grid)
    assert [(thing.x, thing.y, thing.shape) for thing in drawn.things] == [
        (2, 4, Shape.BALL),
        (4, 6, Shape.LOCKED_DOOR),
        (3, 6, Shape.AGENT),
    ]


# ------------------------------------------------------------------------------------------------------------ SciWorld

KITCHEN = """This room is called the kitchen. In it, you see:
\tthe agent
\ta stove, which is turned off.
You also see:
\tA door to the bathroom (that is closed)
\tA door to the hallway (that is open)"""


def test_sciworld_tells_rooms_inventory_and_score_from_the_agents_words() -> None:
    hallway = "In it, you see:\n\ta picture\nYou also see:\n\tA door to the kitchen (that is closed)"
    opening = f"Your task is to boil water.\n\nThis room is called the hallway. {hallway}"
    answers = [
        ("Action: open door to kitchen", "The door is now open.", 0.0, False),
        ("Action: go to kitchen", "You move to the kitchen.", 0.03, False),
        ("Action: look around", KITCHEN, 0.0, False),
        ("Action: pick up metal pot", "You move the metal pot to the inventory.", 0.67, False),
        (
            "Action: inventory",
            "In your inventory, you see:\n\tan orange\n\ta metal pot (containing water)\n",
            0.0,
            False,
        ),
        ("Action: move metal pot to stove", "You move the metal pot to the stove.", 0.0, False),
    ]
    panel = told(made_up("sciworld", 0, opening, answers))
    frames = [{block["kind"]: block for block in frame} for frame in panel["frames"]]
    assert [frame["facts"]["rows"][0][1] for frame in frames] == ["hallway", "hallway", *["kitchen"] * 5]
    assert frames[0]["graph"]["edges"] == [["hallway", "kitchen", "muted"]]
    assert dict(map(tuple, frames[3]["graph"]["nodes"])) == {"bathroom": "muted", "hallway": "good", "kitchen": "next"}
    assert ["kitchen", "hallway", "good"] in frames[3]["graph"]["edges"]
    held = [[row[0] for row in frame["table"]["rows"]] for frame in frames]
    assert held[3:] == [[], ["metal pot"], ["an orange", "a metal pot (containing water)"], ["an orange"]]
    assert frames[6]["line"]["values"] == [0, 0, 3, 3, 70, 70, 70]
    assert panel["always"][0]["text"] == "Your task is to boil water."


# ------------------------------------------------------------------------------------------------------------ SearchQA

FOUND = (
    "<information>Doc 1(Title: Köln) Köln liegt am  RHEIN, nicht am Rheinfall.\n"
    "Doc 2(Title: Bonn) Am Rhein.</information>"
)


def search_episode(answer: str, reply: str, reward: float, **changes: Any) -> Trajectory:
    opening = "Find out the answer.\n\n Question: Wo liegt Köln?"
    turns = [("<search>Köln</search>", FOUND, 0.0, False), (f"<answer>{answer}</answer>", reply, reward, True)]
    return made_up("searchqa", 5, opening, turns, **changes)


def test_searchqa_marks_the_answer_in_the_passages_whatever_its_case_and_spaces() -> None:
    panel = told(search_episode("am Rhein", "Right.", 1.0))
    question, moves, passages = panel["frames"][1]
    assert question["text"] == "Wo liegt Köln?"
    assert moves["rows"] == [["1", "search", "Köln", "2 passages"]]
    text = passages["text"]
    assert [text[mark["start"] : mark["end"]] for mark in passages["marks"]] == ["am  RHEIN", "Am Rhein"]
    assert panel["frames"][2][1]["rows"][1] == ["2", "answer", "am Rhein", "right"]
    assert ["Right answers", "am Rhein"] in panel["always"][0]["rows"]


def test_searchqa_marks_the_right_answer_that_the_server_told_and_not_the_wrong_one() -> None:
    states = [None, None, {"golden_answers": ["am Rhein", "Deutschland"]}]
    panel = told(search_episode("Bonn", "That is not the answer.", 0.0, extra={"states": states}))
    passages = panel["frames"][1][2]
    assert [passages["text"][mark["start"] : mark["end"]] for mark in passages["marks"]] == ["am  RHEIN", "Am Rhein"]
    assert ["Right answers", "am Rhein; Deutschland"] in panel["always"][0]["rows"]


def test_searchqa_knows_the_answers_of_built_in_questions_that_were_made_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    episode = replace(search_episode("Bonn", "That is not the answer.", 0.0), item=Item("searchqa", 0))
    assert "not known" in told(episode)["note"]
    factbook = _folder(cache_folder(None))
    factbook.mkdir(parents=True)
    row = {"question": "Wo liegt Köln?", "golden_answers": ["am Rheinfall"]}
    (factbook / "questions.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    panel = told(episode)
    assert ["Right answers", "am Rheinfall"] in panel["always"][0]["rows"]
    assert panel["frames"][2][2]["title"] == "Passages found in turn 1 (places with the answer: 1)"
    assert "not known" in told(replace(episode, item=Item("searchqa", 1)))["note"]  # it is another question's number


def test_searchqa_marks_the_agents_answer_in_another_colour_where_the_right_one_is_not_known() -> None:
    panel = told(search_episode("Bonn", "That is not the answer.", 0.0))
    assert {mark["tone"] for mark in panel["frames"][1][2]["marks"]} == {"next"}
    assert "not known" in panel["note"]


# ------------------------------------------------------------------------------------------------------------ WebArena

PAGE = (
    "OBSERVATION:\nTab 0 (current): Shop\n\n[1] RootWebArea 'Shop' focused: True\n\t[4] link 'Lamps'\n"
    "\t\t[5] image ''\n\t[7] button 'Buy'\nURL: http://shop.com/\nOBJECTIVE: Buy a lamp\nPREVIOUS ACTION: None"
)
PIXEL = "data:image/png;base64,iVBORw0KGgo="


def test_webarena_shows_the_tree_with_what_is_acted_on_next_and_the_screenshot() -> None:
    answers = [("I click. ```click [7]```", PAGE, 0.0, False)]
    states = [{"screenshot": PIXEL}, {"screenshot": "https://elsewhere.example/x.png"}]
    panel = told(made_up("webarena", 1, PAGE, answers, extra={"states": states}))
    facts, image, head, tree = panel["frames"][0]
    assert ["Address", "http://shop.com/"] in facts["rows"]
    assert ["Next action", "click [7]"] in facts["rows"]
    assert image["source"] == PIXEL
    assert head["text"] == "Tab 0 (current): Shop"
    [root] = tree["roots"]
    assert [child["label"] for child in root["children"]] == ["[4] link 'Lamps'", "[7] button 'Buy'"]
    assert root["children"][0]["children"][0]["label"] == "[5] image ''"
    assert [child["tone"] for child in root["children"]] == ["plain", "next"]
    assert "image" not in [block["kind"] for block in panel["frames"][1]]  # an address elsewhere is no picture


# -------------------------------------------------------------------------------------------------------- every panel


def texts() -> st.SearchStrategy[str]:
    fragments = st.sampled_from(
        [
            *(
                "craft 1 a using 1 b",
                "craft 2 b using 1 a, 3 a",
                "Goal: craft a.",
                "Got 3 a",
                "Crafted 1 a",
                "Inventory: [a] (2)",
            ),
            *(
                "In view: red ball 1 (2 steps forward).",
                "This room is called the a.",
                "You move to the b.",
                "A door to the a (that is open)",
            ),
            *(
                "In your inventory, you see:\n\ta",
                " Question: ",
                "<information>Doc 1(Title: a) b</information>",
                "<answer>a</answer>",
            ),
            *(
                "OBSERVATION:\n[1] a\n\t\t\t[2] b\nURL: x\nOBJECTIVE: y\nPREVIOUS ACTION: z",
                "```click [99999999]```",
                "Action: craft 1 a using",
            ),
            *("<script>alert(1)</script>", "\ud800", "ひらがな 🧵", "99999999999999999999"),
        ]
    )
    return st.lists(fragments | st.text(max_size=20), max_size=5).map("\n".join)


@settings(max_examples=60, deadline=None)
@given(
    task=st.sampled_from(TASKS),
    opening=texts(),
    turns=st.lists(st.tuples(texts(), texts() | st.none(), st.floats(-1, 1), st.booleans()), max_size=4),
    states=st.none()
    | st.lists(
        st.none() | st.dictionaries(st.sampled_from(["screenshot", "golden_answers"]), texts() | st.lists(texts())),
        max_size=7,
    ),
)
def test_a_panel_takes_any_texts_and_has_a_frame_for_every_turn(
    task: str, opening: str, turns: list[tuple[str, str | None, float, bool]], states: Any
) -> None:
    panel = panel_of(made_up(task, 3, opening, turns, extra={"states": states}))
    assert panel is not None
    assert len(panel.frames) == len(turns) + 1
    json.dumps(panel_json(panel))


@pytest.mark.parametrize("task", TASKS)
def test_an_episode_that_never_began_has_a_panel_too(task: str) -> None:
    panel = panel_of(made_up(task, 3, "", [], messages=()))
    assert panel is not None
    assert len(panel.frames) == 1


def test_environments_without_a_panel_and_unknown_ones_have_none() -> None:
    assert panel_of(made_up("wordle", 1, "Guess.", [])) is None
    assert panel_of(made_up("nobody-knows", 1, "Guess.", [])) is None


def test_a_huge_tree_of_commands_ends(fence: Trajectory) -> None:
    commands = "\n".join(f"craft 1 i{n} using 1 i{n + 1}, 1 i{n + 1}" for n in range(40))
    panel = panel_of(made_up("textcraft", 0, f"Crafting commands:\n{commands}\n\nGoal: craft i0.", []))
    assert len(json.dumps(panel_json(panel))) < 200_000


@pytest.fixture(autouse=True)
def _specs() -> Iterator[None]:
    for task in TASKS:
        assert get_spec(task).panel
    yield
