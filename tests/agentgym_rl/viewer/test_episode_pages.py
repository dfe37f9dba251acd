"""Panel, comparison, play and export as a reader meets them, in a browser, with hostile texts in every field."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests
from playwright.sync_api import Browser, Page, expect
from support.chromium import Watched, serious_findings, watched_page
from support.episodes import made_up, played
from support.judges import scripted_model

from agentgym_rl.envs import registry
from agentgym_rl.envs.babyai import SPEC as BABYAI
from agentgym_rl.envs.server import build_app as environment_app
from agentgym_rl.envs.serving import running
from agentgym_rl.envs.textcraft import SPEC as TEXTCRAFT
from agentgym_rl.envs.textcraft.client import TextCraftClient
from agentgym_rl.hosted.endpoint import HostedModel
from agentgym_rl.rollout.log import TrajectoryLog
from agentgym_rl.types import Item, Trajectory
from agentgym_rl.viewer.app import build_app
from agentgym_rl.viewer.library import Library
from agentgym_rl.viewer.playing import EnvServer, PlaySettings

pytestmark = [pytest.mark.browser, pytest.mark.server]

ATTACK = "<img src=x onerror=alert(1)><script>alert(2)</script>\" onmouseover='alert(3)' ünï 🧵 日本"
TREE = (
    f"OBSERVATION:\nTab {ATTACK}\n\n[1] Root '{ATTACK}'\n\t[2] link '{ATTACK}'\n"
    f"URL: {ATTACK}\nOBJECTIVE: {ATTACK}\nPREVIOUS ACTION: None"
)


def hostile() -> Iterator[Trajectory]:
    """An attack in every text that a panel of ours reads."""
    craft = f"Crafting commands:\ncraft 1 {ATTACK} using 1 {ATTACK}\n\nGoal: craft {ATTACK}."
    room = f"Do {ATTACK}\n\nThis room is called the {ATTACK}. In it, you see:\n\tA door to the {ATTACK} (that is open)"
    view = f"Your goal: {ATTACK}\nIn view: red ball 1 (2 steps forward).\nYou carry {ATTACK}."
    found = f"<information>Doc 1(Title: {ATTACK}) {ATTACK}</information>"
    picture = {"screenshot": "javascript:alert(4)", "golden_answers": [ATTACK]}
    for task, opening, answer in (
        ("textcraft", craft, f"Got 1 {ATTACK}"),
        ("sciworld", room, f"You move the {ATTACK} to the inventory."),
        ("babyai", view, view),
        ("searchqa", f"Question: {ATTACK}", found),
        ("webarena", TREE, TREE),
        ("wordle", ATTACK, ATTACK),
    ):
        text = f"Thought: {ATTACK}\nAction: {ATTACK}<search>{ATTACK}</search><answer>{ATTACK}</answer>"
        turns = [(text, answer, 0.5, False), (ATTACK, answer, 0.0, True)]
        episode = made_up(
            task, 1, opening, turns, extra={"states": [picture] * 3}, uid=ATTACK, item=Item(task, 1, ATTACK)
        )
        yield episode
        yield replace(episode, sample_index=1)


def friendly() -> Iterator[Trajectory]:
    environment = TEXTCRAFT.environment()
    environment.reset(200)
    assert TEXTCRAFT.expert is not None
    good = played(TEXTCRAFT, 200, TEXTCRAFT.expert(environment))
    yield replace(good, uid="g")
    yield replace(played(TEXTCRAFT, 200, ["get 4 bamboo", "inventory"]), sample_index=1, uid="g")
    yield played(BABYAI, 7, ["turn left", "move forward"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp("library")
    with TrajectoryLog(root / "a" / "trajectories" / "step1" / "0.jsonl") as log:
        for trajectory in friendly():
            log.write(trajectory)
    with TrajectoryLog(root / "b" / "trajectories" / "step2" / "0.jsonl") as log:
        for trajectory in hostile():
            log.write(trajectory)
    with (root / "b" / "trajectories" / "step2" / "0.jsonl").open("a", encoding="utf-8") as stream:
        stream.write('{"conversations": [{"from": "human", "value": "plain"}, {"from": "gpt", "value": "row"}], ')
        stream.write('"item_id": "textcraft_9", "reward": 1.0}\n{"format": 1, "item_id": "torn')
    return root


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with running(build_app(Library(folder))) as address:
        yield address


@contextmanager
def at(browser: Browser, address: str, **options: Any) -> Iterator[Watched]:
    """A page on an address; at the end nobody but the viewer was asked, and nothing of a text had become an element."""
    with watched_page(browser, **options) as watched:
        watched.page.goto(address)
        yield watched
        assert watched.hosts == {urlsplit(address).netloc}
        assert watched.page.locator("main script, main img[src=x], main [onerror], main [onmouseover]").count() == 0


def ids_of(url: str, item: str) -> list[str]:
    rows = requests.get(f"{url}/api/trajectories", params={"item": f'"{item}"'}, timeout=30).json()["rows"]
    return [row["id"] for row in sorted(rows, key=lambda row: row["sample_index"])]


# --------------------------------------------------------------------------------------------------------------- panel


def test_the_panel_follows_the_turns_by_keys(browser: Browser, url: str) -> None:
    [good, _] = ids_of(url, "textcraft_200")
    with at(browser, f"{url}/#/trajectory/{good}") as watched:
        page = watched.page
        meter = page.get_by_role("meter")
        expect(meter).to_have_attribute("aria-valuenow", "0")
        page.keyboard.press("ArrowRight")
        expect(meter).to_have_attribute("aria-valuenow", "1")
        expect(page.locator(".block-tree .tone-good .label")).to_have_text(["4 bamboo"])
        page.keyboard.press("End")
        expect(page.locator(".block-tree .tone-good > .label").first).to_have_text("1 dark oak fence")


def test_the_world_of_babyai_is_drawn_and_turns_with_the_agent(browser: Browser, url: str) -> None:
    [world] = ids_of(url, "babyai_7")
    with at(browser, f"{url}/#/trajectory/{world}") as watched:
        grid = watched.page.locator("svg.grid")
        expect(grid).to_have_attribute(
            "aria-label", "World: " + str(grid.get_attribute("aria-label")).removeprefix("World: ")
        )
        before = grid.locator("path.body").last.get_attribute("transform")
        watched.page.keyboard.press("ArrowRight")
        expect(grid.locator("path.body").last).not_to_have_attribute("transform", str(before))


@pytest.mark.parametrize("task", ["textcraft", "sciworld", "babyai", "searchqa", "webarena", "wordle"])
def test_hostile_texts_are_shown_as_they_are_in_panels_and_comparisons(browser: Browser, url: str, task: str) -> None:
    one, other = ids_of(url, f"{task}_1")
    with at(browser, f"{url}/#/trajectory/{one}?turn=1") as watched:
        expect(watched.page.locator("main")).to_contain_text("<script>alert(2)</script>")
        if task != "wordle":
            expect(watched.page.locator(".panel")).to_contain_text("alert")
            for _ in range(2):
                watched.page.keyboard.press("ArrowRight")
        watched.page.goto(f"{url}/#/compare?left={one}&right={other}")
        expect(watched.page.locator(".verdict")).to_have_text("Alike in every turn.")
        expect(watched.page.locator(".compared").first).to_contain_text("<img src=x onerror=alert(1)>")


def test_a_bare_conversation_has_a_panel_and_can_be_compared(browser: Browser, url: str) -> None:
    [bare] = ids_of(url, "textcraft_9")
    assert panel_frames(url, bare) == 2
    with at(browser, f"{url}/#/compare?left={bare}&right={bare}") as watched:
        expect(watched.page.locator(".compared")).to_have_count(1)
        expect(watched.page.locator(".compared").first).to_contain_text("row")


class BrittleClient(TextCraftClient):
    task = "brittle"


def test_a_panel_that_fails_is_told_and_the_rest_of_the_page_stands(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    brittle = replace(TEXTCRAFT, name="brittle", client=BrittleClient, panel="support.episodes:failing_panel")
    missing = replace(brittle, panel="support.episodes:nothing")
    with TrajectoryLog(tmp_path / "0.jsonl") as log:
        log.write(made_up("brittle", 1, "Begin.", [("Action: go", "Gone.", 1.0, True)]))
    with running(build_app(Library(tmp_path))) as url:
        for spec, told in ((brittle, "ValueError: no panel"), (missing, "panel='support.episodes:nothing'")):
            monkeypatch.setitem(registry._registered, "brittle", spec)
            [id] = ids_of(url, "brittle_1")
            with at(browser, f"{url}/#/trajectory/{id}") as watched:
                expect(watched.page.locator(".panel")).to_contain_text("The panel of brittle could not be made: ")
                expect(watched.page.locator(".panel")).to_contain_text(told)
                expect(watched.page.locator("main")).to_contain_text("Gone.")
                watched.page.goto(f"{url}/#/compare?left={id}&right={id}")
                expect(watched.page.locator(".compared").first).to_contain_text("Gone.")
            page = requests.get(f"{url}/api/export/html?id={id}", timeout=30)
            assert page.status_code == 200 and told in page.text and "Gone." in page.text


def panel_frames(url: str, id: str) -> int:
    return len(requests.get(f"{url}/api/trajectories/{id}/panel", timeout=30).json()["frames"])


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_are_accessible_and_fit_narrow_and_wide_windows(browser: Browser, url: str, scheme: str) -> None:
    good, bad = ids_of(url, "textcraft_200")
    [world] = ids_of(url, "babyai_7")
    with at(browser, f"{url}/#/runs", color_scheme=scheme) as watched:
        page = watched.page
        for address, awaited in (
            (f"#/trajectory/{good}?turn=3", ".block-tree"),
            (f"#/trajectory/{world}?turn=1", "svg.grid"),
            (f"#/compare?left={good}&right={bad}", ".compared"),
            ("#/export", "a[download]"),
            ("#/play", "pre"),
        ):
            page.goto(f"{url}/{address}")
            expect(page.locator(awaited).first).to_be_visible()
            assert serious_findings(page) == []
            for width in (700, 1280, 2560):
                page.set_viewport_size({"width": width, "height": 900})
                assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (width, address)


# ---------------------------------------------------------------------------------------------------------- comparison


def test_members_of_a_group_are_chosen_compared_and_walked_through_by_keys(browser: Browser, url: str) -> None:
    good, bad = ids_of(url, "textcraft_200")
    with at(browser, f"{url}/#/trajectory/{good}") as watched:
        page = watched.page
        page.get_by_role("link", name="Compare with").click()
        page.get_by_label("Right").select_option(bad)
        expect(page.locator(".verdict")).to_have_text("Alike up to turn 1, different from turn 2 on.")
        expect(page.locator(".compared[aria-current]")).to_have_id("turn-2")
        expect(page.locator("#turn-2 mark.changed").first).to_be_visible()
        page.keyboard.press("n")
        expect(page.locator(".compared[aria-current]")).to_have_id("turn-3")
        page.keyboard.press("k")
        page.keyboard.press("k")
        expect(page.locator(".compared[aria-current]")).to_have_id("turn-1")
        expect(page.get_by_role("meter").first).to_have_attribute("aria-valuenow", "1")
        page.keyboard.press("s")
        expect(page.locator(".heads h2").first).to_contain_text("sample 1")
        with page.expect_download() as saved:
            page.get_by_role("link", name="Save as a preference pair").click()
        assert '"reward": 1' in Path(saved.value.path()).read_text(encoding="utf-8")


def test_an_item_that_is_not_here_is_told(browser: Browser, url: str) -> None:
    with at(browser, f"{url}/#/compare") as watched:
        watched.page.get_by_label("Item").fill("nothing_5")
        watched.page.get_by_role("button", name="Show").click()
        expect(watched.page.locator("main")).to_contain_text("There are not two trajectories of nothing_5 here.")
        watched.page.goto(f"{url}/#/compare?item=x&left=abc-1&right=abc-2")
        expect(watched.page.get_by_role("alert")).to_contain_text("is not here")


# -------------------------------------------------------------------------------------------------------------- export


def test_the_list_leads_to_files_of_what_it_shows(browser: Browser, url: str) -> None:
    with at(browser, f"{url}/#/trajectories?item=textcraft_200") as watched:
        page = watched.page
        page.get_by_role("link", name="Export these").click()
        expect(page.locator("main")).to_contain_text("2 trajectories are chosen")
        page.get_by_label("successes only").check()
        with page.expect_download() as saved:
            page.get_by_role("link", name="Save conversations").click()
        assert Path(saved.value.path()).read_text(encoding="utf-8").count("\n") == 1
        with page.expect_download() as saved:
            page.get_by_role("link", name="Save preference pairs").click()
        assert Path(saved.value.path()).read_text(encoding="utf-8").count("\n") == 1


# ---------------------------------------------------------------------------------------------------------------- play


def open_sessions(url: str) -> int:
    return int(requests.get(f"{url}/health", timeout=10).json()["sessions"])


def eventually(page: Page, holds: Callable[[], bool]) -> bool:
    """Whether it comes to hold; closing a game is not waited for by the page."""
    for _ in range(200):
        if holds():
            return True
        page.wait_for_timeout(50)
    return False


def test_an_item_is_played_by_hand_and_by_a_model_saved_and_closed(
    browser: Browser, folder: Path, tmp_path: Path
) -> None:
    with (
        running(environment_app(TEXTCRAFT)) as environment,
        scripted_model(f"Thought: {ATTACK}\nAction: get 2 bamboo", "Action: inventory", "") as (address, _),
    ):
        play = PlaySettings(
            (EnvServer("textcraft", environment),), (HostedModel(address, "qwen"),), tmp_path / "played"
        )
        with running(build_app(Library(folder), play=play)) as url, at(browser, f"{url}/#/play") as watched:
            page = watched.page
            page.get_by_label("Item").fill("200")
            page.get_by_role("button", name="Begin").click()
            field = page.get_by_label("Your turn")
            expect(field).to_be_focused()
            page.keyboard.type("get 1 dark oak logs")
            page.keyboard.press("Enter")
            expect(page.locator("#turn-1")).to_contain_text("Got 1 dark oak logs")
            page.get_by_label("Available actions").select_option("inventory")
            expect(field).to_have_value("inventory")
            page.get_by_role("button", name="Propose").click()
            expect(field).to_have_value(f"Thought: {ATTACK}\nAction: get 2 bamboo")
            page.get_by_role("button", name="Act", exact=True).click()
            expect(page.locator("#turn-2")).to_contain_text("<script>alert(2)</script>")
            expect(page.locator(".block-table").first).to_contain_text("bamboo")
            assert serious_findings(page) == []
            page.get_by_role("button", name="Model plays on").click()  # until it fails
            expect(page.get_by_role("alert")).to_contain_text("HTTP 500")
            expect(page.locator(".turn")).to_have_count(3)
            page.get_by_role("button", name="Save the trajectory").click()
            expect(page.get_by_role("status").filter(has_text="Saved as").first).to_be_attached()
            assert open_sessions(environment) == 1
            page.goto(f"{url}/#/runs")
            assert eventually(page, lambda: open_sessions(environment) == 0)
            page.goto(f"{url}/#/play")
            page.get_by_role("button", name="Begin").click()
            expect(page.get_by_label("Your turn")).to_be_focused()
            assert open_sessions(environment) == 1
            page.goto(f"{url}/api/runs")  # the whole page is left, as when its tab is closed
            assert eventually(page, lambda: open_sessions(environment) == 0)
    [saved] = (tmp_path / "played").iterdir()
    assert saved.read_text(encoding="utf-8").count("\n") == 1


def test_without_servers_the_page_says_how_to_name_one(browser: Browser, url: str) -> None:
    with at(browser, f"{url}/#/play") as watched:
        expect(watched.page.locator("main")).to_contain_text("--env textcraft=http://127.0.0.1:36001")
