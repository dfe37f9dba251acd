"""The collector: stop reasons, faults as data, late answers, sessions."""

from __future__ import annotations

import asyncio
import json
import math
import sys
import threading
import time
from collections import Counter
from contextlib import nullcontext

import numpy as np
import pytest
from support.rollouts import (
    BrokenEngine,
    ScriptedClient,
    ScriptedEngine,
    ends_after,
    frameless_chat,
    make_limits,
    make_requests,
    make_settings,
)
from support.tokenizers import make_tokenizer

from agentgym_rl.agent.chat import ChatTemplate
from agentgym_rl.errors import ConfigError, ContextFullError, EnvServerError, EnvTimeout, TooManyFailures
from agentgym_rl.rollout.collector import check_failures, collect, count_errors
from agentgym_rl.rollout.log import TrajectoryLog, read_trajectories, to_row
from agentgym_rl.rollout.statistics import rollout_metrics, stop_reason_shares
from agentgym_rl.types import SamplingParams, StepOutput, StopReason


@pytest.fixture(scope="module")
def chat() -> ChatTemplate:
    return ChatTemplate(make_tokenizer())


def roll_out(requests, chat, script, *, engine=None, log=None, on_finished=None, **settings):
    """Collect with an environment in this process."""
    log = [] if log is None else log
    return asyncio.run(
        collect(
            requests,
            engine or ScriptedEngine(chat),
            make_client=lambda: ScriptedClient(script, log),
            chat=chat,
            settings=make_settings(**settings),
            on_finished=on_finished,
        )
    )


def test_trajectories_come_back_in_the_order_of_their_requests(chat):
    def script(item, step, text):
        time.sleep(0.02 * (4 - item) if step == 0 else 0)
        return ends_after(2)(item, step, text)

    finished = []
    trajectories = roll_out(make_requests(range(4), n=2), chat, script, on_finished=finished.append)
    assert [(t.item.index, t.sample_index) for t in trajectories] == [(i, s) for i in range(4) for s in range(2)]
    assert {t.stop_reason for t in trajectories} == {StopReason.DONE}
    assert [t.score for t in trajectories] == [1.0] * 8
    assert sorted(map(id, finished)) == sorted(map(id, trajectories))
    assert collect_nothing(chat) == []


def collect_nothing(chat):
    return roll_out([], chat, ends_after(1))


def test_the_record_of_a_rollout_is_what_the_engine_was_given_and_gave(chat):
    engine = ScriptedEngine(chat)
    (trajectory,) = roll_out(make_requests([3]), chat, ends_after(3), engine=engine)
    for turn, (_, prompt_ids, sampling) in enumerate(engine.requests):
        start = len(prompt_ids)
        sampled = list(chat.encode_answer(f"Action: {turn}"))
        assert trajectory.input_ids[:start].tolist() == prompt_ids
        assert trajectory.input_ids[start : start + len(sampled)].tolist() == sampled
        assert sampling.stop_token_ids == chat.stop_token_ids
    assert [message.content for message in trajectory.messages[2:]] == [
        "observation 0 of 3",
        *("Action: 0", "observation 1 of 3", "Action: 1", "observation 2 of 3", "Action: 2"),
    ]
    assert [turn.observation for turn in trajectory.turns] == [f"observation {step} of 3" for step in (1, 2, 3)]
    assert engine.released == [engine.requests[0][0]]


def test_every_trajectory_has_exactly_one_stop_reason_and_the_shares_are_logged(chat):
    def script(item, step, text):
        if item == 3 and step == 1:
            raise EnvServerError("toy_3 step 1: HTTP 500")
        if item == 2 and step == 1:
            return StepOutput("word " * 20_000, 0.0, False)
        return StepOutput("seen", 0.0, item == 0 and step == 2)

    trajectories = roll_out(make_requests(range(4)), chat, script, max_rounds=3)
    reasons = [t.stop_reason for t in trajectories]
    assert reasons == [StopReason.DONE, StopReason.MAX_ROUNDS, StopReason.LENGTH, StopReason.ENV_ERROR]
    assert [len(t.turns) for t in trajectories[:3]] == [2, 3, 1]
    shares = stop_reason_shares(trajectories)
    assert shares == {reason: (0.25 if reason in reasons else 0.0) for reason in StopReason}
    metrics = rollout_metrics(trajectories)
    assert metrics["rollout/stop/length"] == 0.25
    assert metrics["rollout/errors/EnvServerError"] == 1
    assert metrics["rollout/turns_mean"] == 2.0


def test_no_request_is_sent_when_no_token_is_left():
    chat = frameless_chat()
    engine = ScriptedEngine(chat, lambda turn: "x" * 39)
    limits = make_limits(max_response_length=100, max_tokens=40)

    def script(item, step, text):
        return StepOutput("" if step else "start", 0.0, False)

    (trajectory,) = roll_out(make_requests([1]), chat, script, engine=engine, limits=limits)
    assert [sampling.max_tokens for _, _, sampling in engine.requests] == [40, 40, 20]
    assert [turn.num_tokens for turn in trajectory.turns] == [40, 40, 20]
    assert trajectory.stop_reason == StopReason.LENGTH
    assert not trajectory.masked


class FullEngine(ScriptedEngine):
    """Takes sequences of less than so many tokens."""

    def __init__(self, chat, answer, size):
        super().__init__(chat, answer)
        self.size = size

    async def generate(self, prompt_ids, sampling, *, trajectory_id):
        if len(prompt_ids) >= self.size:
            raise ContextFullError("too long")
        return await super().generate(prompt_ids, sampling, trajectory_id=trajectory_id)


def test_a_model_whose_context_is_full_leaves_the_record_that_a_token_budget_does():
    chat = frameless_chat()

    def script(item, step, text):
        return StepOutput("" if step else "start", 0.25, False)

    def play(max_response_length, size):
        engine = FullEngine(chat, lambda turn: "x" * 39, size)
        limits = make_limits(max_response_length=max_response_length, max_tokens=40)
        (trajectory,) = roll_out(make_requests([1]), chat, script, engine=engine, limits=limits)
        return trajectory

    budget = play(80, size=10_000)
    full = play(1000, size=budget.num_tokens)
    for name in ("stop_reason", "attempt", "messages", "parts", "score", "success", "error", "prompt_length"):
        assert getattr(full, name) == getattr(budget, name), name
    for name in ("input_ids", "loss_mask", "sequence_ids", "rollout_log_probs", "token_rewards"):
        assert np.array_equal(getattr(full, name), getattr(budget, name)), name
    assert full.stop_reason == StopReason.LENGTH and full.score == 0.5
    assert [(turn.num_tokens, turn.observation) for turn in full.turns] == [(40, ""), (40, "")]
    with pytest.raises(ConfigError, match="item toy_1: its prompt leaves the model no room for an answer: too long"):
        play(1000, size=1)


def test_a_prompt_that_is_too_long_ends_the_run_and_names_the_item(chat):
    log: list[str] = []
    with pytest.raises(ConfigError, match="item toy_4: its prompt has"):
        roll_out(make_requests([4]), chat, ends_after(1), limits=make_limits(max_prompt_length=5), log=log)
    assert log.count("open") == log.count("close") == 1


def test_a_programming_error_travels_up_and_all_sessions_are_closed(chat):
    class Buggy(ScriptedEngine):
        async def generate(self, prompt_ids, sampling, *, trajectory_id):
            raise TypeError("a bug of ours")

    log: list[str] = []
    with pytest.raises(TypeError, match="a bug of ours"):
        roll_out(make_requests(range(3)), chat, ends_after(1), engine=Buggy(chat), log=log)
    assert log.count("open") == log.count("close")


def test_whatever_a_users_client_raises_fails_only_its_trajectory(chat):
    def script(item, step, text):
        if item == 1 and step:
            return {}["observation"]
        return ends_after(1)(item, step, text)

    sound, broken = roll_out(make_requests([0, 1]), chat, script)
    assert not sound.masked
    assert broken.stop_reason == StopReason.ENV_ERROR
    assert broken.error == "KeyError: toy_1 turn 1 at http://toy: 'observation'"


def test_a_users_client_that_lets_a_stop_iteration_out_is_not_waited_for(chat):
    def script(item, step, text):
        return next(iter(())) if item == 1 and step else ends_after(1)(item, step, text)

    sound, broken = roll_out(make_requests([0, 1]), chat, script, timeout_s=20)
    assert not sound.masked
    assert broken.error.startswith("RuntimeError: toy_1 turn 1 at http://toy: StopIteration")


@pytest.mark.parametrize(("state", "reward"), [("seen", math.nan), ("seen", math.inf), ("seen", "1"), (None, 1.0)])
def test_an_outcome_that_would_spoil_a_batch_fails_only_its_trajectory(chat, state, reward):
    def script(item, step, text):
        return StepOutput(state, reward, True) if item == 1 and step else ends_after(1)(item, step, text)

    sound, broken = roll_out(make_requests([0, 1]), chat, script)
    assert sound.score == 1.0
    assert broken.masked
    assert broken.error.startswith("EnvProtocolError: toy_1 turn 1")


def test_numbers_of_numpy_are_rewards_as_well_and_can_be_logged(chat):
    trajectories = roll_out(
        make_requests([0]), chat, lambda item, step, text: StepOutput("seen", np.float32(1), np.bool_(step > 0))
    )
    assert json.loads(json.dumps(to_row(trajectories[0])))["reward"] == 1.0


@pytest.mark.parametrize("text", ["half \ud83d pair", "\udcff", "\x00", "\N{PILE OF POO}"])
def test_any_text_of_an_environment_is_observed_and_logged(chat, text, tmp_path):
    trajectories = roll_out(make_requests([0]), chat, lambda item, step, _: StepOutput(text, 0.0, step == 2))
    with TrajectoryLog(tmp_path / "0.jsonl") as log:
        log.write(trajectories[0])
    (read,) = read_trajectories(tmp_path).trajectories
    assert read.messages == trajectories[0].messages
    assert read.messages[2].content == text.encode(errors="surrogatepass").decode(errors="replace")


def test_a_fault_is_tried_again_once_on_a_fresh_session(chat):
    failures = Counter()

    def script(item, step, text):
        if item == 1 and step == 2 and not failures[item]:
            failures[item] += 1
            raise EnvServerError("toy_1 step 2: HTTP 500")
        return ends_after(3)(item, step, text)

    log: list[str] = []
    (trajectory,) = roll_out(make_requests([1]), chat, script, log=log)
    assert (trajectory.attempt, trajectory.stop_reason, trajectory.score) == (2, StopReason.DONE, 1.0)
    assert len(trajectory.turns) == 3
    assert Counter(log) == {"open": 2, "reset 1": 2, "close": 2}


def test_an_item_whose_reset_always_times_out_is_given_up_and_the_step_completes(chat):
    resets: Counter[int] = Counter()

    def script(item, step, text):
        if step == 0:
            resets[item] += 1
        if item == 2 and step == 0:
            raise EnvTimeout("toy item toy_2 step 0: http://toy/reset: no answer within 60 s")
        return ends_after(2)(item, step, text)

    trajectories = roll_out(make_requests(range(6)), chat, script)
    assert [t.stop_reason for t in trajectories].count(StopReason.DONE) == 5
    assert trajectories[2].masked
    assert trajectories[2].num_tokens == 0
    assert trajectories[2].error.startswith("EnvTimeout: toy item toy_2 step 0: http://toy/reset")
    assert resets[2] == 2
    check_failures(trajectories, 0.5)


def test_a_rollout_that_never_returns_becomes_a_deadline_that_names_the_item(chat):
    hang = threading.Event()

    def script(item, step, text):
        if item == 1 and step == 1:
            hang.wait(30)
        return ends_after(2)(item, step, text)

    sound, late = roll_out(make_requests([0, 1]), chat, script, timeout_s=0.3)
    hang.set()
    assert sound.stop_reason == StopReason.DONE
    assert late.stop_reason == StopReason.DEADLINE
    assert late.masked
    assert late.error == "DeadlineExceeded: toy_1 turn 1 at http://toy: not finished after 0.3 s"
    assert count_errors([sound, late]) == {"DeadlineExceeded": 1}


def test_an_engine_that_never_answers_becomes_a_deadline(chat):
    (trajectory,) = roll_out(
        make_requests([0]), chat, ends_after(1), engine=ScriptedEngine(chat, delay_s=30), timeout_s=0.1
    )
    assert trajectory.stop_reason == StopReason.DEADLINE


def test_a_late_answer_of_an_abandoned_attempt_is_never_credited_to_the_new_one(chat):
    release = threading.Event()
    steps: Counter[int] = Counter()

    def script(item, step, text):
        steps[step] += 1
        if step == 1 and steps[1] == 1:
            release.wait(30)
            return StepOutput("late", 100.0, True)
        if step == 2:
            release.set()  # the first attempt's answer arrives while the second attempt is under way
            time.sleep(0.05)
        return StepOutput(f"observation {step}", 1.0 if step == 3 else 0.0, step == 3)

    log: list[str] = []
    (trajectory,) = roll_out(make_requests([0]), chat, script, timeout_s=0.5, log=log)
    assert trajectory.attempt == 2
    assert trajectory.score == 1.0
    assert [turn.observation for turn in trajectory.turns] == ["observation 1", "observation 2", "observation 3"]
    _wait_until(lambda: log.count("close") == 2)  # the abandoned session is closed once its call has returned


def test_sessions_are_reused_by_reset_and_closed_in_the_end(chat):
    log: list[str] = []
    trajectories = roll_out(make_requests(range(12)), chat, ends_after(2), log=log, max_concurrency=3)
    assert len(trajectories) == 12
    counts = Counter(entry.split()[0] for entry in log)
    assert counts["open"] == counts["close"] <= 3
    assert counts["reset"] == 12


def test_sessions_open_side_by_side(chat):
    together = threading.Barrier(8, timeout=20)

    class Client(ScriptedClient):
        def __init__(self) -> None:
            together.wait()  # passes only when all eight are being opened at once
            super().__init__(ends_after(1))

    engine = ScriptedEngine(chat)
    trajectories = asyncio.run(
        collect(make_requests(range(8)), engine, make_client=Client, chat=chat, settings=make_settings())
    )
    assert not any(t.masked for t in trajectories)


@pytest.mark.parametrize("max_concurrency", [1, 3])
def test_a_session_that_hangs_while_it_opens_holds_up_nobody_else(chat, max_concurrency):
    hang, openings = threading.Event(), iter(range(100))

    class Client(ScriptedClient):
        def __init__(self) -> None:
            if next(openings) == 0:
                hang.wait(30)
            super().__init__(ends_after(2))

    settings = make_settings(timeout_s=0.5, max_concurrency=max_concurrency)
    rollout = collect(make_requests(range(6)), ScriptedEngine(chat), make_client=Client, chat=chat, settings=settings)
    trajectories = asyncio.run(rollout)
    hang.set()
    assert {t.stop_reason for t in trajectories} == {StopReason.DONE}
    assert sum(t.attempt == 2 for t in trajectories) <= 1


def test_a_session_that_cannot_be_opened_fails_only_who_waits_for_it(chat):
    openings = iter(range(100))

    class Client(ScriptedClient):
        def __init__(self) -> None:
            if next(openings) in (0, 1):
                raise EnvServerError("http://toy/create: HTTP 500")
            super().__init__(ends_after(2))

    rollout = collect(
        make_requests(range(6)),
        ScriptedEngine(chat),
        make_client=Client,
        chat=chat,
        settings=make_settings(max_concurrency=3),
    )
    trajectories = asyncio.run(rollout)
    assert {t.stop_reason for t in trajectories} == {StopReason.DONE}
    assert sum(t.attempt == 2 for t in trajectories) <= 2


def test_a_broken_engine_stops_the_run_early_with_the_first_cause(chat):
    with pytest.raises(TooManyFailures, match=r"of 40 .*EngineError \d+.*toy_\d+ turn 1 at http://toy: out of memory"):
        roll_out(make_requests(range(40)), chat, ends_after(1), engine=BrokenEngine(chat), max_concurrency=4)


def test_a_group_of_one_bad_item_does_not_stop_the_others(chat):
    def script(item, step, text):
        if item == 0:
            raise EnvServerError("toy_0 reset: HTTP 500")
        time.sleep(0.05)
        return ends_after(1)(item, step, text)

    trajectories = roll_out(make_requests(range(3), n=8), chat, script)
    assert [t.masked for t in trajectories] == [True] * 8 + [False] * 16


def test_too_many_failures_stop_the_run_with_counts_by_type(chat):
    def script(item, step, text):
        if item < 3 and step:
            raise EnvServerError(f"toy_{item} step 1: HTTP 500")
        return ends_after(1)(item, step, text)

    trajectories = roll_out(make_requests(range(5)), chat, script)
    check_failures(trajectories, 0.6)
    check_failures(trajectories[3:], 0.0)
    with pytest.raises(TooManyFailures, match=r"3 of 5 .*EnvServerError 3.*first: EnvServerError: toy_0 step 1"):
        check_failures(trajectories, 0.5)
    with pytest.raises(TooManyFailures, match="3 of 3"):
        check_failures(trajectories[:3], 0.99 + 0.01)


def test_every_turn_has_a_seed_of_its_own_that_a_retry_repeats(chat):
    failed = []

    def script(item, step, text):
        if step == 2 and not failed:
            failed.append(item)
            raise EnvServerError("once")
        return ends_after(3)(item, step, text)

    engine = ScriptedEngine(chat)
    (request,) = make_requests([0])
    request = type(request)(request.item, request.uid, seed=5)
    roll_out([request], chat, script, engine=engine, sampling=SamplingParams(max_tokens=50, temperature=0.7))
    seeds = [sampling.seed for _, _, sampling in engine.requests]
    assert len(set(seeds)) == 3
    assert seeds == seeds[:2] + seeds[:2] + seeds[4:]
    assert {sampling.temperature for _, _, sampling in engine.requests} == {0.7}


@pytest.mark.parametrize("fails", [False, True])
def test_the_interpreters_switch_interval_is_as_before_after_a_rollout(chat, fails):
    seen = []

    def script(item, step, text):
        seen.append(sys.getswitchinterval())
        if fails:
            raise ConfigError("a programming error")
        return ends_after(1)(item, step, text)

    before = sys.getswitchinterval()
    with pytest.raises(ConfigError) if fails else nullcontext():
        roll_out(make_requests([0]), chat, script)
    assert sys.getswitchinterval() == before
    assert seen
    assert seen == pytest.approx([0.05] * len(seen))


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(ConfigError, match="max_rounds=0"):
        make_settings(max_rounds=0)
    with pytest.raises(ConfigError, match=r"agentgym\.timeout=0"):
        make_settings(timeout_s=0)


def _wait_until(condition) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, "waited 10 s in vain"
        time.sleep(0.005)
