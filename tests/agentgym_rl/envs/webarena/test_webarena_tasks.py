"""Task files, addresses, and checks that need no page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.judges import scripted_model

pytest.importorskip("playwright")

from agentgym_rl.envs.registry import get_spec
from agentgym_rl.envs.webarena import SMALL_TASKS, SPEC, WebArenaSettings, configured
from agentgym_rl.envs.webarena.addresses import Addresses, addresses_from_environment
from agentgym_rl.envs.webarena.browser import find_chromium
from agentgym_rl.envs.webarena.evaluators import includes, matches_url, score_answer
from agentgym_rl.envs.webarena.judge import Judge
from agentgym_rl.envs.webarena.site_functions import parse_call
from agentgym_rl.envs.webarena.tasks import Task, read_tasks
from agentgym_rl.errors import ConfigError, EnvServerError

SITES = Addresses(
    {
        "SHOPPING": "http://10.0.0.1:7770",
        "SHOPPING_ADMIN": "http://10.0.0.1:7780/admin",
        "REDDIT": "http://10.0.0.1:9999",
        "WIKIPEDIA": "http://10.0.0.1:8888/wiki_2022/A/Landing",
    }
)


def task_row(**evaluation: Any) -> dict[str, Any]:
    """A task in WebArena's form that asks for a word."""
    return {
        "sites": ["shopping"],
        "task_id": 0,
        "require_login": False,
        "storage_state": None,
        "start_url": "__SHOPPING__",
        "geolocation": None,
        "intent": "What is it?",
        "eval": {"eval_types": ["string_match"], "reference_answers": {"exact_match": "lamp"}} | evaluation,
    }


def read(tmp_path: Path, *rows: dict[str, Any]) -> tuple[Task, ...]:
    (tmp_path / "tasks.json").write_text(json.dumps(rows))
    return read_tasks(tmp_path / "tasks.json")


def answers(tmp_path: Path, **reference: Any) -> Task:
    note = {"string_note": reference.pop("string_note", "")}
    return read(tmp_path, task_row(reference_answers=reference, **note))[0]


# ---------------------------------------------------------------------------------------------------------- task files


def test_the_small_tasks_are_of_all_kinds_on_four_sites() -> None:
    tasks = read_tasks(SMALL_TASKS)
    assert len(tasks) == get_spec("webarena").num_items == 20
    assert [task.task_id for task in tasks] == list(range(20))
    assert {site for task in tasks for site in task.sites} == {"shopping", "shopping_admin", "reddit", "gitlab"}
    assert {check for task in tasks for check in task.evaluation.checks} == {
        "string_match",
        "url_match",
        "program_html",
    }
    assert not any(task.evaluation.needs_judge for task in tasks)


def test_item_lists_share_no_task_and_name_all() -> None:
    root = Path(__file__).parents[4]
    train = {row["item_id"] for row in json.loads((root / "AgentItemId/webarena_train.json").read_text())}
    test = {row["item_id"] for row in json.loads((root / "AgentEval/webarena/webarena_test.json").read_text())}
    assert train | test == {f"webarena_{number}" for number in range(20)} and not train & test


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"sites": []}, "task 0: lacks 'task_id'"),
        (task_row(eval_types=["taste"]), "eval_types has 'taste', must be of string_match, url_match, program_html"),
        (task_row(eval_types=[]), "eval_types is empty"),
        (task_row(reference_answers={"rhymes": "x"}), "reference_answers has rhymes"),
        (task_row(eval_types=["url_match"], url_note="EXACT"), "url_note='EXACT'"),
        (task_row(program_html=[{"url": "last", "required_contents": {}}]), "required_contents must have"),
        ({**task_row(), "eval": None}, "not in WebArena's form"),
    ],
)
def test_a_task_that_cannot_be_judged_is_named(tmp_path: Path, row: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        read(tmp_path, row)


def test_a_file_without_tasks_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent.json'?: No such file"):
        read_tasks(tmp_path / "absent.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ConfigError, match=r"bad.json': not JSON"):
        read_tasks(tmp_path / "bad.json")


def test_a_task_file_gives_the_number_of_items_and_unknown_functions_are_refused(tmp_path: Path) -> None:
    read(tmp_path, task_row(), task_row())
    assert configured(WebArenaSettings(task_file=tmp_path / "tasks.json")).num_items == 2
    target = {"url": "func:shop_guess()", "locator": "", "required_contents": {"exact_match": "x"}}
    (tmp_path / "odd.json").write_text(json.dumps([task_row(eval_types=["program_html"], program_html=[target])]))
    with pytest.raises(ConfigError, match="known functions are reddit_get_post_url"):
        configured(WebArenaSettings(task_file=tmp_path / "odd.json"))


def test_functions_are_read_with_their_constants() -> None:
    assert parse_call("func:reddit_get_post_url('http://x/f/a/1')") == ("reddit_get_post_url", ["http://x/f/a/1"])
    assert parse_call("func:gitlab_get_project_memeber_role(__page__, 'vinta')")[1] == ["vinta"]
    for text in ("func:reddit_get_post_url(open('x'))", "func:__import__('os')", "func:("):
        with pytest.raises(ConfigError):
            parse_call(text)


# ------------------------------------------------------------------------------------------------------------ settings


def test_sites_without_tasks_for_them_are_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDDIT", "http://10.0.0.1:9999")
    with pytest.raises(ConfigError, match="REDDIT is set: name the tasks for these sites with --task-file"):
        SPEC.data_version()


def test_an_address_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITLAB", "10.0.0.1:8023")
    with pytest.raises(ConfigError, match=r"GITLAB='10.0.0.1:8023': must be an address"):
        addresses_from_environment()


def test_a_judge_needs_address_and_name() -> None:
    with pytest.raises(ConfigError, match="judge_url and judge_model go together"):
        WebArenaSettings(judge_url="http://x/v1")


def test_without_a_browser_the_command_that_installs_one_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PLAYWRIGHT_BROWSERS_PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="apt-get install chromium"):
        find_chromium(None)
    with pytest.raises(ConfigError, match="no program"):
        find_chromium(tmp_path / "absent")
    program = tmp_path / "chromium-1200" / "chrome-linux64" / "chrome"
    program.parent.mkdir(parents=True)
    program.touch()
    assert find_chromium(None) == program


# ----------------------------------------------------------------------------------------------------------- addresses


@pytest.mark.parametrize(
    ("seen", "real"),
    [
        ("http://onestopmarket.com/lamp.html?a=1", "http://10.0.0.1:7770/lamp.html?a=1"),
        ("http://luma.com/admin/orders", "http://10.0.0.1:7780/admin/orders"),
        ("http://luma.com/media/x.png", "http://10.0.0.1:7780/media/x.png"),
        ("http://reddit.com", "http://10.0.0.1:9999"),
        ("http://wikipedia.org", "http://10.0.0.1:8888/wiki_2022/A/Landing"),
        ("http://wikipedia.org/wiki_2022/A/Moss", "http://10.0.0.1:8888/wiki_2022/A/Moss"),
    ],
)
def test_addresses_are_exchanged_both_ways(seen: str, real: str) -> None:
    assert SITES.local(seen) == real
    assert SITES.canonical(real) == seen
    assert SITES.contains(real) and not SITES.contains(seen)


def test_an_address_that_only_begins_like_a_site_is_left_as_it_is() -> None:
    text = "http://10.0.0.1:99990, http://10.0.0.1:9999.evil.org and http://10.0.0.1:9999."
    assert SITES.canonical(text) == "http://10.0.0.1:99990, http://10.0.0.1:9999.evil.org and http://reddit.com."


def test_other_spellings_of_a_site_are_understood() -> None:
    for url in ("reddit.com/f/books", "https://www.reddit.com/f/books", " http://reddit.com/f/books "):
        assert SITES.local(url) == "http://10.0.0.1:9999/f/books"
    assert SITES.local("10.0.0.1:9999/f/books") == "http://10.0.0.1:9999/f/books"


@pytest.mark.parametrize(
    "url",
    ["http://reddit.com.evil.org", "http://10.0.0.1:22", "file:///etc/passwd", "javascript:alert(1)", "about:blank",
     "http://10.0.0.1:9999@evil.org/", "http://10.0.0.1:77700", "chrome://version", "http://[", "data:text/html,x"],
)  # fmt: skip
def test_what_only_looks_like_a_site_is_outside(url: str) -> None:
    assert not SITES.contains(SITES.local(url))


def test_sites_that_a_task_needs_and_nobody_configured_are_named() -> None:
    assert SITES.missing('["__SHOPPING__", "__MAP__/x", "__last_url__"]') == ["MAP"]
    assert SITES.filled("__SHOPPING_ADMIN__/x __last_url__") == "http://10.0.0.1:7780/admin/x __last_url__"


# ------------------------------------------------------------------------------------------------------------- answers


@pytest.mark.parametrize(
    ("reference", "answer", "whole_word", "found"),
    [
        ("5", "it is 5.", True, True),
        ("5", "15", True, False),
        ("5", "0.5 km", True, False),
        ("5", "5.5 km", True, False),
        ("5", "15", False, True),
        ("Quest", "the quest band", True, True),
        ("'Quest'", "QUEST", True, True),
        *(
            ("5", part, True, True)
            for part in ("5", "(5)", "$5", "5%", "5's", "5, 6", "is 5 stars", "5: good", "so--5")
        ),
        *(("5", whole, True, False) for whole in ("15/5/2023", "5/10", "4/5", "-5", "3-5", "5-star", "5:30", "12:5")),
        *(("5", whole, True, False) for whole in ("\u22125", "3\u20135", "5.3", ".5", "5.x", "5,000", "1,5", "n:5")),
    ],
)
def test_an_answer_includes_a_reference(reference: str, answer: str, whole_word: bool, found: bool) -> None:
    assert includes(reference, answer, whole_word=whole_word) is found


def test_answers_are_compared_exactly_or_by_what_they_must_include(tmp_path: Path) -> None:
    exact = answers(tmp_path, exact_match="Quest Band")
    assert score_answer(exact, ' "quest band" ', None) and not score_answer(exact, "the quest band", None)
    included = answers(tmp_path, must_include=["Sven", "Tilda"])
    assert score_answer(included, "tilda and sven", None) and not score_answer(included, "Sven", None)


@pytest.mark.parametrize(
    ("reference", "url", "matches"),
    [
        ("http://x/f/books", "http://x/f/books/", True),
        ("http://x/f/books", "http://x/f/books/12/title", True),
        ("http://x/f/books", "http://x/f/art", False),
        ("http://x/f/books |OR| http://x/f/art", "http://x/f/art", True),
        ("http://x/s?q=lamp", "http://x/s?q=lamp&page=2", True),
        ("http://x/s?q=lamp", "http://x/s?q=pan", False),
        ("http://x/s?q=lamp", "http://x/s", False),
        ("http://x/s?q=lamp |OR| http://x/s?q=pan", "http://x/s?q=pan", True),
    ],
)
def test_a_url_matches_by_path_and_query(reference: str, url: str, matches: bool) -> None:
    assert matches_url(reference, url) is matches


# --------------------------------------------------------------------------------------------------------------- judge


def test_a_judge_compares_every_reference_and_is_told_question_reference_and_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "secret")
    task = answers(tmp_path, fuzzy_match=["driving: 2min", "walking: 16min"])
    with scripted_model("Yes.", "no") as (url, asked):
        assert not score_answer(task, "two and sixteen minutes", Judge(url, "small"))
    assert [request["path"] for request in asked] == ["/v1/chat/completions"] * 2
    assert asked[0]["model"] == "small" and asked[0]["key"] == "Bearer secret" and asked[0]["temperature"] == 0
    for part in ("What is it?", "driving: 2min", "two and sixteen minutes"):
        assert part in asked[0]["messages"][0]["content"]


def test_a_judge_is_not_asked_what_is_plain(tmp_path: Path) -> None:
    judge = Judge("http://127.0.0.1:9/v1", "nobody")
    assert score_answer(answers(tmp_path, fuzzy_match=["16min"]), "16MIN", judge)
    assert score_answer(answers(tmp_path, fuzzy_match="N/A"), "n/a", judge)
    assert not score_answer(answers(tmp_path, must_include=["Hyatt"], fuzzy_match=["15min"]), "Hilton, 15min", judge)


def test_a_judge_hears_why_a_task_cannot_be_done(tmp_path: Path) -> None:
    task = answers(tmp_path, fuzzy_match="N/A", string_note="There is no such hotel")
    with scripted_model("yes") as (url, asked):
        assert score_answer(task, "I found no hotel", Judge(url, "small"))
    assert "There is no such hotel" in asked[0]["messages"][0]["content"]


@pytest.mark.parametrize(
    ("reply", "same"),
    [
        ("yes", True),
        ("No.", False),
        ("**Yes**", True),
        ("__no__", False),
        ("Yes. There is no contradiction with the reason.", True),
        ("Yes, no difference in meaning.", True),
        ("No. A yes would need the year.", False),
        ("No because a yes would need the year.", False),
        ("no\n\nOtherwise I would have said yes.", False),
        ("No contradiction with the reason, so yes.", True),
        ("The answer is yes: there is no difference.", True),
        ("Verdict: no", False),
        ("<think>\nIs it a yes? The year: no.\n</think>\n\nYes", True),
        ("It says so, yes. Or no? Yes!\n</think>\n`no`", False),
    ],
)
def test_a_judge_that_says_more_than_one_word_is_understood(reply: str, same: bool) -> None:
    with scripted_model(reply) as (url, asked):
        assert Judge(url, "small").same_meaning(question="q", reference="r", answer="a") is same
    assert len(asked) == 1


@pytest.mark.parametrize(
    "replies",
    [
        ("",),
        ("perhaps",),
        ("Rather yes, but strictly: no.",),
        ("There is no contradiction.",),
        ("<think>yes or no?</think>",),
        ("<think>\nYes, it seems",),
    ],
)
def test_a_judge_without_a_verdict_is_a_fault_and_no_score(tmp_path: Path, replies: tuple[str, ...]) -> None:
    task = answers(tmp_path, fuzzy_match=["16min"])
    with scripted_model(*replies) as (url, asked), pytest.raises(EnvServerError, match="gave no verdict in 3 tries"):
        score_answer(task, "a quarter of an hour", Judge(url, "small"))
    assert len(asked) == 3


def test_a_judge_is_asked_again_when_it_stumbles(tmp_path: Path) -> None:
    with scripted_model("", "hm", "yes") as (url, _):
        assert score_answer(answers(tmp_path, fuzzy_match=["16min"]), "a quarter", Judge(url, "small"))
