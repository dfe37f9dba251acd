"""Ending the server's process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import requests

from agentgym_rl.envs.serving import bind, url_of
from agentgym_rl.errors import ConfigError

pytestmark = pytest.mark.server

HANGING_SERVER = """
import threading
from support.environments import Script, scripted_spec
from agentgym_rl.envs.server import build_app
from agentgym_rl.envs.serving import Server, bind, url_of

listener = bind("127.0.0.1", 0)
app = build_app(scripted_spec(Script(hangs_at={5: 1})))
Server(app, on_ready=lambda: print(url_of(listener), flush=True)).run(sockets=[listener])
"""


def test_sigterm_ends_the_server_even_while_a_step_hangs() -> None:
    root = Path(__file__).parents[3]
    environ = {**os.environ, "PYTHONPATH": f"{root}:{root / 'tests'}"}
    process = subprocess.Popen([sys.executable, "-c", HANGING_SERVER], stdout=subprocess.PIPE, text=True, env=environ)
    assert process.stdout is not None
    try:
        url = process.stdout.readline().strip()
        handle = requests.post(f"{url}/create", timeout=10).json()["id"]
        requests.post(f"{url}/reset", json={"id": handle, "data_idx": 5}, timeout=10)
        with pytest.raises(requests.Timeout):
            requests.post(f"{url}/step", json={"id": handle, "action": "go"}, timeout=0.3)
        started = time.monotonic()
        process.terminate()
        assert process.wait(30) == -signal.SIGTERM
        assert time.monotonic() - started < 15
    finally:
        process.kill()
        process.communicate()


def test_the_url_of_a_socket_on_all_interfaces_is_one_that_clients_can_use() -> None:
    with bind("0.0.0.0", 0) as listener:
        assert url_of(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_an_address_that_cannot_be_had_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1:1: "):
        bind("192.0.2.1", 1)
