"""Environments in child processes: faults stay with their sessions, and no process is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
from support.isolated import SHORT_LIVED, SPEC, IsolatedClient, Settings, isolated
from support.servers import serve

from agentgym_rl.envs import children
from agentgym_rl.envs.children import Starts
from agentgym_rl.envs.server import build_app
from agentgym_rl.errors import EnvServerError

pytestmark = pytest.mark.server


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children import the environment from the tests' folder."""
    tests = Path(__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tests.parent), str(tests)]))


def post(url: str, path: str, **fields: Any) -> requests.Response:
    return requests.post(f"{url}/{path}", json=fields, timeout=60)


def create(url: str) -> int:
    answer = post(url, "create")
    assert answer.status_code == 200, answer.text
    handle: int = answer.json()["id"]
    assert post(url, "reset", id=handle).status_code == 200
    return handle


def pids(url: str, handle: int) -> list[int]:
    found: list[int] = requests.get(f"{url}/pids", params={"id": handle}, timeout=60).json()
    return found


def wait_until_gone(*processes: int) -> None:
    end = time.monotonic() + 20
    while any(psutil.pid_exists(pid) for pid in processes):
        assert time.monotonic() < end, f"still there: {processes}"
        time.sleep(0.02)


def test_a_session_in_a_child_plays_queries_and_closes_and_nothing_is_left() -> None:
    with serve(build_app(SPEC)) as url:
        with IsolatedClient(url) as client:
            assert client.reset(3) == "hello 3"
            assert client.step("Action: go").state == "go"
            assert client.available_actions() == []
            with pytest.raises(EnvServerError, match=r"must be in 0\.\.99"):
                client.reset(100)
        handle = create(url)
        processes = pids(url, handle)
        assert processes[0] != os.getpid()
    wait_until_gone(*processes)


def test_settings_reach_the_child() -> None:
    with serve(build_app(SPEC.with_settings(Settings("salut")))) as url, IsolatedClient(url) as client:
        assert client.reset(1) == "salut 1"


def test_a_child_that_dies_fails_its_own_session_only_and_a_reset_begins_on_a_fresh_one() -> None:
    with serve(build_app(SPEC)) as url:
        dying, other = create(url), create(url)
        processes = pids(url, dying)
        died = post(url, "step", id=dying, action="die")
        assert died.status_code == 500
        assert "its process died" in died.json()["detail"]
        wait_until_gone(*processes)  # the simulator that it had started, too
        again = post(url, "step", id=dying, action="go")
        assert again.status_code == 500
        assert "reset begins a new one" in again.json()["detail"]
        assert post(url, "step", id=other, action="go").json()["observation"] == "go"
        assert post(url, "reset", id=dying, data_idx=7).json()["observation"] == "hello 7"
        assert not set(pids(url, dying)) & set(processes)


def test_a_child_that_hangs_is_killed_after_the_time_limit() -> None:
    with serve(build_app(isolated(call_timeout_s=0.5))) as url:
        handle = create(url)
        processes = pids(url, handle)
        hung = post(url, "step", id=handle, action="hang")
        assert hung.status_code == 500
        assert "step of session" in hung.json()["detail"]
        assert "no answer within 0.5 s; its process was killed" in hung.json()["detail"]
        wait_until_gone(*processes)
        assert post(url, "close", id=handle).json() is True


def test_an_exception_in_the_child_is_a_fault_that_leaves_the_child_alive() -> None:
    with serve(build_app(SPEC)) as url:
        handle = create(url)
        assert "RuntimeError: as told" in post(url, "step", id=handle, action="raise").json()["detail"]
        wrong = post(url, "step", id=handle, action="tuple")
        assert wrong.status_code == 500
        assert "Isolated.step must return a StepResult(observation, reward, done), not (" in wrong.json()["detail"]
        assert post(url, "step", id=handle, action="go").json()["observation"] == "go"


@pytest.mark.parametrize("parallel", [False, True])
def test_sessions_that_share_a_child_run_in_turn_or_in_parallel(parallel: bool) -> None:
    with serve(build_app(isolated(sessions_per_child=2, parallel=parallel))) as url:
        first, second = create(url), create(url)
        assert pids(url, first)[0] == pids(url, second)[0]
        waiting = threading.Thread(target=post, args=(url, "step"), kwargs={"id": first, "action": "wait 1"})
        waiting.start()
        time.sleep(0.3)
        started = time.monotonic()
        post(url, "step", id=second, action="go")
        assert (time.monotonic() - started < 0.4) is parallel
        waiting.join()


def test_a_closed_sessions_environment_serves_the_next_one_where_the_spec_says_so() -> None:
    with serve(build_app(isolated(reuse=True))) as url:
        seen = set()
        for _ in range(6):
            handle = create(url)
            seen.add(tuple(pids(url, handle)))
            post(url, "close", id=handle)
        assert len(seen) <= 2  # the first one's child, and the one started ahead of it


def test_a_child_that_cannot_start_is_a_fault_with_its_reason() -> None:
    with serve(build_app(isolated(source="support.isolated:NOTHING", started_ahead=0))) as url:
        answer = post(url, "create")
        assert answer.status_code == 500
        assert "'support.isolated:NOTHING' of environment 'isolated' does not load" in answer.json()["detail"]


def test_children_without_sessions_are_kept_in_the_number_asked_for() -> None:
    with serve(build_app(isolated(started_ahead=1))) as url:
        handles = [create(url) for _ in range(3)]
        processes = [pids(url, handle) for handle in handles]
        for handle in handles:
            post(url, "close", id=handle)
        end = time.monotonic() + 20
        while sum(psutil.pid_exists(child) for child, _ in processes) > 1:
            assert time.monotonic() < end
            time.sleep(0.05)


def test_sessions_created_at_once_share_no_place() -> None:
    with serve(build_app(isolated(started_ahead=2))) as url, ThreadPoolExecutor(6) as threads:
        handles = list(threads.map(lambda _: create(url), range(6)))
        assert len({pids(url, handle)[0] for handle in handles}) == 6


SERVER = """
from support.isolated import SPEC
from agentgym_rl.envs.server import build_app
from agentgym_rl.envs.serving import Server, bind, url_of

listener = bind("127.0.0.1", 0)
Server(build_app(SPEC), on_ready=lambda: print(url_of(listener), flush=True)).run(sockets=[listener])
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("hanging", [False, True])
def test_no_child_outlives_the_server(number: signal.Signals, hanging: bool) -> None:
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        url = process.stdout.readline().strip()
        handle = create(url)
        processes = pids(url, handle)
        if hanging:
            with pytest.raises(requests.Timeout):
                requests.post(f"{url}/step", json={"id": handle, "action": "hang"}, timeout=0.3)
        process.send_signal(number)
        assert process.wait(30) == -number
        wait_until_gone(*processes)
    finally:
        process.kill()
        process.communicate()


# --------------------------------------------------------------------------------------------- children that never live


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_starts_rest_twice_as_long_after_each_failure_beyond_the_second() -> None:
    clock = Clock()
    starts = Starts(clock)
    rests = []
    for _ in range(10):
        begun, clock.now = clock.now + 1, clock.now + 2
        starts.failed(begun, "it ended")
        rests.append(starts.rest_s())
        clock.now += starts.rest_s()
        assert starts.rest_s() == 0
    assert rests == [0, 0, 1, 2, 4, 8, 16, 32, 60, 60]
    starts.succeeded()
    starts.failed(clock.now + 1, "it ended")
    assert starts.rest_s() == 0


def test_children_that_were_begun_side_by_side_and_fail_count_once() -> None:
    clock = Clock()
    starts = Starts(clock)
    begun, clock.now = clock.now, 101.0
    for _ in range(8):
        starts.failed(begun, "it ended")
    assert starts.rest_s() == 0


def test_a_child_that_dies_at_each_start_is_not_started_over_and_over_and_works_again_once_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = tmp_path / "starts"
    notes.touch()
    monkeypatch.setenv("SHORT_LIVED", str(notes))
    monkeypatch.setattr(children, "_FIRST_REST_S", 1.5)
    with serve(build_app(isolated(SHORT_LIVED, source="support.isolated:SHORT_LIVED"))) as url:
        end = time.monotonic() + 60
        while "in a row" not in (refused := post(url, "create")).text:
            assert time.monotonic() < end, refused.text
            time.sleep(0.02)
        assert refused.status_code == 500
        assert "3 times in a row, and is tried again in" in refused.json()["detail"]
        assert len(notes.read_text().splitlines()) <= 8  # at most two at once
        notes.unlink()
        while (answer := post(url, "create")).status_code != 200:
            assert time.monotonic() < end
            time.sleep(0.05)
        assert post(url, "reset", id=answer.json()["id"], data_idx=2).json()["observation"] == "hello 2"
