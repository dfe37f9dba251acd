"""Scenarios 20 to 28: faults of servers and networks, over real HTTP, injected by a proxy before the real server.

Every kind of fault is tried in every place where it may strike, which takes this file some 30 seconds.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests
from support.environments import Script, ScriptedClient, scripted_spec
from support.faults import Call, Fault, faulty_proxy
from support.logged_server import LoggedClient
from support.rollouts import ScriptedEngine, make_settings
from support.servers import serve, serve_logged
from support.tokenizers import make_tokenizer

from agentgym_rl.agent.chat import ChatTemplate
from agentgym_rl.client.base import EnvClient
from agentgym_rl.client.check import check_server
from agentgym_rl.client.servers import client_factory
from agentgym_rl.envs.server import build_app
from agentgym_rl.errors import EnvServerError, EnvUnreachable, TooManyFailures
from agentgym_rl.rollout.collector import RolloutRequest, check_failures, collect
from agentgym_rl.rollout.statistics import rollout_metrics
from agentgym_rl.types import Item, StepOutput, StopReason, Trajectory

pytestmark = pytest.mark.server

ANSWER_FAULTS = (Fault.NOT_JSON, Fault.TRUNCATED_JSON, Fault.WRONG_TYPES)
BREAKS = (Fault.RESET_UNSEEN, Fault.RESET, Fault.RESET_IN_BODY)
HANGS = (Fault.HANG_UNSEEN, Fault.HANG, Fault.DRIP, Fault.DRIP_HEAD)
IMPATIENT_S = 0.3


@pytest.fixture(scope="module")
def chat() -> ChatTemplate:
    return ChatTemplate(make_tokenizer())


def impatient(*, step: int, attempts: tuple[int, ...] = (1, 2)) -> type[ScriptedClient]:
    """A client that waits long for every answer but the one that never comes: that of a step (0: reset) of item 5."""
    numbers = itertools.count(1)

    class Impatient(ScriptedClient):
        def reset(self, idx: int) -> str:
            self._attempt = next(numbers) if idx == 5 else 0
            self._limit(0)
            return super().reset(idx)

        def step(self, text: str) -> StepOutput:
            self._limit(self._step + 1)
            return super().step(text)

        def _limit(self, now: int) -> None:
            self._connection.timeout_s = IMPATIENT_S if self._attempt in attempts and now == step else 60.0

    return Impatient


class ImpatientFromTheStart(ScriptedClient):
    def __init__(self, env_server_base: str, **options: float) -> None:
        super().__init__(env_server_base, **options | {"timeout": IMPATIENT_S})


def roll_out(
    url: str | list[str],
    chat: ChatTemplate,
    items: range,
    *,
    client: type[EnvClient] = ScriptedClient,
    max_retries: int = 10,
    **settings: float,
) -> list[Trajectory]:
    rollout = collect(
        [RolloutRequest(Item(client.task, item), f"{client.task}_{item}") for item in items],
        ScriptedEngine(chat, lambda turn: f"Action: go {turn}"),
        make_client=client_factory(client, url, max_retries=max_retries),
        chat=chat,
        settings=make_settings(**settings),
    )
    return asyncio.run(rollout)


def at_step(fault: Fault, *, item: int, step: int, attempts: tuple[int, ...] = (1, 2), every_try: bool = True):
    """``fault`` for the steps of an item from ``step`` on (0: its resets) in the given attempts."""

    def script(call: Call) -> Fault | None:
        is_meant = call.item == item and call.attempt in attempts and (every_try or call.tries == 1)
        is_there = 0 < step <= call.step if call.path == "/step" else call.path == "/reset" and step == 0
        return fault if is_meant and is_there else None

    return script


# ---------------------------------------------------------------------------------------------------------- scenario 20


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (Fault.ERROR_500, "EnvServerError"),
        *((fault, "EnvProtocolError") for fault in ANSWER_FAULTS),
        *((fault, "EnvUnreachable") for fault in BREAKS),
        *((fault, "EnvTimeout") for fault in HANGS),
    ],
)
def test_a_session_that_fails_from_its_second_turn_on_is_masked_and_counted_and_the_other_seven_are_trained(
    chat: ChatTemplate, fault: Fault, error: str
) -> None:
    script = Script(turns=3)
    faults = at_step(fault, item=5, step=2)
    with serve(build_app(scripted_spec(script))) as upstream, faulty_proxy(upstream, faults) as proxy:
        trajectories = roll_out(proxy.url, chat, range(8), client=impatient(step=2), max_retries=2)
    (masked,) = [t for t in trajectories if t.masked]
    assert (masked.item.index, masked.attempt, masked.stop_reason) == (5, 2, StopReason.ENV_ERROR)
    assert masked.error.startswith(f"{error}: ")
    assert all(part in masked.error for part in ("scripted_5", "step 2", f"{proxy.url}/step"))
    assert [t.score for t in trajectories if not t.masked] == [1.0] * 7
    metrics = rollout_metrics(trajectories)
    assert (metrics["rollout/score_mean"], metrics["rollout/masked"]) == (1.0, 1)
    assert {name: value for name, value in metrics.items() if "errors" in name} == {f"rollout/errors/{error}": 1}
    check_failures(trajectories, 0.5)


@pytest.mark.parametrize("fault", [Fault.ERROR_500, *ANSWER_FAULTS, *BREAKS, *HANGS])
def test_a_fault_that_passes_costs_one_attempt_and_no_trajectory(chat: ChatTemplate, fault: Fault) -> None:
    script = Script(turns=3)
    faults = at_step(fault, item=5, step=2, attempts=(1,))
    with serve(build_app(scripted_spec(script))) as upstream, faulty_proxy(upstream, faults) as proxy:
        trajectories = roll_out(proxy.url, chat, range(4, 8), client=impatient(step=2, attempts=(1,)), max_retries=2)
    assert [(t.stop_reason, t.score) for t in trajectories] == [(StopReason.DONE, 1.0)] * 4
    assert [t.attempt for t in trajectories] == [1, 2, 1, 1]
    assert [turn.observation for turn in trajectories[1].turns] == [f"item 5 step {step}" for step in (1, 2, 3)]


def test_the_second_attempt_gets_a_session_of_its_own_although_others_lie_idle(chat: ChatTemplate) -> None:
    others_done = threading.Semaphore(0)

    def script(call: Call) -> Fault | None:
        if call.path == "/step" and call.item != 5 and call.step == 2:
            others_done.release()
        if call.path == "/step" and (call.item, call.attempt) == (5, 1):
            return Fault.ERROR_500 if all(others_done.acquire(timeout=60) for _ in range(3)) else None
        return None

    with serve(build_app(scripted_spec(turns=2))) as upstream, faulty_proxy(upstream, script) as proxy:
        trajectories = roll_out(proxy.url, chat, range(5, 9))
    assert [(t.stop_reason, t.attempt) for t in trajectories] == [
        (StopReason.DONE, attempt) for attempt in (2, 1, 1, 1)
    ]
    paths = [call.path for call in proxy.calls if call.path == "/create" or (call.path, call.item) == ("/reset", 5)]
    assert paths[-2:] == ["/create", "/reset"]
    assert paths.count("/create") == 5


@pytest.mark.parametrize("fault", BREAKS)
def test_a_connection_that_breaks_once_costs_not_even_an_attempt_and_each_step_runs_once(
    chat: ChatTemplate, fault: Fault
) -> None:
    script = Script(turns=3)
    faults = at_step(fault, item=5, step=1, every_try=False)
    with serve(build_app(scripted_spec(script))) as upstream, faulty_proxy(upstream, faults) as proxy:
        (trajectory,) = roll_out(proxy.url, chat, range(5, 6))
    assert (trajectory.stop_reason, trajectory.attempt, trajectory.score) == (StopReason.DONE, 1, 1.0)
    assert script.executed == [(5, step, f"go {step - 1}") for step in (1, 2, 3)]
    assert [call.tries for call in proxy.calls if call.path == "/step"] == [1, 2] * 3


# ---------------------------------------------------------------------------------------------------------- scenario 21


@pytest.mark.parametrize("fault", [Fault.ERROR_500, *ANSWER_FAULTS, *BREAKS, *HANGS])
def test_a_run_whose_every_request_fails_stops_with_the_first_error_which_names_url_and_item(
    chat: ChatTemplate, fault: Fault
) -> None:
    started = time.monotonic()
    with (
        serve(build_app(scripted_spec())) as upstream,
        faulty_proxy(upstream, lambda call: fault) as proxy,
        pytest.raises(TooManyFailures) as failure,
    ):
        roll_out(proxy.url, chat, range(64), client=ImpatientFromTheStart, max_concurrency=8)
    assert f"{proxy.url}/create" in str(failure.value)
    assert "scripted_" in str(failure.value)
    assert time.monotonic() - started < 60
    # It stops after a first few instead of trying all 64 twice.
    assert len({call.request_id for call in proxy.calls if call.path == "/create"}) < 64


def test_when_more_than_the_allowed_share_is_masked_the_run_stops_with_counts_by_type(chat: ChatTemplate) -> None:
    def script(call: Call) -> Fault | None:
        is_step = call.path == "/step" and call.item is not None
        return {0: Fault.ERROR_500, 1: Fault.ERROR_500, 2: Fault.NOT_JSON}.get(call.item or 0) if is_step else None

    with serve(build_app(scripted_spec())) as upstream, faulty_proxy(upstream, script) as proxy:
        trajectories = roll_out(proxy.url, chat, range(5))
    check_failures(trajectories, 0.6)
    with pytest.raises(TooManyFailures, match=r"3 of 5 .*EnvServerError 2, EnvProtocolError 1.*first: .*scripted_0"):
        check_failures(trajectories, 0.5)


# ---------------------------------------------------------------------------------------------------------- scenario 22


def test_no_server_is_one_line_with_the_url_and_the_command_that_starts_it() -> None:
    with serve(build_app(scripted_spec())) as url:
        pass
    with pytest.raises(EnvUnreachable) as failure:
        check_server(url, "scripted")
    message = str(failure.value)
    assert "\n" not in message
    assert message.startswith(f"no scripted server at {url}: ")
    assert message.endswith(f"agentgym-rl serve scripted --host 127.0.0.1 --port {url.rsplit(':', 1)[1]}")


# ---------------------------------------------------------------------------------------------------------- scenario 23


@pytest.mark.parametrize("fault", HANGS)
def test_an_item_whose_reset_always_times_out_is_given_up_and_the_step_completes(
    chat: ChatTemplate, fault: Fault
) -> None:
    faults = at_step(fault, item=5, step=0)
    with serve(build_app(scripted_spec(turns=2))) as upstream, faulty_proxy(upstream, faults) as proxy:
        trajectories = roll_out(proxy.url, chat, range(3, 8), client=impatient(step=0))
    assert [t.stop_reason for t in trajectories] == [
        *[StopReason.DONE] * 2,
        StopReason.ENV_ERROR,
        *[StopReason.DONE] * 2,
    ]
    assert trajectories[2].error.startswith("EnvTimeout: scripted item scripted_5 step 0: ")
    assert sum(call.path == "/reset" and call.item == 5 for call in proxy.calls) == 2


# ---------------------------------------------------------------------------------------------------------- scenario 24


def test_two_hundred_clients_leave_no_session_and_closing_again_is_harmless() -> None:
    with serve(build_app(scripted_spec(), max_sessions=1)) as url:
        for _ in range(200):
            client = ScriptedClient(url)
            client.close()
            client.close()
        assert sessions_at(url) == 0
        for handle in (client._handle, 12345):
            assert requests.post(f"{url}/close", json={"id": handle}, timeout=20).json() is False


def test_the_place_of_a_client_that_died_is_free_after_the_sessions_lifetime() -> None:
    now = [0.0]
    with serve(build_app(scripted_spec(), max_sessions=1, session_ttl_s=100, clock=lambda: now[0])) as url:
        dead = ScriptedClient(url)
        dead._connection.close()
        with pytest.raises(EnvServerError, match="HTTP 503"):
            ScriptedClient(url, timeout=0.9)
        now[0] = 100.0
        with ScriptedClient(url) as alive:
            assert alive.reset(1) == "item 1 step 0"
            with pytest.raises(EnvServerError, match="expired after 100 s"):
                dead.step("Action: go")


@pytest.mark.parametrize("fault", [Fault.ERROR_500, *BREAKS, *ANSWER_FAULTS])
def test_a_rollout_with_faults_leaves_no_session(chat: ChatTemplate, fault: Fault) -> None:
    script = Script(turns=3)
    faults = at_step(fault, item=5, step=2)
    with serve(build_app(scripted_spec(script))) as upstream, faulty_proxy(upstream, faults) as proxy:
        roll_out(proxy.url, chat, range(8), max_retries=1, max_concurrency=3)
        assert sessions_at(upstream) == 0
    assert script.open == 0


# ---------------------------------------------------------------------------------------------------------- scenario 25


def test_after_a_kill_in_the_middle_of_a_step_the_run_goes_on_and_nothing_is_executed_twice(
    chat: ChatTemplate, tmp_path: Path
) -> None:
    """The server is killed while a step of each trajectory runs, and comes back on the same port."""
    log, gate = tmp_path / "steps", tmp_path / "gate"
    gate.touch()
    with serve_logged(log, gate, turns=3) as first, ThreadPoolExecutor(1) as thread:
        rollout = thread.submit(roll_out, first.url, chat, range(4), client=LoggedClient, max_retries=100)
        wait_until(lambda: log.exists() and len(log.read_text().splitlines()) == 4)
        first.kill()
        gate.unlink()
        with serve_logged(log, gate, turns=3, port=int(first.url.rsplit(":", 1)[1])) as second:
            trajectories = rollout.result(120)
            assert sessions_at(second.url) == 0
    assert [(t.stop_reason, t.attempt, t.score) for t in trajectories] == [(StopReason.DONE, 2, 1.0)] * 4
    executed = Counter(log.read_text().splitlines())
    assert set(executed.values()) == {1}
    # Four steps of the first attempts, which were under way, and three of each second attempt.
    assert len(executed) == 4 + 4 * 3
    for trajectory in trajectories:
        episodes, steps = zip(*(turn.observation.split() for turn in trajectory.turns), strict=True)
        assert len(set(episodes)) == 1
        assert steps == ("1", "2", "3")
        assert all(executed[turn.observation] == 1 for turn in trajectory.turns)


def test_with_a_second_server_the_run_goes_on_there_although_the_killed_one_stays_away(
    chat: ChatTemplate, tmp_path: Path
) -> None:
    log, gate = tmp_path / "steps", tmp_path / "gate"
    gate.touch()
    with (
        serve_logged(log, gate, turns=3) as first,
        serve_logged(log, gate, turns=3) as second,
        ThreadPoolExecutor(1) as thread,
    ):
        addresses = [first.url, second.url]
        rollout = thread.submit(roll_out, addresses, chat, range(4), client=LoggedClient, max_retries=2)
        wait_until(lambda: log.exists() and len(log.read_text().splitlines()) == 4)
        assert [sessions_at(url) for url in addresses] == [2, 2]
        first.kill()
        gate.unlink()
        trajectories = rollout.result(120)
        assert sessions_at(second.url) == 0
    assert [(t.stop_reason, t.score) for t in trajectories] == [(StopReason.DONE, 1.0)] * 4
    assert sorted(t.attempt for t in trajectories) == [1, 1, 2, 2]
    executed = Counter(log.read_text().splitlines())
    assert set(executed.values()) == {1}
    assert len(executed) == 2 + 4 * 3


# ---------------------------------------------------------------------------------------------------------- scenario 26


def test_of_two_interleaved_clients_one_that_finishes_does_not_touch_the_other() -> None:
    with serve(build_app(scripted_spec(turns=2))) as url, ScriptedClient(url) as first, ScriptedClient(url) as second:
        first.reset(1)
        second.reset(2)
        assert second.step("Action: go") == StepOutput("item 2 step 1", 0.0, False)
        first.step("Action: go")
        assert first.step("Action: go") == StepOutput("item 1 step 2", 1.0, True)
        first.close()
        assert second.step("Action: go") == StepOutput("item 2 step 2", 1.0, True)


# ---------------------------------------------------------------------------------------------------------- scenario 27


@pytest.mark.parametrize("fault", HANGS)
def test_a_rollout_that_never_returns_becomes_a_deadline_that_names_the_item(chat: ChatTemplate, fault: Fault) -> None:
    faults = at_step(fault, item=5, step=1)
    with serve(build_app(scripted_spec())) as upstream, faulty_proxy(upstream, faults) as proxy:
        (trajectory,) = roll_out(proxy.url, chat, range(5, 6), timeout_s=0.5)
    assert (trajectory.stop_reason, trajectory.attempt) == (StopReason.DEADLINE, 2)
    assert trajectory.error.startswith("DeadlineExceeded: scripted_5 ")
    assert trajectory.error.endswith("not finished after 0.5 s")
    assert rollout_metrics([trajectory])["rollout/errors/DeadlineExceeded"] == 1


# ---------------------------------------------------------------------------------------------------------- scenario 28


def test_a_late_answer_of_an_abandoned_attempt_is_never_credited_to_the_new_one(chat: ChatTemplate) -> None:
    """The first attempt's answer arrives while the second attempt is in the middle of its own episode."""
    seen_late = threading.Event()

    def hold_up(call: Call) -> Fault | None:
        if call.path == "/step" and call.attempt == 1:
            return Fault.HANG
        if call.path == "/step" and call.step == 2:
            proxy.release.set()
            # The abandoned session closes once it has read its late answer.
            seen_late.set() if proxy.closed.wait(60) else None
        return None

    script = Script(turns=3, rewards=(0.5, 0.25, 0.125))
    with serve(build_app(scripted_spec(script))) as upstream, faulty_proxy(upstream, hold_up) as proxy:
        (trajectory,) = roll_out(proxy.url, chat, range(5, 6), timeout_s=3.0)
    assert seen_late.is_set()
    assert (trajectory.stop_reason, trajectory.attempt) == (StopReason.DONE, 2)
    assert [turn.reward for turn in trajectory.turns] == [0.5, 0.25, 0.125]
    assert [turn.observation for turn in trajectory.turns] == [f"item 5 step {step}" for step in (1, 2, 3)]
    assert Counter(script.executed) == {(5, 1, "go 0"): 2, (5, 2, "go 1"): 1, (5, 3, "go 2"): 1}


def sessions_at(url: str) -> int:
    sessions: int = requests.get(f"{url}/health", timeout=20).json()["sessions"]
    return sessions


def wait_until(condition) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.01)
