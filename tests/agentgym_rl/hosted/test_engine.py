"""A hosted model as an engine, against an endpoint that misbehaves in every way that one may."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest
from support.chat_server import ChatServer, Scripted, chat_server, says

from agentgym_rl.errors import ConfigError, EngineError
from agentgym_rl.evaluation.usage import Prices, UsageLog, read_usage
from agentgym_rl.hosted.characters import character_chat, messages_of
from agentgym_rl.hosted.endpoint import Endpoint, HostedModel
from agentgym_rl.hosted.engine import HostedEngine, Pace
from agentgym_rl.types import FinishReason, Generation, Message, Role, SamplingParams

OPENING = (Message(Role.USER, "Rules."), Message(Role.ASSISTANT, "OK."), Message(Role.USER, "You see: <|end|> ü\n"))
Ask = Callable[..., Generation]


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with chat_server(lambda number, body: says("Action: look")) as server:
        yield server


@pytest.fixture
def ask(server: ChatServer, tmp_path: Path) -> Ask:
    """One turn after the opening; options are those of the engine or of the model."""

    def run(*, max_retries: int = 3, pace: Pace | None = None, seed: int | None = None, **model: Any) -> Generation:
        async def once() -> Generation:
            with UsageLog(tmp_path / "usage.jsonl") as usage:
                hosted = HostedModel(**{"api_base": server.url, "model": "m", **model})
                engine = HostedEngine(
                    Endpoint(hosted),
                    usage,
                    max_in_flight=4,
                    max_retries=max_retries,
                    pace=pace,
                    first_wait_s=0.01,
                )
                try:
                    prompt = character_chat().encode_prompt(OPENING)
                    sampling = SamplingParams(max_tokens=1000, seed=seed)
                    return await engine.generate(prompt.ids, sampling, trajectory_id="t")
                finally:
                    engine.close()

        return asyncio.run(once())

    return run


def text_of(generation: Generation) -> str:
    return character_chat().decode(generation.token_ids)


def test_a_record_becomes_the_messages_that_it_was_made_of() -> None:
    chat = character_chat()
    ids = [*chat.encode_prompt(OPENING).ids, *chat.encode_answer("Action: go"), *chat.encode_observation("gone", 4).ids]
    assert messages_of(ids) == [*OPENING, Message(Role.ASSISTANT, "Action: go"), Message(Role.USER, "gone")]


def test_the_model_gets_the_conversation_and_its_text_comes_back(ask: Ask, server: ChatServer) -> None:
    generation = ask(key="secret", max_tokens=77, temperature=0.5, body={"top_k": 20, "top_p": None})
    assert text_of(generation) == "Action: look" and generation.finish_reason == FinishReason.STOP
    assert generation.token_ids[-1] == character_chat().end_of_turn_id
    [request] = server.requests
    messages = [{"role": str(message.role), "content": message.content} for message in OPENING]
    assert request == {"model": "m", "messages": messages, "max_tokens": 77, "temperature": 0.5, "top_k": 20}
    assert server.headers[0]["Authorization"] == "Bearer secret"


def test_without_a_key_none_is_sent_not_even_that_of_the_environments(
    ask: Ask, server: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTGYM_TOKEN", "of-the-environments")
    ask()
    assert "Authorization" not in server.headers[0]


def test_a_turn_that_is_cut_and_one_without_text_are_told_apart_from_whole_ones(ask: Ask, server: ChatServer) -> None:
    server.answer = lambda number, body: says("Action: lo", finish_reason="length")
    generation = ask()
    assert generation.finish_reason == FinishReason.LENGTH and text_of(generation) == "Action: lo"
    assert generation.token_ids[-1] == ord("o")
    server.answer = lambda number, body: says(None)
    assert ask().token_ids == (character_chat().end_of_turn_id,)
    parts = [{"type": "text", "text": "Action: "}, {"type": "text", "text": "go"}]
    server.answer = lambda number, body: says(parts)
    assert text_of(ask()) == "Action: go"


def test_half_a_character_is_replaced_so_that_files_and_servers_take_the_answer(
    ask: Ask, server: ChatServer, tmp_path: Path
) -> None:
    answer = b'{"model": "\\udc00", "choices": [{"message": {"content": "go \\ud800 \\ud83d\\ude00"}}]}'
    server.answer = lambda number, body: Scripted(200, answer)
    text = text_of(ask())
    assert text.encode().decode() == text and text.startswith("go ") and text.endswith(" \N{GRINNING FACE}")
    (tmp_path / "usage.jsonl").read_text(encoding="utf-8").encode()


FAULTS = {
    "overload": Scripted(429, {"error": {"message": "slow down"}}),
    "fault": Scripted(500, b"oops"),
    "bad gateway": Scripted(502, b"<html>"),
    "not JSON": Scripted(200, b"{"),
    "another form": Scripted(200, {"choices": []}),
    "a list": Scripted(200, []),
    "beyond all depth": Scripted(200, b"[" * 100_000),
    "endless tokens": Scripted(200, b'{"choices": [{"message": {"content": "x"}}], "usage": {"prompt_tokens": 1e999}}'),
    "dropped": Scripted(drops=True),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_what_may_pass_is_asked_again_and_given_up_in_the_end(ask: Ask, server: ChatServer, fault: Scripted) -> None:
    server.answer = lambda number, body: fault if number < 3 else says("Action: look")
    assert text_of(ask()) == "Action: look"
    assert len(server.requests) == 4 and all(request == server.requests[0] for request in server.requests)
    server.answer = lambda number, body: fault
    with pytest.raises(EngineError, match=r"m at http://.*/v1/chat/completions: .*\(tries: 4\)"):
        ask()
    assert len(server.requests) == 8


def test_an_answer_that_comes_too_late_is_asked_for_again(ask: Ask, server: ChatServer) -> None:
    late = Scripted(200, says("late").content, delay_s=1.0)
    server.answer = lambda number, body: late if number == 0 else says("in time")
    assert text_of(ask(timeout_s=0.3)) == "in time"


@pytest.mark.parametrize("form", ["seconds", "date"])
def test_the_time_that_the_server_names_is_waited_for_by_all(
    ask: Ask, server: ChatServer, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    held: list[float] = []
    monkeypatch.setattr(Pace, "hold", lambda self, seconds: held.append(seconds))
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=40), usegmt=True)
    refusal = Scripted(429, {}, headers={"Retry-After": "40" if form == "seconds" else date})
    server.answer = lambda number, body: refusal if number == 0 else says("Action: look")
    ask()
    assert held == [pytest.approx(40, abs=5)]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (Scripted(401, {"error": "bad key"}), r"HTTP 401: .*bad key.* \(the key is taken from MY_KEY\)"),
        (Scripted(404, {"error": "no such model"}), "HTTP 404: .*no such model"),
        (Scripted(429, {"error": {"code": "insufficient_quota"}}), "HTTP 429: .*insufficient_quota"),
    ],
)
def test_what_no_request_can_pass_ends_the_run_at_once_without_repeating_the_key(
    ask: Ask, server: ChatServer, answer: Scripted, message: str
) -> None:
    server.answer = lambda number, body: answer
    with pytest.raises(ConfigError, match=message) as caught:
        ask(key="secret", key_variable="MY_KEY")
    assert len(server.requests) == 1 and "secret" not in str(caught.value)


def test_a_request_that_is_refused_for_what_it_says_is_a_fault_of_its_trajectory(ask: Ask, server: ChatServer) -> None:
    server.answer = lambda number, body: Scripted(400, {"error": {"code": "context_length_exceeded"}})
    with pytest.raises(EngineError, match=r"HTTP 400: .*context_length_exceeded.* \(tries: 1\)"):
        ask()


def test_a_seed_is_sent_where_it_is_asked_for(ask: Ask, server: ChatServer) -> None:
    ask(seed=2**40 + 5)
    ask(seed=2**40 + 5, sends_seed=True)
    assert [request.get("seed") for request in server.requests] == [None, 5]


def test_requests_and_tokens_per_minute_put_requests_off() -> None:
    now = 100.0
    pace = Pace(requests_per_minute=30, tokens_per_minute=600, clock=lambda: now)
    assert [pace.reserve() for _ in range(3)] == [0, 2, 4]
    pace.spend(50)  # 5 s
    assert pace.reserve() == 11
    now = 200.0
    assert pace.reserve() == 0
    pace.hold(7)
    pace.hold(3)
    assert pace.held_s() == 7


def test_tokens_are_counted_per_answer_over_runs_and_a_torn_line_is_left_out(
    ask: Ask, server: ChatServer, tmp_path: Path
) -> None:
    server.answer = lambda number, body: Scripted(500) if number == 0 else says("x")
    ask()
    with (tmp_path / "usage.jsonl").open("a") as file:
        file.write('{"trajectory": "t", "prom')
    ask()
    usage = read_usage(tmp_path / "usage.jsonl")
    assert (usage.answers, usage.tries, usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (
        2,
        3,
        20,
        8,
        6,
    )
    assert usage.models == ("scripted-2026-01-01",)
    assert usage.cost(Prices(prompt=2.0, completion=10.0)) == pytest.approx((20 * 2 + 6 * 10) / 1e6)
    assert usage.cost(Prices(2.0, 10.0, cached=0.5)) == pytest.approx((12 * 2 + 8 * 0.5 + 6 * 10) / 1e6)
