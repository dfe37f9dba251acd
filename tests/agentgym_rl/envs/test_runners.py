"""What a server logs of an environment's faults: each cause once in full; and calls that hold up every session."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import requests
from support.environments import Script, ScriptedEnvironment, scripted_spec
from support.servers import serve

from agentgym_rl.envs.base import StepResult
from agentgym_rl.envs.registry import EnvSpec
from agentgym_rl.envs.server import build_app

pytestmark = pytest.mark.server


class Scripted(ScriptedEnvironment):
    """Does what its actions say."""

    def __init__(self) -> None:
        super().__init__(Script(turns=100))

    def step(self, action: str) -> StepResult:
        if action == "index":
            raise IndexError(action)
        if action == "key":
            raise KeyError(action)
        if action == "exit":
            sys.exit("gone")
        if action == "sleep":
            time.sleep(0.06)
        return super().step(action)


def spec_of(environment: Callable[[], Any], *, runs_inline: bool) -> EnvSpec:
    return replace(scripted_spec(), environment=environment, runs_inline=runs_inline)


def steps(url: str, *actions: str) -> list[requests.Response]:
    handle = requests.post(f"{url}/create", json={}, timeout=30).json()["id"]
    return [requests.post(f"{url}/step", json={"id": handle, "action": action}, timeout=30) for action in actions]


@pytest.mark.parametrize("runs_inline", [True, False])
def test_a_traceback_is_logged_once_for_its_line_and_every_fault_in_a_line(
    runs_inline: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with serve(build_app(spec_of(Scripted, runs_inline=runs_inline))) as url:
        answers = steps(url, "index", "index", "key", "index")
    assert [answer.status_code for answer in answers] == [500] * 4
    faults = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [record.exc_info is not None for record in faults] == [True, False, True, False]
    assert all("IndexError: index" in record.getMessage() for record in (faults[1], faults[3]))


@pytest.mark.parametrize("runs_inline", [True, False])
def test_an_environment_that_exits_fails_its_call_and_no_more(runs_inline: bool) -> None:
    with serve(build_app(spec_of(Scripted, runs_inline=runs_inline))) as url:
        exited, after = steps(url, "exit", "go")
    assert exited.status_code == 500 and "SystemExit: gone" in exited.json()["detail"]
    assert after.status_code == 200


@pytest.mark.parametrize("runs_inline", [True, False])
def test_slow_calls_are_warned_of_once_where_every_session_waits_for_them(
    runs_inline: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with serve(build_app(spec_of(Scripted, runs_inline=runs_inline))) as url:
        steps(url, *["sleep"] * 5)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == runs_inline
    assert all("step took 0.0" in text and "leave runs_inline out" in text for text in warnings)
