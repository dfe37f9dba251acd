"""A small soak: what it reports as flat is flat, and what is held is found."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from agentgym_rl.threads import thread_environment

BENCH = Path(__file__).parents[2] / "scripts" / "bench"


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCH))
    for name, value in thread_environment(1).items():  # which importing `bench` sets for good
        monkeypatch.setenv(name, value)
    spec = importlib.util.spec_from_file_location("soak", BENCH / "soak.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "soak", module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module


@pytest.mark.server
def test_hundreds_of_trajectories_with_faults_and_deadlines_leave_nothing_behind(soak, monkeypatch, capsys):
    monkeypatch.setattr(soak, "DEADLINE_S", 2.0)
    monkeypatch.setattr(soak, "HANG_S", 2.5)
    before, after = soak.soak(trajectories=400, steps=4, concurrency=16)
    assert list(soak.growth(before, after)) == []
    assert not any(result.is_missed for result in soak.held_results(400, before, after))
    printed = capsys.readouterr().out
    assert "EnvServerError 4" in printed
    assert "DeadlineExceeded" in printed
    assert printed.count("\n") == 7  # header, start, four quarters, summary


def test_everything_that_grew_is_named_and_missed(soak):
    held = soak.Held(threads=3, handles=6, memory_mib=80.0)
    before = soak.Reading(100, 0, held, held)
    assert list(soak.growth(before, before)) == []
    after = soak.Reading(
        400, 2, dataclasses.replace(held, threads=4), dataclasses.replace(held, handles=7, memory_mib=89.0)
    )
    assert list(soak.growth(before, after)) == [
        "2 sessions are open on the server",
        "here: threads grew from 3 to 4",
        "server: handles grew from 6 to 7",
        "server: memory grew from 80.0 to 89.0 MiB",
    ]
    missed = {result.name for result in soak.held_results(400, before, after) if result.is_missed}
    assert missed == {"sessions", "worker_handles", "server_handles", "server_memory"}
