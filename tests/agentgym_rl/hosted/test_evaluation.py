"""``agentgym-rl eval``: whole evaluations of a scripted endpoint on a scripted environment."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.chat_server import ChatServer, Scripted, chat_server, says
from support.environments import Script
from support.parity import TASK, parity_spec
from support.servers import serve

from agentgym_rl.cli import main
from agentgym_rl.envs.registry import register
from agentgym_rl.envs.server import build_app
from agentgym_rl.evaluation.results import read_samples, report_on
from agentgym_rl.types import StopReason

pytestmark = pytest.mark.server

Evaluate = Callable[..., int]


def deterministic(number: int, body: dict[str, Any]) -> Scripted:
    """Writes as many letters as the conversation has messages and its last one digits."""
    messages = body["messages"]
    digits = sum(map(int, filter(str.isdigit, messages[-1]["content"])))
    return says("x" * (len(messages) + digits))


@pytest.fixture
def script() -> Script:
    return Script(turns=2)


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with chat_server(deterministic) as server:
        yield server


@pytest.fixture
def evaluate(server: ChatServer, script: Script, tmp_path: Path) -> Iterator[Evaluate]:
    spec = parity_spec(script)
    register(spec)
    data = tmp_path / "data"
    data.mkdir()
    for name, indices in (("even", (0, 2, 4, 6)), ("odd", (1, 3, 5))):
        (data / f"{name}.json").write_text(json.dumps([f"{TASK}_{index}" for index in indices]))
    with serve(build_app(spec)) as url:

        def run(*options: str, out: str = "out") -> int:
            arguments = [
                *("--api-base", server.url, "--model", "scripted", "--task", TASK, "--env-addr", url),
                *("--data", str(data), "--out", str(tmp_path / out), "--max-rounds", "4", "--n-samples", "2"),
            ]
            return main(["eval", *arguments, *options])

        yield run


def test_the_same_files_and_figures_as_of_a_model_of_ones_own(
    evaluate: Evaluate, server: ChatServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate("--price-in", "1", "--price-out", "2") == 0
    report = report_on(tmp_path / "out")
    assert (report.overall.num_items, report.num_trajectories, report.k) == (7, 14, 2)
    assert [scores.name for scores in report.categories] == ["even", "odd"]
    assert [ending.reason for ending in report.endings] == [StopReason.DONE] and 0 < report.overall.avg < 1
    assert report.usage is not None and report.usage.answers == len(server.requests) == 28
    assert report.cost == pytest.approx((280 * 1 + 28 * 3 * 2) / 1e6)
    printed = capsys.readouterr().out
    assert "7 items x 2 samples = 14 trajectories" in printed and "280 prompt tokens (112 of them cached)" in printed
    [trajectory, *_] = read_samples(tmp_path / "out")
    assert trajectory.num_tokens == 0 and len(trajectory.messages) == 6  # opening of 3, turn, observation, turn
    rows = (tmp_path / "out" / "trajectories" / "0.jsonl").read_text()
    assert server.url in (tmp_path / "out" / "settings.json").read_text() and "input_ids" in rows


def test_an_evaluation_that_was_killed_goes_on_and_asks_for_nothing_twice(
    evaluate: Evaluate, server: ChatServer, tmp_path: Path
) -> None:
    evaluate()
    path = tmp_path / "out" / "trajectories" / "0.jsonl"
    whole, lines = report_on(tmp_path / "out"), path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:5]) + lines[5][:30])
    server.requests.clear()
    assert evaluate() == 0
    again = report_on(tmp_path / "out")
    assert (again.overall, again.categories, again.endings) == (whole.overall, whole.categories, whole.endings)
    assert len(server.requests) == 2 * 9 and again.usage is not None and again.usage.answers == 28 + 18
    counts = Counter((t.item.item_id, t.sample_index) for t in read_samples(tmp_path / "out"))
    assert len(counts) == 14 and set(counts.values()) == {1}


def test_one_trajectory_at_a_time_and_many_give_the_same_figures(evaluate: Evaluate, tmp_path: Path) -> None:
    evaluate("--concurrency", "1", out="one")
    evaluate("--concurrency", "8", out="many")
    one, many = (report_on(tmp_path / name) for name in ("one", "many"))
    assert (one.overall, one.categories, one.endings) == (many.overall, many.categories, many.endings)


def test_results_of_another_model_are_not_mixed_in_and_the_key_is_nowhere(
    evaluate: Evaluate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MY_KEY", "very-secret")
    assert evaluate("--api-key-env", "MY_KEY") == 0
    assert evaluate("--model", "other", "--api-key-env", "MY_KEY") == 1
    said = capsys.readouterr()
    assert "model='other': " in said.err and "holds results made with 'scripted'" in said.err
    written = "".join(path.read_text() for path in tmp_path.rglob("*.json*"))
    assert "very-secret" not in written + said.out + said.err


def test_a_wrong_key_ends_it_with_one_line(
    evaluate: Evaluate, server: ChatServer, script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answer = lambda number, body: Scripted(401, {"error": "bad key"})
    assert evaluate("--concurrency", "1") == 1
    error = capsys.readouterr().err
    assert "HTTP 401" in error and "--api-key-env names the variable" in error and error.count("\n") == 1
    assert script.open == 0


def test_sigterm_closes_all_sessions_and_leaves_what_is_there_to_go_on_from(
    evaluate: Evaluate, server: ChatServer, script: Script, tmp_path: Path
) -> None:
    def ends_it(number: int, body: dict[str, Any]) -> Scripted:
        if number == 9:
            os.kill(os.getpid(), signal.SIGTERM)
        return deterministic(number, body)

    server.answer = ends_it
    assert evaluate("--concurrency", "2") == 130
    assert script.open == 0
    done = len(read_samples(tmp_path / "out"))
    assert 0 < done < 14
    assert evaluate() == 0
    assert report_on(tmp_path / "out").num_trajectories == 14


def test_no_server_at_the_models_address_is_said_at_once(
    evaluate: Evaluate, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate("--api-base", "http://127.0.0.1:9/v1") == 1
    assert "--api-base http://127.0.0.1:9/v1: no server answers there" in capsys.readouterr().err


def test_a_key_that_was_named_must_be_there_and_other_input_must_fit(
    evaluate: Evaluate, capsys: pytest.CaptureFixture[str]
) -> None:
    for options, message in (
        (["--api-key-env", "NOT_SET"], "NOT_SET: this environment variable holds the model's key, and is not set"),
        (["--api-base", "localhost:8000"], "--api-base 'localhost:8000': must be a URL"),
        (["--price-in", "1"], "--price-in and --price-out go together"),
        (["--task", "textcraft"], "2 --task and 1 --env-addr"),
        (["--n-samples", "0"], "--n-samples 0: must be at least 1"),
        (["--agent", "reakt"], "did you mean react?"),
    ):
        assert evaluate(*options) == 1
        assert message in capsys.readouterr().err


def test_a_trajectory_that_the_model_did_not_finish_is_masked_and_done_by_the_next_run(
    evaluate: Evaluate, server: ChatServer, tmp_path: Path
) -> None:
    server.answer = lambda number, body: (
        Scripted(400, {"error": "too long"}) if "item 3" in str(body["messages"]) else deterministic(number, body)
    )
    assert evaluate() == 0
    report = report_on(tmp_path / "out")
    assert (report.num_faults, report.overall.num_items, report.faults_by_type) == (2, 6, {"EngineError": 2})
    server.answer = deterministic
    assert evaluate() == 0
    report = report_on(tmp_path / "out")
    assert (report.num_faults, report.overall.num_items) == (0, 7)


FULL = {
    "by code": {"error": {"message": "shorten it", "code": "context_length_exceeded"}},
    "by words": {"error": {"message": "This model's maximum context length is 8192 tokens.", "code": None}},
}


@pytest.mark.parametrize("status", [400, 413])
@pytest.mark.parametrize("content", FULL.values(), ids=FULL)
def test_a_conversation_that_fills_the_models_context_ends_as_a_result(
    evaluate: Evaluate, server: ChatServer, script: Script, tmp_path: Path, content: Any, status: int
) -> None:
    def answer(number: int, body: dict[str, Any]) -> Scripted:
        is_full = len(body["messages"]) > 3 and "item 3" in str(body["messages"])
        return Scripted(status, content) if is_full else says("xx")

    server.answer = answer
    assert evaluate() == 0
    report = report_on(tmp_path / "out")
    assert (report.num_faults, report.num_trajectories, report.overall.avg) == (0, 14, pytest.approx(6 / 7))
    assert {ending.reason: ending.count for ending in report.endings} == {StopReason.DONE: 12, StopReason.LENGTH: 2}
    assert len(server.requests) == 28 and script.open == 0
    [first, _] = [t for t in read_samples(tmp_path / "out") if t.item.index == 3]
    assert (first.stop_reason, first.score, first.success, first.error, first.attempt) == ("length", 0, False, "", 1)
    assert [turn.observation for turn in first.turns] == ["item 3 step 1"]
    assert [message.role for message in first.messages[2:]] == ["user", "assistant", "user"]
    assert evaluate() == 0 and len(server.requests) == 28


@pytest.mark.parametrize("agent", ["react", "plan"])
@pytest.mark.parametrize("status", [400, 413])
def test_a_prompt_that_the_model_does_not_take_ends_it_and_names_the_item(
    evaluate: Evaluate,
    server: ChatServer,
    script: Script,
    capsys: pytest.CaptureFixture[str],
    status: int,
    agent: str,
) -> None:
    server.answer = lambda number, body: (
        Scripted(status, FULL["by words"]) if "item 3" in str(body["messages"]) else deterministic(number, body)
    )
    assert evaluate("--agent", agent) == 1
    error = capsys.readouterr().err
    assert f"item {TASK}_3: its prompt leaves the model no room for an answer: scripted at " in error
    assert f"HTTP {status}" in error and error.count("\n") == 1 and script.open == 0


@pytest.mark.parametrize(
    ("is_full", "stop_reasons", "num_requests"),
    [
        (lambda messages: len(messages) == 5, [StopReason.LENGTH], 2),
        (lambda messages: "differently" in messages[-1]["content"], [StopReason.DONE], 3),
        (lambda messages: "Be even." in messages[2]["content"], [StopReason.DONE, StopReason.LENGTH], 4),
    ],
    ids=["in a turn", "in the reflection", "in the next trial's prompt"],
)
def test_an_agent_that_reflects_ends_where_the_models_context_is_full(
    evaluate: Evaluate,
    server: ChatServer,
    tmp_path: Path,
    is_full: Callable[[list[dict[str, str]]], bool],
    stop_reasons: list[StopReason],
    num_requests: int,
) -> None:
    def answer(number: int, body: dict[str, Any]) -> Scripted:
        messages = body["messages"]
        if is_full(messages):
            return Scripted(400, FULL["by code"])
        return says("Be even." if "differently" in messages[-1]["content"] else "x")

    server.answer = answer
    assert evaluate("--agent", "reflect", "--max-trials", "2", "--n-samples", "1") == 0
    rows = [json.loads(row) for row in (tmp_path / "out" / "trajectories" / "0.jsonl").read_text().splitlines()]
    for index in range(7):
        assert [row["stop_reason"] for row in rows if row["item_id"] == f"{TASK}_{index}"] == stop_reasons
    assert report_on(tmp_path / "out").num_faults == 0 and len(server.requests) == 7 * num_requests


@pytest.mark.parametrize("finish_reason", ["error", "abort", "content_filter"])
def test_an_answer_that_the_models_server_did_not_finish_is_never_a_score_of_0(
    evaluate: Evaluate, server: ChatServer, tmp_path: Path, finish_reason: str
) -> None:
    server.answer = lambda number, body: (
        says("", finish_reason=finish_reason) if "item 3" in str(body["messages"]) else says("xx")
    )
    assert evaluate("--max-retries", "0") == 0
    report = report_on(tmp_path / "out")
    assert (report.num_faults, report.overall.avg, report.faults_by_type) == (2, 1.0, {"EngineError": 2})


def test_an_agent_that_reflects_tries_again_with_what_it_wrote(
    evaluate: Evaluate, server: ChatServer, tmp_path: Path
) -> None:
    def reflects(number: int, body: dict[str, Any]) -> Scripted:
        return says("Be even." if "differently" in body["messages"][-1]["content"] else "x")

    server.answer = reflects
    assert evaluate("--agent", "reflect", "--max-trials", "2", "--n-samples", "1") == 0
    samples = read_samples(tmp_path / "out")
    assert [trajectory.num_trials for trajectory in samples] == [2] * 7
    assert "Be even." in samples[0].messages[2].content
