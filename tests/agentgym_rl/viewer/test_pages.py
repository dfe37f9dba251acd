"""Runs, curves, lists and trajectories as a reader meets them, in a browser."""
# ruff: noqa: RUF001 - letters of other scripts are what some tests are about

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, Route, expect
from support.chromium import Watched, watched_page
from support.small_run import train_small_run
from support.viewer import make_trajectory, write_rows

from agentgym_rl.envs.serving import running
from agentgym_rl.rollout.log import to_row
from agentgym_rl.types import StopReason
from agentgym_rl.viewer.app import build_app
from agentgym_rl.viewer.library import Library

pytestmark = pytest.mark.browser

ROOT = Path(__file__).resolve().parents[3]
ATTACK = "<img src=x onerror=alert(1)><script>alert(2)</script>\"'><b onmouseover=alert(3)>&amp; ünï 🧵 日本"
LOOK = ("I look.", "inventory", "Inventory: nothing")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real training of two steps."""
    # In a thread: Playwright keeps an event loop in this one, and the trainer runs its own.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(train_small_run, tmp_path_factory.mktemp("small")).result()


@contextmanager
def viewing(browser: Browser, root: Path, **options: Any) -> Iterator[Watched]:
    """A page that shows the viewer of ``root``; its end fails where the page asked anyone but the viewer."""
    with running(build_app(Library(root))) as url, watched_page(browser, base_url=url, **options) as watched:
        watched.page.goto("/")
        yield watched
        assert watched.hosts == {urlsplit(url).netloc}


def go(page: Page, address: str) -> None:
    page.goto(f"/{address}")


def first_row(page: Page) -> Any:
    return page.locator("a.open").first


def assert_accessible(page: Page) -> None:
    """Nothing serious or critical, by axe."""
    found = Axe().run(page).response["violations"]
    serious = [
        f"{each['id']}: {node['html'][:200]}"
        for each in found
        if each["impact"] in ("serious", "critical")
        for node in each["nodes"]
    ]
    assert serious == []


# ------------------------------------------------------------------------------------------------------ a real training


def test_from_the_run_to_why_a_trajectory_failed(browser: Browser, run: Path) -> None:
    with viewing(browser, run.parent) as watched:
        page = watched.page
        page.get_by_role("row", name="run").get_by_role("link", name="run").click()
        expect(page.get_by_role("heading", name="run", exact=True)).to_be_visible()
        for title in ("Reward", "Success", "Turns and horizon", "Stop reasons, share", "Entropy", "KL"):
            expect(page.get_by_role("heading", name=title, exact=True)).to_be_visible()
        expect(page.locator(".chart canvas").first).to_be_visible()
        page.get_by_role("link", name="failures of the last step").click()
        expect(page.locator("tr:has(a.open)")).to_have_count(4)
        first_row(page).click()
        expect(page.get_by_text("Ended by max_rounds: the turns of this training step were used up.")).to_be_visible()
        findings = page.get_by_role("list", name="What stands out")
        expect(findings).to_contain_text("All 2 turns of the horizon were used.")
        expect(findings).to_contain_text("2 of 2 turns without an action.")
        findings.get_by_role("link", name="without an action").click()
        expect(page.locator("section.present")).to_have_attribute("aria-label", "Turn 1")
        expect(page.locator("section.present")).to_contain_text("No action found.")


def test_the_pictures_of_the_documentation_can_be_taken_anew(run: Path, tmp_path: Path) -> None:
    row = json.loads(next(run.glob("trajectories/**/*.jsonl")).read_text().splitlines()[0])
    command = [sys.executable, "scripts/viewer_pictures.py", str(run), "--item", row["item_id"], "--out", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120)
    pictures = {path.stem: path.read_bytes() for path in tmp_path.glob("*.png")}
    assert pictures.keys() == {path.stem for path in (ROOT / "docs" / "images").glob("viewer-*.png")}
    assert all(int.from_bytes(content[16:20], "big") == 1280 for content in pictures.values())
    assert len(set(pictures.values())) == len(pictures)


def test_a_point_of_a_curve_leads_to_the_trajectories_of_its_step(browser: Browser, run: Path) -> None:
    with viewing(browser, run) as watched:
        page = watched.page
        go(page, "#/run/.")
        chart = page.get_by_role("group", name="Reward: arrow keys move")
        expect(chart.locator("canvas")).to_be_visible()
        box = chart.locator(".u-over").bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + box["width"] - 3, box["y"] + 20)
        page.mouse.click(box["x"] + box["width"] - 3, box["y"] + 20)
        expect(page).to_have_url(re.compile(r"#/trajectories\?run=\.&step_min=2&step_max=2$"))
        expect(page.locator("tr:has(a.open)")).to_have_count(4)
        page.mouse.move(0, 0)
        page.go_back()
        expect(chart.locator("canvas")).to_be_visible()
        chart.focus()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("Enter")
        expect(page).to_have_url(re.compile(r"#/trajectories\?run=\.&step_min=1&step_max=1$"))


def test_tokens_are_coloured_by_what_training_made_of_them_with_exact_values(browser: Browser, run: Path) -> None:
    row = json.loads((run / "trajectories/step1/0.jsonl").read_text().splitlines()[0])
    place = row["loss_mask"].index(1)
    with viewing(browser, run) as watched:
        page = watched.page
        go(page, "#/trajectories?step_max=1&item=" + row["item_id"])
        first_row(page).click()
        page.get_by_role("tab", name="Tokens").click()
        expect(
            page.get_by_text(f"{sum(row['loss_mask'])} of {len(row['input_ids'])} tokens are trained on")
        ).to_be_visible()
        token = page.locator(f'[data-index="{place}"]')
        token.hover()
        inspector = page.locator(".inspector")
        expect(inspector).to_contain_text(f"id{row['input_ids'][place]}")
        expect(inspector).to_contain_text(f"engine{row['rollout_log_probs'][place]} nats")
        expect(inspector).to_contain_text("segmentturn 1")
        for colouring in ("Log-probability, trainer", "Gap, trainer minus engine", "Entropy", "Advantage", "Loss mask"):
            page.get_by_label("Colour by").select_option(colouring)
            expect(inspector).to_contain_text(re.compile(f"{colouring.lower()}-?[0-9]"))
        assert token.evaluate("cell => getComputedStyle(cell).backgroundColor") != "rgba(0, 0, 0, 0)"
        page.locator(".token-grid").focus()
        page.keyboard.press("ArrowRight")
        expect(inspector).to_contain_text(f"position{place + 1}")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_is_accessible(browser: Browser, run: Path, scheme: str) -> None:
    library = Library(run)
    library.refresh()
    id = library.summaries()[-1].id
    with viewing(browser, run, color_scheme=scheme) as watched:
        page = watched.page
        for address, awaited in (
            ("#/runs", "tbody a"),
            ("#/run/.", ".chart canvas"),
            ("#/trajectories?grouped=true", "a.open"),
            ("#/items?run=.", "tbody a"),
            (f"#/trajectory/{id}?turn=1", "section.present"),
            (f"#/trajectory/{id}?view=tokens", ".token"),
            (f"#/trajectory/{id}?view=raw", ".raw section"),
            ("#/nowhere", "[role=alert]"),
        ):
            go(page, address)
            expect(page.locator(awaited).first).to_be_visible()
            assert_accessible(page)
        page.keyboard.press("?")
        expect(page.get_by_role("dialog", name="Keys")).to_be_visible()
        assert_accessible(page)


def test_a_narrow_window_and_a_wide_one_need_no_sideways_scrolling(browser: Browser, run: Path) -> None:
    library = Library(run)
    library.refresh()
    addresses = ("#/runs", "#/run/.", "#/trajectories", "#/items?run=.", f"#/trajectory/{library.summaries()[0].id}")
    with viewing(browser, run) as watched:
        for width in (700, 1280, 2560):
            watched.page.set_viewport_size({"width": width, "height": 900})
            for address in addresses:
                go(watched.page, address)
                expect(watched.page.locator("main h1").first).to_be_visible()
                assert watched.page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (width, address)


# ------------------------------------------------------------------------------------------------------------- keyboard


def test_everything_can_be_reached_by_keys(browser: Browser, tmp_path: Path) -> None:
    turns = [("I think.", f"get {number} log", f"Got {number} log.") for number in range(1, 4)]
    rows = [make_trajectory(index, sample=sample, turns=turns) for index in (1, 2) for sample in (0, 1)]
    write_rows(tmp_path / "step1/0.jsonl", rows)
    with viewing(browser, tmp_path) as watched:
        page, keys = watched.page, watched.page.keyboard
        expect(page.locator("tbody a").first).to_be_visible()
        keys.press("t")
        expect(page.locator("tr:has(a.open)")).to_have_count(4)
        keys.press("/")
        expect(page.get_by_label("Text", exact=True)).to_be_focused()
        keys.type("got 3 LOG")
        expect(page).to_have_url(re.compile("text=got\\+3\\+LOG"))
        keys.press("Escape")
        for key in ("j", "ArrowDown", "k"):
            keys.press(key)
        expect(page.locator("tr.chosen")).to_contain_text("textcraft_1")
        keys.press("Enter")
        expect(page.get_by_role("heading", name="textcraft_1")).to_be_visible()
        for key, turn in (("ArrowRight", 1), ("j", 2), ("End", 3), ("j", 3), ("ArrowLeft", 2)):
            keys.press(key)
            expect(page.locator("section.present")).to_have_attribute("aria-label", f"Turn {turn}")
        keys.press("Home")
        expect(page.locator("section.present")).to_have_attribute("aria-label", "Start")
        page.get_by_label("Speed").select_option("4")
        page.locator("main").focus()
        keys.press(" ")
        expect(page.get_by_role("button", name="Pause")).to_be_visible()
        expect(page.get_by_role("button", name="Play")).to_be_visible()  # at the end it stops by itself
        expect(page.locator("section.present")).to_have_attribute("aria-label", "Turn 3")
        for key, view in (("2", "Tokens"), ("3", "Raw"), ("1", "Turns")):
            keys.press(key)
            expect(page.get_by_role("tab", name=view)).to_have_attribute("aria-selected", "true")
        keys.press("n")
        expect(page.get_by_text("2 of 4")).to_be_visible()
        keys.press("]")
        expect(page.locator("nav[aria-label=Group] [aria-current]")).to_contain_text("sample 1")
        keys.press("[")
        expect(page.locator("nav[aria-label=Group] [aria-current]")).to_contain_text("sample 0")
        keys.press("u")
        expect(page).to_have_url(re.compile("#/trajectories"))
        expect(page.get_by_label("Text", exact=True)).to_have_value("got 3 LOG")
        keys.press("?")
        expect(page.get_by_role("dialog")).to_contain_text("open the row")
        keys.press("Escape")
        expect(page.get_by_role("dialog")).to_be_hidden()
        keys.press("g")
        expect(page.get_by_role("heading", name="Runs")).to_be_visible()


def test_a_search_that_is_asked_for_before_its_field_is_there_gets_it(browser: Browser, tmp_path: Path) -> None:
    write_rows(tmp_path / "step1/0.jsonl", [make_trajectory(1, turns=[("I think.", "get 1 log", "Got 1 log.")])])
    held: list[Route] = []
    with viewing(browser, tmp_path) as watched:
        page, keys = watched.page, watched.page.keyboard
        expect(page.locator("tbody a").first).to_be_visible()
        page.route("**/api/facets*", lambda route: held.append(route))
        keys.press("t")
        expect(page.locator("tr:has(a.open)")).to_have_count(1)
        keys.press("/")
        expect(page.get_by_label("Text", exact=True)).to_have_count(0)
        held[0].continue_()
        expect(page.get_by_label("Text", exact=True)).to_be_focused()


# -------------------------------------------------------------------------------------------------------- hostile texts


def test_no_text_of_a_file_is_ever_more_than_text(browser: Browser, tmp_path: Path) -> None:
    turns = [(ATTACK, ATTACK, ATTACK), (ATTACK, ATTACK, ATTACK)]
    hostile = to_row(make_trajectory(1, turns=turns, opening=ATTACK))
    hostile |= {
        **{"item_id": f"{ATTACK}_1", "category": ATTACK, "uid": ATTACK, "error": ATTACK, "stop_reason": ATTACK},
        "extra": {ATTACK: [ATTACK], "states": [ATTACK]},
        "asides": [{"kind": ATTACK, "message": 1, "finish_reason": ATTACK, "num_tokens": 1, "generation_s": 0.0}],
    }
    hostile["turns"][0]["finish_reason"] = ATTACK
    hostile["conversations"][2]["from"] = ATTACK
    hostile["parts"][2] = [[ATTACK, 0, 5]]
    name = "<img src=x onerror=alert(4)>'\"&"
    folder = tmp_path / name
    write_rows(folder / "trajectories/step1/0.jsonl", [hostile, hostile | {"sample_index": 1}])
    (folder / "trajectories/step1/1.jsonl").write_text("{" + ATTACK + "\n")
    (folder / "metrics.jsonl").write_text(
        json.dumps({"step": 1, "rollout/score_mean": 0.5, f"rollout/stop/{ATTACK}": 1}) + "\n"
    )
    (folder / "token_values").mkdir()
    vocab = {"model": {"vocab": {f"{ATTACK}{index}": index for index in range(50)}}}
    (folder / "token_values/tokenizer.json").write_text(json.dumps(vocab))
    with viewing(browser, tmp_path) as watched:
        page = watched.page

        def assert_harmless() -> None:
            assert page.locator("main img, main script, main b, main [onmouseover]").count() == 0

        page.get_by_role("link", name=name).click()
        expect(page.locator(".chart canvas").first).to_be_visible()
        expect(page.locator(".u-legend").filter(has_text=ATTACK)).to_be_visible()
        page.get_by_label("Add a curve").select_option(f"rollout/stop/{ATTACK}")
        expect(page.get_by_role("heading", name=f"rollout/stop/{ATTACK}")).to_be_visible()
        assert_harmless()
        page.get_by_role("link", name="last step, by group").click()
        expect(page.locator("tr.group")).to_contain_text(ATTACK)
        page.locator("summary").click()
        assert_harmless()
        first_row(page).click()
        expect(page.get_by_role("heading", name=f"{ATTACK}_1")).to_be_visible()
        expect(page.locator(".part.thought").first).to_contain_text(ATTACK)
        assert_harmless()
        for view in ("Tokens", "Raw"):
            page.get_by_role("tab", name=view).click()
            expect(page.locator("#stage")).to_contain_text(ATTACK)
            assert_harmless()
        page.locator(".raw details").last.click()
        expect(page.locator(".raw details").last).to_contain_text("item_id")
        assert_harmless()
        for address in (
            f"#/{ATTACK}",
            f"#/run/{ATTACK}",
            f"#/trajectory/{ATTACK}",
            f"#/trajectories?run={ATTACK}&stop={ATTACK}",
        ):
            go(page, address)
            expect(page.locator("main h1")).to_be_visible()
            assert_harmless()


def test_the_browser_itself_refuses_html_of_a_string_and_foreign_addresses(browser: Browser, run: Path) -> None:
    """The second line of defence: what a slip in the front end would meet."""
    with running(build_app(Library(run))) as url:
        page = browser.new_page()
        page.goto(url)
        expect(page.locator("tbody a").first).to_be_visible()
        refused = page.evaluate(
            """async () => {
                const tried = [
                    () => { document.body.innerHTML = "<b>x</b>"; },
                    () => { document.createElement("script").text = "1"; },
                    async () => fetch("http://127.0.0.1:1/"),
                    async () => (await import("/static/js/dom.js")).h("a", { href: "javascript:alert(1)" }),
                    async () => (await import("/static/js/dom.js")).h("b", { onclick: "alert(1)" }),
                    async () => (await import("/static/js/dom.js")).h("img", { src: "http://127.0.0.1:1/x.png" }),
                ];
                const names = [];
                for (const each of tried) {
                    try { await each(); names.push("done"); } catch (error) { names.push(error.name); }
                }
                return names;
            }"""
        )
        page.close()
        assert refused == ["TypeError", "TypeError", "TypeError", "Error", "Error", "Error"]


# ------------------------------------------------------------------------------------------------------ odd file states


def test_an_empty_folder_says_what_it_lacks(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").touch()
    with viewing(browser, tmp_path) as watched:
        expect(watched.page.get_by_role("link", name="run", exact=True)).to_be_visible()
        go(watched.page, "#/run/run")
        expect(watched.page.get_by_role("heading", name="run")).to_be_visible()
        go(watched.page, "#/trajectories")
        expect(watched.page.get_by_text("No trajectory passes these filters.")).to_be_visible()


def test_torn_and_spoiled_files_are_shown_as_far_as_they_go(browser: Browser, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "step1/0.jsonl", [make_trajectory(1), make_trajectory(2)])
    path.write_bytes(path.read_bytes()[:-40])
    (tmp_path / "step1/1.jsonl").write_text("no JSON\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "rollout/score_mean": 0.25}\n{"step": 2, "roll')
    with viewing(browser, tmp_path) as watched:
        expect(watched.page.get_by_text("1 file with unreadable rows")).to_be_visible()
        go(watched.page, "#/trajectories")
        expect(watched.page.locator("a.open")).to_have_text(["textcraft_1"])


def test_an_observation_of_ten_thousand_tokens_is_shown_and_so_is_other_script(
    browser: Browser, tmp_path: Path
) -> None:
    words = " ".join(f"слово{number}" for number in range(10_000))
    turns = [("考えます 🤔", "поиск Ω", words), ("עברית", "fin", "ende ß")]
    write_rows(tmp_path / "step1/0.jsonl", [make_trajectory(1, turns=turns, opening="Ζητούμενο: ﷽ 𝔘𝔫𝔦")])
    with viewing(browser, tmp_path) as watched:
        page = watched.page
        go(page, "#/trajectories?text=слово9999")
        first_row(page).click()
        for text in ("考えます 🤔", "поиск Ω", "Ζητούμενο: ﷽ 𝔘𝔫𝔦", "עברית", "ende ß"):
            expect(page.get_by_text(text, exact=True).last).to_be_visible()
        expect(page.locator(".part.observation").nth(1)).to_contain_text("слово9999")
        page.get_by_role("tab", name="Tokens").click()
        expect(page.locator(".token")).to_have_count(len(page.locator(".token").all()))
        before = page.locator(".token").count()
        assert before < 1000
        page.get_by_role("button", name="Show the other 9,600 tokens").click()
        assert page.locator(".token").count() == before + 9600


def test_ten_thousand_trajectories_are_listed_filtered_and_turned_over(browser: Browser, tmp_path: Path) -> None:
    for step in range(1, 51):
        rows = [make_trajectory(index, step=step, score=step / 50) for index in range(5)]
        (tmp_path / f"step{step}").mkdir()
        lines = "".join(json.dumps(to_row(row)) + "\n" for row in rows)
        (tmp_path / f"step{step}/0.jsonl").write_text(lines * 40)
    with viewing(browser, tmp_path) as watched:
        page = watched.page
        go(page, "#/trajectories?sort=score&descending=true")
        expect(page.locator(".total")).to_have_text("1–100 of 10,000")
        expect(page.locator("a.open")).to_have_count(100)
        page.keyboard.press("n")
        expect(page.locator(".total")).to_have_text("101–200 of 10,000")
        page.get_by_label("Step from").fill("50")
        expect(page.locator(".total")).to_have_text("1–100 of 200")
        page.get_by_role("button", name="Item").click()
        expect(page.locator("th[aria-sort=ascending]")).to_contain_text("Item")
        page.get_by_role("button", name="Clear").click()
        expect(page.locator(".total")).to_have_text("1–100 of 10,000")


def test_case_10_the_mask_splits_the_record_into_prompt_turn_observation_turn(browser: Browser, tmp_path: Path) -> None:
    mask = {"loss_mask": [0, 0, 1, 1, 0, 1, 1], "sequence_ids": [0, 0, 1, 1, 2, 3, 3], "input_ids": [1] * 7}
    row = to_row(make_trajectory(1)) | mask | {"rollout_log_probs": [0.0] * 7, "token_rewards": [[6, 1.0]]}
    write_rows(tmp_path / "0.jsonl", [row])
    with viewing(browser, tmp_path) as watched:
        page = watched.page
        page.keyboard.press("t")
        first_row(page).click()
        page.get_by_role("tab", name="Tokens").click()
        expect(page.get_by_text("4 of 7 tokens are trained on")).to_be_visible()
        expect(page.locator(".segment h2")).to_have_text(
            ["prompt 2 tokens", "turn 1 2 tokens", "observation 1 tokens", "turn 2 2 tokens"]
        )


# ---------------------------------------------------------------------------------------------------- live, links, JSON


def test_a_run_is_followed_while_it_trains(browser: Browser, tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 1, "rollout/score_mean": 0.25, "actor/entropy": 1.5}\n')
    rows = write_rows(tmp_path / "trajectories/step1/0.jsonl", [make_trajectory(1)])
    with viewing(browser, tmp_path) as watched:
        page = watched.page
        go(page, "#/run/.")
        expect(page.get_by_text("● live")).to_be_visible()
        expect(page.get_by_text("score 0.25")).to_be_visible()
        with metrics.open("a") as file:
            file.write('{"step": 2, "rollout/score_mean": 0.75, "actor/entropy": 0.5}\n{"step": 3, "rollo')
        write_rows(tmp_path / "trajectories/step2/0.jsonl", [make_trajectory(2, step=2)])
        expect(page.get_by_text("score 0.75")).to_be_visible()
        expect(page.get_by_text("2 trajectories")).to_be_visible()
        expect(page.get_by_role("group", name="Entropy: ")).to_contain_text("Last step 2: entropy 0.5")
        go(page, "#/trajectories")
        expect(page.locator(".total")).to_have_text("1–2 of 2")
        with rows.open("a") as file:
            line = json.dumps(to_row(make_trajectory(3)))
            file.write(line[:50])
            file.flush()
            file.write(line[50:] + "\n")
        expect(page.locator(".total")).to_have_text("1–3 of 3")


def test_a_turn_can_be_linked_to_and_a_trajectory_copied(browser: Browser, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "step1/0.jsonl", [make_trajectory(1, turns=[LOOK, LOOK, LOOK])])
    with viewing(browser, tmp_path, permissions=["clipboard-read", "clipboard-write"]) as watched:
        page = watched.page
        page.keyboard.press("t")
        first_row(page).click()
        page.get_by_role("link", name="Turn 2", exact=True).click()
        expect(page.locator("section.present")).to_have_attribute("aria-label", "Turn 2")
        address = page.url
        expect(page.get_by_role("list", name="What stands out")).to_contain_text("“inventory” 3 times in a row")
        page.keyboard.press("c")
        expect(page.get_by_role("button", name="Copied")).to_be_visible()
        assert page.evaluate("navigator.clipboard.readText()") == path.read_text().rstrip("\n")
        go(page, "#/runs")
        expect(page.get_by_role("heading", name="Runs")).to_be_visible()
        page.goto(address)
        expect(page.locator("section.present")).to_have_attribute("aria-label", "Turn 2")


def test_a_failure_is_compared_with_a_success_of_its_group(browser: Browser, tmp_path: Path) -> None:
    failure = make_trajectory(1, turns=[LOOK, ("Now?", "get 1 log", "Got 1 log.")])
    others = [
        make_trajectory(1, sample=sample, turns=[LOOK] * turns, score=1.0, success=True, stop_reason=StopReason.DONE)
        for sample, turns in ((1, 3), (2, 1))
    ]
    write_rows(tmp_path / "step1/0.jsonl", [failure, *others])
    with viewing(browser, tmp_path) as watched:
        page = watched.page
        page.keyboard.press("t")
        first_row(page).click()
        page.get_by_role("link", name="2 of 3 in the group succeeded: compare with sample 2.").click()
        expect(page).to_have_url(re.compile(r"#/compare\?left=\w+-0&right=\w+-2$"))
        expect(page.locator(".compared").first).to_be_visible()


def test_a_goal_that_was_reached_and_not_paid_is_pointed_to(browser: Browser, tmp_path: Path) -> None:
    opening = "Crafting commands:\ncraft 2 stick using 1 plank\n\nGoal: craft stick."
    turns = [
        ("I fetch.", "get 1 plank", "Got 1 plank"),
        ("I craft.", "craft 2 stick using 1 plank", "Crafted 2 minecraft:stick"),
        LOOK,
    ]
    rows = [make_trajectory(8), make_trajectory(9, turns=turns, opening=opening)]
    rows.append(make_trajectory(9, sample=1, turns=turns[:1], opening=opening, success=True, score=1.0))
    write_rows(tmp_path / "trajectories/step1/0.jsonl", rows)
    with viewing(browser, tmp_path) as watched:
        page = watched.page
        go(page, "#/run/.")
        page.get_by_role("link", name="by item", exact=True).click()
        item = page.get_by_role("row", name="textcraft_9")
        expect(item.get_by_role("cell")).to_have_text(["stick", "2", "50%", "0.5", "1", "0"])
        assert_accessible(page)
        page.get_by_role("button", name="Tries").click()
        expect(page).to_have_url(re.compile("sort=tries"))
        item.get_by_role("link").click()
        expect(page.locator("tr:has(a.open)")).to_have_count(2)
        page.get_by_label("Goal, by the panel").select_option("contradicted")
        page.get_by_label("Item", exact=True).fill("")
        expect(page.locator("tr:has(a.open)")).to_have_count(2)
        first_row(page).click()
        findings = page.get_by_role("list", name="What stands out")
        expect(findings).to_contain_text("The panel shows the goal as reached after turn 2, but there is no success")
        findings.get_by_role("link", name="goal as reached").click()
        expect(page.locator("section.present")).to_have_attribute("aria-label", "Turn 2")
        page.get_by_role("link", name="sample 1: 1").click()
        expect(findings).to_contain_text("A success, but the panel shows the goal as reached at no turn.")


def test_a_fault_says_what_went_wrong(browser: Browser, tmp_path: Path) -> None:
    fault = make_trajectory(
        1, turns=(), stop_reason=StopReason.ENV_ERROR, error="EnvTimeout: no answer in 60 s", attempt=2
    )
    write_rows(tmp_path / "step1/0.jsonl", [fault])
    with viewing(browser, tmp_path) as watched:
        page = watched.page
        page.keyboard.press("t")
        expect(page.locator("tr:has(a.open)")).to_contain_text("fault")
        first_row(page).click()
        expect(page.get_by_text("on attempt 2. EnvTimeout: no answer in 60 s")).to_be_visible()
        expect(page.get_by_text("it is not trained on and counts in no average")).to_be_visible()


@pytest.mark.server
def test_the_command_serves_on_this_machine_alone_with_the_token_it_was_given(browser: Browser, tmp_path: Path) -> None:
    write_rows(tmp_path / "step1/0.jsonl", [make_trajectory(1)])
    command = [
        sys.executable,
        "-m",
        "agentgym_rl.cli",
        "view",
        str(tmp_path),
        "--port",
        "0",
        "--token",
        "open+me&1",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            match = re.search(r" on (http://127\.0\.0\.1:\d+)/\?token=open%2Bme%261$", said.strip())
            assert match is not None, said
            with watched_page(browser) as watched:
                watched.page.goto(match[1])
                expect(watched.page.get_by_text("Needs the token")).to_be_visible()
                watched.page.goto(said.split(" on ")[1].strip())
                expect(watched.page.locator("tbody a").first).to_be_visible()
                assert "token" not in watched.page.url
        finally:
            process.terminate()


# ------------------------------------------------------------------------------------------------ what is no training


def test_an_evaluation_has_no_last_step_and_tells_its_one_point_at_any_width(browser: Browser, tmp_path: Path) -> None:
    write_rows(tmp_path / "trajectories/0.jsonl", [make_trajectory(1), make_trajectory(2)])
    with viewing(browser, tmp_path) as watched:
        page = watched.page
        expect(page.locator("tbody td").nth(1)).to_have_text("–")
        go(page, "#/run/.")
        expect(page.get_by_role("link", name="failures", exact=True)).to_be_visible()
        expect(page.get_by_role("link", name=re.compile("last step"))).to_have_count(0)
        legend = page.get_by_role("group", name="Turns and horizon: ").locator(".u-series").nth(1)
        for width in (1280, 2560, 900):
            page.set_viewport_size({"width": width, "height": 900})
            page.wait_for_timeout(100)
            expect(legend.locator(".u-value")).to_have_text(re.compile(r"\d"))


def test_conversations_without_names_can_be_opened_and_told_apart(browser: Browser, tmp_path: Path) -> None:
    said = [{"from": "human", "value": "Go."}, {"from": "gpt", "value": "north"}]
    rows = [{"conversations": said}, {"item_id": "maze_1", "conversations": said}]
    write_rows(tmp_path / "0.jsonl", [*rows, rows[1]])
    with viewing(browser, tmp_path) as watched:
        page = watched.page
        go(page, "#/trajectories?sort=item_id")
        page.get_by_role("link", name="unnamed").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("unnamed")
        go(page, "#/compare?item=maze_1")
        options = page.get_by_label("Left").locator("option")
        expect(options).to_have_count(3)
        expect(options.nth(1)).to_have_text(re.compile(r"\(line 2\)"))
        expect(options.nth(2)).to_have_text(re.compile(r"\(line 3\)"))


def test_a_viewer_that_has_ended_is_told_in_words(browser: Browser, tmp_path: Path) -> None:
    write_rows(tmp_path / "0.jsonl", [make_trajectory(1)])
    with watched_page(browser) as watched:
        with running(build_app(Library(tmp_path))) as url:
            watched.page.goto(url)
            expect(watched.page.locator("tbody a").first).to_be_visible()
        expect(watched.page.get_by_role("alert")).to_contain_text("The viewer does not answer.")
        watched.page.goto(f"{url}/#/trajectories")
        expect(watched.page.get_by_role("alert")).to_contain_text("The viewer does not answer.")


def test_a_row_that_is_gone_is_not_copied_and_the_page_says_so(browser: Browser, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "0.jsonl", [make_trajectory(1)])
    with viewing(browser, tmp_path) as watched:
        page = watched.page
        go(page, "#/trajectories")
        first_row(page).click()
        expect(page.get_by_role("heading", level=1)).to_have_text("textcraft_1")
        file.unlink()
        page.get_by_role("button", name="Copy as JSON").click()
        expect(page.get_by_role("button", name=re.compile("Not copied: trajectory .* is not here"))).to_be_visible()
