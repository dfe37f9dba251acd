"""SciWorld over HTTP: forms of answers, the client, and simulators that come and go with the server."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
from support.servers import ServerProcess, serve_process

from agentgym_rl.envs.registry import get_spec
from agentgym_rl.envs.sciworld import SciWorldClient
from agentgym_rl.errors import EnvServerError

pytestmark = [pytest.mark.java, pytest.mark.server]

GOLDEN = json.loads(Path(__file__).with_name("golden.json").read_text())
SHORT = next(row for row in GOLDEN if row["task"] == "find-non-living-thing")
_PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serve_process(
        "sciworld", "--sessions-per-simulator", "1", "--started-ahead", "0", "--expose-grader"
    ) as started:
        yield started


@pytest.fixture(scope="module")
def handle(server: ServerProcess) -> int:
    created = post(server, "create")
    assert list(created) == ["id"]
    handle: int = created["id"]
    return handle


def post(server: ServerProcess, path: str, **fields: Any) -> Any:
    answer = requests.post(f"{server.url}/{path}", json=fields, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def ask(server: ServerProcess, path: str, handle: int) -> Any:
    answer = requests.get(f"{server.url}/{path}", params={"id": handle}, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + _PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def simulators(server: ServerProcess) -> list[psutil.Process]:
    """The Java processes under the server."""
    found = []
    for process in psutil.Process(server.process.pid).children(recursive=True):
        try:
            if process.name() == "java":
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def test_answers_have_the_forms_of_the_protocol(server: ServerProcess, handle: int) -> None:
    start = post(server, "reset", id=handle, data_idx=SHORT["item"])
    assert {name: type(value) for name, value in start.items()} == {
        "id": int, "task_name": str, "var_num": int, "task_description": str, "observation": str, "reward": int,
        "score": int, "deleted": bool, "done": bool,
    }  # fmt: skip
    assert (start["task_name"], start["var_num"], start["score"], start["done"]) == (SHORT["task"], 0, 0, False)
    assert ask(server, "observation", handle) == start["observation"]

    step = post(server, "step", id=handle, action=SHORT["actions"][0])
    assert {name: type(value) for name, value in step.items()} == {
        "observation": str, "reward": int, "score": int, "done": bool,
    }  # fmt: skip
    seen = post(server, "step_visual", id=handle, action="inventory")
    assert {"observation", "reward", "score", "done", "info", "object_tree", "inventory", "moves"} == set(seen)
    assert seen["object_tree"]["name"] == "universe"
    assert ask(server, "observation", handle) == seen["observation"]

    hint = ask(server, "action_hint", handle)
    assert "focus on OBJ" in hint["possible_actions"] and "agent" in hint["possible_objects"]
    assert ask(server, "task_description", handle) == {"task_description": start["task_description"]}
    assert ask(server, "object_tree", handle)["object_tree"]["name"] == "universe"
    assert ask(server, "state", handle)["moves"] == seen["moves"]
    assert ask(server, "detail", handle) == {
        "task_name": SHORT["task"], "var_num": 0, "task_description": start["task_description"], "deleted": False,
    } | {name: seen[name] for name in ("observation", "reward", "score", "done")}  # fmt: skip
    assert "Subgoals" in ask(server, "goals", handle)["goals"]


def test_goals_are_off_unless_asked_for() -> None:
    assert "goals" not in get_spec("sciworld").queries


def test_an_index_outside_the_space_is_an_error_and_never_wraps_around(server: ServerProcess, handle: int) -> None:
    for index in (-1, 4639, 2**60):
        assert post(server, "reset", id=handle, data_idx=index) == {"error": f"data_idx {index}: must be in 0..4638"}
    post(server, "reset", id=handle, data_idx=4638)


def test_the_client_reports_the_score_so_far(server: ServerProcess) -> None:
    with SciWorldClient(server.url, timeout=120) as client:
        opening = client.reset(SHORT["item"])
        assert opening.startswith("Your task is to find a(n) non-living thing.") and "This room is called" in opening
        outputs = [client.step(f"Thought: next.\nAction: {action}") for action in SHORT["actions"]]
        assert [output.reward for output in outputs] == sorted(output.reward for output in outputs)
        assert (outputs[-1].reward, outputs[-1].done) == (100, True)
        with pytest.raises(EnvServerError, match="has finished: reset"):
            client.step("Action: look around")
        client.reset(0)
        output = client.step("Action: focus on agent")
        assert (output.reward, output.done) == (-100, True)


def test_a_simulator_that_is_killed_fails_only_its_own_session(server: ServerProcess, handle: int) -> None:
    post(server, "reset", id=handle, data_idx=SHORT["item"])
    with SciWorldClient(server.url, timeout=120, max_retries=0) as client:
        expected = client.reset(SHORT["item"])
        first, second = simulators(server)
        first.kill()
        wait_until(lambda: not first.is_running() or first.status() == psutil.STATUS_ZOMBIE)
        answers = [
            requests.post(f"{server.url}/step", json={"id": each, "action": "look around"}, timeout=120)
            for each in (handle, client._handle)
        ]
        assert sorted(answer.status_code for answer in answers) == [200, 500]
        assert any("process ended with status -9" in answer.text for answer in answers)
        assert post(server, "reset", id=handle, data_idx=SHORT["item"])["task_name"] == SHORT["task"]
        assert client.reset(SHORT["item"]) == expected
        assert second in simulators(server) and len(simulators(server)) == 2


@pytest.mark.parametrize("end", [ServerProcess.stop, ServerProcess.kill], ids=["SIGTERM", "kill -9"])
def test_no_simulator_outlives_the_server(end: Callable[[ServerProcess], Any]) -> None:
    with serve_process("sciworld", "--started-ahead", "0") as server:
        with SciWorldClient(server.url, timeout=120) as client:
            client.reset(SHORT["item"])
            under = psutil.Process(server.process.pid).children(recursive=True)
            assert any(process.name() == "java" for process in under)
            end(server)
        wait_until(lambda: not any(process.is_running() for process in under))
