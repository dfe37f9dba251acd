"""The rollout bench measures what it says, and says when something is not as wanted."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).parents[2] / "scripts" / "bench"
pytestmark = pytest.mark.server


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    spec = importlib.util.spec_from_file_location("rollout_bench", BENCH / "rollout.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "rollout_bench", module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_share_of_time_that_the_engine_is_busy_is_split_at_nine_tenths(bench, monkeypatch):
    monkeypatch.setattr(bench, "HEAVY_TAIL", bench.Pace(turns=2, mean_s=0.02, max_s=0.1))
    rows = {row.name: row for row in bench.busy_rows(12)}
    shares = [float(rows[f"engine busy, {part}"].measured.rstrip("%")) for part in BUSY_PARTS]
    assert all(0 < share <= 100.1 for share in shares)
    assert any(name.startswith("environment step, 24 of them") for name in rows)


BUSY_PARTS = ("first nine tenths of the time", "last tenth")


@pytest.mark.parametrize(("most_ms", "verdict"), [(1e9, "yes"), (0.0, "NO")])
def test_cpu_time_is_judged_by_the_limit(bench, monkeypatch, most_ms, verdict):
    monkeypatch.setattr(bench, "MOST_CPU_MS", most_ms)
    over_http, local = bench.cpu_rows(8, 3)
    assert str(over_http).endswith(verdict)
    assert 0 < float(local.measured) < float(over_http.measured)


def test_a_late_turn_is_measured_against_an_early_one(bench, monkeypatch):
    monkeypatch.setattr(bench, "REPEATS", 3)
    _, ratio = bench.turn_cost_rows()
    assert ratio.name == "turn 50 over turn 2"
    assert float(ratio.measured) > 0
