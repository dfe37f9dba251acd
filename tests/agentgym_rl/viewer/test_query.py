"""Which trajectories a list shows, and in which order."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError
from support.viewer import make_trajectory, write_rows

from agentgym_rl.types import StopReason
from agentgym_rl.viewer.library import Library
from agentgym_rl.viewer.query import Query, Searches, page_of, select

LOOK = ("I look.", "inventory", "Inventory: nothing")


@pytest.fixture
def library(tmp_path: Path) -> Library:
    """Two steps of one run and an evaluation; scores and turns differ."""
    for step in (1, 2):
        rows = [
            make_trajectory(index, step=step, sample=sample, score=0.1 * step * sample, success=sample == 1)
            for sample in (1, 0)
            for index in (7, 12)
        ]
        write_rows(tmp_path / f"run/trajectories/step{step}/0.jsonl", rows)
    (tmp_path / "run/metrics.jsonl").touch()
    others = [
        make_trajectory(3, task="babyai", turns=[LOOK] * 3, stop_reason=StopReason.DONE, score=1.0, success=True),
        make_trajectory(4, task="babyai", turns=(), stop_reason=StopReason.ENV_ERROR),
        make_trajectory(120, task="babyai", turns=[("Straße", "go", "Ein Ölbaum: 橄欖樹")], score=0.5),
    ]
    write_rows(tmp_path / "eval/trajectories/0.jsonl", others)
    found = Library(tmp_path)
    found.refresh()
    return found


def found(library: Library, **fields: object) -> list[tuple[str, int, int]]:
    query = Query(**fields)  # type: ignore[arg-type]
    return [(row.item_id, row.step, row.sample_index) for row in select(library, query, Searches())]


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({}, 11),
        ({"run": ["run"]}, 8),
        ({"run": ["run", "eval"]}, 11),
        ({"phase": "eval"}, 3),
        ({"task": "babyai"}, 3),
        ({"item": "craft_1"}, 4),
        ({"item": "BabyAI"}, 3),
        ({"item": '"babyai_12"'}, 0),
        ({"item": '"babyai_120"'}, 1),
        ({"step_min": 2}, 4),
        ({"step_max": 1, "run": ["run"]}, 4),
        ({"success": True}, 5),
        ({"success": False}, 6),
        ({"stop": ["done", "env_error"]}, 2),
        ({"turns_min": 2}, 1),
        ({"turns_max": 0}, 1),
        ({"score_min": 0.15}, 4),
        ({"score_max": 0.05}, 4),  # the fault has no score, so no bound lets it pass
        ({"uid": "step1/textcraft_7", "step_max": 1}, 2),
        ({"tokens_min": 1000}, 0),
        ({"text": "straẞE"}, 1),
        ({"text": "橄欖樹"}, 1),
        ({"text": "goal: craft a STICK"}, 11),
        ({"text": '"value"'}, 0),
    ],
)
def test_filters_let_pass_what_they_name(library: Library, fields: dict[str, object], count: int) -> None:
    assert len(found(library, **fields)) == count


def test_order_is_natural_and_what_has_no_value_comes_last(library: Library) -> None:
    by_item = [item for item, _, _ in found(library, sort="item_id")]
    assert by_item == ["babyai_3", "babyai_4", "babyai_120"] + ["textcraft_7"] * 4 + ["textcraft_12"] * 4
    for descending in (False, True):
        assert found(library, sort="score", descending=descending)[-1][0] == "babyai_4"
    assert found(library, sort="score", descending=True)[0][0] == "babyai_3"


def test_members_of_a_group_stand_together_where_the_first_of_them_would(library: Library) -> None:
    rows = found(library, run=["run"], sort="score", descending=True, grouped=True)
    assert rows == [
        *(("textcraft_7", 2, 0), ("textcraft_7", 2, 1), ("textcraft_12", 2, 0), ("textcraft_12", 2, 1)),
        *(("textcraft_7", 1, 0), ("textcraft_7", 1, 1), ("textcraft_12", 1, 0), ("textcraft_12", 1, 1)),
    ]


def test_pages_are_stretches_of_the_list(library: Library) -> None:
    query = Query(sort="item_id", offset=2, limit=3)
    page = page_of(select(library, query, Searches()), query)
    assert (page.total, page.offset) == (11, 2)
    assert [row.item_id for row in page.rows] == ["babyai_120", "textcraft_7", "textcraft_7"]


def test_a_search_reads_each_row_once_and_new_ones_later(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    read_rows = Library.read_rows
    monkeypatch.setattr(Library, "read_rows", lambda self, ids: (reads.append(len(ids)), read_rows(self, ids))[1])
    searches, query = Searches(), Query(text="inventory")
    assert len(select(library, query, searches)) == len(select(library, query, searches)) == 9
    write_rows(library.root / "eval/trajectories/0.jsonl", [make_trajectory(9, task="babyai")], mode="a")
    library.refresh()
    assert len(select(library, query, searches)) == 10
    assert reads == [11, 0, 1]


def test_a_file_that_is_written_anew_is_searched_anew(library: Library) -> None:
    searches, file = Searches(), library.root / "eval/trajectories/0.jsonl"
    for fruit in ("apple", "melon and more", "apple, and then some"):
        write_rows(file, [make_trajectory(9, task="babyai", turns=[("I look.", "take", f"an {fruit}")])])
        library.refresh()
        assert [len(select(library, Query(text=text), searches)) for text in ("an apple", "an melon")] == [
            int("apple" in fruit),
            int("melon" in fruit),
        ]


@pytest.mark.parametrize(
    "fields",
    [{"limit": 0}, {"limit": 10**6}, {"offset": -1}, {"sort": "id; drop"}, {"score_min": "nan"}, {"path": "/etc"}],
)
def test_impossible_questions_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Query(**fields)  # type: ignore[arg-type]
