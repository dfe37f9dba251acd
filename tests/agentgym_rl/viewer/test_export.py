"""What is taken away: HTML files that need nothing else and let no text act, conversations, preference pairs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import requests
from playwright.sync_api import Browser, expect
from support.chromium import watched_page
from support.episodes import made_up, played

from agentgym_rl.cli import main
from agentgym_rl.data.conversations import read_conversations
from agentgym_rl.data.pairs import read_pairs
from agentgym_rl.envs import registry
from agentgym_rl.envs.babyai import SPEC as BABYAI
from agentgym_rl.envs.serving import running
from agentgym_rl.rollout.log import TrajectoryLog, to_row
from agentgym_rl.types import StopReason, Trajectory
from agentgym_rl.viewer.app import build_app
from agentgym_rl.viewer.export import bundle
from agentgym_rl.viewer.library import Library

pytestmark = pytest.mark.browser

ATTACK = "</script><script>alert(1)</script><img src=x onerror=alert(2)>'\"&lt;\u2028 ünï 🧵 日本"


def episodes() -> list[Trajectory]:
    """Two members of a group, an attack in every text, a world, and a fault."""
    good = made_up(
        "wordle", 1, "Guess.", [("Thought: a\nAction: crane", "ok", 0.0, False), ("Action: slate", "yes", 1.0, True)]
    )
    bad = made_up(
        "wordle", 1, "Guess.", [("Thought: a\nAction: crane", "ok", 0.0, False), ("Action: crate", "no", 0.0, True)]
    )
    attack = [(f"Thought: {ATTACK}\nAction: {ATTACK}", ATTACK, 0.5, False), (ATTACK, None, 0.0, False)]
    hostile = made_up(
        "searchqa", 2, f"Question: {ATTACK}", attack, extra={"states": [ATTACK, {"golden_answers": [ATTACK]}]}
    )
    world = played(BABYAI, 7, ["turn left", "turn right"])
    fault = made_up("wordle", 1, "Guess.", [], stop_reason=StopReason.ENV_ERROR, error=f"EnvError: {ATTACK}")
    return [good, replace(bad, sample_index=1), hostile, world, replace(fault, sample_index=2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp("library")
    file = root / "trajectories" / "step4" / "0.jsonl"
    with TrajectoryLog(file) as log:
        for trajectory in episodes():
            log.write(replace(trajectory, uid=trajectory.item.item_id))
    with file.open("a", encoding="utf-8") as stream:
        stream.write('{"format": 1, "item_id": "torn')
    return root


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with running(build_app(Library(folder))) as address:
        yield address


def run(*arguments: object) -> None:
    assert main(["export", *map(str, arguments)]) == 0


PLACE = "trajectories/step4/0.jsonl:"


def export(folder: Path, out: Path, lines: Sequence[int]) -> Path:
    run(folder, "--out", out, *(word for line in lines for word in ("--at", f"{PLACE}{line}")))
    return out


# ---------------------------------------------------------------------------------------------------------------- HTML


def test_a_trajectory_as_a_file_shows_turns_and_world_by_keys_and_asks_nobody(
    browser: Browser, folder: Path, tmp_path: Path
) -> None:
    file = export(folder, tmp_path / "out" / "world.html", [4])
    with watched_page(browser) as watched:
        page = watched.page
        page.goto(file.as_uri())
        expect(page.locator("h1")).to_contain_text("babyai_7 · train step 4, sample 0")
        expect(page.locator(".turn")).to_have_count(2)
        expect(page.locator(".turn h4")).to_have_text(["assistant", "observation"] * 2)
        agent = page.locator("svg.grid g.thing path.body").last
        before = agent.get_attribute("transform")
        page.keyboard.press("ArrowRight")
        expect(page.locator("#turn-1")).to_have_attribute("aria-current", "true")
        assert agent.get_attribute("transform") != before
        page.keyboard.press("k")
        assert agent.get_attribute("transform") == before
        page.locator("#turn-2").click()
        expect(page.locator("#turn-2")).to_have_attribute("aria-current", "true")
        assert watched.hosts == {""}  # the file itself


def test_a_comparison_as_a_file_marks_what_differs(browser: Browser, folder: Path, tmp_path: Path) -> None:
    file = export(folder, tmp_path / "two.html", [1, 2])
    with watched_page(browser) as watched:
        watched.page.goto(file.as_uri())
        expect(watched.page.locator(".verdict")).to_have_text("Alike up to turn 1, different from turn 2 on.")
        expect(watched.page.locator("mark.changed")).to_have_text(["slate", "yes", "crate", "no"])
        expect(watched.page.locator(".compared[aria-current]")).to_have_id("turn-2")


def test_hostile_texts_are_shown_as_they_are_in_exported_files(browser: Browser, folder: Path, tmp_path: Path) -> None:
    for number, lines in enumerate(([3], [3, 5], [5])):
        file = export(folder, tmp_path / f"hostile{number}.html", lines)
        source = file.read_text(encoding="utf-8")
        assert source.count("<script") == source.count("</script>") == 2
        with watched_page(browser) as watched:
            watched.page.goto(file.as_uri())
            expect(watched.page.locator("main")).to_contain_text(
                "<script>alert(1)</script><img src=x onerror=alert(2)>"
            )
            assert watched.page.locator("main img, main script").count() == 0


def test_the_policy_of_an_exported_file_forbids_all_but_its_own_script(
    browser: Browser, folder: Path, tmp_path: Path
) -> None:
    file = export(folder, tmp_path / "policy.html", [1])
    source = file.read_text(encoding="utf-8")
    # Were a text to become a script after all, it would not run.
    file.write_text(source.replace("</body>", "<script>document.title = 'taken'</script></body>"), encoding="utf-8")
    context = browser.new_context()
    page = context.new_page()
    refused: list[str] = []
    page.on("console", lambda message: refused.append(message.text))
    page.goto(file.as_uri())
    expect(page.locator("h1")).to_contain_text("wordle_1")
    assert page.title() == "wordle_1"
    assert any("Content Security Policy" in text for text in refused)
    context.close()


def test_modules_are_put_into_one_script_or_refused() -> None:
    source = bundle({"js/a.js": "export function f() {}\n", "js/b.js": 'import { f } from "./a.js";\nf();\n'})
    assert "modules.a = (() => {\nfunction f() {}\n\nreturn { f };\n})();" in source
    assert "const { f } = modules.a;" in source
    for form in ('import x from "./a.js";', "export default 1;", "const a = '</script>';"):
        with pytest.raises(ValueError, match=r"js/a\.js"):
            bundle({"js/a.js": form})


# ------------------------------------------------------------------------------------------------ conversations, pairs


def test_conversations_are_those_that_training_reads_and_faults_are_left_out(folder: Path, tmp_path: Path) -> None:
    run(folder, "--out", tmp_path / "all.jsonl", "--item", "wordle_1")
    conversations = read_conversations(tmp_path / "all.jsonl")
    assert [conversation.item_id for conversation in conversations] == ["wordle_1", "wordle_1"]
    trained = [
        [m.content for m, flag in zip(each.messages, each.train_flags, strict=True) if flag] for each in conversations
    ]
    assert trained[0] == ["Thought: a\nAction: crane", "Action: slate"]
    run(folder, "--out", tmp_path / "good.jsonl", "--success")
    assert len(read_conversations(tmp_path / "good.jsonl")) == 1


def test_pairs_are_of_members_of_one_item_that_differ(folder: Path, tmp_path: Path) -> None:
    run(folder, "--out", tmp_path / "pairs.jsonl", "--as", "pairs")
    [pair] = read_pairs(tmp_path / "pairs.jsonl")
    assert (pair.item_id, pair.chosen_reward, pair.rejected_reward) == ("wordle_1", 1.0, 0.0)
    assert pair.chosen.messages[-1].content == "Action: slate"


def test_the_pages_links_give_the_same_files(url: str, folder: Path) -> None:
    rows = requests.get(f"{url}/api/trajectories", params={"sort": "item_id"}, timeout=30).json()["rows"]
    ids = [row["id"] for row in rows if row["item_id"] == "wordle_1" and row["score"] is not None]
    html = requests.get(f"{url}/api/export/html", params={"id": ids[0], "other": ids[1]}, timeout=30)
    assert 'filename="wordle_1.html"' in html.headers["content-disposition"]
    pairs = requests.get(f"{url}/api/export/pairs", params={"id": ids, "threshold": -1e9}, timeout=30)
    assert [json.loads(line)["item_id"] for line in pairs.text.splitlines()] == ["wordle_1"]
    chosen = requests.get(f"{url}/api/export/conversations", params={"item": "wordle", "score_min": 1}, timeout=30)
    assert chosen.headers["x-count"] == "1"
    assert requests.get(f"{url}/api/export/html", params={"id": "nobody-1"}, timeout=30).status_code == 404
    assert requests.get(f"{url}/api/export/pairs", params={"per_item": 0}, timeout=30).status_code == 422


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--out", "x.html"], "5 are chosen: name them by --at FILE:LINE"),
        (["--out", "x.html", "--at", "3"], "--at 3: must be FILE:LINE"),
        (["--out", "x.html", "--at", "other.jsonl:1"], "no trajectory in line 1 of other.jsonl"),
        (["--out", "x.html", "--at", f"{PLACE}6"], "no trajectory in line 6"),
        (["--out", "x.txt"], "end in .json or .jsonl"),
    ],
)
def test_what_cannot_be_exported_is_said_in_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    arguments = [str(tmp_path / word) if word.startswith("x.") else word for word in arguments]
    assert main(["export", str(folder), *arguments]) == 1
    message = capsys.readouterr().err
    assert told in message
    assert re.fullmatch(r"agentgym-rl: [^\n]+\n", message)


def test_a_panel_that_fails_is_told_in_one_line_and_the_file_is_written_without_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing = replace(BABYAI, panel="support.episodes:failing_panel")
    monkeypatch.setitem(registry._registered, "babyai", failing)
    file = export(folder, tmp_path / "world.html", [4])
    told = "The panel of babyai could not be made: ValueError: no panel for babyai_7"
    assert told in file.read_text(encoding="utf-8")
    assert [record.getMessage() for record in caplog.records] == [told]
    assert caplog.records[0].exc_info is None


@pytest.mark.parametrize("what", ["export/html", "export/conversations", "export/pairs"])
def test_half_a_surrogate_pair_is_replaced_in_files(tmp_path: Path, what: str) -> None:
    rows = [
        to_row(made_up("maze\ud800", 1, "Go \ud800.", [("Action: \udfff", "ok \ud800", score, True)]))
        for score in (0.0, 1.0)
    ]
    (tmp_path / "0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    library = Library(tmp_path)
    library.refresh()
    with running(build_app(library)) as url:
        id = library.summaries()[0].id
        answer = requests.get(f"{url}/api/{what}", params={"id": id}, timeout=30)
        assert answer.status_code == 200
        answer.content.decode()  # is UTF-8
    assert main(["export", str(tmp_path / "0.jsonl"), "--at", "1", "--out", str(tmp_path / "out.html")]) == 0
    (tmp_path / "out.html").read_text(encoding="utf-8")
    assert main(["export", str(tmp_path / "0.jsonl"), "--out", str(tmp_path / "out.jsonl")]) == 0
    assert len(read_conversations(tmp_path / "out.jsonl")) == 2
