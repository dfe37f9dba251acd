"""The gate of the fault run: what it writes down is what the server did, whatever it leaves of the answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from support.servers import serve

from agentgym_rl.envs.registry import get_spec
from agentgym_rl.envs.server import build_app
from agentgym_rl.envs.textcraft.client import TextCraftClient
from agentgym_rl.errors import EnvError, EnvUnreachable

EXPERIMENTS = Path(__file__).parents[2] / "scripts" / "experiments"

pytestmark = pytest.mark.server

MISHAPS = {
    "DELAYED": False,
    "THROTTLED": False,
    "CUT_UNSEEN": False,
    "ANSWER_LOST": False,
    "CUT_MIDWAY": False,
    "BUSY_UNSEEN": False,
    "DRIPPING": True,
    "ERROR_500_UNSEEN": True,
    "ERROR_502": True,
    "NO_JSON": True,
    "HALF_JSON": True,
    "WRONG_TYPES": True,
}
"""Whether a client's call fails of it."""


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """In front of a TextCraft server."""
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    from fault_run.gate import Gate
    from fault_run.ledger import Ledger

    ledger = Ledger(tmp_path / "ledger.jsonl")
    with serve(build_app(get_spec("textcraft"))) as url:
        gate = Gate("textcraft-0", ledger, seed=0)
        gate.open(urlsplit(url).netloc)
        yield gate
        gate.shut()
    ledger.close()


def contents_of(folder: Path) -> Any:
    from fault_run.ledger import read_ledger

    return read_ledger(folder / "ledger.jsonl")


def once(gate: Any, name: str) -> None:
    """Let the next call meet this mishap, and the following ones fair weather."""
    from fault_run.gate import FAIR, Mishap, Weather

    draw = type(gate)._draw

    def draw_once() -> Any:
        drawn = draw(gate)
        gate.weather = FAIR
        return drawn

    gate._draw = draw_once
    gate.weather = Weather((Mishap[name],), 1.0, (40.0, 40.0) if name == "DRIPPING" else (0.1, 0.1))


@pytest.mark.parametrize(("name", "fails"), MISHAPS.items())
def test_each_mishap_is_survived_or_a_fault_and_the_ledger_tells_what_was_run(
    gate: Any, tmp_path: Path, name: str, fails: bool
) -> None:
    client = TextCraftClient(gate.url, timeout=5)
    opening = client.reset(0)
    once(gate, name)
    if fails:
        with pytest.raises(EnvError):
            client.step("Action: inventory")
    else:
        assert client.step("Action: inventory").state.startswith("Inventory")
    assert gate.mishaps == {name.lower(): 1}
    client.close()
    contents = contents_of(tmp_path)
    assert contents.contradictions == ()
    assert contents.repeated == (name in ("ANSWER_LOST", "CUT_MIDWAY"))
    # /create begins an episode of its own, which no trajectory tells of.
    (episode,) = contents.episodes
    assert (episode.task, episode.index, episode.opening) == ("textcraft", 0, opening)
    assert [step.action for step in episode.steps] == ["inventory"] * (name != "ERROR_500_UNSEEN")


def test_behind_a_gate_that_is_shut_nobody_answers_until_it_opens_for_another_life(gate: Any, tmp_path: Path) -> None:
    client = TextCraftClient(gate.url, timeout=5, max_retries=1)
    client.reset(0)
    gate.shut()
    with pytest.raises(EnvUnreachable):
        client.step("Action: inventory")
    with serve(build_app(get_spec("textcraft"))) as url:
        gate.open(urlsplit(url).netloc)
        with pytest.raises(EnvError):  # of a handle that the other life gave
            client.step("Action: inventory")
        with TextCraftClient(gate.url, timeout=5) as fresh:
            fresh.reset(1)
    assert [(episode.index, len(episode.steps)) for episode in contents_of(tmp_path).episodes] == [(0, 0), (1, 0)]
