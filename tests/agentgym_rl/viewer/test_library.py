"""The library: files found, read as far as they go, and followed while they grow or are replaced."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest
from support.viewer import make_trajectory, write_rows

from agentgym_rl.cli import main
from agentgym_rl.errors import ConfigError
from agentgym_rl.rollout.log import to_row
from agentgym_rl.types import StopReason
from agentgym_rl.viewer.library import Library


def row(index: int, **fields: object) -> bytes:
    return json.dumps(to_row(make_trajectory(index, **fields))).encode() + b"\n"  # type: ignore[arg-type]


def items(library: Library) -> list[str]:
    library.refresh()
    return [summary.item_id for summary in library.summaries()]


def metrics_line(step: int, score: float) -> str:
    return json.dumps({"step": step, "rollout/score_mean": score}) + "\n"


def test_runs_phases_and_steps_follow_from_the_folders(tmp_path: Path) -> None:
    write_rows(tmp_path / "a/trajectories/step10/0.jsonl", [make_trajectory(1)])
    write_rows(tmp_path / "a/trajectories/step9/0.jsonl", [make_trajectory(2)])
    write_rows(tmp_path / "a/trajectories/val_step5/0.jsonl", [make_trajectory(3)])
    (tmp_path / "a/metrics.jsonl").write_text(metrics_line(9, 0.5))
    write_rows(tmp_path / "evaluation/trajectories/1.jsonl", [make_trajectory(4, step=8)])
    write_rows(tmp_path / "alone/step3/0.jsonl", [make_trajectory(5)])
    library = Library(tmp_path)
    library.refresh()
    assert library.runs() == ["a", "alone", "evaluation"]
    assert [(s.run, s.phase, s.step, s.item_id) for s in library.summaries()] == [
        ("a", "train", 9, "textcraft_2"),
        ("a", "train", 10, "textcraft_1"),
        ("a", "val", 5, "textcraft_3"),
        ("alone", "train", 3, "textcraft_5"),
        ("evaluation", "eval", 7, "textcraft_4"),  # the policy's version
    ]
    assert library.metrics("evaluation") is None
    assert library.folder_of("a") == tmp_path / "a"
    assert library.folder_of("../a") is None


def test_a_single_file_is_a_library_too(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "some.jsonl", [make_trajectory(1), make_trajectory(2)])
    write_rows(tmp_path / "other.jsonl", [make_trajectory(3)])
    assert items(Library(path)) == ["textcraft_1", "textcraft_2"]


def test_what_does_not_exist_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere: no such file or folder"):
        Library(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "content", "is_warned"),
    [("notes.txt", "", True), ("pairs.jsonl", '{"chosen": []}\n', True), ("run/metrics.jsonl", "", False)],
)
def test_a_folder_without_runs_is_said_at_once_with_what_is_looked_for(
    tmp_path: Path,
    name: str,
    content: str,
    is_warned: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("agentgym_rl.envs.serving.Server.run", lambda server, sockets: sockets[0].close())
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(content)
    assert main(["view", str(tmp_path), "--port", "0"]) == 0
    said = capsys.readouterr().err
    assert (f"warning: no run in {tmp_path} yet: looked for metrics.jsonl" in said) is is_warned


def test_a_torn_last_row_is_left_until_it_is_whole_and_read_rows_keep_their_names(tmp_path: Path) -> None:
    path = tmp_path / "step1" / "0.jsonl"
    path.parent.mkdir()
    second = row(2)
    path.write_bytes(row(1) + second[:100])
    library = Library(tmp_path)
    assert items(library) == ["textcraft_1"]
    assert library.progress().is_complete and library.problems() == []
    [before] = library.summaries()
    with path.open("ab") as file:
        file.write(second[100:] + row(3)[:-1])  # the last one whole, but for its line's end
    assert items(library) == ["textcraft_1", "textcraft_2", "textcraft_3"]
    with path.open("ab") as file:
        file.write(b"\n" + row(4))
    assert items(library) == [f"textcraft_{index}" for index in (1, 2, 3, 4)]
    assert library.find(before.id) == before
    for summary in library.summaries():
        content = library.read_row(summary.id)
        assert content is not None and json.loads(content)["item_id"] == summary.item_id


def test_only_what_was_appended_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_rows(tmp_path / "0.jsonl", [make_trajectory(index) for index in range(20)])
    library = Library(tmp_path)
    library.refresh()
    read: list[tuple[int, int]] = []
    take = Library._take
    monkeypatch.setattr(
        Library, "_take", lambda self, file, line: (read.append((file.offset, len(line))), take(self, file, line))
    )
    size = path.stat().st_size
    write_rows(path, [make_trajectory(20)], mode="a")
    assert len(items(library)) == 21
    assert [offset for offset, _ in read] == [size]


@pytest.mark.parametrize("in_place", [True, False])
def test_a_file_that_was_written_anew_is_read_anew(tmp_path: Path, in_place: bool) -> None:
    """As when a run that died goes on: its steps' files are removed and made again, perhaps longer than before."""
    path = write_rows(tmp_path / "step1/0.jsonl", [make_trajectory(1), make_trajectory(2)])
    library = Library(tmp_path)
    assert items(library) == ["textcraft_1", "textcraft_2"]
    if not in_place:
        path.unlink()
    longer = [make_trajectory(index, turns=[("hm", "look", "nothing " * 40)]) for index in (5, 6, 7)]
    write_rows(path, longer)
    assert items(library) == ["textcraft_5", "textcraft_6", "textcraft_7"]
    write_rows(path, [make_trajectory(8)])  # and shorter
    assert items(library) == ["textcraft_8"]
    shutil.rmtree(path.parent)
    assert items(library) == []


def test_unreadable_rows_are_counted_named_and_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "0.jsonl"
    path.write_bytes(row(1) + b"{not json}\n[1, 2]\n\n" + b'{"item_id": "x_1"}\n' + b"\xff\xfe\n" + row(2) + b'{"ite')
    (tmp_path / "empty.jsonl").touch()
    library = Library(tmp_path)
    assert items(library) == ["textcraft_1", "textcraft_2"]
    [problem] = library.problems()
    assert problem.startswith("0.jsonl: 3 unreadable rows, the first: line 2: ")
    assert library.progress().is_complete


def test_files_of_other_things_are_passed_over_in_silence(tmp_path: Path) -> None:
    write_rows(tmp_path / "a/pairs.jsonl", [{"item_id": "maze_1", "chosen": [], "rejected": []}])
    write_rows(tmp_path / "b/0.jsonl", [make_trajectory(1)])
    library = Library(tmp_path)
    assert items(library) == ["textcraft_1"]
    assert library.problems() == [] and library.runs() == ["b"] and library.progress().is_complete


def test_deeply_nested_rows_are_unreadable_and_no_more(tmp_path: Path) -> None:
    (tmp_path / "0.jsonl").write_bytes(
        b'{"item_id":"a_1","conversations":[],"extra":' + b"[" * 100_000 + b"\n" + row(1)
    )
    library = Library(tmp_path)
    assert items(library) == ["textcraft_1"]
    assert len(library.problems()) == 1


def test_rows_with_numbers_that_are_not_finite_are_read(tmp_path: Path) -> None:
    fields = to_row(make_trajectory(1)) | {"rollout_log_probs": [float("nan")] * 3, "duration_s": float("inf")}
    (tmp_path / "0.jsonl").write_text(json.dumps(fields, allow_nan=True).replace("Infinity", "1.0") + "\n")
    assert items(Library(tmp_path)) == ["textcraft_1"]


@pytest.mark.parametrize("name", ["item_id", "uid", "category", "error"])
def test_rows_with_half_a_surrogate_pair_are_read(tmp_path: Path, name: str) -> None:
    (tmp_path / "0.jsonl").write_text(json.dumps(to_row(make_trajectory(1)) | {name: "half \ud800"}) + "\n")
    library = Library(tmp_path)
    library.refresh()
    [summary] = library.summaries()
    assert getattr(summary, name) == "half ?" and library.problems() == []


def test_a_last_row_in_pythons_dialect_is_whole_without_its_line_feed(tmp_path: Path) -> None:
    fields = to_row(make_trajectory(1)) | {"duration_s": float("nan"), "error": "half \ud800"}
    (tmp_path / "0.jsonl").write_text(json.dumps({**fields, "duration_s": 1.0, "extra": {"x": float("nan")}}))
    assert items(Library(tmp_path)) == ["textcraft_1"]


def test_metrics_of_other_programs_are_read_as_far_as_they_have_steps(tmp_path: Path) -> None:
    lines = ['{"step": 1, "loss": NaN}', '{"step": true}', '{"step": 1.5}', '{"step": 2, "loss": 0.5}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    library = Library(tmp_path)
    library.refresh()
    metrics = library.metrics(".")
    assert metrics is not None and metrics.rows == [{"step": 1, "loss": None}, {"step": 2, "loss": 0.5}]
    assert library.problems() == ["metrics.jsonl: 2 unreadable rows, the first: line 2: the row has no step"]


def test_conversations_without_turns_or_tokens_are_shown_too(tmp_path: Path) -> None:
    said = [{"from": "human", "value": "Go."}, {"from": "gpt", "value": "Action: north", "loss": True}]
    write_rows(tmp_path / "expert.jsonl", [{"item_id": "maze_3", "conversations": said}])
    library = Library(tmp_path)
    library.refresh()
    [summary] = library.summaries()
    assert (summary.task, summary.turns, summary.tokens, summary.score, summary.stop_reason) == ("maze", 1, 0, None, "")


def test_faults_have_no_score(tmp_path: Path) -> None:
    fault = make_trajectory(1, stop_reason=StopReason.ENV_ERROR, turns=(), error="EnvTimeout: slow")
    library = Library(write_rows(tmp_path / "0.jsonl", [fault]))
    library.refresh()
    [summary] = library.summaries()
    assert (summary.score, summary.success, summary.stop_reason) == (None, False, "env_error")
    assert summary.error == "EnvTimeout: slow"


def test_metrics_are_followed_and_begin_anew_with_the_run(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(metrics_line(1, 0.1) + metrics_line(2, 0.2) + '{"step": 3, "rol')
    library = Library(tmp_path)
    library.refresh()
    first = library.metrics(".")
    assert first is not None and [row["step"] for row in first.rows] == [1, 2]
    with path.open("a") as file:
        file.write('lout/score_mean": 0.3}\n')
    library.refresh()
    second = library.metrics(".")
    assert second is not None and [row["step"] for row in second.rows] == [1, 2, 3]
    assert second.generation == first.generation
    aside = tmp_path / "aside"
    aside.write_text(metrics_line(1, 0.1) + metrics_line(2, 0.9))
    os.replace(aside, path)
    library.refresh()
    third = library.metrics(".")
    assert third is not None and [row["rollout/score_mean"] for row in third.rows] == [0.1, 0.9]
    assert third.generation > second.generation


def test_a_file_that_vanishes_between_two_looks_has_no_rows(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "0.jsonl", [make_trajectory(1)])
    library = Library(tmp_path)
    library.refresh()
    [summary] = library.summaries()
    path.unlink()
    assert library.read_row(summary.id) is None
    assert list(library.read_rows({summary.id})) == []


def test_links_out_of_the_folder_are_not_followed(tmp_path: Path) -> None:
    secret = write_rows(tmp_path / "outside" / "secret.jsonl", [make_trajectory(9)])
    inside = tmp_path / "inside"
    write_rows(inside / "0.jsonl", [make_trajectory(1)])
    (inside / "link.jsonl").symlink_to(secret)
    (inside / "folder").symlink_to(secret.parent)
    (inside / "here.jsonl").symlink_to(inside / "0.jsonl")
    assert items(Library(inside)) == ["textcraft_1", "textcraft_1"]


def test_reading_stops_when_its_time_is_over_and_goes_on_later(tmp_path: Path) -> None:
    for step in range(5):
        write_rows(tmp_path / f"step{step}/0.jsonl", [make_trajectory(step)])
    library = Library(tmp_path)
    library.refresh(budget_s=0)
    assert len(library.summaries()) == 1 and not library.progress().is_complete
    for _ in range(4):
        library.refresh(budget_s=0)
    assert len(library.summaries()) == 5 and library.progress().is_complete


def test_looking_for_files_takes_nothing_of_the_time_for_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for run in range(5):
        write_rows(tmp_path / f"run{run}/0.jsonl", [make_trajectory(run)])
    now = 0.0
    monkeypatch.setattr("agentgym_rl.viewer.library.time.monotonic", lambda: now)
    look = Library._scan

    def look_long(library: Library) -> None:
        nonlocal now
        now += 10.0
        look(library)

    monkeypatch.setattr(Library, "_scan", look_long)
    library = Library(tmp_path)
    library.refresh(budget_s=0.2)
    assert len(library.summaries()) == 5
    now += 39.0
    library.refresh(budget_s=0.2)
    assert now == 49.0  # what takes long is not done again at once
    now += 2.0
    library.refresh(budget_s=0.2)
    assert now == 61.0


@pytest.mark.parametrize("number", ["1", "-1", "00", "\u0660", "9" * 5000, "", "0 ", "0\n"])
def test_names_of_no_trajectory_name_none(tmp_path: Path, number: str) -> None:
    write_rows(tmp_path / "0.jsonl", [make_trajectory(1)])
    library = Library(tmp_path)
    library.refresh()
    [summary] = library.summaries()
    key = summary.id.rpartition("-")[0]
    assert library.find(f"{key}-0") == summary and library.read_row(f"{key}-0") is not None
    assert library.find(f"{key}-{number}") is None and library.read_row(f"{key}-{number}") is None


def test_ten_thousand_trajectories_are_read_in_seconds(tmp_path: Path) -> None:
    line = row(1, turns=[("I think so.", "get 1 log", "Got 1 log.")] * 8)
    for step in range(1, 51):
        folder = tmp_path / f"step{step}"
        folder.mkdir()
        (folder / "0.jsonl").write_bytes(line * 200)
    library = Library(tmp_path)
    began = time.process_time()
    library.refresh()
    assert len(library.summaries()) == 10_000
    assert time.process_time() - began < 10  # about 0.5 s on an idle machine
