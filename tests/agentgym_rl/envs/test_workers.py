"""A server of several worker processes: each session stays with its process, and a dead process takes only its own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import requests
from support.servers import ServerProcess, serve_process

from agentgym_rl.client.base import EnvClient
from agentgym_rl.envs.serving import bind
from agentgym_rl.envs.textcraft import TextCraftClient
from agentgym_rl.envs.workers import bind_shared
from agentgym_rl.errors import ConfigError, EnvServerError

pytestmark = pytest.mark.server

WORKERS = 3


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serve_process("textcraft", "--workers", str(WORKERS), "--max-sessions", "60") as server:
        yield server


def post(url: str, path: str, **fields: Any) -> requests.Response:
    """Over a connection of its own, as a client without a session does."""
    return requests.post(f"{url}/{path}", json=fields, timeout=30)


def create(url: str) -> int:
    handle: int = post(url, "create").json()["id"]
    return handle


def sessions_of_all_workers(url: str) -> list[int]:
    """One session per worker: connections are shared out by the kernel, so it takes a few."""
    found: dict[int, int] = {}
    end = time.monotonic() + 30
    while len(found) < WORKERS:
        assert time.monotonic() < end, f"only workers {found.keys()} answered"
        handle = create(url)
        if handle % WORKERS in found:
            post(url, "close", id=handle)
        found.setdefault(handle % WORKERS, handle)
    return [found[worker] for worker in range(WORKERS)]


def worker_processes(server: ServerProcess) -> list[psutil.Process]:
    return sorted(psutil.Process(server.process.pid).children(), key=lambda process: process.pid)


def test_a_session_is_reached_over_any_connection(server: ServerProcess) -> None:
    for handle in sessions_of_all_workers(server.url):
        for count in range(1, 7):
            post(server.url, "step", id=handle, action="get 1 acacia logs")
            seen = requests.get(f"{server.url}/observation", params={"id": handle}, timeout=30).json()
            assert seen == "Got 1 acacia logs"
            inventory = post(server.url, "step", id=handle, action="inventory").json()["observation"]
            assert inventory == f"Inventory: [acacia logs] ({count})"
        assert post(server.url, "close", id=handle).json() is True
        assert post(server.url, "close", id=handle).json() is False


def test_a_repeated_step_runs_once_whichever_worker_it_reaches(server: ServerProcess) -> None:
    handle = create(server.url)
    for _ in range(6):
        requests.post(
            f"{server.url}/step",
            json={"id": handle, "action": "get 1 acacia logs"},
            headers={"X-Request-Id": "a"},
            timeout=30,
        )
    assert post(server.url, "step", id=handle, action="inventory").json()["observation"].endswith("(1)")
    post(server.url, "close", id=handle)


def test_a_batch_reaches_sessions_of_all_workers(server: ServerProcess) -> None:
    handles = sessions_of_all_workers(server.url)
    calls = [
        {"path": "/step", "body": {"id": handle, "action": f"get {n} acacia logs"}}
        for n, handle in enumerate(handles, 1)
    ]
    answers = post(server.url, "batch", calls=calls).json()
    assert [answer["body"]["observation"] for answer in answers] == [f"Got {n} acacia logs" for n in (1, 2, 3)]
    closes = [{"path": "/close", "body": {"id": handle}} for handle in handles]
    assert [answer["body"] for answer in post(server.url, "batch", calls=closes).json()] == [True] * WORKERS


def test_health_and_metrics_are_of_all_workers(server: ServerProcess) -> None:
    handles = sessions_of_all_workers(server.url)
    health = requests.get(f"{server.url}/health", timeout=30).json()
    assert (health["sessions"], health["capacity"], health["workers"]) == (WORKERS, 60, WORKERS)
    metrics = requests.get(f"{server.url}/metrics", timeout=30).text
    for worker in range(WORKERS):
        assert f'agentgym_sessions{{environment="textcraft",worker="{worker}"}} 1\n' in metrics
    assert metrics.count("# TYPE agentgym_sessions gauge") == 1
    for handle in handles:
        post(server.url, "close", id=handle)


def test_a_worker_without_room_passes_a_create_on() -> None:
    with serve_process("textcraft", "--workers", "2", "--max-sessions", "5") as server:
        handles = [create(server.url) for _ in range(5)]
        assert len({handle % 2 for handle in handles}) == 2
        assert post(server.url, "create").status_code == 503


def test_a_worker_that_dies_is_replaced_and_only_its_sessions_fail() -> None:
    with serve_process("textcraft", "--workers", str(WORKERS)) as server:
        handles = sessions_of_all_workers(server.url)
        victim = worker_processes(server)[1]
        victim.kill()
        end = time.monotonic() + 30
        while requests.get(f"{server.url}/health", timeout=30).json()["workers"] < WORKERS or victim.is_running():
            assert time.monotonic() < end
            time.sleep(0.05)
        answers = [post(server.url, "step", id=handle, action="inventory").json() for handle in handles]
        assert [list(answer) == ["error"] for answer in answers] == [False, True, False]
        assert len(sessions_of_all_workers(server.url)) == WORKERS


def test_clients_of_a_dead_worker_see_a_fault_never_a_reward() -> None:
    with serve_process("textcraft", "--workers", "2") as server:
        clients: list[EnvClient] = [TextCraftClient(server.url, max_retries=3) for _ in range(8)]
        for client in clients:
            client.reset(0)
        worker_processes(server)[0].kill()
        faults, steps = 0, 0
        for client in clients:
            try:
                steps += client.step("Action: inventory").reward == 0
            except EnvServerError:
                faults += 1
        assert faults + steps == len(clients)
        for client in clients:
            client.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_worker_outlives_the_server(number: signal.Signals) -> None:
    with serve_process("textcraft", "--workers", "2") as server:
        workers = worker_processes(server)
        assert len(workers) == 2
        os.kill(server.process.pid, number)
        assert server.process.wait(30) == -number
        gone, alive = psutil.wait_procs(workers, timeout=30)
        assert (len(gone), alive) == (2, [])


def test_an_address_that_another_server_shares_out_is_refused() -> None:
    listeners = bind_shared("127.0.0.1", 0, 2)
    try:
        for listener in listeners:
            listener.listen()
        with pytest.raises(ConfigError, match="cannot listen on"):
            bind_shared("127.0.0.1", listeners[0].getsockname()[1], 2)
        with pytest.raises(ConfigError, match="cannot listen on"):
            bind("127.0.0.1", listeners[0].getsockname()[1])
    finally:
        for listener in listeners:
            listener.close()


def test_workers_that_answered_for_one_another_end_without_a_word(capfd: pytest.CaptureFixture[str]) -> None:
    with serve_process("textcraft", "--workers", "2") as server:
        handle = create(server.url)
        for _ in range(12):  # each over a new connection, which the kernel gives to either
            assert requests.get(f"{server.url}/observation", params={"id": handle}, timeout=30).status_code == 200
        server.stop()
    assert capfd.readouterr().err == ""
