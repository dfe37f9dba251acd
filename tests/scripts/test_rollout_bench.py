"""The rollout bench measures what it says, and says when something is not as wanted."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from agentgym_rl.threads import thread_environment

BENCH = Path(__file__).parents[2] / "scripts" / "bench"
pytestmark = pytest.mark.server


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    for name, value in thread_environment(1).items():  # which importing `bench` sets for good
        monkeypatch.setenv(name, value)
    spec = importlib.util.spec_from_file_location("rollout_bench", BENCH / "rollout.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "rollout_bench", module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_share_of_time_that_the_engine_is_busy_is_split_at_nine_tenths(bench, monkeypatch):
    monkeypatch.setattr(bench, "HEAVY_TAIL", bench.Pace(turns=2, mean_s=0.02, max_s=0.1))
    results = {result.name: result.measured for result in bench.busy_results(12)}
    assert all(0 < results[part] <= 100.1 for part in ("busy", "busy_tail"))
    assert results["tokens"] > 0


@pytest.mark.parametrize(("most_ms", "is_missed"), [(1e9, False), (0.0, True)])
def test_cpu_time_is_judged_by_the_limit(bench, monkeypatch, most_ms, is_missed):
    monkeypatch.setattr(bench, "MOST_CPU_MS", most_ms)
    over_http, local = bench.cpu_results(8, 3)
    assert over_http.is_missed == is_missed
    assert 0 < local.measured < over_http.measured


def test_a_late_turn_is_measured_against_an_early_one(bench, monkeypatch):
    monkeypatch.setattr(bench, "REPEATS", 3)
    [ratio] = bench.turn_cost_results()
    assert "turn 50 over turn 2" in ratio.what
    assert ratio.measured > 0
