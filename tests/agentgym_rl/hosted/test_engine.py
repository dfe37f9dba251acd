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

from agentgym_rl.errors import ConfigError, ContextFullError, EngineError
from agentgym_rl.evaluation.usage import Prices, UsageLog, read_usage
from agentgym_rl.hosted.characters import character_chat, messages_of
from agentgym_rl.hosted.endpoint import Endpoint, HostedModel
from agentgym_rl.hosted.engine import HostedEngine, Pace
from agentgym_rl.rollout.requests import make_requests
from agentgym_rl.types import FinishReason, Generation, Item, Message, Role, SamplingParams

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


def ends(finish_reason: Any, text: Any = "", **choice: Any) -> Scripted:
    """An answer whose choice has further fields; half of a text may stand in it."""
    message = {"role": "assistant", "content": text}
    return Scripted(content={"model": "m", "choices": [{"message": message, "finish_reason": finish_reason, **choice}]})


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
    "error as end": ends("error"),
    "error as end of half a text": ends("error", "Action: lo"),
    "error beside an end": ends("stop", error={"code": 502, "message": "Provider returned error"}),
    "error beside an answer": Scripted(content={**says("Action: lo").content, "error": {"code": 502}}),
    "abort": ends("abort", "Action: lo"),
    "out of resources": ends("insufficient_system_resource", "Action: lo"),
    "filtered": ends("content_filter", None),
    "filtered, as parts": ends("content_filter", [{"type": "text", "text": ""}]),
    "unknown end of nothing": ends("SAFETY"),
    "no reason": ends(17, "Action: lo"),
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


@pytest.mark.parametrize(
    ("answer", "finish_reason"),
    [
        (ends("tool_calls", None), FinishReason.STOP),
        (ends("stop", ""), FinishReason.STOP),
        (ends(None, ""), FinishReason.STOP),
        (ends("eos", "Action: lo"), FinishReason.STOP),
        (ends("content_filter", "Action: lo"), FinishReason.STOP),
        (ends("stop", "Action: lo", error=None), FinishReason.STOP),
        (ends("length", ""), FinishReason.LENGTH),
        (ends("model_length", "Action: lo"), FinishReason.LENGTH),
    ],
)
def test_what_the_model_itself_ended_is_a_turn_even_without_a_text(
    ask: Ask, server: ChatServer, answer: Scripted, finish_reason: FinishReason
) -> None:
    server.answer = lambda number, body: answer
    generation = ask()
    text = answer.content["choices"][0]["message"]["content"] or ""
    assert (text_of(generation), generation.finish_reason, len(server.requests)) == (text, finish_reason, 1)


OTHER_REFUSALS = {
    "a wrong parameter": {"error": {"message": "top_k: must be at least 1", "code": "invalid_value", "param": "top_k"}},
    "an unknown parameter": {"error": {"message": "Unknown parameter: 'context_length'.", "code": "unknown_parameter"}},
    "too many tokens a minute": {
        "error": {"message": "Request too large: tokens per minute: Limit 6000", "code": "rate_limit_exceeded"}
    },
    "a body too large": b"<html><title>413 Request Entity Too Large</title></html>",
    "a conversation about it": {"detail": [{"msg": "extra field", "input": "the maximum context length is 10"}]},
    "no object": ["bad"],
    "nothing": b"",
}


@pytest.mark.parametrize("status", [400, 413])
@pytest.mark.parametrize("content", OTHER_REFUSALS.values(), ids=OTHER_REFUSALS)
def test_a_request_that_is_refused_for_what_it_says_is_a_fault_of_its_trajectory(
    ask: Ask, server: ChatServer, content: Any, status: int
) -> None:
    server.answer = lambda number, body: Scripted(status, content)
    with pytest.raises(EngineError, match=rf"HTTP {status}: .*\(tries: 1\)") as caught:
        ask()
    assert not isinstance(caught.value, ContextFullError)


_OPENAI_WORDS = "This model's maximum context length is 8192 tokens. However, your messages resulted in 8300 tokens."
FULL = {
    "code alone": {"error": {"code": "context_length_exceeded"}},
    "code and words": {"error": {"message": _OPENAI_WORDS, "code": "context_length_exceeded", "param": "messages"}},
    "words and no code": {"error": {"message": _OPENAI_WORDS, "type": "invalid_request_error", "code": None}},
    "words and the status as code": {"error": {"message": _OPENAI_WORDS, "type": "BadRequestError", "code": 400}},
    "error not wrapped": {"object": "error", "message": _OPENAI_WORDS, "code": 400},
    "error a text": {"error": "Your input exceeds the context window of this model."},
    "error a heading": {"error": "Bad Request", "message": _OPENAI_WORDS},
    "a list": [
        {"error": {"message": "The input token count (9000) exceeds the maximum number of tokens allowed (8192)."}}
    ],
    "detail": {"detail": "Input length (5000) exceeds model's maximum context length (4096)."},
    "type": {"error": {"message": "try a shorter one", "type": "exceed_context_size_error", "n_ctx": 256}},
    "size": {"error": {"message": "request (4390 tokens) exceeds the available context size (4096 tokens)"}},
    "limit": {"error": {"message": "input length and `max_tokens` exceed context limit: 199000 + 8192 > 200000"}},
    "prompt": {"error": {"message": "prompt is too long: 210000 tokens > 200000 maximum", "type": "invalid_request"}},
    "model length": {"message": "The decoder prompt (length 50) is longer than the maximum model length of 40."},
    "a proxy's class": {"error": {"message": "litellm.ContextWindowExceededError: BadRequestError", "code": "400"}},
    "passed on": {"error": {"message": "Provider returned error", "metadata": {"raw": f'{{"m": "{_OPENAI_WORDS}"}}'}}},
    "inputs": {"error": "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4096. Given: 4090"},
    "plain text": _OPENAI_WORDS.encode(),
}


@pytest.mark.parametrize("status", [400, 413])
@pytest.mark.parametrize("content", FULL.values(), ids=FULL)
def test_a_conversation_beyond_the_models_context_is_told_apart_and_asked_for_once(
    ask: Ask, server: ChatServer, content: Any, status: int
) -> None:
    server.answer = lambda number, body: Scripted(status, content)
    with pytest.raises(ContextFullError, match=rf"m at http://.*: HTTP {status}: "):
        ask()
    assert len(server.requests) == 1


def test_a_code_that_says_so_counts_with_any_status_and_words_do_not(ask: Ask, server: ChatServer) -> None:
    server.answer = lambda number, body: Scripted(500, FULL["type"])
    with pytest.raises(ContextFullError, match=r"HTTP 500: .*\(tries: 1\)"):
        ask()
    server.answer = lambda number, body: Scripted(500, FULL["words and no code"])
    with pytest.raises(EngineError, match=r"HTTP 500: .*\(tries: 4\)"):
        ask()


def test_half_an_answer_about_contexts_is_no_word_of_the_servers(ask: Ask, server: ChatServer) -> None:
    server.answer = lambda number, body: Scripted(200, b'{"choices": [{"message": {"content": "maximum context length')
    with pytest.raises(EngineError, match="tries: 4") as caught:
        ask()
    assert not isinstance(caught.value, ContextFullError)


def test_a_seed_is_sent_where_it_is_asked_for_and_each_bit_of_it_counts(ask: Ask, server: ChatServer) -> None:
    ask(seed=2**40 + 5)
    seeds = [0, *(1 << bit for bit in range(63))]
    for seed in [*seeds, *seeds]:
        ask(seed=seed, sends_seed=True)
    assert "seed" not in server.requests[0]
    sent = [request["seed"] for request in server.requests[1:]]
    assert sent[:64] == sent[64:] and len(set(sent)) == 64 and all(0 <= seed < 2**31 for seed in sent)


def test_no_two_of_many_items_turns_share_a_seed() -> None:
    """A turn's seed is the sample's, moved up by 16 bits, and the turn's number."""
    requests = make_requests([Item("textcraft", index) for index in range(300)], n=1, purpose="eval", seed=0)
    model = HostedModel("http://127.0.0.1:9", "m", sends_seed=True)
    turns = [(request.seed * 65536 + turn) % 2**63 for request in requests if request.seed for turn in range(4)]
    assert len({model.request((), seed)["seed"] for seed in turns}) == 1200


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
