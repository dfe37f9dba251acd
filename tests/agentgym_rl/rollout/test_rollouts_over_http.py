"""Rollouts against a real server over HTTP, with an environment that misbehaves as scripted."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter

import pytest
from support.environments import Script, ScriptedClient, scripted_spec
from support.rollouts import ScriptedEngine, make_settings
from support.servers import serve
from support.tokenizers import make_tokenizer

from agentgym_rl.agent.chat import ChatTemplate
from agentgym_rl.envs.server import build_app
from agentgym_rl.errors import TooManyFailures
from agentgym_rl.rollout.collector import RolloutRequest, check_failures, collect
from agentgym_rl.rollout.log import TrajectoryLog, read_trajectories
from agentgym_rl.rollout.statistics import rollout_metrics
from agentgym_rl.types import Item, StopReason

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def chat() -> ChatTemplate:
    return ChatTemplate(make_tokenizer())


def roll_out(url, chat, items, *, client=ScriptedClient, request_timeout_s=20.0, max_retries=2, **settings):
    rollout = collect(
        [RolloutRequest(Item("scripted", item), f"scripted_{item}") for item in items],
        ScriptedEngine(chat, lambda turn: f"Action: go {turn}"),
        make_client=lambda: client(url, timeout=request_timeout_s, max_retries=max_retries),
        chat=chat,
        settings=make_settings(**settings),
    )
    return asyncio.run(rollout)


def test_env_crash_is_masked_and_never_scored_zero(chat):
    script = Script(turns=3, fails_at={5: 2})
    with serve(build_app(scripted_spec(script))) as url:
        trajectories = roll_out(url, chat, range(8))
    trained = [t for t in trajectories if not t.masked]
    (masked,) = [t for t in trajectories if t.masked]
    assert [t.score for t in trained] == [1.0] * 7
    assert masked.item.index == 5
    assert masked.attempt == 2
    assert masked.stop_reason == StopReason.ENV_ERROR
    assert masked.error.startswith("EnvServerError: ")
    assert all(part in masked.error for part in ("scripted_5", "step 2", url, "500"))
    metrics = rollout_metrics(trajectories)
    assert metrics["rollout/score_mean"] == 1.0
    assert metrics["rollout/errors/EnvServerError"] == 1
    check_failures(trajectories, 0.5)


def test_a_run_without_a_server_stops_with_its_address(chat):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(TooManyFailures, match="EnvUnreachable") as failure:
            roll_out(url, chat, range(20), max_retries=0)
    assert url in str(failure.value)
    assert "scripted_" in str(failure.value)


def test_interleaved_sessions_of_one_server_do_not_touch_each_other(chat):
    script = Script(turns=4, latency_s=lambda item, step: 0.01)
    with serve(build_app(scripted_spec(script))) as url:
        first, second = ScriptedClient(url), ScriptedClient(url)
        first.reset(1)
        second.reset(2)
        assert second.step("Action: a").state == "item 2 step 1"
        first.close()
        assert second.step("Action: b").state == "item 2 step 2"
        second.close()
        trajectories = roll_out(url, chat, range(16), max_concurrency=5)
    for trajectory in trajectories:
        observations = [turn.observation for turn in trajectory.turns]
        assert observations == [f"item {trajectory.item.index} step {step}" for step in (1, 2, 3, 4)]
    assert script.open == 0


def test_a_step_that_hangs_becomes_a_deadline_and_the_others_finish(chat):
    script = Script(turns=2, hangs_at={3: 1})
    with serve(build_app(scripted_spec(script))) as url:
        trajectories = roll_out(url, chat, range(5), timeout_s=2.0)
        script.release.set()
    assert [t.stop_reason for t in trajectories] == [StopReason.DONE] * 3 + [StopReason.DEADLINE, StopReason.DONE]
    assert "scripted_3 turn 1" in trajectories[3].error
    assert url in trajectories[3].error


def test_a_cumulative_score_is_paid_in_differences(chat):
    spec = scripted_spec(Script(turns=3, rewards=(0.2, 0.5, 1.0)), cumulative=True)
    with serve(build_app(spec)) as url:
        (trajectory,) = roll_out(url, chat, [1], client=spec.client)
    assert [turn.reward for turn in trajectory.turns] == pytest.approx([0.2, 0.3, 0.5])
    assert trajectory.score == 1.0
    assert float(trajectory.token_rewards.sum()) == pytest.approx(1.0)


class TellingClient(ScriptedClient):
    """Tells a viewer what the agent is not told."""

    def _read_reset(self, content):
        self.viewer_state = None
        return super()._read_reset(content)

    def _read_step(self, content):
        self.viewer_state = {"secret": content["observation"].upper()}
        return super()._read_step(content)


def test_what_a_client_tells_a_viewer_is_kept_with_the_trajectory_and_never_reaches_the_agent(chat, tmp_path):
    with serve(build_app(scripted_spec(Script(turns=2)))) as url:
        (trajectory,) = roll_out(url, chat, [1], client=TellingClient)
        (plain,) = roll_out(url, chat, [1])
    seen = [turn.observation for turn in trajectory.turns]
    assert trajectory.extra == {"states": [None, *({"secret": text.upper()} for text in seen)]}
    assert plain.extra == {}
    assert trajectory.messages == plain.messages
    assert trajectory.input_ids.tolist() == plain.input_ids.tolist()
    with TrajectoryLog(tmp_path / "0.jsonl") as log:
        log.write(trajectory)
    (read,) = read_trajectories(tmp_path).trajectories
    assert read.extra == trajectory.extra


def test_every_step_of_every_trajectory_runs_exactly_once(chat):
    script = Script(turns=3)
    with serve(build_app(scripted_spec(script))) as url:
        roll_out(url, chat, range(10), max_concurrency=4)
    assert Counter(script.executed) == {(item, step, f"go {step - 1}"): 1 for item in range(10) for step in (1, 2, 3)}
    assert script.open == 0


@pytest.mark.parametrize("num_items", [16, 40])
def test_more_trajectories_than_places_on_the_server_all_finish_on_handed_on_sessions(chat, num_items):
    script = Script(turns=3, latency_s=lambda item, step: 0.02)
    with serve(build_app(scripted_spec(script), max_sessions=4)) as url:
        started = time.monotonic()
        trajectories = roll_out(url, chat, range(num_items), max_concurrency=16)
    assert {(t.stop_reason, t.attempt) for t in trajectories} == {(StopReason.DONE, 1)}
    assert time.monotonic() - started < 15  # nobody waits until a client gives up (20 s)
    assert script.open == 0
