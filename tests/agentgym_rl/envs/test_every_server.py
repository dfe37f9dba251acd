"""What holds for the server of every environment: sessions, faults, fuzzed requests, nothing left behind.

An environment joins with one entry of `TASKS`.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import requests
import schemathesis
from support.dialect_b import QUIZ_SPEC
from support.environments import scripted_spec
from support.isolated import SPEC as ISOLATED_SPEC
from support.servers import serve

from agentgym_rl.client.base import EnvClient
from agentgym_rl.client.connection import Connection
from agentgym_rl.envs.base import Environment, ResetResult, StepResult
from agentgym_rl.envs.checking import Verdict, check_environment, sample_items
from agentgym_rl.envs.registry import EnvSpec, get_spec
from agentgym_rl.envs.server import EnvApp, build_app
from agentgym_rl.errors import EnvServerError


@dataclass(frozen=True)
class Task:
    """How one environment is tested."""

    spec: Callable[[], EnvSpec]
    """Its spec, small enough for a test."""
    cycles: int = 10_000
    """Sessions that are opened and closed in a row: fewer where each costs a simulator."""
    sessions: int = 8
    """Sessions that live at once."""
    fuzz_examples: int = 15
    """Requests per path that the fuzzer makes."""
    check_items: int = 3
    check_steps: int = 8
    """What `agentgym-rl check` looks at."""


def _with_few_children(spec: EnvSpec) -> EnvSpec:
    """No children beyond those that sessions need."""
    assert spec.isolation is not None
    return replace(spec, isolation=replace(spec.isolation, started_ahead=0))


TASKS: dict[str, Any] = {
    "textcraft": Task(lambda: get_spec("textcraft")),
    "babyai": Task(lambda: get_spec("babyai")),
    "searchqa": Task(lambda: get_spec("searchqa"), cycles=500),
    "sciworld": pytest.param(
        Task(lambda: get_spec("sciworld"), cycles=12, sessions=3, fuzz_examples=3, check_items=2, check_steps=3),
        marks=pytest.mark.java,
    ),
    "webarena": pytest.param(
        Task(
            lambda: _with_few_children(get_spec("webarena")),
            cycles=12,
            sessions=2,
            fuzz_examples=3,
            check_items=2,
            check_steps=4,
        ),
        marks=pytest.mark.browser,
    ),
    # No environments of the project, but of the forms that it serves: in threads, in dialect B, in child processes.
    "scripted": Task(scripted_spec, cycles=500),
    "quiz": Task(lambda: QUIZ_SPEC, cycles=500),
    "isolated": Task(lambda: ISOLATED_SPEC, cycles=12, sessions=2, fuzz_examples=5),
}
"""Task -> how to start it small; `pytest.param(Task(...), marks=pytest.mark.java)` marks what needs more."""


pytestmark = pytest.mark.server


@pytest.fixture(params=TASKS.values(), ids=TASKS.keys())
def task(request: pytest.FixtureRequest) -> Task:
    chosen: Task = request.param
    return chosen


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children import their environment from the tests' folder."""
    tests = Path(__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tests.parent), str(tests)]))


@dataclass(frozen=True)
class Running:
    url: str
    app: EnvApp
    spec: EnvSpec

    def client(self, **options: Any) -> EnvClient:
        return self.spec.client(self.url, **options)

    def call(self, path: str, handle: int | None = None, **fields: Any) -> requests.Response:
        named = {} if handle is None else {self.spec.wire.handle_field: handle}
        return requests.post(f"{self.url}/{path}", json=named | fields, timeout=60)

    def create(self) -> int:
        answer = self.call("create")
        assert answer.status_code == 200, answer.text
        content = answer.json()
        handle: int = content[self.spec.wire.handle_field] if isinstance(content, dict) else content
        return handle

    def health(self) -> dict[str, Any]:
        found: dict[str, Any] = requests.get(f"{self.url}/health", timeout=60).json()
        return found


@pytest.fixture
def running(task: Task) -> Iterator[Running]:
    spec = task.spec()
    app = build_app(spec)
    with serve(app) as url:
        yield Running(url, app, spec)
    assert len(app.store) == 0


# ------------------------------------------------------------------------------------------------------------ sessions


def test_many_create_close_cycles_leave_nothing(running: Running, task: Task) -> None:
    connection, field = Connection(running.url, timeout_s=120, max_retries=0), running.spec.wire.handle_field
    threads = None
    for number in range(task.cycles // task.sessions):
        created = _batch(connection, [{"path": "/create"}] * task.sessions)
        handles = [content[field] if isinstance(content, dict) else content for content in created]
        _batch(connection, [{"path": "/close", "body": {field: handle}} for handle in handles])
        if number == task.cycles // task.sessions // 2:
            threads = threading.active_count()
    connection.close()
    assert running.health()["sessions"] == 0
    assert threads is not None
    assert threading.active_count() <= threads + 1
    metrics = requests.get(f"{running.url}/metrics", timeout=10).text
    closed = task.cycles // task.sessions * task.sessions
    assert f'sessions_closed_total{{environment="{running.spec.name}"}} {closed}\n' in metrics


def _batch(connection: Connection, calls: list[dict[str, Any]]) -> list[Any]:
    """Contents of the answers, which must all be good."""
    answers = connection.post("batch", {"calls": calls}).content
    assert [answer["status"] for answer in answers] == [200] * len(calls), answers
    return [answer["body"] for answer in answers]


def test_closing_twice_or_an_unknown_handle_is_harmless(running: Running) -> None:
    handle = running.create()
    answers = [running.call("close", each) for each in (handle, handle, 12345)]
    assert [answer.status_code for answer in answers] == [200, 200, 200]
    closed = running.spec.wire.closed
    assert [answer.json() for answer in answers] == [closed(True), closed(False), closed(False)]


def test_a_client_that_died_frees_its_place_after_the_lifetime(task: Task) -> None:
    now, spec = [0.0], task.spec()
    with serve(build_app(spec, max_sessions=1, session_ttl_s=100, clock=lambda: now[0])) as url:
        spec.client(url)
        full = requests.post(f"{url}/create", timeout=60)
        assert (full.status_code, full.headers["Retry-After"]) == (503, "1")
        now[0] = 101
        with spec.client(url) as second:
            second.reset(0)


def test_finishing_one_session_does_not_touch_another(running: Running) -> None:
    with running.client() as first, running.client() as second:
        seen = first.reset(0)
        assert second.reset(0) == seen
        first.step(f"Action: {running.spec.client.example_action}")
        expected = second.step(f"Action: {running.spec.client.example_action}")
        assert expected.state == first.observation()
        first.close()
        assert second.reset(0) == seen


def test_a_server_that_was_restarted_reports_the_lost_session_and_serves_fresh_ones(task: Task) -> None:
    spec = task.spec()
    with serve(build_app(spec)) as url:
        port = int(url.rsplit(":", 1)[1])
        lost = spec.client(url, max_retries=1)
        lost.reset(0)
    with serve(build_app(spec), port=port) as url:
        with pytest.raises(EnvServerError, match="no session"):
            lost.step(f"Action: {spec.client.example_action}")
        with spec.client(url) as fresh:
            assert isinstance(fresh.reset(0), str)
        lost.close()


def test_a_late_answer_of_an_abandoned_call_is_never_credited_to_the_next_one(task: Task) -> None:
    """The session goes on after the abandoned call; a new session knows nothing of it."""
    spec = task.spec()
    app, gate = build_app(spec), threading.Event()
    slow = _SlowStep(app, gate)
    with serve(slow) as url:
        running = Running(url, app, spec)
        abandoned = running.create()
        running.call("reset", abandoned)
        slow.armed = True
        late = {spec.wire.handle_field: abandoned, "action": spec.client.example_action}
        with pytest.raises(requests.Timeout):
            requests.post(f"{url}/step", json=late, timeout=0.3)
        with running.client() as fresh:
            start = fresh.reset(0)
            gate.set()
            time.sleep(0.1)
            assert fresh.observation() == start
            assert fresh.step(f"Action: {spec.client.example_action}").state == fresh.observation()


class _SlowStep:
    """An application that, once armed, makes the next step wait until a gate opens."""

    def __init__(self, app: EnvApp, gate: threading.Event) -> None:
        self._app, self._gate = app, gate
        self.armed = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] == "/step" and self.armed:
            self.armed = False
            await asyncio.to_thread(self._gate.wait, 30)
        await self._app(scope, receive, send)


def test_sessions_in_parallel_see_what_each_would_alone(running: Running, task: Task) -> None:
    def episode(item: int) -> list[Any]:
        with running.client() as client:
            seen: list[Any] = [client.reset(item)]
            for _ in range(3):
                output = client.step(f"Action: {running.spec.client.example_action}")
                seen.append((output.state, output.reward, output.done))
                if output.done:
                    break
            return seen

    items = [number % 2 for number in range(task.sessions)]
    alone = [episode(0), episode(1)]
    with ThreadPoolExecutor(task.sessions) as threads:
        assert list(threads.map(episode, items)) == [alone[item] for item in items]


# -------------------------------------------------------------------------------------------------- refusals and faults


def test_what_the_environment_refuses_is_told_in_its_dialect(running: Running) -> None:
    unknown = running.call("step", 12345, action="x")
    if running.spec.wire.refuses_with_200:
        assert (unknown.status_code, list(unknown.json())) == (200, ["error"])
    else:
        assert (unknown.status_code, list(unknown.json())) == (404, ["detail"])


def test_a_step_before_the_first_reset_is_refused_where_create_begins_no_episode(running: Running) -> None:
    if running.spec.wire.starts_on_create:
        pytest.skip("create begins an episode")
    answer = running.call("step", running.create(), action="x")
    assert answer.status_code in (200, 400)
    assert "reset it first" in answer.text


def test_a_fault_of_the_environment_is_an_error_for_the_client_and_never_a_reward(task: Task) -> None:
    class Broken(Environment):
        def reset(self, data_idx: int) -> ResetResult:
            raise RuntimeError("the simulator is gone")

        def step(self, action: str) -> StepResult:
            raise RuntimeError("the simulator is gone")

        def observation(self) -> str:
            return ""

    spec = replace(task.spec(), environment=Broken, isolation=None, runs_inline=False)
    with serve(build_app(spec)) as url, pytest.raises(EnvServerError, match="RuntimeError: the simulator is gone"):
        spec.client(url).reset(0)


def test_the_checker_finds_nothing(task: Task) -> None:
    spec = task.spec()
    results = list(check_environment(spec, sample_items(spec.num_items, task.check_items), steps=task.check_steps))
    assert [result for result in results if result.verdict == Verdict.FAILED] == []


# ------------------------------------------------------------------------------------------------------------- fuzzing


def test_no_request_that_the_schema_describes_or_nearly_describes_is_answered_500(running: Running, task: Task) -> None:
    """Every path with generated fields, valid and invalid, on unknown handles and on a live one."""
    schema = schemathesis.openapi.from_url(f"{running.url}/openapi.json")
    live = running.create()
    for result in schema.get_all_operations():
        _fuzz(result.ok(), live, running.spec, task.fuzz_examples)
    running.call("close", live)
    for handle in list(running.app.store._sessions):  # what /create and /batch were made to open
        running.call("close", handle)
    assert running.health()["sessions"] == 0


def _fuzz(operation: Any, live: int, spec: EnvSpec, examples: int) -> None:
    modes = [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE]
    dice = random.Random(0)

    @hypothesis.settings(
        max_examples=examples, deadline=None, suppress_health_check=list(hypothesis.HealthCheck), database=None
    )
    @hypothesis.given(
        case=hypothesis.strategies.one_of([operation.as_strategy(generation_mode=mode) for mode in modes])
    )
    @hypothesis.seed(0)
    def probe(case: Any) -> None:
        if isinstance(case.body, dict) and spec.wire.handle_field in case.body and dice.random() < 0.7:
            case.body[spec.wire.handle_field] = live
        if case.query and spec.wire.handle_field in case.query and dice.random() < 0.7:
            case.query[spec.wire.handle_field] = live
        if (
            case.operation.path == "/close" and live in (case.body or {}).values()
            if isinstance(case.body, dict)
            else False
        ):
            return
        response = case.call(timeout=30)
        assert response.status_code < 500 or response.status_code == 503, f"{case.as_curl_command()}: {response.text}"

    probe()


@pytest.mark.parametrize(
    "body", [b"\xff\xfe", b'{"a":NaN}', b'{"id":1e400}', b"null", b'"x"', b'{"id":' + b"9" * 400 + b"}", b"\x00"]
)
def test_bytes_that_are_no_request_are_refused(running: Running, body: bytes) -> None:
    for path in ("create", "reset", "step", "close", "batch"):
        status = requests.post(f"{running.url}/{path}", data=body, timeout=30).status_code
        assert status in (200, 400, 404, 422), (path, body, status)
